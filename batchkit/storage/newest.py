"""The newest record of each row of ``results.jsonl``, found without parsing every line."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from contextlib import closing
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

from batchkit.storage.index_set import INDEX_LIMIT
from batchkit.storage.lines import RECORD_HEAD, record_in, whole_record

if TYPE_CHECKING:
    import numpy as np

_LONGEST_START = len(RECORD_HEAD) + len(f"{INDEX_LIMIT},")
_BLOCK_BYTES = 1 << 20
_AT_ONCE = 4096  # rows


class NewestLine(NamedTuple):
    """The newest line of the row with the index ``row``: bytes ``start`` to ``end`` of the log."""

    row: int
    start: int
    end: int


class NewestLog:
    """The newest line of each row of a log, ordered by row index. A missing log has none.

    ``view`` is the log as it was when this was made, even if a requeue replaces it meanwhile; only
    the parts that are read are in memory. ``rows``, ``starts`` and ``ends`` have an entry for each
    row. Line n of the log goes from byte ``bounds[n]`` to ``bounds[n + 1]``, and ``lines`` holds the
    number of each row's line. All are int64 arrays.
    """

    def __init__(self, path: Path) -> None:
        with path.open("rb") if path.exists() else BytesIO() as file:
            self.bounds, self.lines, self.rows = _newest(file)
            has_lines = len(self.bounds) > 1
            self.view: mmap.mmap | bytes = (
                mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if has_lines else b""
            )

    def __iter__(self) -> Iterator[NewestLine]:
        for at in range(0, len(self.rows), _AT_ONCE):
            here = slice(at, at + _AT_ONCE)
            lines = self.lines[here]
            columns = self.rows[here], self.bounds[lines], self.bounds[lines + 1]
            yield from map(NewestLine, *(column.tolist() for column in columns))

    @property
    def starts(self) -> np.ndarray[Any, Any]:
        starts: np.ndarray[Any, Any] = self.bounds[self.lines]
        return starts

    @property
    def ends(self) -> np.ndarray[Any, Any]:
        ends: np.ndarray[Any, Any] = self.bounds[self.lines + 1]
        return ends

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


def _newest(log: BinaryIO) -> tuple[np.ndarray[Any, Any], ...]:
    """``bounds``, ``lines`` and ``rows`` of a NewestLog, in one pass."""
    import numpy as np

    bounds, by_row = line_rows(log)
    order = np.argsort(by_row, kind="stable")  # stable: the newest of a row stays the last
    by_row = by_row[order]
    is_newest = np.append(by_row[1:] != by_row[:-1], True)[: len(by_row)] & (by_row >= 0)
    return bounds, order[is_newest], by_row[is_newest]


def line_rows(log: BinaryIO) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """The byte positions at which lines begin, and the last one's end; and the row index of each
    line, -1 if it is broken. A torn last line is left out."""
    import numpy as np

    offset, ends, indexes = 0, [np.zeros(1, np.int64)], [np.zeros(0, np.int64)]
    for block in _blocks(log):
        ends_here = np.flatnonzero(np.frombuffer(block, np.uint8) == ord("\n")) + 1
        found = _plain_indexes(block, ends_here)
        if found is None:
            found = np.array([_index(raw) for raw in BytesIO(block)], np.int64)
        ends.append(ends_here + offset)
        indexes.append(found)
        offset += len(block)
    return np.concatenate(ends), np.concatenate(indexes)


def _blocks(log: BinaryIO) -> Iterator[bytes]:
    """The log in blocks of whole lines, without a torn last line."""
    while block := log.read(_BLOCK_BYTES) + log.readline():
        whole = block[: block.rfind(b"\n") + 1]
        if whole:
            yield whole
        if len(whole) < len(block):
            return


def _plain_indexes(block: bytes, ends: np.ndarray[Any, Any]) -> np.ndarray[Any, Any] | None:
    """The row index of each line; None if a line does not look as the store writes it.

    Such a line starts with an index, has no second start of a line and no NUL, and ends in "}".
    """
    import numpy as np

    text, starts = np.frombuffer(block, np.uint8), np.append(0, ends[:-1])
    n_head = len(RECORD_HEAD)
    if (
        b"\0" in block
        or block.count(RECORD_HEAD) != len(ends)
        or (ends - starts).min() < _LONGEST_START
    ):
        return None
    first = text[starts[:, None] + np.arange(_LONGEST_START)]
    digits = first[:, n_head:].astype(np.int64) - ord("0")
    n_digits = ((digits < 0) | (digits > 9)).argmax(axis=1)  # 0 also if all are digits
    looks_whole = (
        (first[:, :n_head] == np.frombuffer(RECORD_HEAD, np.uint8)).all()
        and n_digits.all()
        and (first[np.arange(len(first)), n_head + n_digits] == ord(",")).all()
        and (text[ends - 2] == ord("}")).all()
    )
    if not looks_whole:
        return None
    powers = n_digits[:, None] - 1 - np.arange(digits.shape[1])
    indexes: np.ndarray[Any, Any] = (digits * 10 ** powers.clip(0) * (powers >= 0)).sum(axis=1)
    return indexes


def _index(raw: bytes) -> int:
    """The row index of a line, -1 if it is not a record.

    A line that looks as the store writes it is not parsed completely.
    """
    looks_whole = raw.startswith(RECORD_HEAD) and raw.endswith(b"}\n")
    if looks_whole and raw.find(RECORD_HEAD, 1) < 0 and b"\0" not in raw:
        digits = raw[len(RECORD_HEAD) : raw.find(b",", len(RECORD_HEAD))]
        if digits.isdigit():
            return int(digits)
    record = record_in(raw)
    return -1 if record is None else record.index
