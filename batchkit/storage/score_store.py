"""``scores.jsonl``: what ``batchkit score`` found, one line per row, beside ``results.jsonl``.

The log is append-only and holds what the model wrote and the scores that were known when the row
finished. Scores that came later (charts, a judge, another scoring) are here. A line counts only
for the record that it was made from: a row that was run again has its own scores, and so has a
record whose row index changed (``--on-change requeue``).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import orjson

from batchkit.config.tables import JobConfig
from batchkit.errors import JobError, StoreError
from batchkit.storage.checkpoint import check_log
from batchkit.storage.files import replacing
from batchkit.storage.log import RESULTS
from batchkit.storage.newest import read_newest
from batchkit.storage.runfolder import is_run
from batchkit.storage.schema import is_count

SCORES = "scores.jsonl"
_KEYS = ("index", "input_hash", "finished_at")


@dataclass(frozen=True, slots=True)
class ScoreLine:
    """The scores of the record of row ``index`` that was finished at ``finished_at``.

    ``input_hash`` is the record's: many rows finish within one millisecond.
    """

    index: int
    input_hash: str | None
    finished_at: str
    prediction: str | None
    scores: Mapping[str, float | None]
    unscored: str | None = None  # why some of them could not be computed


_NAMES = [field.name for field in fields(ScoreLine)]


def read_scored(folder: Path) -> Iterator[dict[str, Any]]:
    """The newest record of each row, in the order of the input, with its newest scores."""
    newest_of = newest_scores(folder)
    for record in read_newest(folder / RESULTS):
        line = newest_of(*(record.get(key) for key in _KEYS))
        if line is not None:
            record["prediction"], record["scores"] = line["prediction"], line["scores"]
            record["unscored"] = line.get("unscored")
        yield record


def newest_scores(folder: Path) -> Callable[[Any, Any, Any], dict[str, Any] | None]:
    """A function from a record's index, input hash and time to its line; it must be asked for ascending
    indexes."""
    lines = _lines(folder / SCORES)
    line = next(lines, None)

    def of(index: int, input_hash: str | None, finished_at: str | None) -> dict[str, Any] | None:
        nonlocal line
        while line is not None and line["index"] < index:
            line = next(lines, None)
        found = line is not None and [line[key] for key in _KEYS]
        return line if found == [index, input_hash, finished_at] else None

    return of


def join_scores(folders: Sequence[Path], chosen: Iterable[tuple[int, int]]) -> Iterator[ScoreLine]:
    """For each (row index, folder number), indexes ascending, the row's line there, if any."""
    books = [_lines(folder / SCORES) for folder in folders]
    lines = [next(book, None) for book in books]
    for index, number in chosen:
        line = lines[number]
        while line is not None and line["index"] < index:
            line = next(books[number], None)
        lines[number] = line
        if line is not None and line["index"] == index:
            yield ScoreLine(**{name: line[name] for name in _NAMES if name in line})


def write_scores(folder: Path, lines: Iterable[ScoreLine], *, before: Callable[[], None]) -> None:
    """Replace the scores of a run in one step; ``lines`` in the order of the input.

    ``before`` is called when all of them are on disk and the old ones are not yet replaced.

    Raises:
        StoreError: the file can't be written.
    """
    path = folder / SCORES
    try:
        with replacing(path) as temporary, temporary.open("wb") as file:
            for line in lines:
                file.write(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE))
            file.flush()
            os.fsync(file.fileno())
            before()
    except OSError as error:
        raise StoreError(f"{path}: can't write: {error.strerror or error}") from error


def references_of(job: JobConfig) -> dict[str, str | None] | None:
    """The right answers by id, from the run in ``scoring.reference_run``; None if it is not set.

    Raises:
        JobError: there is no such run, it has no predictions, or an id names several of its rows.
    """
    if job.scoring.reference_run is None:
        return None
    folder = Path(job.scoring.reference_run)
    if not is_run(folder):
        raise JobError(f"scoring.reference_run: {folder}: no run there; make that run first")
    check_log(folder)
    found: dict[str, str | None] = {}
    ids = set[str]()
    for record in read_scored(folder):
        if record["id"] in ids:
            raise JobError(
                f"scoring.reference_run: {folder}: id {record['id']!r} names two of its rows; give"
                " both runs an input.id that names one"
            )
        ids.add(record["id"])
        if record["status"] != "ok":
            continue
        if "prediction" not in record:
            raise JobError(
                f"scoring.reference_run: {folder}: its answers have no prediction; give it"
                f" [scoring] extract, and `batchkit score` it"
            )
        found[record["id"]] = record["prediction"]
    return found


def check_one_row_each(references: Mapping[str, Any], shared_ids: Iterable[str]) -> None:
    """Raises JobError if one of ``references`` is for an id that several rows have: it may be for any."""
    if names := sorted(references.keys() & {*shared_ids}):
        raise JobError(
            f"scoring.reference_run: id {names[0]!r} names several rows of this run, and the answer"
            " there may be for any of them; give both runs an input.id that names one"
        )


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    if not path.exists():
        return
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            try:
                line: dict[str, Any] = orjson.loads(raw)
                if not all(name in line for name in _NAMES):
                    raise ValueError("not a line of scores")
                if not is_count(line["index"]) or not isinstance(line["scores"], dict):
                    raise ValueError("index or scores is not what a line of scores has")
            except (ValueError, TypeError) as error:
                raise StoreError(
                    f"{path} line {number}: damaged: {error}; `batchkit score` writes it again"
                ) from error
            yield line
