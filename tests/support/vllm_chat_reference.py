"""What vLLM's OpenAI server answers with different parsers: its own classes on one engine.

``main`` is a program, JSON in, JSON out. Input: {"options": of the engine, "groups": [{"reasoning_parser",
"tool_call_parser", "bodies": [of a request]}]}; output: for each group its ``chat.completion``s.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import subprocess
import sys
from typing import Any

from tests.support.forks import Fork


def chat_reference(options: dict[str, Any], groups: list[dict[str, Any]]) -> list[list[Any]]:
    """What this program answers, in a process of its own."""
    pipe = subprocess.PIPE
    command = [sys.executable, "-m", __name__]
    with Fork(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        task = json.dumps({"options": options, "groups": groups})
        stdout, stderr = process.communicate(task, timeout=240)
    assert process.returncode == 0, stderr[-3000:]
    answers: list[list[Any]] = json.loads(stdout)
    return answers


def main() -> None:
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    # For vLLM this is still true, but it leaves the worker in the engine's process: fewer imports.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "01"
    from vllm.v1.engine import utils

    utils.get_mp_context = lambda: multiprocessing.get_context("fork")
    json.dump(asyncio.run(_answers(**json.load(sys.stdin))), sys.stdout)
    sys.stdout.flush()
    os._exit(0)


async def _answers(options: dict[str, Any], groups: list[dict[str, Any]]) -> list[list[Any]]:
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
