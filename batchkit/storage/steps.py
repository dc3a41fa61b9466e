"""``steps.jsonl``: every generation of the rows that have several, in the order in which they ended.

A generation is in it before its row asks for the next one. So a row that was interrupted gets the
answers that it had, and repeats only what was in flight (``execution/rollouts/replay.py``). As with the
log, a kill at any time loses nothing that was written; a power cut at most what came since the
checkpoint, and then no record of ``results.jsonl`` is newer.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import orjson

import batchkit.errors
from batchkit.errors import RowError, ServerError, StoreError
from batchkit.storage.checkpoint import Totals
from batchkit.storage.files import free_name, open_private, write_all, write_atomically
from batchkit.storage.newest import line_rows
from batchkit.storage.plain_json import encoded
from batchkit.storage.schema import error_of, seconds_of
from batchkit.types import Choice, Completion, Request, Usage, line_of_choice, utc_now

STEPS = "steps.jsonl"


class GenerationLine(NamedTuple):
    """A line of ``steps.jsonl``, newline included, and what it says: at least ``index`` and ``usage``."""

    raw: bytes
    generation: Mapping[str, Any]


def generation_line(completion: Completion) -> GenerationLine:
    """The line for ``completion``, one generation of its row."""
    request, usage, error = completion.request, completion.usage, completion.error
    call = request.call
    assert call is not None
    choice = completion.choice
    several = len(completion.choices) > 1 or (choice is not None and choice.logprobs is not None)
    table: dict[str, Any] = {
        "index": request.row.index,
        "step": call.step,
        "call": call.number,
        "status": "ok" if error is None else "failed",
        "id": request.row.id,
        "attempt": request.attempt,
        "engine": call.engine or None,
        "request_hash": call.request_hash,
        "text": None if choice is None else choice.text,
        "reasoning": None if choice is None else choice.reasoning,
        "tool_calls": None if choice is None else choice.tool_calls,
        "finish_reason": None if choice is None else choice.finish_reason,
        "usage": None
        if usage is None
        else {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "reasoning_tokens": usage.reasoning_tokens,
        },
        "latency_s": round(seconds_of(completion.latency_s), 4),
        "finished_at": utc_now(),
        "error": None if error is None else asdict(error_of(error)),
        "choices": [*map(line_of_choice, completion.choices)] if several else None,
        "selected": completion.selected,
        "votes": completion.votes,
    }
    kept = {key: value for key, value in table.items() if value is not None}
    return GenerationLine(encoded(kept), kept)


def completion_of(line: Mapping[str, Any], request: Request) -> Completion:
    """What a recorded generation answered to ``request``."""
    if "choices" in line:
        choices = tuple(map(_choice, line["choices"]))
    else:
        choices = (_choice(line),) if "text" in line else ()
    usage = line.get("usage")
    return Completion(
        request,
        choices,
        None if usage is None else Usage(**usage),
        line.get("latency_s", 0.0),
        _error(line["error"]) if line["status"] == "failed" else None,
        selected=line.get("selected"),
        votes=line.get("votes"),
    )


class StepsLog:
    """The ``steps.jsonl`` of one run folder, open for appending; made when its first line is written.

    Used by one process and one thread, as the Store that owns it. ``totals`` say which rows have a
    record, whose generations nobody asks for any more. ``count`` is the number of generations, and
    ``open_usage`` the tokens of those whose row has no record yet.

    Raises:
        StoreError: the disk refuses.
    """

    def __init__(self, folder: Path, totals: Totals) -> None:
        self.path = folder / STEPS
        self._totals = totals
        self._file: int | None = None
        self._end = self.count = self.salvaged_bytes = 0
        self._synced_end = 0
        self._open: defaultdict[int, list[Usage]] = defaultdict(list)
        # Of rows without a record: where the lines of this start begin and end.
        self._written: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
        try:
            if self.path.exists():
                self._open_file()
        except OSError as error:
            raise StoreError(f"{self.path}: {error.strerror or error}") from error

    def known(self, index: int) -> list[dict[str, Any]]:
        """What is recorded of the row, in the order of the log. Another thread may ask for rows of
        which nothing is being written."""
        return [self._line(*place) for place in self._places(index)]

    def write(self, lines: Sequence[GenerationLine]) -> None:
        """Append ``lines``; from now on they survive a kill."""
        try:
            if self._file is None:
                self._open_file()
            block = b"".join(line.raw for line in lines)
            try:
                write_all(self._descriptor, block)
            except BaseException:
                with suppress(OSError):
                    os.ftruncate(self._descriptor, self._end)
                raise
        except OSError as error:
            raise StoreError(
                f"{self.path}: can't write: {error.strerror}; every generation before is on disk."
                " Make room, then run the same command again"
            ) from error
        self.count += len(lines)
        for line in lines:
            index, start = line.generation["index"], self._end
            self._end += len(line.raw)
            self._written[index].append((start, self._end))
            self._open[index].append(_usage_of(line.generation))

    def settle(self, index: int) -> None:
        """The row has its record now."""
        self._open.pop(index, None)
        self._written.pop(index, None)

    @property
    def open_usage(self) -> Usage:
        usages = [usage for row in self._open.values() for usage in row]
        prompt = sum(usage.prompt_tokens for usage in usages)
        return Usage(prompt, sum(usage.completion_tokens for usage in usages))

    @property
    def is_synced(self) -> bool:
        return self._synced_end == self._end

    def sync(self) -> None:
        """What was written survives a power cut.

        Raises:
            OSError: the disk refuses.
        """
        if self._file is not None and not self.is_synced:
            os.fsync(self._file)
            self._synced_end = self._end

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    @property
    def _descriptor(self) -> int:
        assert self._file is not None
        return self._file

    def _open_file(self) -> None:
        self._file = open_private(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        import numpy as np

        with self.path.open("rb") as file:
            self._bounds, rows = line_rows(file)
        self._end, size = int(self._bounds[-1]), os.fstat(self._file).st_size
        if size > self._end:  # a kill cut the last line off
            torn = os.pread(self._file, size - self._end, self._end)
            write_atomically(free_name(self.path, ".torn-"), torn)
            os.ftruncate(self._file, self._end)
            self.salvaged_bytes = size - self._end
        self.count = len(rows)
        order = np.argsort(rows, kind="stable")
        self._known_rows, self._known_lines = rows[order], order
        for index in np.unique(rows).tolist():
            if index >= 0 and not self._totals.is_settled(index):
                self._open[index] = [*map(_usage_of, self.known(index))]

    def _places(self, index: int) -> Iterator[tuple[int, int]]:
        """Where the row's lines begin and end."""
        if self._file is not None and self._known_rows.size:
            import numpy as np

            first, last = np.searchsorted(self._known_rows, [index, index + 1])
            for at in self._known_lines[first:last]:
                yield int(self._bounds[at]), int(self._bounds[at + 1])
        yield from self._written.get(index, ())

    def _line(self, start: int, end: int) -> dict[str, Any]:
        line: dict[str, Any] = orjson.loads(os.pread(self._descriptor, end - start, start))
        return line


def _usage_of(generation: Mapping[str, Any]) -> Usage:
    usage = generation.get("usage") or {}
    return Usage(usage.get("prompt_tokens", 0), usage.get("completion_tokens", 0))


def _choice(line: Mapping[str, Any]) -> Choice:
    names = ("text", "finish_reason", "logprobs", "reasoning", "tool_calls")
    return Choice(*(line.get(name) for name in names))  # type: ignore[arg-type]


def _error(found: Mapping[str, Any]) -> RowError:
    known = getattr(batchkit.errors, str(found.get("type")), None)
    kind = known if isinstance(known, type) and issubclass(known, RowError) else ServerError
    return kind(str(found.get("message")))
