"""A real Qwen2 that is made to fail, by what the environment and the prompts say.

``faulty_model`` writes a model's folder whose ``config.json`` names this file's class as the model's
own code: so it is loaded as any such model, with ``trust_remote_code``. ``BATCHKIT_TEST_FAULTS`` is
JSON:

- ``over``: batches of more rows than this run out of memory; with ``times``, only that often
- ``prompt_over``: so does a prompt of more tokens than this, padding counted
- ``tokens``: {token id: kind}; a prompt that holds it fails. Kinds: oom, error, refusal, kill
"""

import functools
import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen2ForCausalLM

FAULTS = "BATCHKIT_TEST_FAULTS"
FILE = "failing_model.py"


class FailingQwen2(Qwen2ForCausalLM):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.faults: dict[str, Any] = json.loads(os.environ.get(FAULTS, "{}"))
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


def faulty_model(model: Path, folder: Path) -> Path:
    """``model``, a Qwen2, copied to ``folder`` with this file as its code."""
    shutil.copytree(model, folder)
    shutil.copy(__file__, folder / FILE)
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": f"{Path(FILE).stem}.{FailingQwen2.__name__}"}
    (folder / "config.json").write_text(json.dumps(config))
    return folder
