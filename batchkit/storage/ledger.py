"""Reading ``results.jsonl``: what a line says, and which line is the newest for each row."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Mapping
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

import orjson

from batchkit.errors import StoreError
from batchkit.storage.index_set import INDEX_LIMIT
from batchkit.storage.schema import fault_in

if TYPE_CHECKING:
    import numpy as np

RESULTS = "results.jsonl"
IS_MISSING = "is missing; its rows must be run again: batchkit run --fresh"
REQUEUE = ".requeue"  # a folder beside the log: holds what will replace the log
RECORD_HEAD = b'{"index":'
_LONGEST_START = len(RECORD_HEAD) + len(f"{INDEX_LIMIT},")
_BLOCK_BYTES = 1 << 20


class LogLine(NamedTuple):
    """One line of the log; ``record`` is None if the bytes are not a record.

    ``offset`` and ``end`` are byte positions, ``end`` behind the newline (or at the end of the
    file if the newline is missing: such a line is torn and never a record).
    """

    offset: int
    end: int
    record: dict[str, Any] | None


def log_of(folder: Path) -> Path:
    """The path of a run's log.

    Raises:
        StoreError: it is missing, or it is being replaced.
    """
    path = folder / RESULTS
    if os.path.lexists(folder / REQUEUE):
        raise StoreError(
            f"{folder}: --on-change requeue was interrupted while it replaced {RESULTS}; run the"
            " job again to finish it"
        )
    if not path.is_file():
        raise StoreError(f"{path}: {IS_MISSING}")
    return path


def read_lines(path: Path, offset: int = 0) -> Iterator[LogLine]:
    """The log's lines from byte ``offset`` on, in the order in which they were written."""
    if not path.exists():
        return
    with path.open("rb") as file:
        file.seek(offset)
        for raw in file:
            end = offset + len(raw)
            yield LogLine(offset, end, record_of(raw))
            offset = end


def failure_kind(record: Mapping[str, Any]) -> str | None:
    """The record's error kind; ``empty`` for an ok record without text; None for an answer."""
    if record["status"] == "failed":
        return str((record.get("error") or {}).get("kind", "unknown"))
    texts = [choice.get("text") for choice in record.get("choices") or [record]]
    return None if any((text or "").strip() for text in texts) else "empty"


class Newest(NamedTuple):
    """The position of each row's newest record, ordered by row index.

    Line n of the log goes from byte ``bounds[n]`` to ``bounds[n + 1]``; ``lines`` holds the number
    of each row's line. Both are int64 arrays.
    """

    bounds: np.ndarray[Any, Any]
    lines: np.ndarray[Any, Any]


class NewestRows(NamedTuple):
    """As ``Newest``; ``rows`` holds the rows' indexes, ascending (int64)."""

    bounds: np.ndarray[Any, Any]
    lines: np.ndarray[Any, Any]
    rows: np.ndarray[Any, Any]


def read_newest(path: Path) -> Iterator[dict[str, Any]]:
    """The newest record of each row, in the order of the input.

    Makes two passes over one open file, even if a requeue replaces the log meanwhile. Between them
    it holds 16 bytes per record, never the records.
    """
    if not path.exists():
        return
    with path.open("rb") as file:
        bounds, lines = newest_lines(file)
        if not len(lines):
            return
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view:
            for start in bounds[lines].tolist():
                yield whole_record(view[start : view.find(b"\n", start)], path, start)


def whole_record(raw: bytes, path: Path, offset: int) -> dict[str, Any]:
    """The record in the line ``raw``, which begins at byte ``offset`` of ``path``.

    Raises:
        StoreError: it is damaged.
    """
    try:
        record: dict[str, Any] = orjson.loads(raw)
        fault = fault_in(record)
    except orjson.JSONDecodeError as error:
        fault = str(error)
    if fault is not None:
        raise StoreError(
            f"{path}: the record at byte {offset} is damaged: {fault}. `batchkit verify --repair"
            f" {path.parent}` sets it aside; its row is then run again"
        )
    return record


def newest_offsets(path: Path) -> np.ndarray[Any, Any]:
    """int64 array: the byte offset of each row's newest record, ordered by row index."""
    bounds, lines, _ = newest_rows(path)
    offsets: np.ndarray[Any, Any] = bounds[lines]
    return offsets


def newest_lines(log: BinaryIO) -> Newest:
    """One pass over the open log."""
    bounds, lines, _ = _newest_rows(log)
    return Newest(bounds, lines)


def newest_rows(path: Path) -> NewestRows:
    """As ``newest_lines``, with the rows' indexes; a missing log holds none."""
    with path.open("rb") if path.exists() else BytesIO() as log:
        return _newest_rows(log)


def _newest_rows(log: BinaryIO) -> NewestRows:
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
    by_row = np.concatenate(indexes)
    order = np.argsort(by_row, kind="stable")  # stable: the newest of a row stays the last
    by_row = by_row[order]
    is_newest = np.append(by_row[1:] != by_row[:-1], True)[: len(by_row)] & (by_row >= 0)
    return NewestRows(np.concatenate(ends), order[is_newest], by_row[is_newest])


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
    record = record_of(raw)
    return -1 if record is None else int(record["index"])


def record_of(raw: bytes) -> dict[str, Any] | None:
    """The record in the line ``raw``, newline included; None if it is not a record."""
    if not raw.endswith(b"\n"):
        return None
    try:
        record: dict[str, Any] = orjson.loads(raw)
    except orjson.JSONDecodeError:
        return None
    return record if fault_in(record) is None else None
