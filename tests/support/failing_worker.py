"""A real vLLM worker that is made to fail, by what the environment, the job and the requests say.

``BATCHKIT_TEST_FAULTS`` is JSON; so is the engine's ``additional_config``, which goes before it. Kinds of
faults: oom, error, kill, hang.

- ``once``: {kind: step} fails at that step, the first time only; a marker in ``folder`` shows
- ``over``: more running requests than this run out of memory
- ``load_over``: so does loading with a larger ``max_num_seqs``
- ``load_s``: each load takes this much longer; ``reload_s``: so does every one but the first
- a file ``HOLD`` in ``folder``: no load ends while it is there
- ``lora``: any request with an adapter in a folder of that name is killed
- ``prompt_over``: so does a step with a prompt longer than this
- ``random``: {seed, kinds, mean_s, until} fails once in each engine's life, ``mean_s`` after its
  first step on average, but not after that time of day (seconds since 1970)
- ``shows``: each engine is a line of ``SHOWN`` with these environment variables
- ``step_s``: each step takes this much longer; ``leak_mb``: and loses this much memory for good

A request whose ``extra_args`` has ``poison`` (a kind) fails whenever it runs. Where there is a
``folder``, each fault is a line of its ``strikes.jsonl`` before it strikes, and with ``random`` each
engine is a line of its ``engines.txt``.
"""

import json
import os
import signal
import time
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import torch
from vllm.v1.worker.cpu_worker import CPUWorker

STRIKES = "strikes.jsonl"
ENGINES = "engines.txt"
SHOWN = "shown.jsonl"
HOLD = "hold"


class Chance(NamedTuple):
    """The one random fault of this engine, ``after_s`` from its first step."""

    kind: str
    after_s: float
    until: float


class FailingWorker(CPUWorker):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.faults: dict[str, Any] = self.vllm_config.additional_config or json.loads(
            os.environ.get("BATCHKIT_TEST_FAULTS", "{}")
        )
        self.steps = 0
        self.began = 0.0
        self.leaked: list[bytes] = []
        self.poison: dict[str, str] = {}
        self.chance = self._draw() if "random" in self.faults else None
        self.step_s: float = self.faults.get("step_s", 0)

    def load_model(self, *args: Any, **kwargs: Any) -> Any:
        limit = self.faults.get("load_over")
        if limit is not None and self.vllm_config.scheduler_config.max_num_seqs > limit:
            self._fail("oom", "load_over")
        time.sleep(self.faults.get("load_s", 0))
        if "shows" in self.faults:
            shown = {name: os.environ.get(name) for name in self.faults["shows"]}
            _append(Path(self.faults["folder"]) / SHOWN, json.dumps(shown) + "\n")
        while Path(self.faults.get("folder", "."), HOLD).exists():
            time.sleep(0.05)
        if "reload_s" in self.faults:
            first = _append(Path(self.faults["folder"]) / ENGINES, f"{os.getpid()}\n") == 1
            time.sleep(0 if first else self.faults["reload_s"])
        return super().load_model(*args, **kwargs)

    def execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        self.steps += 1
        self.began = self.began or time.monotonic()
        running = scheduler_output.num_scheduled_tokens
        for new in scheduler_output.scheduled_new_reqs:
            extra = getattr(new.sampling_params, "extra_args", None) or {}
            if "poison" in extra:
                self.poison[new.req_id] = extra["poison"]
            if new.lora_request and Path(new.lora_request.path).name == self.faults.get("lora"):
                self._fail("kill", "lora")
            if len(new.prompt_token_ids) > self.faults.get("prompt_over", 10**9):
                self._fail("oom", "prompt_over")
        for name, kind in self.poison.items():
            if name in running:
                self._fail(kind, "poison")
        if len(running) > self.faults.get("over", 10**9):
            self._fail("oom", "over")
        for kind, step in self.faults.get("once", {}).items():
            marker = Path(self.faults["folder"]) / kind
            if self.steps >= step and not marker.exists():
                marker.touch()
                self._fail(kind, "once")
        if self.chance is not None and self._is_due(self.chance):
            self._fail(self.chance.kind, "random")
        time.sleep(self.step_s)
        self.leaked.append(b"x" * (self.faults.get("leak_mb", 0) * 2**20))
        return super().execute_model(scheduler_output, *args, **kwargs)

    def _draw(self) -> Chance:
        """By the seed and the number of this engine, so that the kinds are the same each time."""
        random = self.faults["random"]
        number = _append(Path(self.faults["folder"]) / ENGINES, f"{os.getpid()}\n")
        generator = Random(f"{random['seed']}/{number}")
        after_s = generator.expovariate(1 / random["mean_s"])
        return Chance(generator.choice(random["kinds"]), after_s, random["until"])

    def _is_due(self, chance: Chance) -> bool:
        return time.monotonic() - self.began >= chance.after_s and time.time() < chance.until

    def _fail(self, kind: str, why: str) -> None:
        if "folder" in self.faults:
            strike = {"kind": kind, "why": why, "step": self.steps, "pid": os.getpid()}
            _append(Path(self.faults["folder"]) / STRIKES, json.dumps(strike) + "\n")
        fail(kind)


def fail(kind: str) -> None:
    if kind == "oom":
        raise torch.OutOfMemoryError("planted: out of memory")
    if kind == "error":
        raise RuntimeError("planted: device-side assert")
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "hang":
        time.sleep(3600)


def _append(path: Path, line: str) -> int:
    """How many lines the file has with this one. One engine writes at a time."""
    with path.open("a") as file:
        file.write(line)
    return path.read_bytes().count(b"\n")
