"""``steps.jsonl``: every generation of the rows that have several, in the order in which they ended.

A generation is in it before its row asks for the next one. So a row that was interrupted gets the
answers that it had, and repeats only what was in flight (``execution/rollouts/replay.py``). As with the
log, a kill at any time loses nothing that was written, and a power cut at most what came since the
checkpoint.

A resume needs the lines of rows that have no record yet, and these are near the end. So the checkpoint
has the place of the first of them, and what all lines count (``StepsPoint``): a resume reads from
there. There is no checksum: it would have to read all of the file, and what a damaged line before that
place said is in no answer any more, since its row has its record. A line that is not a generation is
passed over; its generation is asked for again. ``batchkit verify`` reads all lines.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Container, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import batchkit.errors
from batchkit.errors import RowError, ServerError, StoreError
from batchkit.storage.checkpoint import StepsPoint, Totals
from batchkit.storage.files import (
    free_name,
    is_same_file,
    open_private,
    write_all,
    write_atomically,
)
from batchkit.storage.ledger import LogLine, read_lines, record_of, tokens_in
from batchkit.storage.plain_json import encoded
from batchkit.storage.schema import error_of, fault_in_generation, possible, seconds_of
from batchkit.types import Choice, Completion, Request, Usage, line_of_choice, utc_now

STEPS = "steps.jsonl"
_BLOCK_BYTES = 1 << 20


class GenerationLine(NamedTuple):
    """A line of ``steps.jsonl``, newline included, and what it says: at least ``index`` and ``usage``."""

    raw: bytes
    generation: Mapping[str, Any]


def generation_line(completion: Completion) -> GenerationLine:
    """The line for ``completion``, one generation of its row."""
    request, error = completion.request, completion.error
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
        "usage": _table_of(completion.usage),
        "earlier_usage": _table_of(completion.earlier_usage),
        "latency_s": round(seconds_of(completion.latency_s), 4),
        "finished_at": utc_now(),
        "error": None if error is None else asdict(error_of(error)),
        "choices": [*map(line_of_choice, completion.choices)] if several else None,
        "selected": completion.selected,
        "votes": completion.votes,
    }
    kept = {key: value for key, value in table.items() if value is not None}
    return GenerationLine(encoded(kept), kept)


def fresh_line(generation: Mapping[str, Any]) -> GenerationLine:
    """The line of a generation that was recorded before; its row may ask for something else now."""
    fresh = {**generation, "replay": "fresh"}
    return GenerationLine(encoded(fresh), fresh)


def completion_of(line: Mapping[str, Any], request: Request) -> Completion:
    """What a recorded generation answered to ``request``; which of several answers counts is chosen again."""
    if "choices" in line:
        choices = tuple(map(_choice, line["choices"]))
    else:
        choices = (_choice(line),) if "text" in line else ()
    return Completion(
        request,
        choices,
        _usage(line.get("usage")),
        line.get("latency_s", 0.0),
        _error(line.get("error") or {}) if line["status"] == "failed" else None,
        earlier_usage=_usage(line.get("earlier_usage")),
    )


class StepsLog:
    """The ``steps.jsonl`` of one run folder, open for appending; made when its first line is written.

    Used by one process and one thread, as the Store that owns it, but for ``known``. ``totals`` say
    which rows have a record; ``point``, of the last checkpoint, where to begin to read. ``count`` is
    the number of generations in the file, and ``usage`` are their tokens. ``broken_at``: the byte position
    of a line that is not a generation, if there is one among those that were read.

    Raises:
        StoreError: the disk refuses, or the file is not what it was at the last checkpoint.
    """

    def __init__(self, folder: Path, totals: Totals, point: StepsPoint) -> None:
        self.path = folder / STEPS
        self._totals = totals
        self._file: int | None = None
        self._end = self._synced_end = point.end
        self.count = point.generations
        self.usage = Usage(point.prompt_tokens, point.completion_tokens)
        self.salvaged_bytes = 0
        self.broken_at: int | None = None
        # Where the lines of a row begin and end, by turns: of rows without a record, in the order of their
        # first lines, and of those that were recalled.
        self._places: dict[int, array[int]] = {}
        self._recalled: Container[int] = ()
        self._recalled_end = 0
        try:
            if os.path.lexists(self.path):
                self._file = open_private(self.path, os.O_RDWR | os.O_APPEND)
            if (damage := steps_damage(folder, point)) is not None:
                raise StoreError(damage)
            if self._file is not None:
                self._recover(self._file, point)
        except OSError as error:
            raise StoreError(f"{self.path}: {error.strerror or error}") from error

    def known(self, index: int) -> list[dict[str, Any]]:
        """What is recorded of the row, in the order of the log; of a row that is tried again, what came of
        earlier attempts says ``earlier``. Another thread may ask for rows of which nothing is being written.

        Raises:
            StoreError: the disk refuses.
        """
        places = self._places.get(index)
        if places is None:
            return []
        try:
            file = open_private(self.path, os.O_RDONLY)
            try:
                found = [
                    self._read(file, *place)
                    for place in zip(places[::2], places[1::2], strict=True)
                ]
            finally:
                os.close(file)
        except OSError as error:
            raise StoreError(f"{self.path}: {error.strerror or error}") from error
        lines = [line for line in found if line is not None and line["index"] == index]
        if self.broken_at is not None or len(lines) < len(found):  # some of the row's may be lost
            return [{**line, "replay": "fresh"} for line in lines]
        return lines

    def recall(self, rows: Container[int]) -> None:
        """From now on, know the generations of ``rows``, too, though they have a record."""
        self._recalled, self._recalled_end = rows, self._end
        for line in read_lines(self.path, 0, generation_in):
            index = -1 if line.record is None else line.record["index"]
            if index in rows and self._totals.is_settled(index):
                self._hold(index, line.offset, line.end)

    def write(self, lines: Iterable[GenerationLine]) -> None:
        """Append ``lines``; from now on they survive a kill."""
        lines = [*lines]
        try:
            if self._file is None:
                self._file = open_private(
                    self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND
                )
            try:
                write_all(self._file, b"".join(line.raw for line in lines))
            except BaseException:
                with suppress(OSError):
                    os.ftruncate(self._file, self._end)
                raise
        except OSError as error:
            raise StoreError(
                f"{self.path}: can't write: {error.strerror}; every generation before is on disk."
                " Make room, then run the same command again"
            ) from error
        for line in lines:
            start, self._end = self._end, self._end + len(line.raw)
            self._count(line.generation)
            index = line.generation["index"]
            if index in self._recalled or not self._totals.is_settled(index):
                self._hold(index, start, self._end)

    def settle(self, index: int) -> None:
        """The row has its record now."""
        self._places.pop(index, None)

    @property
    def point(self) -> StepsPoint:
        """For a checkpoint."""
        settled = self._totals.is_settled
        open_rows = (places for row, places in self._places.items() if not settled(row))
        first = next((places[0] for places in open_rows), self._end)
        if self.broken_at is not None:  # what is known of a row behind it may not be all
            first = min(first, self.broken_at)
        usage = self.usage
        return StepsPoint(
            first, self._end, self.count, usage.prompt_tokens, usage.completion_tokens
        )

    @property
    def is_synced(self) -> bool:
        return self._synced_end == self._end

    @property
    def is_there(self) -> bool:
        """False if the file was removed, replaced or cut since it was opened."""
        return self._file is None or is_same_file(self.path, self._file, self._end)

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

    def _recover(self, file: int, point: StepsPoint) -> None:
        """Count the lines since the checkpoint, and find those of rows without a record."""
        self._end, size = _whole_end(file), os.fstat(file).st_size
        if size > self._end:  # a kill cut the last line off
            torn = os.pread(file, size - self._end, self._end)
            write_atomically(free_name(self.path, ".torn-"), torn)
            os.ftruncate(file, self._end)
            self.salvaged_bytes = len(torn)
        for line in read_lines(self.path, point.first, generation_in):
            if line.record is None:
                self.broken_at = line.offset if self.broken_at is None else self.broken_at
                continue
            if line.end > point.end:
                self._count(line.record)
            if not self._totals.is_settled(line.record["index"]):
                self._hold(line.record["index"], line.offset, line.end)

    def _count(self, generation: Mapping[str, Any]) -> None:
        self.count += 1
        self.usage = _added(self.usage, generation)

    def _hold(self, index: int, start: int, end: int) -> None:
        self._places.setdefault(index, array("q")).extend((start, end))

    def _read(self, file: int, start: int, end: int) -> dict[str, Any] | None:
        line = generation_in(os.pread(file, end - start, start))
        if line is None or end > self._recalled_end:
            return line
        # A retry may choose in another way.
        kept = {key: value for key, value in line.items() if key not in ("selected", "votes")}
        return {**kept, "earlier": True}


def generation_in(raw: bytes) -> dict[str, Any] | None:
    """The generation in the line ``raw``, newline included; None if it is not one."""
    return record_of(raw, fault_in_generation)


def raw_lines(folder: Path) -> Iterator[tuple[LogLine, bytes]]:
    """The lines of ``steps.jsonl``, if there is one, each with its bytes."""
    path = folder / STEPS
    if path.exists():
        with path.open("rb") as file:
            for line in read_lines(path, 0, generation_in):
                yield line, file.read(line.end - line.offset)


def steps_damage(folder: Path, point: StepsPoint) -> str | None:
    """How ``steps.jsonl`` shows that it is not the file of the checkpoint that has ``point``, and the
    remedy; None if nothing shows.

    Raises:
        OSError: it can't be read.
    """
    path = folder / STEPS
    remedy = (
        f"; put a copy of it back, or accept what is left with `batchkit verify --repair {folder}`: answers"
        " stay, and rows without an answer ask again for what is gone"
    )
    size = path.stat().st_size if path.exists() else 0
    if size < point.end:
        return f"{path}: has {size} bytes, and had {point.end} at the last checkpoint{remedy}"
    for place in filter(None, (point.first, point.end)):
        with path.open("rb") as file:
            file.seek(place - 1)
            if file.read(1) != b"\n":
                return f"{path}: was changed since the last checkpoint, before byte {place}{remedy}"
    return None


def counted(folder: Path, point: StepsPoint) -> StepsPoint:
    """``point``, with what was written since then. Safe while a run writes."""
    generations, usage = point.generations, Usage(point.prompt_tokens, point.completion_tokens)
    for line in read_lines(folder / STEPS, point.end, generation_in):
        if line.record is not None:
            generations, usage = generations + 1, _added(usage, line.record)
    return StepsPoint(
        point.first, point.end, generations, usage.prompt_tokens, usage.completion_tokens
    )


def _added(usage: Usage, generation: Mapping[str, Any]) -> Usage:
    """``usage`` with the tokens of ``generation``."""
    prompt_tokens, completion_tokens = tokens_in(generation)
    return Usage(usage.prompt_tokens + prompt_tokens, usage.completion_tokens + completion_tokens)


def _whole_end(file: int) -> int:
    """The byte behind the last newline."""
    end = os.fstat(file).st_size
    while end:
        start = max(0, end - _BLOCK_BYTES)
        if (last := os.pread(file, end - start, start).rfind(b"\n")) >= 0:
            return start + last + 1
        end = start
    return 0


def _table_of(usage: Usage | None) -> dict[str, int | None] | None:
    return None if (known := possible(usage)) is None else asdict(known)


def _usage(found: Mapping[str, Any] | None) -> Usage | None:
    if found is None:
        return None
    return Usage(found["prompt_tokens"], found["completion_tokens"], found.get("reasoning_tokens"))


def _choice(line: Mapping[str, Any]) -> Choice:
    names = ("text", "finish_reason", "logprobs", "reasoning", "tool_calls")
    return Choice(*(line.get(name) for name in names))  # type: ignore[arg-type]


def _error(found: Mapping[str, Any]) -> RowError:
    known = getattr(batchkit.errors, str(found.get("type")), None)
    kind = known if isinstance(known, type) and issubclass(known, RowError) else ServerError
    return kind(str(found.get("message")))
