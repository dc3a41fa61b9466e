"""A real vLLM worker that is made to fail, by what the environment and the requests say.

``BATCHKIT_TEST_FAULTS`` is JSON: ``folder`` holds a marker for each fault that strikes once;
``once``: {kind: step} fails at that step, the first time only; ``over``: more running requests than
this run out of memory; ``load_over``: so does loading with a larger ``max_num_seqs``;
``prompt_over``: so does a step with a prompt longer than this. A request whose ``extra_args`` has
``poison`` (a kind) fails whenever it runs. Kinds: oom, error, kill, hang.
"""

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
from vllm.v1.worker.cpu_worker import CPUWorker


class FailingWorker(CPUWorker):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.faults: dict[str, Any] = json.loads(os.environ.get("BATCHKIT_TEST_FAULTS", "{}"))
        self.steps = 0
        self.poison: dict[str, str] = {}

    def load_model(self, *args: Any, **kwargs: Any) -> Any:
        limit = self.faults.get("load_over")
        if limit is not None and self.vllm_config.scheduler_config.max_num_seqs > limit:
            raise torch.OutOfMemoryError("planted: out of memory at load")
        return super().load_model(*args, **kwargs)

    def execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        self.steps += 1
        running = scheduler_output.num_scheduled_tokens
        for new in scheduler_output.scheduled_new_reqs:
            extra = new.sampling_params.extra_args or {}
            if "poison" in extra:
                self.poison[new.req_id] = extra["poison"]
            if len(new.prompt_token_ids) > self.faults.get("prompt_over", 10**9):
                fail("oom")
        for name, kind in self.poison.items():
            if name in running:
                fail(kind)
        if len(running) > self.faults.get("over", 10**9):
            fail("oom")
        for kind, step in self.faults.get("once", {}).items():
            marker = Path(self.faults["folder"]) / kind
            if self.steps >= step and not marker.exists():
                marker.touch()
                fail(kind)
        return super().execute_model(scheduler_output, *args, **kwargs)


def fail(kind: str) -> None:
    if kind == "oom":
        raise torch.OutOfMemoryError("planted: out of memory")
    if kind == "error":
        raise RuntimeError("planted: device-side assert")
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "hang":
        time.sleep(3600)
