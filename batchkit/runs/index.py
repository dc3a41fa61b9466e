"""An index of a run's log: rows are filtered, sorted and found without parsing the log again.

It grows with the log of a running run: each request for rows first reads on for a moment. It is
kept in ``.view/`` beside the log, a cache that may be deleted at any time; where that can't be
written, it is in memory only.
"""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from io import FileIO
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import orjson

from batchkit.config.regular_file import open_regular
from batchkit.errors import StoreError
from batchkit.runs.columns import Columns, Table
from batchkit.runs.saved_columns import load, save
from batchkit.runs.values import reader
from batchkit.storage.checkpoint import CHECKPOINT, check_log
from batchkit.storage.job_toml import job_of_run
from batchkit.storage.lines import whole_record
from batchkit.storage.log import RESULTS, log_of
from batchkit.storage.newest import last_of_each
from batchkit.storage.score_store import SCORES

_BLOCK_BYTES = 1 << 20
_LONGEST_BYTES = 1 << 28  # without a whole record: the rest is damaged, or not a log
_WORTH_SAVING = 20_000  # entries: fewer are read again in a moment
_GROWTH = 1.25  # since it was last saved
_KEPT = 4  # two are needed to compare runs


class Snapshot(NamedTuple):
    """The index at one moment; entries, scores and names as in ``Columns``.

    ``newest``: the number of each row's newest entry, in the order of the rows. ``share``: how much
    of the log and its scores was read; 1 if all was.
    """

    entries: Table
    scores: Table
    newest: Table
    kinds: Sequence[str]
    groups: Sequence[str]
    scorers: Sequence[str]
    share: float


class Index:
    """The index of the log that was in ``folder`` when this was made; requests in several threads
    share it.

    Raises:
        StoreError: the log can't be read.
    """

    def __init__(self, folder: Path, group_by: str | None) -> None:
        self.folder, self.group_by, self.path = folder, group_by, folder / RESULTS
        self._log_problem: str | None = None
        self._scores_problem: str | None = None
        self._log = _opened(self.path)
        self._stat = os.fstat(self._log.fileno())
        self._scores: FileIO | None = None
        self._growing = threading.Lock()  # held by the request that lets it grow
        self._read = reader(group_by)
        self._columns = load(folder, self._log, group_by) or Columns()
        self._saved = self._columns.n, self._columns.scored_by
        self._snapshot = _snapshot(self._columns, 0.0)
        self._check()

    @property
    def problem(self) -> str | None:
        """What is wrong with the log or its scores, as far as it is known by now."""
        return self._log_problem or self._scores_problem

    def is_current(self, group_by: str | None) -> bool:
        """False if the folder has another log now, or if the log was cut."""
        try:
            now = self.path.stat()
        except OSError:
            return False
        is_same = os.path.samestat(now, self._stat) and now.st_size >= self._columns.end
        return is_same and group_by == self.group_by

    def grow(self, budget_s: float) -> Snapshot:
        """The index after reading on for about ``budget_s``, or to the end of the log."""
        deadline = time.monotonic() + budget_s
        if self._growing.acquire(timeout=2 * budget_s):  # another request has it for ``budget_s``
            try:
                self._grow(deadline)
            finally:
                self._growing.release()
        return self._snapshot

    def record(self, entry: Any) -> dict[str, Any]:
        """The record of one of a snapshot's entries, with its newest scores.

        Raises:
            StoreError: the log was changed.
        """
        start, scored_at = int(entry["start"]), int(entry["scored_at"])
        record = whole_record(self.raw(start, int(entry["length"])), self.path, start)
        if scored_at >= 0 and self._scores is not None:
            line = orjson.loads(_line_at(self._scores, scored_at))
            record |= {name: line.get(name) for name in ("prediction", "scores", "unscored")}
        return record

    def raw(self, start: int, length: int) -> bytes:
        """Bytes of the log, as it was when this was made."""
        return os.pread(self._log.fileno(), length, start)

    def _grow(self, deadline: float) -> None:
        is_idle = self._log_problem is not None and not self._checker.is_alive()
        if is_idle and _stamp(self.folder / CHECKPOINT) != self._checked:
            self._check()  # it may have been repaired
        before = self._state()
        while True:
            size = os.fstat(self._log.fileno()).st_size
            is_whole = self._read_log(self._columns, size, deadline) and self._read_scores(deadline)
            if is_whole or time.monotonic() >= deadline:
                break
        columns = self._columns
        share = 1.0 if is_whole else min(0.99, columns.end / max(size, 1))
        if before != self._state() or share != self._snapshot.share:
            self._snapshot = _snapshot(columns, share)
        n_saved, scored_by = self._saved
        has_grown = columns.n >= n_saved * _GROWTH or columns.scored_by != scored_by
        if is_whole and has_grown and columns.n >= _WORTH_SAVING:
            save(columns, self.folder, self._log, self.group_by)
            self._saved = columns.n, columns.scored_by

    def _state(self) -> tuple[int, int, int]:
        columns = self._columns
        return id(columns), columns.n, columns.scored_end

    def _read_log(self, columns: Columns, size: int, deadline: float) -> bool:
        """True at the end, before a line that is not complete."""
        length = _BLOCK_BYTES
        while columns.end < size:
            block = self.raw(columns.end, length)
            if columns.add(block, self._read, size):
                length = _BLOCK_BYTES
            elif columns.end + len(block) >= size or length > _LONGEST_BYTES:
                return True
            else:  # a line longer than the block, or only broken ones in it
                length *= 2
            if time.monotonic() >= deadline:
                return columns.end >= size
        return True

    def _read_scores(self, deadline: float) -> bool:
        """As ``_read_log``, for scores.jsonl. If that was replaced, the index starts from nothing again."""
        columns, path = self._columns, self.folder / SCORES
        stamp = _stamp(path)
        if columns.scored_by not in (None, stamp):
            self._columns, self._scores, self._scores_problem = Columns(), None, None
            return False
        if stamp is None:
            return True
        if self._scores is None:
            self._scores = _opened(path)
        columns.scored_by, newest = stamp, _newest(columns)
        rows = columns.entries["row"][newest].astype(np.int64)
        for raw in _blocks(self._scores, columns.scored_end):
            try:
                columns.add_scores(raw, newest, rows)
            except ValueError as error:
                self._scores_problem = f"{path}: {error}; `batchkit score` writes it again"
                return True
            if time.monotonic() >= deadline:
                return columns.scored_end >= stamp[1]
        return True

    def _check(self) -> None:
        """Beside the requests, in a thread of its own: it reads the whole log."""
        self._checked = _stamp(self.folder / CHECKPOINT)

        def check() -> None:
            try:
                check_log(self.folder)
                self._log_problem = None
            except (StoreError, OSError) as error:
                self._log_problem = str(error)

        self._checker = threading.Thread(target=check, name="check of the log", daemon=True)
        self._checker.start()


def _snapshot(columns: Columns, share: float) -> Snapshot:
    return Snapshot(
        columns.entries[: columns.n],
        columns.scores[: columns.n],
        _newest(columns),
        tuple(columns.kinds.texts),
        tuple(columns.groups.texts),
        tuple(columns.scorers.texts),
        share,
    )


def _newest(columns: Columns) -> Table:
    rows = columns.entries["row"][: columns.n]
    if len(rows) < 2 or (rows[1:] > rows[:-1]).all():
        return np.arange(len(rows))
    return last_of_each(rows)


def _opened(path: Path) -> FileIO:
    try:
        return open_regular(path)
    except OSError as error:
        raise StoreError(f"{path}: can't be read: {error.strerror}") from error


def _blocks(file: FileIO, start: int) -> Iterator[bytes]:
    """The whole lines from byte ``start`` on, some at a time."""
    length = _BLOCK_BYTES
    while block := os.pread(file.fileno(), length, start):
        whole = block[: block.rfind(b"\n") + 1]
        if not whole and len(block) < length:
            return
        length = _BLOCK_BYTES if whole else 2 * length
        start += len(whole)
        if whole:
            yield whole


def _line_at(file: FileIO, start: int) -> bytes:
    length = 4096
    while True:
        found = os.pread(file.fileno(), length, start)
        if b"\n" in found or len(found) < length:
            return found.partition(b"\n")[0]
        length *= 2


def _stamp(path: Path) -> list[int] | None:
    """Equal while the file is the same. The second number is its size."""
    try:
        found = path.lstat()
    except OSError:
        return None
    return [found.st_ino, found.st_size, found.st_mtime_ns]


class Indexes:
    """The indexes of the runs that were looked at last."""

    def __init__(self) -> None:
        self._indexes: OrderedDict[Path, Index] = OrderedDict()
        self._lock = threading.Lock()  # requests, in several threads

    def of(self, folder: Path) -> Index:
        """The index of the log that is in ``folder`` now.

        Raises:
            BatchkitError: the run can't be read.
        """
        group_by = job_of_run(folder).scoring.group_by
        log_of(folder)
        with self._lock:
            index = self._indexes.pop(folder, None)
            if index is None or not index.is_current(group_by):
                index = Index(folder, group_by)
            self._indexes[folder] = index
            while len(self._indexes) > _KEPT:
                self._indexes.popitem(last=False)
            return index
