"""An index of a run's log, to filter, sort, count and pair rows without parsing the log again.

It grows with the log of a running run: each request for rows first reads new lines for a short time.
"""

from __future__ import annotations

import os
import threading
import time
from array import array
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from io import BufferedReader
from itertools import islice
from math import nan
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import orjson

from batchkit.config.regular_file import open_regular
from batchkit.errors import StoreError
from batchkit.scoring.metrics import group_name
from batchkit.storage.checkpoint import CHECKPOINT, check_log
from batchkit.storage.lines import NO_TEXT, answers_in_words, failure_kind, record_in, whole_record
from batchkit.storage.log import RESULTS
from batchkit.storage.newest_lines import last_of_each
from batchkit.storage.score_store import SCORES, ScoreLine, score_lines
from batchkit.types import Record

_AT_ONCE = 2_000  # lines per step

Table = np.ndarray[Any, Any]

ENTRY = np.dtype(
    [
        ("start", "<i8"),  # byte offset of the line in the log
        ("length", "<u4"),
        ("row", "<u4"),
        ("id", "<u8"),  # a hash of the id
        ("made", "<u4"),  # a hash, which the scores.jsonl line made from this record shares
        ("answer", "<u4"),  # a hash of the answer
        ("letters", "<u4"),  # characters of the answer
        ("tokens", "<u4"),  # completion tokens
        ("prompt_tokens", "<u4"),
        ("latency", "<f4"),
        ("group", "<u4"),  # an index into ``groups``
        ("kind", "<u2"),  # kind of failure: an index into ``kinds``; 0 for an answer
        ("is_ok", "?"),
        ("is_cut", "?"),  # the answer ended at max_tokens
        ("is_shortened", "?"),  # the prompt was truncated to fit
    ]
)


@dataclass(frozen=True, eq=False)
class Snapshot:
    """The index at one moment.

    ``entries`` has an ``ENTRY`` for each complete record of the log. ``scores`` has a row for each entry and a
    column for each of ``scorers``; nan means not scored. ``newest`` has the position of each row's newest entry, in
    row order. ``share`` is the fraction of the log that has been read.
    """

    entries: Table
    scores: Table
    newest: Table
    kinds: Sequence[str]
    groups: Sequence[str]
    scorers: Sequence[str]
    share: float


class ScoresFile:
    """The ``scores.jsonl`` that an index has read, and the positions of its lines.

    - ``stamp``: of the file that was read; None if there was none.
    - ``problem``: damage to the file, or None.
    """

    def __init__(self, stamp: tuple[int, ...] | None = None) -> None:
        self.stamp = stamp
        self.problem: str | None = None
        self._file: BufferedReader | None = None
        self._rows, self._bounds = array("I"), array("q", [0])

    def read(self, path: Path) -> Iterator[ScoreLine]:
        """Yield the lines of ``path``, and note their positions. An error becomes the ``problem``."""
        try:
            self._file = BufferedReader(open_regular(path))
            for raw, line in zip(self._file, score_lines(path), strict=True):
                yield line
                self._rows.append(line.index)
                self._bounds.append(self._bounds[-1] + len(raw))
        except (StoreError, OSError, ValueError) as error:
            self.problem = str(error)

    def line_of(self, row: int) -> dict[str, Any]:
        """Return the row's line, or an empty dict if it has none."""
        place = bisect_left(self._rows, row)
        if self._file is None or self._rows[place : place + 1] != array("I", [row]):
            return {}
        start, end = self._bounds[place : place + 2]
        line: dict[str, Any] = orjson.loads(os.pread(self._file.fileno(), end - start, start))
        return line


class Index:
    """The index of the log that was in ``folder`` when this object was created. Several threads may use one index.

    ``problem`` describes damage to the log or its scores found so far.

    Raises:
        StoreError: The log can't be read.
    """

    def __init__(self, folder: Path, group_by: str | None) -> None:
        self.folder, self.group_by, self.path = folder, group_by, folder / RESULTS
        try:
            self._log = BufferedReader(open_regular(self.path))
        except OSError as error:
            raise StoreError(f"{self.path}: can't be read: {error.strerror}") from error
        self._growing = threading.Lock()  # held by the thread that extends the index
        self._checked: tuple[int, ...] | None = None
        self._log_problem: str | None = ""  # "": not checked yet
        self._clear()
        self._snapshot = self._now(0.0)

    @property
    def problem(self) -> str | None:
        return self._log_problem or self._scored.problem

    def is_current(self, group_by: str | None) -> bool:
        """Return whether the folder still has the same log, not truncated, and the same grouping."""
        try:
            now = self.path.stat()
        except OSError:
            return False
        is_same = os.path.samestat(now, os.fstat(self._log.fileno())) and now.st_size >= self._end
        return is_same and group_by == self.group_by

    def grow(self, budget_s: float) -> Snapshot:
        """Read new lines for about ``budget_s`` seconds or to the end of the log, and return the index."""
        deadline = time.monotonic() + budget_s
        # Another thread holds it for about ``budget_s``.
        if self._growing.acquire(timeout=2 * budget_s):
            try:
                self._grow(deadline)
            finally:
                self._growing.release()
        return self._snapshot

    def record(self, entry: Any) -> dict[str, Any]:
        """Return the record of one entry of a snapshot, with its newest scores.

        Raises:
            StoreError: The log was changed.
        """
        start = int(entry["start"])
        record = whole_record(self.raw(start, int(entry["length"])), self.path, start)
        line = self._scored.line_of(int(entry["row"]))
        if all(line.get(name) == record.get(name) for name in ("input_hash", "finished_at")):
            record |= {name: line.get(name) for name in ("prediction", "scores", "unscored")}
        return record

    def raw(self, start: int, length: int) -> bytes:
        """Return bytes of the log that this index has open, even if the file was replaced."""
        return os.pread(self._log.fileno(), length, start)

    def _clear(self) -> None:
        # Only the first ``_n`` entries are set. The rest of the array is never touched, so it takes no physical memory.
        # ``_end``: end of the last indexed line.
        self._buffer, self._n, self._end = (np.empty(0, ENTRY), 0, 0)
        self._scores: dict[str, array[float]] = {}  # by scorer; nan or past the end: not scored
        self._kinds: dict[str, int] = {"": 0}
        self._groups: dict[str, int] = {}
        self._scored = ScoresFile()

    def _grow(self, deadline: float) -> None:
        stamp = stamp_of(self.folder / SCORES)
        if self._scored.stamp not in (None, stamp):
            self._clear()
        before = self._end, self._scored.stamp
        is_whole = self._read_log(deadline)
        share = min(0.99, self._end / max(1, os.fstat(self._log.fileno()).st_size))
        if is_whole:
            share = 1.0
            if stamp != self._scored.stamp:
                self._read_scores(stamp)
            self._check()
        if (self._end, self._scored.stamp) != before or share != self._snapshot.share:
            self._snapshot = self._now(share)

    def _now(self, share: float) -> Snapshot:
        entries = self._buffer[: self._n]
        scores = np.full((len(entries), len(self._scores)), np.nan)
        for place, column in enumerate(self._scores.values()):
            scores[: len(column), place] = column
        return Snapshot(
            entries,
            scores,
            last_of_each(entries["row"]),
            tuple(self._kinds),
            tuple(self._groups),
            tuple(self._scores),
            share,
        )

    def _read_log(self, deadline: float) -> bool:
        """Read lines until the deadline. Return True at the end of the log.

        Broken lines at the end are read again next time, because a running run may cut them off.
        """
        start = self._log.seek(self._end)
        while True:
            lines, found = [*islice(self._log, _AT_ONCE)], list[tuple[Any, ...]]()
            for raw in lines:
                if (record := record_in(raw)) is not None:
                    self._put(self._n + len(found), record.scores or {})
                    found.append(self._entry(record, raw, start))
                    self._end = start + len(raw)
                start += len(raw)
            with np.errstate(over="ignore"):  # a latency may exceed float32
                self._append(np.array(found, ENTRY))
            if len(lines) < _AT_ONCE or time.monotonic() >= deadline:
                return len(lines) < _AT_ONCE

    def _append(self, entries: Table) -> None:
        """Append ``entries``. Earlier snapshots share the buffer and stay valid."""
        n = self._n + len(entries)
        if n > len(self._buffer):
            size = os.fstat(self._log.fileno()).st_size
            buffer = np.empty(n + int(n * size / max(1, self._end)), ENTRY)
            buffer[: self._n] = self._buffer[: self._n]
            self._buffer = buffer
        self._buffer[self._n : n], self._n = entries, n

    def _entry(self, record: Record, raw: bytes, start: int) -> tuple[Any, ...]:
        if (
            record.choices
            or record.tool_calls
            or any(getattr(record, n) is not None for n in NO_TEXT)
        ):
            line = orjson.loads(raw)
            answer, kind = "\n".join(answers_in_words(line)), failure_kind(line) or ""
        else:
            answer, kind = record.text or "", "" if (record.text or "").strip() else "empty"
        if record.error is not None:
            kind = record.error.kind
        group = 0
        if self.group_by is not None and isinstance(record.fields, dict):
            name = group_name(record.fields.get(self.group_by))
            group = self._groups.setdefault(name, len(self._groups))
        return (
            *(start, len(raw), record.index, hash_of(record.id)),
            _made(record.input_hash, record.finished_at),
            *(crc32(answer.encode()), len(answer)),
            record.usage.completion_tokens if record.usage else 0,
            record.usage.prompt_tokens if record.usage else 0,
            *(record.latency_s, group, self._kinds.setdefault(kind, len(self._kinds))),
            *(record.status == "ok", record.finish_reason == "length"),
            bool(record.truncated_tokens),
        )

    def _put(self, number: int, scores: Mapping[str, float | None]) -> None:
        for name, score in scores.items():
            column = self._scores.setdefault(name, array("d"))
            column.extend([nan] * (number + 1 - len(column)))
            column[number] = nan if score is None else score

    def _read_scores(self, stamp: tuple[int, ...] | None) -> None:
        """Take the scores from each line computed from the newest record of its row."""
        entries, self._scored = self._buffer[: self._n], ScoresFile(stamp)
        newest = last_of_each(entries["row"])
        rows = entries["row"][newest]
        for line in self._scored.read(self.folder / SCORES):
            place = int(rows.searchsorted(np.uint32(line.index)))
            if place < len(rows) and rows[place] == line.index:
                number = int(newest[place])
                if entries["made"][number] == _made(line.input_hash, line.finished_at):
                    self._put(number, {**dict.fromkeys(self._scores), **line.scores})

    def _check(self) -> None:
        """Check the log against its checkpoint, once. A damaged log is checked again, because it may have been
        repaired."""
        stamp = stamp_of(self.folder / CHECKPOINT)
        if self._log_problem is None or (self._log_problem and stamp == self._checked):
            return
        self._checked = stamp
        try:
            check_log(self.folder)
            self._log_problem = None
        except (StoreError, OSError) as error:
            self._log_problem = str(error)


def hash_of(row_id: str) -> int:
    return int.from_bytes(blake2b(row_id.encode(), digest_size=8).digest(), "little")


def _made(input_hash: str | None, finished_at: str) -> int:
    return crc32(f"{input_hash} {finished_at}".encode())


def stamp_of(path: Path) -> tuple[int, int, int] | None:
    """Return a value that stays equal while the file is unchanged."""
    try:
        found = path.lstat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns
