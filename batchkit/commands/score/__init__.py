"""Scoring of a run's answers again, without the model.

Scores in ``results.jsonl`` were computed as the rows finished. Scores computed here replace them
(``storage/score_store.py``). Deferred scores, which need all answers, are only computed here. Scores that judges gave
(``judge.py``) are kept.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from batchkit.commands import Say
from batchkit.commands.score.deferred import deferred_scores, fields_of_deferred
from batchkit.config.loading import load_job
from batchkit.config.seams import is_deferred
from batchkit.config.tables import JobConfig
from batchkit.errors import InputError, JobError, StoreError
from batchkit.execution.first_rows import check_columns, scoring_hints
from batchkit.execution.stop import StopRequest
from batchkit.runs.inputs import with_fields
from batchkit.runs.scores import table_of
from batchkit.scoring import Scoring, scorers_of
from batchkit.scoring.deferred import Answered
from batchkit.scoring.metrics import ScoreTable
from batchkit.sources import read_rows
from batchkit.storage.checkpoint import check_log
from batchkit.storage.identity import scoring_of
from batchkit.storage.job_toml import job_of_run, write_job
from batchkit.storage.log import RESULTS
from batchkit.storage.newest_lines import read_newest
from batchkit.storage.runfolder import Claim, claim
from batchkit.storage.score_store import (
    SCORES,
    ScoreLine,
    check_one_row_each,
    references_of,
    score_lines,
    write_scores,
)
from batchkit.storage.starts import StartLog, read_history

Scores = Mapping[str, float | None]


class Judged(NamedTuple):
    """New scores of a judge: their names, and the scores of each judged row, by its index."""

    names: Sequence[str] = ()
    scores: Mapping[int, Scores] = {}


def score_run(folder: Path, job: JobConfig | None = None, *, say: Say = print) -> ScoreTable:
    """Score every answer of a run again with ``job.scoring`` (by default the run's own), and store the scores.

    Raises:
        JobError: The job defines no scoring, or rows needed for it are missing.
        StoreError: Another process uses the run, or its results are missing.
        LostLockError: The run folder's lock was removed meanwhile. No score is written.
    """
    with StopRequest().installed(), claim(folder) as lock:
        return rescored(folder, lock, job or job_of_run(folder), say)


def finish_scoring(folder: Path, job: JobConfig, *, say: Say) -> ScoreTable | None:
    """Compute the scores that are still missing when a run has ended.

    Returns the score table, or None if the job has no scoring.
    """
    if not job.scoring.is_on:
        return None
    if not is_scored(folder, job):
        with claim(folder) as lock:
            return rescored(folder, lock, job, say)
    return table_of(folder, job)


def is_scored(folder: Path, job: JobConfig) -> bool:
    """Return True if the run has all scores of ``job.scoring``, computed with these settings and from the current
    content of all files."""
    if _may_differ(folder, job):
        return False
    now = scored_from(folder, job)
    return not now or read_history(folder).scored_from == now


def scored_from(folder: Path, job: JobConfig) -> list[list[int]]:
    """Return size and modification time of each file that the deferred scores and references come from. Scores are out
    of date if these values change. They are compared for equality only, because modification times can't be ordered if
    a clock was set."""
    made_from = [folder / RESULTS] if _has_deferred(scorers_of(job.scoring)) else []
    if job.scoring.reference_run is not None:  # the reference run may be running at the same time
        reference = Path(job.scoring.reference_run)
        made_from = [folder / RESULTS, reference / RESULTS, reference / SCORES]
    found = [path.stat() if path.exists() else None for path in made_from]
    return [[0, 0] if stat is None else [stat.st_size, stat.st_mtime_ns] for stat in found]


def rescored(
    folder: Path, lock: Claim, job: JobConfig, say: Say, judged: Judged | None = None
) -> ScoreTable:
    """Score a run that this process has locked, as ``score_run`` does. Also store the scores in ``judged``."""
    judged, starts = judged or Judged(), StartLog(folder, lock)
    names_judged = [*dict.fromkeys((*read_history(folder).judged, *judged.names))]
    if not names_judged:
        check_scoring(job)
    check_log(folder)
    for hint in scoring_hints(job.scoring, _first_row(job)):
        say(hint)
    made_from = scored_from(folder, job)
    if references := references_of(job):
        ids = Counter(record["id"] for record in read_newest(folder / RESULTS))
        check_one_row_each(references, (name for name, n_rows in ids.items() if n_rows > 1))
    scoring = Scoring(job.scoring, references, say)
    names = scoring.fields | fields_of_deferred(job)
    later: dict[int, dict[str, float | None]] = {}
    if _has_deferred(scoring.scorers):
        needs_later = [
            _answered(record, fields, scoring)
            for record, fields in _answers(folder, job, names)
            if _text_of(record).strip() and _has_deferred(scoring.table_for(fields).scorers)
        ]
        later = deferred_scores(job, scoring, needs_later, say)
    kept = _kept(folder, {*names_judged} - {*judged.names}, say)

    def lines() -> Iterator[ScoreLine]:
        for record, fields in _answers(folder, job, names):
            scored = scoring.score(_text_of(record), fields, record["id"])
            made = _Made(record["index"], record.get("input_hash"), record["finished_at"])
            of_judges = {**kept.get(made, {}), **judged.scores.get(made.row, {})}
            scores = {**of_judges, **scored.scores, **later.get(made.row, {})}
            yield ScoreLine(*made, scored.prediction, scores, scored.unscored)

    def before() -> None:
        lock.check()  # scoring may have taken hours
        _mark(starts, job, names_judged)

    write_scores(folder, lines(), before=before)
    lock.check()
    write_job(folder, job_of_run(folder).with_keys(scoring=job.scoring))
    starts.learn(scoring=scoring_of(job), scored_from=made_from)
    starts.save()
    return table_of(folder, job)


class _Made(NamedTuple):
    """The values that identify a record in ``scores.jsonl``."""

    row: int
    input_hash: str | None
    finished_at: str


def _kept(folder: Path, names: set[str], say: Say) -> dict[_Made, Scores]:
    """Return the scores that judges gave before, by record. ``names``: the names of these scores."""
    if not names:
        return {}
    try:
        return {
            _Made(line.index, line.input_hash, line.finished_at): {
                name: line.scores[name] for name in names & line.scores.keys()
            }
            for line in score_lines(folder / SCORES)
        }
    except StoreError as error:
        say(f"{error}; scores of judges are lost until `batchkit score --judge` adds them again")
        return {}


def _first_row(job: JobConfig) -> Mapping[str, Any] | None:
    """Return the fields of the input's first row, or None if the input can no longer be read.

    Raises:
        JobError: All of the first rows lack a field that the job names.
    """
    if job.input.path is None:
        return None
    try:
        check_columns(read_rows(job.input), job)
        row = next(read_rows(job.input), None)
    except InputError:  # the kept fields may be enough
        return None
    return None if row is None or row.error is not None else row.fields


def _answers(
    folder: Path, job: JobConfig, names: set[str]
) -> Iterator[tuple[dict[str, Any], Mapping[str, Any]]]:
    """Yield the newest record of each answered row, with the row's fields, which include ``names``
    (``with_fields``)."""
    ok = (record for record in read_newest(folder / RESULTS) if record["status"] == "ok")
    return with_fields(ok, job, names)


def _answered(record: Mapping[str, Any], fields: Mapping[str, Any], scoring: Scoring) -> Answered:
    text, row_id = _text_of(record), record["id"]
    known, reference = scoring.score(text, fields, row_id), scoring.reference(fields, row_id)
    return Answered(record["index"], row_id, fields, text, reference, known)


def _has_deferred(scorers: Iterable[str]) -> bool:
    return any(map(is_deferred, scorers))


def _text_of(record: Mapping[str, Any]) -> str:
    """Return the text to score: the answer's text, or the label of a class."""
    return str(record.get("label") or record["text"] or "")


def _may_differ(folder: Path, job: JobConfig) -> bool:
    """Return True if rows of the run may have been scored with other settings than ``job`` has."""
    return read_history(folder).scoring != scoring_of(job)


def _mark(starts: StartLog, job: JobConfig, judged: list[str]) -> None:
    """Store the names of the scores that judges gave. If the scoring changes, mark the run as scored with mixed
    settings. This is done before the scores are replaced, because the replacement may be interrupted."""
    if starts.history.scoring != scoring_of(job):
        starts.learn(scoring=None)
    starts.learn(judged=judged)
    starts.save()


def check_scoring(job: JobConfig) -> None:
    """Raise JobError if ``job`` defines no scoring."""
    if not job.scoring.is_on:
        raise JobError(
            "the job scores nothing: set [scoring] extract, reference and scorers, in the job file"
            " or by --set scoring.scorers='[\"em\"]' --set scoring.reference=FIELD"
        )


def check_overrides(overrides: Sequence[str]) -> None:
    """Raise JobError if an override sets something other than scoring or the run's name and folder."""
    for override in overrides:
        if not override.startswith(("scoring.", "name=", "output.dir=")):
            raise JobError(
                f"--set {override}: has no effect, because the rows are answered already; `score` accepts scoring.…,"
                " and name or output.dir to select the run"
            )


def job_to_score(folder: Path, named: Path | None, overrides: Sequence[str]) -> JobConfig:
    """Return the job with which to score the run in ``folder``.

    ``named``: a job file whose scoring replaces the run's own.

    Raises:
        JobError: The scoring does not fit the run's job.
    """
    if named is None:
        return job_of_run(folder, [o for o in overrides if o.startswith("scoring.")])
    job = job_of_run(folder).with_keys(scoring=load_job(named, overrides).scoring)
    origin = f"{folder}, with the scoring of {named}"
    JobConfig.model_validate(job.model_dump(), context={"origin": origin})
    return job


def job_of_rows(named: Path | None, folder: Path | None, overrides: Sequence[str]) -> JobConfig:
    """Return the job whose input has the rows of the predictions: the job file ``named``, or the job of the run in
    ``folder``.

    Raises:
        JobError: Neither is given.
    """
    if named is not None:
        return load_job(named, overrides, if_missing={"engine": {"kind": "dry-run"}})
    if folder is None:
        raise JobError(
            "--predictions needs the rows and the scoring of a job; give --job JOB (or a RUN)"
        )
    return job_of_run(folder, overrides)
