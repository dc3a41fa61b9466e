"""``[rollout]``: calls the user's function for each row, and gives it an object that makes generations."""

from __future__ import annotations

import asyncio
import hashlib
import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import orjson
from msgspec.structs import replace

from batchkit.config.tables import JobConfig, RolloutTable
from batchkit.config.tables.misfits import misfits
from batchkit.errors import EmptyTextError, JobError, RequestError, RolloutError, RowError
from batchkit.execution.rollouts.open_row import OpenRow
from batchkit.execution.rollouts.row_loop import shown_error
from batchkit.execution.start import Start
from batchkit.rendering.renderer import PromptRenderer, with_media_bytes
from batchkit.rendering.tools import checked_tools
from batchkit.sources.reader import shown
from batchkit.storage.plain_json import valid
from batchkit.types import Choice, Completion, Request

Prompt = str | Sequence[Mapping[str, Any]]
_STEP = re.compile(r"\w*", re.ASCII)
_SCALARS = (type(None), bool, int, float, str)
_GIVEN = "python "  # prefix of ``rollout.function`` if a program passed the function

Function = Callable[[Mapping[str, Any], "Generate"], Awaitable[str | dict[str, Any] | Completion]]


class Rollout:
    """A solver that answers each row with a user's function: one passed in Python, or the one that the job names."""

    def __init__(self, start: Start) -> None:
        assert start.job.rollout is not None
        self._start = start
        self._function = start.options.rollout or loaded_function(start.job.rollout.function)

    async def solve(self, row: OpenRow) -> Completion:
        """Return the outcome of the row: the value that the function returned, or its error."""
        generate = Generate(row, self._start)
        # A copy, because the row is scored and recorded as it was read.
        fields = deepcopy(dict(row.row.fields))
        try:
            text, parsed = _answer(await self._function(fields, generate))
        except (asyncio.CancelledError, GeneratorExit):
            raise
        except BaseException as error:
            return row.failed(_row_error(error))
        return replace(row.outcome(None, [Choice(text, None)]), parsed=parsed)


def with_function(job: JobConfig, function: Any) -> JobConfig:
    """Return ``job`` with ``function`` as its rollout.

    The function's name in the job contains a hash of its source, by which a resume notices changes.

    Raises:
        JobError: ``function`` is not a coroutine function, or does not fit the job.
    """
    if not inspect.iscoroutinefunction(function):
        raise JobError(
            f"rollout: found {shown(function)}, expected a function `async def solve(row, generate)`"
        )
    if job.workers.count is not None:
        raise JobError(
            "rollout: a function can't be sent to workers on Ray; name it in the job (rollout.function ="
            ' "module:name"), or leave workers.count out'
        )
    try:
        source = hashlib.sha256(inspect.getsource(function).encode()).hexdigest()[:16]
    except (OSError, TypeError):  # typed at a prompt, or a functools.partial
        source = "unknown"
    name = getattr(function, "__name__", "function")
    table = RolloutTable(
        function=f"{_GIVEN}{source}:{name}",
        **({} if job.rollout is None else {"concurrency": job.rollout.concurrency}),
    )
    job = job.with_keys(rollout=table)
    if found := misfits(job):
        raise JobError("\n".join(found))
    return job


def loaded_function(name: str) -> Function:
    """Return the function that ``rollout.function`` names.

    Raises:
        JobError: the function does not exist, or its module can't be imported.
    """
    place, _, attribute = name.rpartition(":")
    if place.startswith(_GIVEN):
        raise JobError(
            f"rollout.function: the function {attribute} was passed by a program (ProductionBatchProcessor(…,"
            f" rollout={attribute})); run that program again"
        )
    try:
        module = (
            _import_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
        )
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        if isinstance(error, ModuleNotFoundError) and f"{place}.".startswith(f"{error.name}."):
            raise JobError(
                f"rollout.function: no module {place!r}; name a file that ends in .py, as in solve.py:{attribute}, or"
                f" an installed module, as in package.module:{attribute}"
            ) from error
        raise JobError(
            f"rollout.function: {place} can't be imported:\n{shown_error(error)}"
        ) from error
    function = getattr(module, attribute, None)
    if not inspect.iscoroutinefunction(function):
        found = "nothing" if function is None else shown(function)
        raise JobError(
            f"rollout.function: found {found} as {attribute} in {place}, expected a function `async def"
            f" {attribute}(row, generate)`"
        )
    try:
        inspect.signature(function).bind("row", "generate")
    except TypeError as error:
        raise JobError(
            f"rollout.function: {attribute}{inspect.signature(function)} in {place} can't be called with a"
            f" row and generate: {error}"
        ) from None
    return function


def _import_file(path: Path) -> Any:
    """Import the module in ``path``. The module is executed at each call, because the file may have changed.

    Like a script, the module may import modules from its own folder.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file")
    folder, name = str(path.parent), path.stem
    if folder not in sys.path:
        sys.path.insert(0, folder)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None  # the file's name ends with .py
    module = importlib.util.module_from_spec(spec)
    if name not in sys.stdlib_module_names:
        sys.modules[name] = module  # needed to pickle objects of classes defined there
    spec.loader.exec_module(module)
    return module


def _answer(value: Any) -> tuple[str, Any]:
    """Return the text of a function's result, and the value if it is a dict.

    Raises:
        RowError: the result is not an answer.
    """
    parsed = None
    if isinstance(value, Completion):
        text = value.text
    elif isinstance(value, str):
        text = valid(value)
    elif isinstance(value, dict):
        try:
            line = orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY)
        except (TypeError, RecursionError) as error:
            raise RolloutError(
                f"the function returned a dict that can't be converted to JSON: {error}"
            ) from None
        text, parsed = line.decode(), orjson.loads(line)
    else:
        raise RolloutError(
            f"the function returned {shown(value)} ({type(value).__name__}), expected a text, a dict or"
            " a completion"
        )
    if not text.strip():
        raise EmptyTextError(
            "the function returned no text, or only white space; return the row's answer"
        )
    return text, parsed


def _row_error(error: BaseException) -> RowError:
    """Return the row's error after its function raised ``error``.

    A RowError is returned unchanged. For a group of RowErrors, the first one is returned. Any other exception becomes a
    RolloutError with its traceback.
    """
    if isinstance(error, BaseExceptionGroup):
        rest = error.subgroup(lambda one: not isinstance(one, RowError | BaseExceptionGroup))
        if rest is None:
            return _row_error(error.exceptions[0])
    return error if isinstance(error, RowError) else RolloutError(shown_error(error))


class Generate:
    """An object that makes the generations of a row; the rollout's function gets it as its second argument.

    ``await generate(prompt)`` makes one generation; ``await generate.many(prompts)`` makes several at the same time.
    After a restart, generations that were answered before are not sent again: the function gets the recorded answers.
    """

    def __init__(self, row: OpenRow, start: Start) -> None:
        self._row, self._start = row, start
        self._sampling = start.job.params()
        self._loop = asyncio.get_running_loop()

    async def __call__(
        self,
        prompt: Prompt,
        *,
        step: str = "",
        engine: str = "",
        chat: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: Any = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **sampling: Any,
    ) -> Completion:
        """Generate an answer to ``prompt``: chat messages in OpenAI's shape, with or without images, or a text.

        The arguments are copied, so the function may change them afterwards.

        - ``step``: name of this generation in ``steps.jsonl`` and in tables.
        - ``engine``: one of ``[engines]``.
        - ``chat``: False makes a text the whole prompt, without a chat template. By default, a text is the user's
          message.
        - ``sampling``: parameters of ``vllm.SamplingParams``; they override the job's ``[sampling]``.

        Raises:
            RowError: this generation failed. If the function does not catch it, the row fails with it.
        """
        self._check(step, engine)
        wanted = checked_tools(
            _json_copy("tools", tools),
            _json_copy("tool_choice", tool_choice),
            "tools",
            "tool_choice",
        )
        messages = _messages(prompt) if chat else None
        if messages is None and (wanted.tools or not isinstance(prompt, str)):
            raise RequestError(
                "generate: chat=False sends a plain text; leave tools out, or give chat messages"
            )
        request = Request(
            self._row.row,
            messages,
            str(prompt) if messages is None else None,
            self._sampling | {name: _json_copy(name, value) for name, value in sampling.items()},
            input_hash="",
            tools=wanted.tools,
            tool_choice=wanted.tool_choice,
            chat_template_kwargs=_json_copy("chat_template_kwargs", chat_template_kwargs) or {},
        )
        has_parts = any(isinstance(one.get("content"), list) for one in messages or ())
        completion = await self._row.ask(
            lambda: self._rendered(request), step, engine, takes_long=has_parts
        )
        assert completion is not None
        if completion.error is not None:
            raise completion.error
        # A recorded completion has no prompt, so a new one must not have it either.
        return completion if completion.prompt is None else replace(completion, prompt=None)

    async def many(
        self, prompts: Sequence[Prompt], *, return_exceptions: bool = False, **arguments: Any
    ) -> list[Any]:
        """Return the completions of all ``prompts``, in order. ``arguments``: as for a single call.

        ``return_exceptions``: return the error of a failed generation in its place, instead of raising it.

        Raises:
            RowError: one of the generations failed; the others are cancelled.
        """
        tasks = [asyncio.ensure_future(self(prompt, **arguments)) for prompt in prompts]
        try:
            return await asyncio.gather(*tasks, return_exceptions=return_exceptions)
        finally:
            for task in tasks:
                task.cancel()

    def _check(self, step: str, engine: str) -> None:
        if asyncio.get_running_loop() is not self._loop:
            raise RequestError(
                "generate: was called on another event loop; await it on the event loop that runs the function"
            )
        engines = self._start.job.engines
        if engine and engine not in engines:
            known = f"expected one of [engines]: {', '.join(engines)}"
            known = known if engines else "but the job has no [engines]; leave engine out"
            raise RequestError(f"generate: engine is {engine!r}, {known}")
        if not isinstance(step, str) or not _STEP.fullmatch(step):
            raise RequestError(
                f"generate: step is {shown(step)}, expected a name of letters, digits and _"
            )

    def _rendered(self, request: Request) -> Request:
        """Return ``request`` with its images opened."""
        if request.messages is None:
            return request
        renderer = self._start.renderer
        assert isinstance(renderer, PromptRenderer), "steps and recordings have no function"
        messages = renderer.messages(request.messages)
        made = with_media_bytes(replace(request, messages=messages))
        if made.media_bytes:
            return made
        return replace(made, messages=_json_copy("messages", messages))


def _messages(prompt: Any) -> list[Mapping[str, Any]]:
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    is_list = isinstance(prompt, list | tuple)
    if is_list and prompt and all(isinstance(message, Mapping) for message in prompt):
        return [dict(message) for message in prompt]
    raise RequestError(f"generate: found {shown(prompt)}, expected a text or a list of messages")


def _json_copy(name: str, value: Any) -> Any:
    """Return a copy of an argument in JSON's types, so that later changes by the function don't change the request.

    Raises:
        RequestError: the value can't be converted to JSON.
    """
    if type(value) in _SCALARS:
        return value
    try:
        return orjson.loads(orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY))
    except (TypeError, RecursionError) as error:
        raise RequestError(
            f"generate: {name} is {shown(value)}, which can't be converted to JSON: {error}"
        ) from None
