"""``[rollout]``: the user's function, called for each row."""

from __future__ import annotations

import asyncio
import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Awaitable, Callable, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import orjson
from msgspec.structs import replace

from batchkit.config.tables import JobConfig, RolloutTable
from batchkit.config.tables.misfits import misfits
from batchkit.errors import EmptyTextError, JobError, RolloutError, RowError
from batchkit.execution.rollouts.generate import Generate
from batchkit.execution.rollouts.open_row import OpenRow
from batchkit.execution.rollouts.row_loop import shown_error
from batchkit.execution.start import Start
from batchkit.rendering.messages import short
from batchkit.storage.plain_json import valid
from batchkit.types import Choice, Completion

_GIVEN = "python "  # begins the place of a function that a program has given

Function = Callable[[Mapping[str, Any], Generate], Awaitable[str | dict[str, Any] | Completion]]


class Rollout:
    """Answers rows with the function that a program gave, or that the job names."""

    def __init__(self, start: Start) -> None:
        assert start.job.rollout is not None
        self._start = start
        self._function = start.options.rollout or loaded_function(start.job.rollout.function)

    async def solve(self, row: OpenRow) -> Completion:
        """The outcome of the row: what the function returned, or its error."""
        generate = Generate(row, self._start)
        fields = deepcopy(dict(row.row.fields))  # the row is scored and recorded as it was read
        try:
            text, parsed = _answer(await self._function(fields, generate))
        except (asyncio.CancelledError, GeneratorExit):
            raise
        except BaseException as error:
            return row.failed(_row_error(error))
        return replace(row.outcome(None, [Choice(text, None)]), parsed=parsed)


def with_function(job: JobConfig, function: Any) -> JobConfig:
    """``job`` with ``function`` of the calling program as its rollout's; its name has a hash of the
    source, by which a resume knows it.

    Raises:
        JobError: it is no coroutine function, or does not fit the job.
    """
    if not inspect.iscoroutinefunction(function):
        raise JobError(
            f"rollout: found {short(function)}, expected a function `async def solve(row, generate)`"
        )
    if job.run.workers is not None:
        raise JobError(
            "rollout: workers on Ray don't get a function; name it in the job (rollout.function ="
            ' "module:name"), or leave run.workers out'
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
    job = job.model_copy(update={"rollout": table})
    if found := misfits(job):
        raise JobError("\n".join(found))
    return job


def loaded_function(name: str) -> Function:
    """The function that ``rollout.function`` names.

    Raises:
        JobError: there is none, or its module can't be imported.
    """
    place, _, attribute = name.rpartition(":")
    if place.startswith(_GIVEN):
        raise JobError(
            f"rollout.function: {attribute} was given by a program (ProductionBatchProcessor(…,"
            f" rollout={attribute})); run that program again"
        )
    try:
        module = _of_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        raise JobError(
            f"rollout.function: {place} can't be imported:\n{shown_error(error)}"
        ) from error
    function = getattr(module, attribute, None)
    if not inspect.iscoroutinefunction(function):
        found = "nothing" if function is None else short(function)
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


def _of_file(path: Path) -> Any:
    """The module in ``path``, which may import what is beside it, as a script may. It is run again each
    time: the file may have changed."""
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
        sys.modules[name] = module  # what is defined there can be pickled
    spec.loader.exec_module(module)
    return module


def _answer(value: Any) -> tuple[str, Any]:
    """The text of what a function returned, and the value of a dict.

    Raises:
        RowError: it is no answer.
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
            raise RolloutError(f"the function returned a dict that is no JSON: {error}") from None
        text, parsed = line.decode(), orjson.loads(line)
    else:
        raise RolloutError(
            f"the function returned {short(value)} ({type(value).__name__}), expected a text, a dict or"
            " a completion"
        )
    if not text.strip():
        raise EmptyTextError("the function returned no text, or only white space")
    return text, parsed


def _row_error(error: BaseException) -> RowError:
    """``error`` itself if it is a row's, or a group of nothing else; others with their traceback."""
    if isinstance(error, BaseExceptionGroup):
        rest = error.subgroup(lambda one: not isinstance(one, RowError | BaseExceptionGroup))
        if rest is None:
            return _row_error(error.exceptions[0])
    return error if isinstance(error, RowError) else RolloutError(shown_error(error))
