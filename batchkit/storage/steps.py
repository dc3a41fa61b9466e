"""``steps.jsonl``: every generation of rows that have several, in the order in which they ended.

A generation is in the log before its row makes the next request. If the row is interrupted, it gets its recorded
answers when it is run again, and repeats only requests that were in flight (``execution/rollouts/open_row.py``).

A resume needs only the lines of rows without a record, which are near the end of the log. The checkpoint
(``StepsPoint``) stores the offset of the first of these lines, and counts over all lines. So a resume parses the log
only from that offset on.
"""

from __future__ import annotations

from array import array
from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import orjson
from msgspec.structs import replace

import batchkit.errors
from batchkit.errors import RowError, ServerError
from batchkit.storage.checkpoint import StepsPoint, Totals
from batchkit.storage.files import disk_errors
from batchkit.storage.lines import Generation, Spent, encoded, generation_in
from batchkit.storage.log import STEPS, Log, LogLine, read_generations
from batchkit.storage.schema import answer_of
from batchkit.types import Choice, Completion, Request, Usage


class GenerationLine(NamedTuple):
    """A generation, and its line for ``steps.jsonl`` with the newline."""

    raw: bytes
    generation: Generation


def generation_line(completion: Completion) -> GenerationLine:
    call = completion.request.call
    assert call is not None
    generation = Generation(
        **answer_of(completion, completion.choices, of_failed=True),
        step=call.step,
        call=call.number,
        engine=call.engine or None,
    )
    return line_with(generation)


def fresh_line(generation: Generation) -> GenerationLine:
    """Return the line of a recorded generation with the mark ``replay: fresh``.

    The mark allows the row to make other requests when it is run again.
    """
    return line_with(replace(generation, replay="fresh"))


def line_with(generation: Generation) -> GenerationLine:
    return GenerationLine(encoded(generation), generation)


def completion_of(line: Mapping[str, Any], request: Request) -> Completion:
    """Return a recorded generation, a ``line`` of ``steps.jsonl``, as the completion of ``request``.

    ``selected`` is not set: ``[select]`` has to select the choice again.
    """
    if "choices" in line:
        choices = tuple(map(_choice, line["choices"]))
    else:
        choices = () if line["text"] is None else (_choice(line),)
    return Completion(
        request,
        choices,
        msgspec.convert(line.get("usage"), Usage | None),
        line.get("latency_s", 0.0),
        _error(line.get("error") or {}) if line["status"] == "failed" else None,
        earlier_usage=msgspec.convert(line.get("earlier_usage"), Usage | None),
    )


class StepsLog:
    """The ``steps.jsonl`` of a run folder, open for appending. Use it from one thread; other threads may call
    ``known``.

    Parameters:

    - ``totals``: counts over ``results.jsonl``, which show which rows have a record.
    - ``point``: counts over ``steps.jsonl`` at the last checkpoint.
    - ``counted_by_row``: for each row whose record was written after the checkpoint, the number and tokens of the
      generations that the record counts.

    Attributes:

    - ``spent``: totals of all generations, including lost ones.
    - ``lost``: for each row in ``counted_by_row``, how many of its generations are missing in the file after a power
      cut. Rows that miss none are left out.

    Raises:
        StoreError: the disk fails, or the file differs from the last checkpoint.
    """

    def __init__(
        self, folder: Path, totals: Totals, point: StepsPoint, counted_by_row: Mapping[int, Spent]
    ) -> None:
        self._totals = totals
        self.spent = point.spent
        # Start and end offsets of each row's lines, alternating: for rows without a record, in the order of
        # their first lines, and for recalled rows.
        self._places: dict[int, array[int]] = {}
        self._recalled: Container[int] = ()
        self._recalled_end = 0
        counted_end = point.checksum.end
        there = dict.fromkeys(counted_by_row, Spent())

        def take(line: LogLine[Generation]) -> None:
            assert line.record is not None
            if line.end > counted_end:
                self.spent = self.spent.with_one(line.record)
            index = line.record.index
            if index in there:
                there[index] = there[index].with_one(line.record)
            elif not totals.is_settled(index):
                self._hold(index, line.offset, line.end)

        path = folder / STEPS
        self.log = Log(path, generation_in, point.checksum, take, start=point.first)
        self.lost: dict[int, int] = {}
        for row, counted in counted_by_row.items():
            if (n_lost := counted.generations - there[row].generations) > 0:
                self.lost[row] = n_lost
                self.spent = self.spent.with_tokens_of(counted, there[row])

    def known(self, index: int) -> list[dict[str, Any]]:
        """Return the recorded generations of a row that may be run again, in the order of the log.

        In a retry, generations of earlier attempts have the key ``earlier``. Another thread may call this for a row,
        unless generations of that row are being written.

        Raises:
            StoreError: the disk fails.
        """
        places = self._places.get(index)
        if places is None:
            return []
        with disk_errors(self.log.path, "can't be read"):
            return [self._read(*place) for place in zip(places[::2], places[1::2], strict=True)]

    def recall(self, rows: Container[int]) -> None:
        """Make ``known`` also return the generations of ``rows``, which have records and will be retried."""
        self._recalled, self._recalled_end = rows, self.log.end
        for line in read_generations(self.log.path.parent):
            index = -1 if line.record is None else line.record.index
            if index in rows and self._totals.is_settled(index):
                self._hold(index, line.offset, line.end)

    def write(self, lines: Sequence[GenerationLine]) -> None:
        """Append ``lines``, which then survive a kill."""
        end = self.log.end
        self.log.append(b"".join(line.raw for line in lines))
        for line in lines:
            start, end = end, end + len(line.raw)
            self.spent = self.spent.with_one(line.generation)
            index = line.generation.index
            if index in self._recalled or not self._totals.is_settled(index):
                self._hold(index, start, end)

    def forget(self, index: int) -> None:
        """Forget the positions of a row's generations, because the row has its record now."""
        self._places.pop(index, None)

    @property
    def point(self) -> StepsPoint:
        settled = self._totals.is_settled
        open_rows = (places for row, places in self._places.items() if not settled(row))
        first = next((places[0] for places in open_rows), self.log.end)
        return StepsPoint(self.log.checksum, first, self.spent)

    def _hold(self, index: int, start: int, end: int) -> None:
        self._places.setdefault(index, array("q")).extend((start, end))

    def _read(self, start: int, end: int) -> dict[str, Any]:
        line: dict[str, Any] = orjson.loads(self.log.read(start, end))
        return line if end > self._recalled_end else {**line, "earlier": True}


def spent_in(folder: Path, point: StepsPoint) -> Spent:
    """Return the totals of all generations in ``folder``. A run may write to the folder meanwhile.

    ``point``: the totals at the checkpoint; only later lines are read.
    """
    spent = point.spent
    for line in read_generations(folder, point.checksum.end):
        if line.record is not None:
            spent = spent.with_one(line.record)
    return spent


def totals_by_step(folder: Path) -> dict[str, Spent]:
    """Return totals of the generations in ``steps.jsonl`` by step name, in the order in which the names first occur."""
    found: dict[str, Spent] = {}
    for line in read_generations(folder):
        if (generation := line.record) is not None:
            found[generation.step] = found.get(generation.step, Spent()).with_one(generation)
    return found


def _choice(line: Mapping[str, Any]) -> Choice:
    names = ("text", "finish_reason", "logprobs", "reasoning", "tool_calls")
    return Choice(*(line.get(name) for name in names))  # type: ignore[arg-type]


def _error(found: Mapping[str, Any]) -> RowError:
    known = getattr(batchkit.errors, str(found.get("type")), None)
    kind = known if isinstance(known, type) and issubclass(known, RowError) else ServerError
    return kind(str(found.get("message")))
