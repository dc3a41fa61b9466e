"""Reading ``results.jsonl``: what a line says, and which line is the newest for each row."""

from __future__ import annotations

import mmap
from array import array
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import orjson

from batchkit.errors import StoreError
from batchkit.indexset import INDEX_LIMIT

if TYPE_CHECKING:
    import numpy as np

RESULTS = "results.jsonl"
_HEAD = b'{"index":'


class Line(NamedTuple):
    """One line of the ledger; ``record`` is None where the bytes are not a record.

    ``offset`` and ``end`` are byte positions, ``end`` behind the newline (or at the end of the
    file where the newline is missing: such a line is torn and never a record).
    """

    offset: int
    end: int
    record: dict[str, Any] | None


def log_of(folder: Path) -> Path:
    """The ledger of a run.

    Raises:
        StoreError: it is gone.
    """
    path = folder / RESULTS
    if not path.is_file():
        raise StoreError(f"{path}: is missing; its rows must be run again: batchkit run --fresh")
    return path


def read_lines(path: Path, offset: int = 0) -> Iterator[Line]:
    """The ledger's lines from byte ``offset`` on, in the order in which they were written."""
    if not path.exists():
        return
    with path.open("rb") as file:
        file.seek(offset)
        for raw in file:
            end = offset + len(raw)
            yield Line(offset, end, _parse(raw))
            offset = end


def failure_kind(record: Mapping[str, Any]) -> str | None:
    """The record's error kind; ``empty`` for an ok record without text; None for an answer."""
    if record["status"] == "failed":
        return str((record.get("error") or {}).get("kind", "unknown"))
    texts = [choice.get("text") for choice in record.get("choices") or [record]]
    return None if any((text or "").strip() for text in texts) else "empty"


def read_newest(path: Path) -> Iterator[dict[str, Any]]:
    """The newest record of each row, in the order of the input.

    Two passes over the file; it holds 16 bytes a record between them, never the records.
    """
    offsets = newest_offsets(path)
    if not len(offsets):
        return
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view:
        for start in offsets.tolist():
            try:
                record: dict[str, Any] = orjson.loads(view[start : view.find(b"\n", start)])
            except orjson.JSONDecodeError as error:
                raise StoreError(
                    f"{path}: the record at byte {start} is damaged: {error}"
                ) from error
            yield record


def newest_offsets(path: Path) -> np.ndarray[Any, Any]:
    """int64 array: the byte offset of each row's newest record, ordered by row index."""
    import numpy as np

    indexes, offsets, offset = array("q"), array("q"), 0
    if path.exists():
        with path.open("rb") as file:
            for raw in file:
                if (index := _index(raw)) is not None:
                    indexes.append(index)
                    offsets.append(offset)
                offset += len(raw)
    by_row = np.array(indexes, dtype=np.int64)
    order = np.argsort(by_row, kind="stable")  # stable: the newest of a row stays the last
    by_row = by_row[order]
    is_newest = np.append(by_row[1:] != by_row[:-1], True)[: len(by_row)]
    newest: np.ndarray[Any, Any] = np.array(offsets, dtype=np.int64)[order[is_newest]]
    return newest


def _index(raw: bytes) -> int | None:
    """The row index of a line. A line as the store writes them is not parsed as a whole."""
    looks_whole = raw.startswith(_HEAD) and raw.endswith(b"}\n")
    if looks_whole and raw.find(_HEAD, 1) < 0 and b"\0" not in raw:
        digits = raw[len(_HEAD) : raw.find(b",", len(_HEAD))]
        if digits.isdigit():
            return int(digits)
    record = _parse(raw)
    return None if record is None else record["index"]


def _parse(raw: bytes) -> dict[str, Any] | None:
    if not raw.endswith(b"\n"):
        return None
    try:
        record = orjson.loads(raw)
    except orjson.JSONDecodeError:
        return None
    if not isinstance(record, dict) or record.get("status") not in ("ok", "failed"):
        return None
    usage = record.get("usage")
    if not isinstance(usage, dict | None):
        return None
    counts = (usage.get("prompt_tokens"), usage.get("completion_tokens")) if usage else (0, 0)
    numbers = (record.get("index"), *counts)
    if all(type(number) is int and 0 <= number < INDEX_LIMIT for number in numbers):
        return record
    return None
