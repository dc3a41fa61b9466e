"""What vLLM itself answers: ``main`` is a program, ``python -m tests.support.vllm_reference KIND``, JSON in
and out. Each function here asks it in a process of its own; an image is given by its path."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from tests.support.forks import Fork


def _ask(kind: str, *args: Any, **kwargs: Any) -> list[Any]:
    pipe = subprocess.PIPE
    command = [sys.executable, "-m", __name__, kind]
    with Fork(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        stdout, stderr = process.communicate(json.dumps([args, kwargs]), timeout=240)
    assert process.returncode == 0, stderr[-3000:]
    answers: list[Any] = json.loads(stdout)
    return answers


# Each is answered by the function of that kind below, which says what it takes.
reference = partial(_ask, "chat")
generated = partial(_ask, "generate")
pooled = partial(_ask, "pooled")
with_loras = partial(_ask, "loras")
chat_reference = partial(_ask, "serve")


def main() -> None:
    kind = sys.argv[1]
    # For vLLM "01" is still true, but it leaves the worker in the engine's process: fewer imports.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "01" if kind == "serve" else "0"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    args, kwargs = json.load(sys.stdin)
    json.dump(globals()[f"_{kind}"](*args, **kwargs), sys.stdout)
    sys.stdout.flush()
    os._exit(0)


def _chat(options: dict[str, Any], conversations: list[Any], max_tokens: int) -> list[Any]:
    """``LLM.chat``, one call for all. An image part is {"type": "image_path", "path": …}."""
    from vllm import LLM, SamplingParams

    for message in (message for messages in conversations for message in messages):
        if isinstance(message["content"], list):
            message["content"] = [
                _image_part(part["path"]) if part["type"] == "image_path" else part
                for part in message["content"]
            ]
    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    return _told(LLM(**options).chat(conversations, params, use_tqdm=False))


def _generate(options: dict[str, Any], calls: list[dict[str, Any]], max_tokens: int) -> list[Any]:
    """``LLM.generate``, one call for all, of {"prompt": …, "images": [path], "videos": [{"frames": the path of an array, …metadata}],
    "audios": [the path of an array of samples at 16,000 a second]}."""
    import numpy as np
    from vllm import LLM, SamplingParams

    prompts: list[Any] = []
    for call in calls:
        data: dict[str, list[Any]] = {"image": [*map(_image, call.get("images", ()))]}
        for video in call.get("videos", ()):
            metadata = {"do_sample_frames": False, "video_backend": "opencv", **video}
            data.setdefault("video", []).append((np.load(metadata.pop("frames")), metadata))
        for path in call.get("audios", ()):
            data.setdefault("audio", []).append((np.load(path), 16000))
        data = {name: found for name, found in data.items() if found}
        prompts.append({"prompt": call["prompt"], "multi_modal_data": data})
    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    return _told(LLM(**options).generate(prompts, params, use_tqdm=False))


def _told(outputs: list[Any]) -> list[Any]:
    return [
        {
            "text": output.outputs[0].text,
            "finish_reason": output.outputs[0].finish_reason,
            "prompt_tokens": len(output.prompt_token_ids),
            "completion_tokens": len(output.outputs[0].token_ids),
        }
        for output in outputs
    ]


def _loras(options: dict[str, Any], calls: list[dict[str, Any]]) -> list[Any]:
    """The texts of ``LLM.chat``, for each of ``calls``, {"lora": an adapter's folder or None, "texts": […]}, alone."""
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    llm = LLM(enable_lora=True, max_lora_rank=64, enable_prefix_caching=False, **options)
    params, found = SamplingParams(temperature=0, max_tokens=12), []
    for number, call in enumerate(calls, start=1):
        lora = None if call["lora"] is None else LoRARequest(str(number), number, call["lora"])
        messages = [[{"role": "user", "content": text}] for text in call["texts"]]
        outputs = llm.chat(messages, params, use_tqdm=False, lora_request=lora)
        found.append([output.outputs[0].text for output in outputs])
    return found


def _pooled(options: dict[str, Any], calls: list[dict[str, Any]]) -> list[Any]:
    """{"method": "embed" (or "token_embed", …), "texts": […], "params": {…}}; one of ``score`` has "query" and
    "documents" instead of "texts". A text with an image is {"prompt": its text with the image's place in
    it, "image": path}, a document {"text": …, "image": path}. A list for each call."""
    from vllm import LLM

    llm = LLM(runner="pooling", **options)
    return [_answer(llm, **call) for call in calls]


def _answer(llm: Any, method: str, params: dict[str, Any], **given: Any) -> list[Any]:
    from vllm import PoolingParams

    common = {"pooling_params": PoolingParams(**params), "use_tqdm": False}
    if method == "score":
        outputs = llm.score(given["query"], [*map(_document, given["documents"])], **common)
        return [output.outputs.score for output in outputs]
    if method in ("token_embed", "token_classify"):
        outputs = llm.encode([*map(_prompt, given["texts"])], pooling_task=method, **common)
        return [output.outputs.data.tolist() for output in outputs]
    outputs = getattr(llm, method)([*map(_prompt, given["texts"])], **common)
    name = {"embed": "embedding", "classify": "probs"}[method]
    return [getattr(output.outputs, name) for output in outputs]


def _prompt(text: Any) -> Any:
    if isinstance(text, str):
        return text
    return {"prompt": text["prompt"], "multi_modal_data": {"image": _image(text["image"])}}


def _document(text: Any) -> Any:
    if isinstance(text, str):
        return text
    return {"content": [_image_part(text["image"]), {"type": "text", "text": text["text"]}]}


def _image_part(path: str) -> dict[str, Any]:
    return {"type": "image_pil", "image_pil": _image(path)}


def _image(path: str) -> Any:
    from PIL import Image

    return Image.open(Path(path)).convert("RGB")


def _serve(options: dict[str, Any], groups: list[dict[str, Any]]) -> list[Any]:
    """The OpenAI server's own classes on one engine: for each group, {"reasoning_parser",
    "tool_call_parser", "bodies": [of a request]}, its ``chat.completion``s."""
    return asyncio.run(_served(options, groups))


async def _served(options: dict[str, Any], groups: list[dict[str, Any]]) -> list[Any]:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.v1.engine.async_llm import AsyncLLM

    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**options))
    found = []
    for group in groups:
        serving = _serving(engine, group["reasoning_parser"], group["tool_call_parser"])
        requests = [ChatCompletionRequest(**body) for body in group["bodies"]]
        answers = await asyncio.gather(*map(serving.create_chat_completion, requests))
        found.append([answer.model_dump(mode="json") for answer in answers])
    engine.shutdown()
    return found


def _serving(engine: Any, reasoning_parser: str | None, tool_call_parser: str | None) -> Any:
    """As ``vllm.entrypoints.generate.api_router`` makes it."""
    from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
    from vllm.entrypoints.openai.models.protocol import BaseModelPath
    from vllm.entrypoints.openai.models.serving import OpenAIServingModels
    from vllm.renderers.online_renderer import OnlineRenderer

    path = engine.model_config.model
    shared: dict[str, Any] = {
        "request_logger": None,
        "chat_template": None,
        "chat_template_content_format": "auto",
        "enable_auto_tools": tool_call_parser is not None,
        "tool_parser": tool_call_parser,
        "reasoning_parser": reasoning_parser or "",
    }
    renderer = OnlineRenderer(engine.model_config, engine.renderer, **shared)
    models = OpenAIServingModels(engine, [BaseModelPath(name=path, model_path=path)])
    return OpenAIServingChat(engine, models, "assistant", online_renderer=renderer, **shared)


if __name__ == "__main__":
    main()


def counts(usage: Mapping[str, int]) -> dict[str, int]:
    """Without those that depend on what ran before."""
    return {name: usage[name] for name in ("prompt_tokens", "completion_tokens")}
