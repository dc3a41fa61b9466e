"""A short summary of a run's failures: each kind with an example and advice."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from batchkit.config.tables import JobConfig
from batchkit.config.terminal import shortened
from batchkit.errors import (
    EmptyTextError,
    EngineCrashError,
    InvalidOutputError,
    RowOutOfMemoryError,
    RowTimeoutError,
    ServerError,
)
from batchkit.storage.checkpoint import Totals
from batchkit.storage.lines import record_of
from batchkit.storage.newest_lines import NewestLog

_MAY_PASS = {error.kind for error in (
    EngineCrashError, RowOutOfMemoryError, RowTimeoutError, ServerError)}  # fmt: skip
_OF_THE_MODEL = {EmptyTextError.kind, InvalidOutputError.kind}
_LONGEST = 500  # characters of a message


@dataclass(frozen=True, slots=True)
class Failure:
    """The rows that failed with one kind of error.

    - ``rows``: number of these rows. ``index``, ``id`` and ``message`` are those of the first row.
    - ``may_pass``: True if a retry without any change may succeed.
    """

    kind: str
    rows: int
    index: int
    id: str
    message: str
    may_pass: bool


def failures_of(log: Path, totals: Totals, job: JobConfig) -> list[Failure]:
    """Return one ``Failure`` for each kind of error, the most frequent first. ``totals``: counts over ``log``."""
    by_kind = {kind: rows for kind, rows in totals.failed_by_kind.items() if rows}
    if not by_kind:
        return []
    sampled = [job.sampling.temperature, *(job.retry.temperatures or ())]
    may_pass = _MAY_PASS | (_OF_THE_MODEL if any(sampled) else set())
    found = []
    with closing(NewestLog(log)) as newest:
        for kind, rows in by_kind.items():
            index = next(iter(rows))
            record = record_of(newest.of(index)[0]) or {}
            message = shortened(str((record.get("error") or {}).get("message")), _LONGEST)
            name = str(record.get("id"))
            found.append(Failure(kind, len(rows), index, name, message, kind in may_pass))
    return sorted(found, key=lambda failure: -failure.rows)


def uncovered_in(log: Path) -> int:
    """Return how many transcripts in ``log`` miss part of the audio."""
    with closing(NewestLog(log)) as newest:
        lines = (newest.view[line.start : line.end] for line in newest)
        marked = (record_of(line) for line in lines if b'"coverage":' in line)
        return sum(bool(record and record.get("coverage")) for record in marked)


def lines_of(failures: Sequence[Failure], folder: str, *, was_retry: bool) -> Iterator[str]:
    """Yield the lines that a terminal shows for the failures, and the next command to run."""
    for failure in failures:
        row = f"row {failure.index} (id {failure.id})"
        yield f"failed by {failure.kind}: {failure.rows:,}, for example {row}: {failure.message}"
    again = [failure.kind for failure in failures if failure.may_pass]
    others = [failure.kind for failure in failures if not failure.may_pass]
    if again and not was_retry:
        kinds = "".join(f" --kind {kind}" for kind in again) if others else ""
        yield f"next: batchkit retry-failed{kinds} {folder}"
    if same := [kind for kind in others if kind in _OF_THE_MODEL]:
        yield (
            f"rows failed by {', '.join(same)} would fail again at temperature 0: change the prompt, or set"
            " retry.temperatures"
        )
    if wrong := [kind for kind in others if kind not in _OF_THE_MODEL]:
        yield f"rows failed by {', '.join(wrong)} would fail again: first fix the problems in the messages"
    if failures:
        yield f"each row with its message: batchkit show --failed {folder}"
