"""``.view/index`` in a run folder: the columns of its log, so that the next view has them at once.

A line of JSON, the entries, the scores. It is a cache: one that does not fit the log is ignored.
"""

from __future__ import annotations

import os
from contextlib import suppress
from io import BufferedReader, FileIO
from pathlib import Path
from zlib import crc32

import numpy as np
import orjson

from batchkit.config.regular_file import open_regular
from batchkit.runs.columns import ENTRY, Columns
from batchkit.storage.files import replacing

_FOLDER, _NAME = ".view", "index"
_VERSION = f"1 {ENTRY.descr}"  # another one if a column is added
_TAIL_BYTES = 4096
_LONGEST_HEAD = 1 << 24


def load(folder: Path, log: FileIO, group_by: str | None) -> Columns | None:
    """The columns that were saved for the open ``log``; None if there are none that fit."""
    try:
        with BufferedReader(open_regular(folder / _FOLDER / _NAME)) as file:
            head = orjson.loads(file.readline(_LONGEST_HEAD))
            n, width = head["n"], len(head["scorers"])
            sizes = n * ENTRY.itemsize, n * width * 4
            if head["of"] != _of(log, head["end"], group_by) or (
                sum(sizes) != os.fstat(file.fileno()).st_size - file.tell()
            ):
                return None
            entries, scores = map(bytearray, sizes)
            file.readinto(entries)
            file.readinto(scores)
        if crc32(scores, crc32(entries)) != head["crc32"]:
            return None
        return Columns(
            np.frombuffer(entries, ENTRY),
            np.frombuffer(scores, np.float32).reshape(n, width),
            **{name: head[name] for name in ("end", "scored_by", "scored_end")},
            **{name: head[name] for name in ("kinds", "groups", "scorers")},
        )
    except (OSError, ValueError, TypeError, KeyError, MemoryError):
        return None


def save(columns: Columns, folder: Path, log: FileIO, group_by: str | None) -> None:
    """Save them, unless the folder can't be written."""
    entries, scores = columns.entries[: columns.n], columns.scores[: columns.n]
    raw = entries.view(np.uint8).data, np.ascontiguousarray(scores).data
    head = {
        "of": _of(log, columns.end, group_by),
        "n": columns.n,
        "crc32": crc32(raw[1], crc32(raw[0])),
        **{name: getattr(columns, name) for name in ("end", "scored_by", "scored_end")},
        **{name: getattr(columns, name).texts for name in ("kinds", "groups", "scorers")},
    }
    with suppress(OSError):
        place = folder / _FOLDER
        place.mkdir(exist_ok=True)
        if place.is_symlink():
            return
        with replacing(place / _NAME) as temporary, temporary.open("wb") as file:
            file.writelines([orjson.dumps(head), b"\n", *raw])


def _of(log: FileIO, end: int, group_by: str | None) -> list[object]:
    """What must be equal: the version, the file, and its bytes before ``end``."""
    found = os.fstat(log.fileno())
    tail = os.pread(log.fileno(), _TAIL_BYTES, max(0, end - _TAIL_BYTES))[-_TAIL_BYTES:]
    return [_VERSION, found.st_dev, found.st_ino, crc32(tail[: min(end, _TAIL_BYTES)]), group_by]
