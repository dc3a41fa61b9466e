"""Scoring of predictions that other tools made for the rows of a job's input.

Formats: a JSONL file, a table (CSV, Parquet, Excel), or a JSON file with a list. Each of its entries may be a line of
OpenAI's batch output, or an entry in the form of another tool.
"""

from __future__ import annotations

import json
from codecs import BOM_UTF8
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from batchkit.commands import Say
from batchkit.commands.score import check_scoring
from batchkit.commands.score.deferred import deferred_scores
from batchkit.config.regular_file import open_regular
from batchkit.config.seams import PREDICTIONS as SEAM
from batchkit.config.tables import InputTable, JobConfig
from batchkit.errors import JobError
from batchkit.execution.first_rows import check_columns, scoring_hints
from batchkit.scoring import Scored, Scoring
from batchkit.scoring.deferred import Answered
from batchkit.scoring.metrics import ScoreTable, tabulate
from batchkit.sources import read_rows
from batchkit.sources.formats import format_with, suffix_of
from batchkit.storage.plain_json import parsed, valid
from batchkit.storage.score_store import references_of
from batchkit.types import BROKEN_OFF, Row

PREDICTIONS = {
    "openai": "batchkit.commands.score.predictions:of_batch",
    "realhit": "batchkit.contrib.realhit.harness:of_results",
}
"""Functions that convert an entry in the form of another tool, and return any other entry unchanged."""
_IDS = ("id", "Id", "custom_id", "query_id")
_PREDICTIONS = ("prediction", "answer")
# An entry with ``text`` and one of these keys comes from an export of batchkit.
_OF_OURS = ("status", "finish_reason")
_TEXTS = ("text", "response", "Response", "output")
_TABLES = ("csv", "parquet", "xlsx")


class PredictionScores(NamedTuple):
    """The score table of predictions. ``missing``: number of input rows without a prediction."""

    table: ScoreTable
    missing: int

    def to_json(self) -> dict[str, Any]:
        return {**self.table.to_json(), "missing": self.missing}

    def to_text(self) -> str:
        text = self.table.to_text()
        if self.missing:
            text += f"\n\n{self.missing:,} rows of the input have no prediction"
        return text


def score_predictions(job: JobConfig, path: Path, say: Say = print) -> PredictionScores:
    """Score the predictions in the file ``path`` against the rows of the job's input, matched by id.

    Raises:
        JobError: The job defines no scoring, the file can't be read, or none of its ids is in the input.
    """
    check_scoring(job)
    scoring = Scoring(job.scoring, references_of(job), say)
    made = read_predictions(path)
    rows = _rows_by_id(job)
    if not rows.keys() & made.keys():
        raise JobError(
            f"{path}: none of its {len(made):,} ids is an id of the job's input"
            f" (the first ids are {next(iter(made), None)!r} here and {next(iter(rows), None)!r} in the input);"
            " set input.id to the field that identifies a row"
        )
    if strangers := made.keys() - rows.keys():
        say(
            f"{len(strangers):,} predictions have no row in the input, for example id {min(strangers)!r}"
        )
    check_columns(iter(rows.values()), job)
    for hint in scoring_hints(job.scoring, next(iter(rows.values())).fields):
        say(hint)
    known = [(rows[name], made[name]) for name in rows if name in made]
    answers = [
        Answered(
            row.index,
            row.id,
            row.fields,
            found.text or found.prediction or "",
            scoring.reference(row.fields, row.id),
            _scored(scoring, found, row.fields, row.id),
        )
        for row, found in known
        if not found.failed
    ]
    later = deferred_scores(job, scoring, answers, say)
    records: list[dict[str, Any]] = [
        {
            "status": "ok",
            "fields": a.fields,
            "scores": {**a.known.scores, **later.get(a.index, {})},
            "unscored": a.known.unscored,
        }
        for a in answers
    ]
    records += [{"status": "failed", "fields": row.fields} for row, found in known if found.failed]
    return PredictionScores(tabulate(records, job.scoring.group_by), len(rows) - len(known))


def _rows_by_id(job: JobConfig) -> dict[str, Row]:
    rows: dict[str, Row] = {}
    for row in read_rows(job.input):
        if row.error is not None:
            continue
        if (other := rows.setdefault(row.id, row)) is not row:
            raise JobError(
                f"{job.input.path}: rows {other.index} and {row.index} have the same id {row.id!r}, so a prediction"
                " may be for either; set input.id to a field that is different in each row"
            )
    return rows


def _scored(scoring: Scoring, found: Prediction, fields: Mapping[str, Any], row_id: str) -> Scored:
    if found.prediction is None:
        return scoring.score(found.text or "", fields, row_id)
    return scoring.score_prediction(found.prediction, fields, row_id)


class Prediction(NamedTuple):
    """A prediction for a row: the ``prediction`` itself, or the ``text`` of an answer, from which it is extracted."""

    prediction: str | None
    text: str | None
    failed: bool = False


def read_predictions(path: Path) -> dict[str, Prediction]:
    """Return the predictions in a file, by row id.

    An entry is a line, a table row, or a member of the list (or of ``results``) in a ``.json`` file. It has an ``id``,
    and a prediction or a text; or it is a line of OpenAI's batch output.

    - The prediction is ``prediction`` or ``answer``. The text is the first of ``text``, ``response``, ``Response`` and
      ``output``.
    - In batchkit's own exports, ``answer`` is a column of the input and is ignored.
    - An entry counts as a failed row if it is marked as failed, if its answer is null, or if its text is blank.
    - A blank prediction without a text is an answer, because a metric may score it 0.
    - If two entries have the same id and at least one of them failed, the later entry counts.

    Raises:
        JobError: The file is missing or not JSON; an entry has no id, or neither a prediction nor a text; or an id has
            two different answers.
    """
    found: dict[str, Prediction] = {}
    conversions = [SEAM.load(name) for name in SEAM.names()]
    for where, entry in _entries(path):
        for convert in conversions:
            entry = convert(entry)
        row_id = _first(entry, _IDS)
        if row_id is None:
            raise JobError(f"{where}: has no row id; it needs one of {', '.join(_IDS)}")
        made, known = _prediction(entry, where), found.get(str(row_id))
        if known not in (None, made) and not (known.failed or made.failed):
            raise JobError(
                f"{where}: a second, different answer for id {row_id!r}; remove one of them"
            )
        found[str(row_id)] = made
    if not found:
        raise JobError(
            f"{path}: has no predictions; it needs one line per row, with an id and a prediction or a text"
        )
    return found


def _is_batch(entry: Mapping[str, Any]) -> bool:
    """Return True if the entry is a line of OpenAI's batch output or error file."""
    response = entry.get("response")
    return "custom_id" in entry and (
        isinstance(response, Mapping) or (response is None and "error" in entry)
    )


def of_batch(entry: Mapping[str, Any]) -> Mapping[str, Any]:
    """Convert a line of OpenAI's batch output to an entry with ``id`` and ``text``: the ``custom_id`` and the first
    choice. The line's own ``id`` is not a row id."""
    if not _is_batch(entry):
        return entry
    failed = {"id": entry["custom_id"], "status": "failed"}
    response = entry.get("response") or {}
    if entry.get("error") or response.get("status_code", 200) != 200:
        return failed
    try:
        body = response["body"]
        if body.get("object") == "response":
            text, is_whole = _of_response(body)
            return {"id": entry["custom_id"], "text": text} if is_whole else failed
        first = min(body["choices"], key=lambda choice: choice.get("index") or 0)
        text = first["message"]["content"] if "message" in first else first["text"]
        is_whole = not body.get("error") and first.get("finish_reason") not in BROKEN_OFF
    except (KeyError, TypeError, ValueError, AttributeError):  # no answer, or not a chat answer
        return failed
    return {"id": entry["custom_id"], "text": text} if is_whole else failed


def _of_response(body: Mapping[str, Any]) -> tuple[str, bool]:
    """Return the text in a body of the Responses API, and whether the body is a complete answer."""
    parts = [
        part for item in body["output"] if item["type"] == "message" for part in item["content"]
    ]
    text = "".join(part["text"] for part in parts if part["type"] == "output_text")
    return text, not body.get("error") and body.get("status") in ("completed", "incomplete")


def _prediction(entry: Mapping[str, Any], where: str) -> Prediction:
    if entry.get("status") == "failed":
        return Prediction(None, None, failed=True)
    # In batchkit's own export, an ``answer`` is a column of the input: often the reference, never the prediction.
    is_ours = "text" in entry and any(name in entry for name in _OF_OURS)
    predictions = ("prediction",) if is_ours else _PREDICTIONS
    known = _PREDICTIONS + _TEXTS
    if not any(name in entry for name in known):
        names = ", ".join(map(str, entry))
        raise JobError(
            f"{where}: has neither a prediction nor a text, only {names}; it needs one of {', '.join(known)}"
        )
    prediction, text = _text(_first(entry, predictions)), _text(_first(entry, _TEXTS))
    answer = text if prediction is None else prediction
    is_blank = text is not None and not text.strip() and not (prediction or "").strip()
    if answer is None or is_blank:
        return Prediction(None, None, failed=True)
    return Prediction(prediction, text)


def _text(value: Any) -> str | None:
    if value is None:
        return None
    return valid(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))


def _entries(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield each entry of the file, with its position for error messages."""
    if not path.exists():
        raise JobError(f"--predictions {path}: no such file; check the path")
    if path.suffix == ".json":
        yield from _members(path)
        return
    is_table = format_with(suffix_of(path.name)) in _TABLES
    for row in read_rows(InputTable(path=str(path), format="auto" if is_table else "jsonl")):
        if row.error is not None:
            raise JobError(f"--predictions: {row.error}")
        yield f"{path} row {row.index}", row.fields


def _members(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the entries of a ``.json`` file. It may contain NaN, which the row readers reject."""
    try:
        with open_regular(path) as file:
            whole = parsed(file.readall().removeprefix(BOM_UTF8))
    except OSError as error:
        raise JobError(f"--predictions {path}: can't be read: {error.strerror}") from error
    except ValueError as error:
        raise JobError(f"{path}: not JSON: {error}") from None
    entries = whole.get("results") if isinstance(whole, dict) else whole
    if not isinstance(entries, list):
        raise JobError(f"{path}: expected a list, or an object with a list of `results`")
    for number, entry in enumerate(entries):
        where = f"{path} entry {number} (counted from 0)"
        if not isinstance(entry, dict):
            raise JobError(f"{where}: found {str(entry)[:60]!r}, expected an object with an id")
        yield where, entry


def _first(entry: Mapping[str, Any], names: tuple[str, ...]) -> Any:
    return next((entry[name] for name in names if entry.get(name) is not None), None)
