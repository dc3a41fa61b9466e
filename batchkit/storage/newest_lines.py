"""An index of a log's lines by row: the newest record of each row, or all of its generations."""

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
from batchkit.types import COUNT_LIMIT, Count

if TYPE_CHECKING:
    import numpy as np

    Numbers = np.ndarray[Any, Any]

_AT_ONCE = 4096  # rows
_PLACES_AT_ONCE = 2**20  # lines; limits memory, because numpy makes an int64 of each
_DENSE = 4  # use a table if row numbers reach at most this many times the number of lines


Span = tuple[int, int | None]
"""The lines of a log between two bytes, which are ends of lines. None is the log's end."""
WHOLE: Span = (0, None)


class NewestLine(NamedTuple):
    """The position of a row's newest line: bytes ``start`` to ``end`` of the log. ``row``: the row's index."""

    row: int
    start: int
    end: int


class NewestLog:
    """An index of a log that has the newest line of each row, in the order of the rows.

    Lines that name no row and a cut-off end are left out; a missing log has no lines. Memory: 20 bytes per line. The
    log is mapped into memory, so it stays readable if a requeue replaces the file.

    - ``every``: index all lines of each row instead of the newest.
    - ``span``: index only the lines between these two bytes of the log; None is the log's end.
    - ``view`` (attribute): the log's bytes at the time when this object was made.
    - ``rows`` (attribute, uint32): the row of each indexed line.
    """

    def __init__(self, path: Path, *, every: bool = False, span: Span = WHOLE) -> None:
        with opened_log(path) as file:
            rows, self._starts, self._sizes = _lines(file, span)
            self.view: mmap.mmap | bytes = (
                mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if len(rows) else b""
            )
        self._lines = rows.argsort(kind="stable") if every else last_of_each(rows)
        self.rows = rows[self._lines]

    def __iter__(self) -> Iterator[NewestLine]:
        for at in range(0, len(self.rows), _AT_ONCE):
            yield from self.lines(slice(at, at + _AT_ONCE))
            self.release()

    @property
    def sizes(self) -> Numbers:
        """The size of each line in bytes (uint32)."""
        return self._sizes[self._lines]

    def lines(self, part: slice) -> list[NewestLine]:
        lines = self._lines[part]
        starts = self._starts[lines]
        ends = starts + self._sizes[lines]
        return [*map(NewestLine, self.rows[part].tolist(), starts.tolist(), ends.tolist())]

    def of(self, row: int) -> list[bytes]:
        """Return the lines of ``row``, in the order of the log."""
        import numpy as np

        if not 0 <= row < COUNT_LIMIT:
            return []
        wanted = np.uint32(row)  # a search for an int would copy all rows
        here = slice(*(int(self.rows.searchsorted(wanted, side)) for side in ("left", "right")))
        return [self.view[line.start : line.end] for line in self.lines(here)]

    def release(self) -> None:
        """Let the kernel drop the pages of the file that were read, so that the process's memory does not grow."""
        if isinstance(self.view, mmap.mmap):
            self.view.madvise(mmap.MADV_DONTNEED)

    def close(self) -> None:
        if isinstance(self.view, mmap.mmap):
            self.view.close()


def read_newest(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the newest record of each row, in input order.

    Reads the file twice: first to find the lines, at 20 bytes of memory per record, then to parse them.
    """
    with closing(NewestLog(path)) as log:
        for line in log:
            yield whole_record(log.view[line.start : line.end], path, line.start)


class Generations:
    """A reader of the ``steps.jsonl`` in ``folder`` by row. A missing file has no generations.

    The first call indexes the file at 20 bytes of memory per line. Afterwards only the requested lines are read. Lines
    that are not generations are left out.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / STEPS
        self._log: NewestLog | None = None

    def of(self, index: int) -> list[dict[str, Any]]:
        """Return the generations of the row with this index, in the order in which they ended."""
        if self._log is None:
            self._log = NewestLog(self._path, every=True)
        lines = self._log.of(index)
        return [orjson.loads(raw) for raw in lines if generation_in(raw) is not None]

    def of_record(self, record: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the generations of the record's row; with ``[[steps]]``, each merged with its entry in the record."""
        found = self.of(record["index"]) if record.get("generations") is not None else []
        if (steps := record.get("steps")) is None:
            return found
        by_step = {line["step"]: line for line in found}
        return [{**by_step.get(name, {}), "step": name, **step} for name, step in steps.items()]

    def close(self) -> None:
        if self._log is not None:
            self._log.close()


def last_of_each(rows: Numbers) -> Numbers:
    """Return the last position of each number in ``rows``, ordered by number. The numbers must not be negative."""
    import numpy as np

    if not len(rows):
        return np.empty(0, np.int32)
    n_numbers = int(rows.max()) + 1
    if n_numbers > _DENSE * len(rows):
        # Stable, so that the newest line of a row stays the last.
        order = np.argsort(rows, kind="stable")
        in_order = rows[order]
        last: Numbers = order[np.append(in_order[1:] != in_order[:-1], True)]
        return last
    # A table of all numbers takes a quarter of the memory of a sort.
    last = np.full(n_numbers, -1, np.int32 if len(rows) < 2**31 else np.int64)
    for at in range(0, len(rows), _PLACES_AT_ONCE):
        part = rows[at : at + _PLACES_AT_ONCE]
        last[part] = np.arange(at, at + len(part))
    return last[last >= 0]


class _Line(msgspec.Struct):
    index: Count


_decoder = msgspec.json.Decoder(_Line)


def _lines(log: BinaryIO, span: Span) -> tuple[Numbers, Numbers, Numbers]:
    """Return the row (uint32), the first byte (int64) and the size (uint32) of each whole line that has a row."""
    import numpy as np

    rows, starts, sizes = array("I"), array("q"), array("I")
    start, end = span
    log.seek(start)
    for raw in log:
        if end is not None and start >= end:
            break
        if raw.endswith(b"\n") and (row := _row_of(raw)) is not None:
            rows.append(row)
            starts.append(start)
            sizes.append(len(raw))
        start += len(raw)
    return (
        np.frombuffer(rows, np.uint32),
        np.frombuffer(starts, np.int64),
        np.frombuffer(sizes, np.uint32),
    )


def _row_of(raw: bytes) -> int | None:
    try:
        return _decoder.decode(raw).index
    except msgspec.MsgspecError:
        return None
