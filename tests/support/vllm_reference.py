"""What ``vllm.LLM`` itself answers, one call for all: ``main`` is a program, JSON in, JSON out.

Input: {"options": for vllm.LLM, "conversations": [messages], "max_tokens": n}; an image part of a
message is {"type": "image_path", "path": …}.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

from tests.support.forks import Fork


def reference(
    options: dict[str, Any], conversations: list[Any], max_tokens: int
) -> list[dict[str, Any]]:
    """What this program answers, in a process of its own."""
    task = {"options": options, "conversations": conversations, "max_tokens": max_tokens}
    pipe = subprocess.PIPE
    command = [sys.executable, "-m", __name__]
    with Fork(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        stdout, stderr = process.communicate(json.dumps(task), timeout=240)
    assert process.returncode == 0, stderr[-2000:]
    answers: list[dict[str, Any]] = json.loads(stdout)
    return answers


def main() -> None:
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    from PIL import Image
    from vllm import LLM, SamplingParams

    task = json.load(sys.stdin)
    for messages in task["conversations"]:
        for message in messages:
            if isinstance(message["content"], list):
                message["content"] = [
                    {"type": "image_pil", "image_pil": Image.open(part["path"]).convert("RGB")}
                    if part["type"] == "image_path"
                    else part
                    for part in message["content"]
                ]
    llm = LLM(**task["options"])
    params = SamplingParams(temperature=0, max_tokens=task["max_tokens"])
    outputs = llm.chat(task["conversations"], params, use_tqdm=False)
    answers = [
        {
            "text": output.outputs[0].text,
            "finish_reason": output.outputs[0].finish_reason,
            "prompt_tokens": len(output.prompt_token_ids),
            "completion_tokens": len(output.outputs[0].token_ids),
        }
        for output in outputs
    ]
    json.dump(answers, sys.stdout)
    sys.stdout.flush()
    os._exit(0)
