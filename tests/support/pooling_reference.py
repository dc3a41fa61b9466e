"""What ``vllm.LLM`` itself answers to pooling calls: ``main`` is a program, JSON in, JSON out.

Input: {"options": for vllm.LLM, "calls": [{"method": "embed", "texts": […], "params": {…}}, …]}; a call
of ``score`` has "query" and "documents" instead of "texts". A text with an image is {"prompt": its
text with the image's place in it, "image": path}, a document {"text": …, "image": path}. The output has a list for each call.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

from tests.support.forks import Fork


def pooled(options: dict[str, Any], calls: list[dict[str, Any]]) -> list[Any]:
    """What this program answers, in a process of its own."""
    pipe = subprocess.PIPE
    command = [sys.executable, "-m", __name__]
    with Fork(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        task = json.dumps({"options": options, "calls": calls})
        stdout, stderr = process.communicate(task, timeout=240)
    assert process.returncode == 0, stderr[-2000:]
    answers: list[Any] = json.loads(stdout)
    return answers


def main() -> None:
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    from vllm import LLM

    task = json.load(sys.stdin)
    llm = LLM(runner="pooling", **task["options"])
    json.dump([_answer(llm, **call) for call in task["calls"]], sys.stdout)
    sys.stdout.flush()
    os._exit(0)


def _answer(llm: Any, method: str, params: dict[str, Any], **given: Any) -> list[Any]:
    from vllm import PoolingParams

    made = PoolingParams(**params)
    if method == "score":
        outputs = llm.score(
            given["query"],
            [_document(document) for document in given["documents"]],
            pooling_params=made,
            use_tqdm=False,
        )
        return [output.outputs.score for output in outputs]
    prompts = [_prompt(text) for text in given["texts"]]
    outputs = getattr(llm, method)(prompts, pooling_params=made, use_tqdm=False)
    name = {"embed": "embedding", "classify": "probs"}[method]
    return [getattr(output.outputs, name) for output in outputs]


def _prompt(text: Any) -> Any:
    if isinstance(text, str):
        return text
    return {"prompt": text["prompt"], "multi_modal_data": {"image": _image(text["image"])}}


def _document(text: Any) -> Any:
    if isinstance(text, str):
        return text
    image = {"type": "image_pil", "image_pil": _image(text["image"])}
    return {"content": [image, {"type": "text", "text": text["text"]}]}


def _image(path: str) -> Any:
    from PIL import Image

    return Image.open(path).convert("RGB")
