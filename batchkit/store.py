"""The writing side of a run folder's ledger: ``results.jsonl`` and ``checkpoint.json``.

The log is the truth; the checkpoint is a cache of what the log says up to ``offset``. A row counts
as settled only once its record is in the log, and the checkpoint moves only after an fsync. So a
kill at any instant costs nothing that was written, and a power cut nothing before the checkpoint.
"""

from __future__ import annotations

import base64
import math
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from batchkit.errors import StoreError
from batchkit.indexset import IndexSet
from batchkit.ledger import RESULTS, read_lines
from batchkit.runfolder import write_atomically
from batchkit.types import Record

CHECKPOINT = "checkpoint.json"
VERSION = 1
COUNTS = ("records", "prompt_tokens", "completion_tokens")
_DEEPEST = 100  # orjson gives up at 254 levels, the record's own included


class Line(NamedTuple):
    """A record as it stands in the log, newline and all, and what it says: at least ``index``,
    ``status``, ``usage`` and ``error``."""

    raw: bytes
    told: dict[str, Any]


def line_of(record: Record) -> Line:
    """The line that tells of ``record``."""
    told = record.to_json()
    return Line(_encode(told), told)


@dataclass
class Totals:
    """What the ledger holds, kept up to date with every line."""

    completed: IndexSet = field(default_factory=IndexSet)
    failed_by_kind: dict[str, IndexSet] = field(default_factory=dict)
    records: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0

    @property
    def ok(self) -> int:
        return len(self.completed)

    @property
    def failed(self) -> int:
        return sum(map(len, self.failed_by_kind.values()))

    @property
    def failed_rows(self) -> IndexSet:
        rows = IndexSet()
        for kind_rows in self.failed_by_kind.values():
            rows = rows | kind_rows
        return rows

    def count_by_kind(self) -> dict[str, int]:
        return {kind: len(rows) for kind, rows in self.failed_by_kind.items() if len(rows)}

    def is_settled(self, index: int) -> bool:
        """True where the row has a record, be it ok or failed."""
        return index in self.completed or any(
            index in rows for rows in self.failed_by_kind.values()
        )

    def add(self, record: Mapping[str, Any]) -> None:
        """Count one line; the newest record of a row decides where it stands."""
        index = record["index"]
        self.records += 1
        if usage := record.get("usage"):
            self.prompt_tokens += usage["prompt_tokens"]
            self.completion_tokens += usage["completion_tokens"]
        for rows in self.failed_by_kind.values():
            rows.discard(index)
        if record["status"] == "ok":
            self.completed.add(index)
        else:
            self.completed.discard(index)
            kind = (record.get("error") or {}).get("kind", "unknown")
            self.failed_by_kind.setdefault(kind, IndexSet()).add(index)


class Store:
    """The ledger of one run folder, open for appending.

    One process at a time (the folder's lock), one thread. ``append`` only collects; ``flush``
    writes all that was collected in one call, and from then on those rows are settled; ``sync``
    makes them outlive a power cut and moves the checkpoint.

    Every method raises StoreError when the disk refuses; the log is then cut back to its last
    whole line, and the store stays usable for reading.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / RESULTS
        self.salvaged_bytes = 0
        try:
            self._file = _open_log(self.path)
            self.totals, offset = trusted_checkpoint(folder)
            self._end = self._recover(offset)
        except OSError as error:
            raise StoreError(f"{self.path}: {error.strerror or error}") from error
        self._lines: list[bytes] = []
        self._pending: list[dict[str, Any]] = []
        self._synced_end = -1

    def append(self, record: Record) -> None:
        """Collect ``record`` for the next ``flush``."""
        self.copy(line_of(record))

    def copy(self, line: Line) -> None:
        """Collect a line that was made elsewhere, as it stands."""
        self._lines.append(line.raw)
        self._pending.append(line.told)

    def flush(self) -> None:
        """Write what was appended; after this the rows count as settled."""
        if not self._lines:
            return
        block = b"".join(self._lines)
        try:
            written = os.write(self._file, block)
            while written < len(block):
                written += os.write(self._file, block[written:])
            self._end += len(block)
            pending, self._lines, self._pending = self._pending, [], []
        except BaseException as error:
            # Also after a KeyboardInterrupt: what is still collected will be written again.
            with suppress(OSError):
                os.ftruncate(self._file, self._end)
            if not isinstance(error, OSError):
                raise
            raise StoreError(
                f"{self.path}: can't write: {error.strerror}; every row before is on disk."
                " Make room, then run the same command again"
            ) from error
        for line in pending:
            self.totals.add(line)

    def sync(self) -> float:
        """Flush, fsync, then move the checkpoint. Returns the seconds that it took."""
        self.flush()
        started = time.monotonic()
        if self._synced_end == self._end:
            return 0.0
        try:
            os.fsync(self._file)
            self.checkpoint()
        except OSError as error:
            raise StoreError(
                f"{self.folder / CHECKPOINT}: can't write: {error.strerror}; every finished row is"
                f" in {RESULTS}. Make room, then run the same command again"
            ) from error
        self._synced_end = self._end
        return time.monotonic() - started

    def close(self) -> None:
        """Sync and close; the file is closed even when the disk refuses."""
        try:
            self.sync()
        finally:
            os.close(self._file)

    def checkpoint(self) -> None:
        """Replace the checkpoint by what the log says up to its end; ``sync`` is the safe way."""
        totals = self.totals
        content = orjson.dumps(
            {
                "version": VERSION,
                "offset": self._end,
                "completed": totals.completed.ranges(),
                "failed": totals.failed_rows.ranges(),
                "failed_by_kind": {
                    kind: rows.ranges() for kind, rows in totals.failed_by_kind.items() if len(rows)
                },
                "counts": {
                    "records": totals.records,
                    "ok": totals.ok,
                    "failed": totals.failed,
                    "prompt_tokens": totals.prompt_tokens,
                    "completion_tokens": totals.completion_tokens,
                },
            },
            option=orjson.OPT_SERIALIZE_NUMPY,
        )
        write_atomically(self.folder / CHECKPOINT, content)

    def _recover(self, offset: int) -> int:
        """Count the lines past ``offset``; where a line is broken, cut the rest off.

        What is cut is kept as ``results.jsonl.torn-<n>``; whole records behind a broken line are
        written again, so that nothing which was finished is lost. Returns the end of the log.
        """
        end, broken_at, whole = offset, None, []
        for line in read_lines(self.path, offset):
            end = line.end
            if line.record is not None:
                self.totals.add(line.record)
                if broken_at is not None:
                    whole.append(orjson.dumps(line.record, option=orjson.OPT_APPEND_NEWLINE))
            elif broken_at is None:
                broken_at = line.offset
        if broken_at is None:
            return end
        with self.path.open("rb") as file:
            file.seek(broken_at)
            torn = file.read()
        write_atomically(free_name(self.path, "torn"), torn)
        self.salvaged_bytes = len(torn)
        if not whole:
            os.ftruncate(self._file, broken_at)
            return broken_at
        self._rewrite(broken_at, whole)
        return os.fstat(self._file).st_size

    def _rewrite(self, end: int, lines: list[bytes]) -> None:
        """The log up to ``end``, then ``lines``: in one step, so that a kill loses none of them."""
        temporary = self.path.with_name(f"{RESULTS}.tmp")
        with self.path.open("rb") as old, temporary.open("wb") as new:
            while (left := end - new.tell()) > 0:
                new.write(old.read(min(left, 2**20)))
            new.writelines(lines)
            new.flush()
            os.fsync(new.fileno())
        temporary.replace(self.path)
        os.close(self._file)
        self._file = _open_log(self.path)


def read_checkpoint(folder: Path) -> tuple[Totals, int] | None:
    """What ``checkpoint.json`` says, and its offset; None where it is missing or damaged."""
    try:
        found = orjson.loads((folder / CHECKPOINT).read_bytes())
        if found["version"] != VERSION:
            return None
        totals = Totals(
            completed=IndexSet.from_ranges(found["completed"]),
            failed_by_kind={
                kind: IndexSet.from_ranges(ranges)
                for kind, ranges in found["failed_by_kind"].items()
            },
            **{name: _count(found["counts"][name]) for name in COUNTS},
        )
        return totals, _count(found["offset"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def trusted_checkpoint(folder: Path) -> tuple[Totals, int]:
    """The checkpoint where it fits the log; else nothing and 0: then the whole log is read."""
    found = read_checkpoint(folder)
    if found is not None and _ends_a_line(folder / RESULTS, found[1]):
        return found
    return Totals(), 0


def _open_log(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is not a count")
    return value


def _ends_a_line(path: Path, offset: int) -> bool:
    if offset == 0:
        return True
    with path.open("rb") as file:
        file.seek(offset - 1)
        return file.read(1) == b"\n"


def free_name(path: Path, suffix: str) -> Path:
    """``<path>.<suffix>-<n>`` with the first n that is not taken."""
    number = 1
    while (free := path.with_name(f"{path.name}.{suffix}-{number}")).exists():
        number += 1
    return free


def _encode(line: dict[str, Any]) -> bytes:
    try:
        return orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE | orjson.OPT_NON_STR_KEYS)
    except (TypeError, RecursionError):  # a kept field that JSON has no word for
        return orjson.dumps(_plain(line), option=orjson.OPT_APPEND_NEWLINE)


def _plain(value: Any, depth: int = 0) -> Any:
    """``value`` in JSON's own types: bytes as base64, what is foreign as its text."""
    if isinstance(value, Mapping | list | tuple) and depth > _DEEPEST:
        return "(nested too deeply)"
    if isinstance(value, Mapping):
        return {_valid(str(key)): _plain(part, depth + 1) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part, depth + 1) for part in value]
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, str):
        return _valid(value)
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        return str(value)
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, bool | int | float | None) else _valid(str(value))


def _valid(text: str) -> str:
    """``text`` without lone surrogates, which UTF-8 has no word for."""
    return text.encode("utf-8", "replace").decode()
