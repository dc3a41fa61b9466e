"""``scores.jsonl``: the scores of ``batchkit score``, one line per row, next to ``results.jsonl``.

``results.jsonl`` is append-only and holds the scores that were known when a row finished. Scores that are computed
later (deferred scorers, another scoring) are in ``scores.jsonl``. Each line of ``scores.jsonl`` belongs to one record.
A line is ignored if its row was run again, or has another index after ``--on-change requeue``.
"""

from __future__ import annotations

import heapq
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from batchkit.config.tables import JobConfig
from batchkit.config.tables.input import variants
from batchkit.errors import JobError, StoreError
from batchkit.storage.checkpoint import check_log
from batchkit.storage.files import disk_errors, replacing
from batchkit.storage.index_set import IndexSet
from batchkit.storage.log import RESULTS, opened_log
from batchkit.storage.newest_lines import read_newest
from batchkit.storage.runfolder import is_run
from batchkit.types import Count

SCORES = "scores.jsonl"


class ScoreLine(msgspec.Struct, frozen=True):
    """The scores of one record: the record of row ``index`` that was finished at ``finished_at``.

    ``input_hash`` is the record's hash. It is compared, too, because several records may have the same time.
    """

    index: Count
    input_hash: str | None
    finished_at: str
    prediction: str | None
    scores: Mapping[str, float | None]
    unscored: str | None = None  # why some scores could not be computed


_decoder = msgspec.json.Decoder(ScoreLine)


class Scores:
    """A reader of the ``scores.jsonl`` in ``folder``, if there is one. Call ``of`` with ascending row indexes."""

    def __init__(self, folder: Path) -> None:
        self._lines = score_lines(folder / SCORES)
        self._line = next(self._lines, None)

    def of(self, index: int, input_hash: str | None, finished_at: str | None) -> ScoreLine | None:
        """Return the scores of the record with this row index, hash and time; None if there are none. Raises StoreError
        if a line is damaged."""
        while (line := self._line) is not None and line.index < index:
            self._line = next(self._lines, None)
        if line is None or (line.index, line.input_hash, line.finished_at) != (
            index,
            input_hash,
            finished_at,
        ):
            return None
        return line


def read_scored(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the newest record of each row with its newest scores, in input order."""
    return scored(read_newest(folder / RESULTS), folder)


def scored(records: Iterable[dict[str, Any]], folder: Path) -> Iterator[dict[str, Any]]:
    """Yield ``records`` of the run, which are in input order, with their newest scores."""
    scores = Scores(folder)
    for record in records:
        line = scores.of(record["index"], record.get("input_hash"), record["finished_at"])
        if line is not None:
            names = ("prediction", "scores", "unscored")
            record |= {name: getattr(line, name) for name in names}
        yield record


def join_scores(folders: Sequence[Path], picked: Sequence[IndexSet]) -> Iterator[ScoreLine]:
    """Yield the score lines of a merged run, ordered by row.

    ``picked``: for each of ``folders``, the rows whose scores are taken from this folder.
    """

    def of(folder: Path, rows: IndexSet) -> Iterator[ScoreLine]:
        return (line for line in score_lines(folder / SCORES) if line.index in rows)

    return heapq.merge(*map(of, folders, picked), key=lambda line: line.index)


def write_scores(folder: Path, lines: Iterable[ScoreLine], *, before: Callable[[], None]) -> None:
    """Replace the ``scores.jsonl`` of a run. ``lines`` must be in input order.

    ``before`` is called after all lines are on disk and before the old file is replaced.

    Raises:
        StoreError: the file can't be written.
    """
    path = folder / SCORES
    with disk_errors(path), replacing(path) as temporary, temporary.open("wb") as file:
        for line in lines:
            file.write(msgspec.json.encode(line) + b"\n")
        file.flush()
        os.fsync(file.fileno())
        before()


def references_of(job: JobConfig) -> dict[str, str | None] | None:
    """Return the reference answers by row id, from the run in ``scoring.reference_run``; None if that is not set.

    With ``input.cross``, a row occurs several times, each time with other values. The reference answer for its id is
    used each time, unless the reference run has an answer for the id with these values.

    Raises:
        JobError: there is no such run, it has no predictions, or an id names several of its rows.
    """
    if job.scoring.reference_run is None:
        return None
    folder = Path(job.scoring.reference_run)
    if not is_run(folder):
        raise JobError(
            f"scoring.reference_run: {folder}: no run in this folder; run the job of that run first"
        )
    check_log(folder)
    found: dict[str, str | None] = {}
    ids = set[str]()
    for record in read_scored(folder):
        if record["id"] in ids:
            raise JobError(
                f"scoring.reference_run: {folder}: id {record['id']!r} names two of its rows; give"
                " both runs an input.id that is unique"
            )
        ids.add(record["id"])
        if record["status"] != "ok":
            continue
        if "prediction" not in record:
            raise JobError(
                f"scoring.reference_run: {folder}: its answers have no prediction; set [scoring] extract"
                " for that run, and score it with `batchkit score`"
            )
        found[record["id"]] = record["prediction"]
    if not job.input.cross:
        return found
    labels = [variant.label for variant in variants(job.input.cross)]
    of_values = {f"{name}/{label}": its for name, its in found.items() for label in labels}
    return of_values | found


def check_one_row_each(references: Mapping[str, Any], shared_ids: Iterable[str]) -> None:
    """Raise JobError if an id in ``references`` belongs to several rows, because the reference answer may be for any of
    them.

    ``shared_ids``: ids that several rows have.
    """
    if names := sorted(references.keys() & {*shared_ids}):
        raise JobError(
            f"scoring.reference_run: id {names[0]!r} names several rows of this run, and the reference's"
            " answer may be for any of them; give both runs an input.id that is unique"
        )


def score_lines(path: Path) -> Iterator[ScoreLine]:
    """Yield the lines of a ``scores.jsonl``, if it exists. Raises StoreError if a line is damaged."""
    with opened_log(path) as file:
        for number, raw in enumerate(file, start=1):
            try:
                yield _decoder.decode(raw)
            except (msgspec.MsgspecError, UnicodeDecodeError) as error:
                raise StoreError(
                    f"{path} line {number}: damaged: {error}; `batchkit score` writes this file again"
                ) from error
