"""Where each row's lines are in a log: its newest record, or all of its generations."""

from __future__ import annotations

import mmap
from array import array
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

import msgspec
import orjson

from batchkit.storage.lines import generation_in, whole_record
from batchkit.storage.log import STEPS, opened_log
from batchkit.types import Count

if TYPE_CHECKING:
    import numpy as np

    Numbers = np.ndarray[Any, Any]

_AT_ONCE = 4096  # rows


class NewestLine(NamedTuple):
    """The newest line of the row with the index ``row``: bytes ``start`` to ``end`` of the log."""

    row: int
    start: int
    end: int


class NewestLog:
    """The newest line of each row of a log, or with ``every`` all of them, in the order of the rows. A missing log
    has none; what is not a line of a row is left out, and so is a torn end.

    ``view`` is the log as it was when this was made, even if a requeue replaces it meanwhile; only
    the parts that are read are in memory. ``rows``, ``starts`` and ``ends`` (bytes) have an entry for each
    line: int64 arrays.
    """

    def __init__(self, path: Path, *, every: bool = False) -> None:
        with opened_log(path) as file:
            bounds, rows = _lines(file)
            self.view: mmap.mmap | bytes = (
                mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if len(rows) else b""
            )
        lines = rows.argsort(kind="stable") if every else last_of_each(rows)
        lines = lines[rows[lines] >= 0]
        self.rows, self.starts, self.ends = rows[lines], bounds[lines], bounds[lines + 1]

    def __iter__(self) -> Iterator[NewestLine]:
        for at in range(0, len(self.rows), _AT_ONCE):
            columns = (
                of[at : at + _AT_ONCE].tolist() for of in (self.rows, self.starts, self.ends)
            )
            yield from map(NewestLine, *columns)
            self.release()

    def of(self, row: int) -> list[bytes]:
        """The row's lines, in the order of the log."""
        here = slice(*self.rows.searchsorted([row, row + 1]))
        return [self.view[a:b] for a, b in zip(self.starts[here], self.ends[here], strict=True)]

    def release(self) -> None:
        """Let the kernel drop the pages that were read."""
        if isinstance(self.view, mmap.mmap):
            self.view.madvise(mmap.MADV_DONTNEED)

    def close(self) -> None:
        if isinstance(self.view, mmap.mmap):
            self.view.close()


def read_newest(path: Path) -> Iterator[dict[str, Any]]:
    """The newest record of each row, in the order of the input.

    Makes two passes over one open file. Between them it holds 24 bytes per record, never the
    records.
    """
    with closing(NewestLog(path)) as log:
        for line in log:
            yield whole_record(log.view[line.start : line.end], path, line.start)


class Generations:
    """What the ``steps.jsonl`` of ``folder`` has of each row; nothing, if there is none.

    From the first question on it holds 24 bytes for each line, and it reads only lines that are asked
    for. A line that is not a generation is left out.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / STEPS
        self._log: NewestLog | None = None

    def of(self, index: int) -> list[dict[str, Any]]:
        """The row's, in the order in which they ended."""
        if self._log is None:
            self._log = NewestLog(self._path, every=True)
        lines = self._log.of(index)
        return [orjson.loads(raw) for raw in lines if generation_in(raw) is not None]

    def of_record(self, record: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Of a row with several: its generations; of ``[[steps]]``, each with what its record has of it."""
        found = self.of(record["index"]) if record.get("generations") is not None else []
        if (steps := record.get("steps")) is None:
            return found
        by_step = {line["step"]: line for line in found}
        return [{**by_step.get(name, {}), "step": name, **step} for name, step in steps.items()]

    def close(self) -> None:
        if self._log is not None:
            self._log.close()


def last_of_each(rows: Numbers) -> Numbers:
    """The places of the last of equal ``rows``, in the order of the rows."""
    import numpy as np

    order = np.argsort(rows, kind="stable")  # stable: the newest of a row stays the last
    in_order = rows[order]
    last: Numbers = order[np.append(in_order[1:] != in_order[:-1], True)[: len(rows)]]
    return last


class _Line(msgspec.Struct):
    index: Count


_decoder = msgspec.json.Decoder(_Line)


def _lines(log: BinaryIO) -> tuple[Numbers, Numbers]:
    """The byte positions at which lines begin, and the last one's end; and the row of each line, -1 if it is
    broken."""
    import numpy as np

    bounds, rows = array("q", [0]), array("q")
    for raw in log:
        if raw.endswith(b"\n"):
            bounds.append(bounds[-1] + len(raw))
            rows.append(_row_of(raw))
    return np.frombuffer(bounds, np.int64), np.frombuffer(rows, np.int64)


def _row_of(raw: bytes) -> int:
    try:
        return _decoder.decode(raw).index
    except msgspec.MsgspecError:
        return -1
