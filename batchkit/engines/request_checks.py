"""Checks of requests and options, shared by the engines that hold a model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from batchkit.config.problems import problems_in
from batchkit.config.regular_file import read_text
from batchkit.config.suggest import nearest
from batchkit.config.tables import DEMO_MODEL, DEMO_MODELS, JobConfig, Table
from batchkit.config.tool_definitions import why_not_forced
from batchkit.errors import JobError, PromptTooLongError, RequestError
from batchkit.types import Request


def check_length(
    request: Request, prompt_tokens: int, max_model_len: int, *, generates: bool = True
) -> None:
    """Check that the prompt leaves room for an answer of one token.

    After a truncation, there must be room for the whole answer, because the prompt was cut to make that room. A model
    that does not generate (``generates`` is False) needs no room. Raises PromptTooLongError if there is too little
    room; the error has the token counts.
    """
    room = 1 if request.cut is None else request.cut.answer_tokens
    if prompt_tokens + (room if generates else 0) <= max_model_len:
        return
    tokens = f"the prompt has {prompt_tokens} tokens; max_model_len"
    wanted = "an answer" if room == 1 else f"an answer of {room}"
    limit = f"{max_model_len} leaves no room for {wanted}" if generates else f"is {max_model_len}"
    error = PromptTooLongError(f"{tokens} {limit}")
    error.prompt_tokens, error.max_model_len = prompt_tokens, max_model_len
    raise error


def check_forced_call(request: Request, job: JobConfig) -> None:
    """Raise RequestError if the row's ``tool_choice`` requires a call that the engine cannot enforce."""
    engine = job.engine
    if reason := why_not_forced(request.tool_choice, engine.kind, engine.tool_call_parser):
        raise RequestError(f"tool_choice: {reason}")


def missing_model(model: str) -> str | None:
    """Return an error message if ``model`` is a path that does not exist or a folder without a model, otherwise
    None."""
    folder = Path(model)
    if folder.is_dir() and not any(map(_is_of_a_model, folder.iterdir())):
        found = f"{model} is not a model's folder: it has no config.json"
    elif not folder.exists() and (folder.is_absolute() or model.startswith(".")):
        found = f"no folder {model}"
    elif (
        not folder.exists()
        and model not in DEMO_MODELS
        and (near := nearest(model, [*DEMO_MODELS], cutoff=0.85))
    ):
        return f"engine.model: no model {model}; did you mean {near!r}?"
    else:
        return None
    return (
        f"engine.model: {found}; give a model's folder or its name on the hub (the model that comes with"
        f" batchkit is {DEMO_MODEL})"
    )


def _is_of_a_model(path: Path) -> bool:
    return path.name in ("config.json", "params.json") or path.suffix == ".gguf"


def chat_template(options: Mapping[str, Any]) -> str | None:
    """Return the chat template in the option ``chat_template``, which may be a file name, as in ``vllm.LLM``.

    None selects the model's own template. Raises JobError if the file can't be read.
    """
    template = options.get("chat_template")
    if template is None or any(c in template for c in "{}\n"):
        return template
    try:
        return read_text(template)
    except OSError as error:
        raise JobError(f"engine.options.chat_template: {error}") from error


def template_kwargs(job: JobConfig, request: Request) -> dict[str, Any]:
    """Return the variables for the chat template: those of the job, overridden by those of the row.

    ``reasoning_effort`` of a row switches thinking on or off, as in vLLM's server, unless the row sets
    ``enable_thinking``.
    """
    own = dict(request.chat_template_kwargs)
    if (effort := own.get("reasoning_effort")) is not None:
        own.setdefault("enable_thinking", effort != "none")
    return {**job.prompt.chat_template_kwargs, **own}


def cause(error: BaseException) -> str:
    """Return the type and message of the innermost error, because models' processors wrap errors in pages of
    arguments."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {error}"


def problems_with(
    place: str, table: type[Table], values: Mapping[str, Any], kind: str
) -> list[str]:
    """Check ``values`` of the job's table ``place`` (such as ``engine.options``) against the model ``table``.

    Return one message per wrong key. An unknown key is reported as unknown to engines of ``kind``.
    """
    try:
        table.model_validate(values)
    except ValidationError as error:
        unknown = f'kind = "{kind}" has no such name'
        return [f"{place}.{line}" for line in problems_in(error, table, values, unknown)]
    return []
