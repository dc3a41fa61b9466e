"""Definitions of the functions that a model can call (``tools``), and the choice of the function that it must call
(``tool_choice``).

Both use OpenAI's format: https://platform.openai.com/docs/api-reference/chat/create.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeGuard

import orjson
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from batchkit.config.answer_schema import fault_in_schema
from batchkit.config.regular_file import read_text
from batchkit.config.suggest import did_you_mean
from batchkit.config.terminal import shortened
from batchkit.errors import JobError

CHOICES = ("auto", "none", "required")
_SHAPE = '{"type": "function", "function": {"name": …, "parameters": …}}'


def is_template(tools: object) -> TypeGuard[str]:
    """Return True if ``prompt.tools`` is a template for each row, not a file name."""
    return isinstance(tools, str) and "{{" in tools


class _Function(BaseModel):
    model_config = ConfigDict(strict=True)

    name: str = Field(min_length=1)
    description: str | None = None
    parameters: dict[str, Any] | None = None


class _Tool(BaseModel):
    model_config = ConfigDict(strict=True)

    type: Literal["function"] = "function"
    function: _Function


_TOOLS = TypeAdapter(Annotated[list[_Tool], Field(min_length=1)])


def check_tools(tools: Any) -> None:
    """Raise ValueError if ``tools`` is not a list of definitions in OpenAI's format, or a name is defined twice. The
    message names the wrong entry and the problem."""
    try:
        names = [tool.function.name for tool in _TOOLS.validate_python(tools)]
    except ValidationError as error:
        detail = error.errors(include_url=False)[0]
        found = f"found {shortened(repr(detail['input']))}"
        if detail["type"] == "missing":
            found = "is missing"
        if not detail["loc"]:
            raise ValueError(f"{found}, expected a list of at least one {_SHAPE}") from None
        place = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in detail["loc"])
        raise ValueError(f"{place}: {found}, expected {_SHAPE}") from None
    for name in {name for name in names if names.count(name) > 1}:
        raise ValueError(f"{name!r} is defined more than once")


def check_parameters(tools: Sequence[Mapping[str, Any]]) -> None:
    """Raise ValueError if the parameters of a tool are not a JSON schema."""
    for n, tool in enumerate(tools):
        fault = fault_in_schema(tool["function"].get("parameters") or {})
        if fault is not None:
            raise ValueError(f"[{n}].function.parameters: not a valid JSON schema: {fault}")


def choice_of(choice: Any, tools: Sequence[Mapping[str, Any]] | None) -> Any:
    """Return ``tool_choice`` in OpenAI's format: a function name becomes an object.

    Without ``tools``, the name is not checked.

    Raises:
        ValueError: The choice is not "auto", "none", "required" or a function in ``tools``.
    """
    if choice is None or choice in CHOICES:
        return choice
    name = choice
    if isinstance(choice, Mapping):
        function = choice.get("function")
        name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or not name:
        raise ValueError(
            f"found {shortened(repr(choice))}, expected {', '.join(map(repr, CHOICES))}, the name of a function,"
            ' or {"type": "function", "function": {"name": …}}'
        )
    known = None if tools is None else [tool["function"]["name"] for tool in tools]
    if known is not None and name not in known:
        hint = did_you_mean(name, known) or f"; tools has {', '.join(known)}"
        raise ValueError(f"no tool has the name {name!r}{hint}")
    return {"type": "function", "function": {"name": name}}


def why_not_forced(choice: Any, kind: str, tool_call_parser: str | None) -> str | None:
    """Return why an engine of ``kind`` cannot force the model to call a function as ``choice`` demands, or None if it
    can."""
    if choice in (None, "auto", "none"):
        return None
    if kind == "transformers":
        return 'transformers can\'t force a function call; set engine.kind = "vllm", or use "auto" here'
    if kind == "vllm" and tool_call_parser is None:
        return (
            "forcing a call needs engine.tool_call_parser: set it to vLLM's parser for this model, for example"
            ' "hermes", or use "auto" here'
        )
    return None


def tools_in(path: str) -> list[dict[str, Any]]:
    """Return the tool definitions in a JSON file.

    Raises:
        JobError: The file can't be read, or a definition is invalid.
    """
    try:
        tools = orjson.loads(read_text(path))
    except orjson.JSONDecodeError as error:
        raise JobError(f"prompt.tools: {path}: not JSON: {error}") from error
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise JobError(f"prompt.tools: {path}: can't be read: {reason}") from error
    try:
        check_tools(tools)
        check_parameters(tools)
    except ValueError as error:
        raise JobError(f"prompt.tools: {path}: {error}") from None
    found: list[dict[str, Any]] = tools
    return found
