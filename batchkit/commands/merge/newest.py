"""Reads several logs of one job as one: the record of each row, and whether they agree."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import orjson

from batchkit.errors import StoreError
from batchkit.storage.lines import failure_kind, record_of
from batchkit.storage.newest import NewestLog

if TYPE_CHECKING:
    import numpy as np

_BATCH = 4096  # rows


class NewestRecord(NamedTuple):
    """The record of a row that counts, as the line ``raw`` of the log number ``log``.

    ``answers``: how many logs have an answer for the row; ``agree``: their texts, labels and scores are equal.
    """

    log: int
    raw: bytes
    record: dict[str, Any]
    answers: int
    agree: bool


class JoinedLogs:
    """The newest record of each row over several logs that no process writes to.

    In each log the newest record of a row counts. Of those the newest answer wins, by
    ``finished_at``; a failure counts only if no log has an answer. Holds 28 bytes for each record,
    and only the part of the logs being read. ``rows``: the rows' indexes, ascending (int64).

    Raises:
        StoreError: a log can't be read, or a record in it is damaged.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        import numpy as np

        self._paths = paths
        self._held = ExitStack()
        try:
            found = [self._held.enter_context(closing(NewestLog(path))) for path in paths]
        except OSError as error:
            self._held.close()
            raise StoreError(f"{error.filename}: can't be read: {error.strerror}") from error
        self._newest = found
        logs = [np.full(len(log.rows), n, np.int32) for n, log in enumerate(found)]
        rows = np.concatenate([log.rows for log in found])
        order = np.argsort(rows, kind="stable")
        rows = rows[order]
        self._logs = np.concatenate(logs)[order]
        self._starts = np.concatenate([log.starts for log in found])[order]
        self._ends = np.concatenate([log.ends for log in found])[order]
        is_first = np.append(True, rows[1:] != rows[:-1])[: len(rows)]
        self._firsts = np.flatnonzero(is_first)
        self.rows: np.ndarray[Any, Any] = rows[self._firsts]

    def __iter__(self) -> Iterator[NewestRecord]:
        """In the order of the input."""
        import numpy as np

        bounds = np.append(self._firsts, len(self._logs))
        for at in range(0, len(self.rows), _BATCH):
            batch = bounds[at : at + _BATCH + 1]
            here = slice(batch[0], batch[-1])
            lines = list(zip(*(a[here].tolist() for a in self._columns()), strict=True))
            for first, end in pairwise((batch - batch[0]).tolist()):
                yield _newest_of([self._read(*line) for line in lines[first:end]])
            for log in self._newest:
                log.release()

    def close(self) -> None:
        self._held.close()

    def _columns(self) -> tuple[np.ndarray[Any, Any], ...]:
        return self._logs, self._starts, self._ends

    def _read(self, log: int, start: int, end: int) -> NewestRecord:
        """One line, regardless of other logs that have the row."""
        raw = self._newest[log].view[start:end]
        record = record_of(raw)
        if record is None:
            raise StoreError(
                f"{self._paths[log]}: the record at byte {start} is damaged; `batchkit verify`"
                " audits the run"
            )
        return NewestRecord(log, raw, record, answers=1, agree=True)


def _newest_of(found: list[NewestRecord]) -> NewestRecord:
    if len(found) == 1:
        return found[0]
    answers = [line for line in found if failure_kind(line.record) is None]
    newest = max(answers or found, key=lambda line: str(line.record.get("finished_at")))
    texts = {_answer(line.record) for line in answers}
    return newest._replace(answers=len(answers), agree=len(texts) < 2)


def _answer(record: dict[str, Any]) -> bytes:
    """What two answers have to have in common to be the same; ids of tool calls are random."""
    parts = [
        (choice.get("text"), [call["function"] for call in choice.get("tool_calls") or ()])
        for choice in record.get("choices") or [record]
    ]
    return orjson.dumps([parts, record.get("label"), record.get("score")])
