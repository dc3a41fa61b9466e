"""A real Qwen2 that is made to fail, by what the environment and the prompts say.

A model's folder has this file, and its ``config.json`` names the class (``transformers_jobs.py``): so it is
loaded as any model with code of its own, with ``trust_remote_code``. ``BATCHKIT_TEST_FAULTS`` is JSON:

- ``over``: batches of more rows than this run out of memory; with ``times``, only that often
- ``prompt_over``: so does a prompt of more tokens than this, padding counted
- ``tokens``: {token id: kind}; a prompt that holds it fails. Kinds: oom, error, refusal, kill
"""

import functools
import json
import os
import signal
from typing import Any

import torch
from transformers import Qwen2ForCausalLM


class FailingQwen2(Qwen2ForCausalLM):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.faults: dict[str, Any] = json.loads(os.environ.get("BATCHKIT_TEST_FAULTS", "{}"))
        self.struck = 0

    @functools.wraps(Qwen2ForCausalLM.forward)  # generate goes by its signature
    def forward(self, input_ids: Any, *args: Any, **kwargs: Any) -> Any:
        rows, length = input_ids.shape
        if rows > self.faults.get("over", rows) and self.struck < self.faults.get("times", 1e9):
            self.struck += 1
            fail("oom")
        if length > self.faults.get("prompt_over", length):
            fail("oom")
        for token, kind in self.faults.get("tokens", {}).items():
            if length > 1 and int(token) in input_ids.flatten().tolist():
                fail(kind)
        return super().forward(input_ids, *args, **kwargs)


def fail(kind: str) -> None:
    if kind == "oom":
        raise torch.OutOfMemoryError("planted: out of memory")
    if kind == "error":
        raise RuntimeError("planted: shapes cannot be multiplied")
    if kind == "refusal":
        raise ValueError("planted: this can't be")
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
