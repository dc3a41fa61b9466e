"""A request's tools, as vLLM's server gives them to the chat template."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from batchkit.errors import RequestError
from batchkit.types import Request


def tools_of(request: Request) -> list[Any] | None:
    """The request's tools as vLLM's own types.

    Raises:
        RequestError: vLLM refuses one.
    """
    if request.tools is None:
        return None
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionToolsParam

    found = []
    for n, tool in enumerate(request.tools):
        try:
            found.append(ChatCompletionToolsParam.model_validate(tool))
        except ValidationError as error:
            (first, *_) = error.errors(include_url=False)
            place = "".join(f".{part}" for part in first["loc"])
            raise RequestError(f"tools[{n}]{place}: {first['msg']}") from error
    return found
