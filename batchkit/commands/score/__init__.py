"""Scores the answers of a run again.

The scores of a run's records are in ``results.jsonl``, computed as the rows finished; scores
computed here replace them (``storage/score_store.py``). Charts and judgements, which need a sandbox
or a second model, are scored only here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from batchkit.commands import Say
from batchkit.commands.score.deferred import deferred_scores, is_deferred, names_of_deferred
from batchkit.commands.score.judge import FOLDER, Answered
from batchkit.config.loading import load_job
from batchkit.config.tables import JobConfig
from batchkit.errors import InputError, JobError
from batchkit.execution.first_rows import check_columns, scoring_hints
from batchkit.execution.stop import StopRequest
from batchkit.runs.inputs import with_fields
from batchkit.runs.scores import table_of
from batchkit.scoring import Scoring, scorers_of
from batchkit.scoring.metrics import ScoreTable
from batchkit.sources import read_rows
from batchkit.storage.checkpoint import check_log
from batchkit.storage.identity import scoring_of
from batchkit.storage.job_toml import job_of_run, write_job
from batchkit.storage.log import RESULTS
from batchkit.storage.manifest import read_manifest
from batchkit.storage.newest import read_newest
from batchkit.storage.runfolder import Claim, claim
from batchkit.storage.score_store import (
    SCORES,
    ScoreLine,
    check_one_row_each,
    references_of,
    write_scores,
)


def score_run(folder: Path, job: JobConfig | None = None, *, say: Say = print) -> ScoreTable:
    """Score every answer of a run again, as ``job.scoring`` says, and store the scores.

    Without ``job``: the run's own. Judgements that the run already has are not requested again.

    Raises:
        JobError: nothing is scored, or the rows that the scoring needs are missing.
        StoreError: another process works on the run, or its results are missing.
        LostLockError: the run folder's lock was removed meanwhile; no score is written then.
    """
    with StopRequest().installed() as stop, claim(folder) as lock:
        return _score_run(folder, lock, job or job_of_run(folder), stop, say)


def finish_scoring(
    folder: Path, job: JobConfig, *, stop: StopRequest, say: Say
) -> ScoreTable | None:
    """Compute the scores left when a run has ended; its table, or None if nothing is scored."""
    if not job.scoring.is_on:
        return None
    if not is_scored(folder, job):
        with claim(folder) as lock:
            return _score_run(folder, lock, job, stop, say)
    return table_of(folder, job)


def is_scored(folder: Path, job: JobConfig) -> bool:
    """True if the run has every score that ``job.scoring`` asks for."""
    if _is_other(folder, job):
        return False
    now = scored_from(folder, job)
    return not now or read_manifest(folder).scored_from == now


def scored_from(folder: Path, job: JobConfig) -> list[list[int]]:
    """Size and time of each file that scores depend on after the rows have finished.

    They are compared for equality: which file is older says nothing if a clock was set.
    """
    made_from = [folder / RESULTS] if is_deferred(scorers_of(job.scoring)) else []
    if job.scoring.reference_run is not None:  # it may run while this one does
        reference = Path(job.scoring.reference_run)
        made_from = [folder / RESULTS, reference / RESULTS, reference / SCORES]
    found = [path.stat() if path.exists() else None for path in made_from]
    return [[0, 0] if stat is None else [stat.st_size, stat.st_mtime_ns] for stat in found]


def _score_run(
    folder: Path, lock: Claim, job: JobConfig, stop: StopRequest, say: Say
) -> ScoreTable:
    check_scoring(job)
    check_log(folder)
    for hint in scoring_hints(job.scoring, _first_row(job)):
        say(hint)
    made_from = scored_from(folder, job)
    if references := references_of(job):
        ids = Counter(record["id"] for record in read_newest(folder / RESULTS))
        check_one_row_each(references, (name for name, n_rows in ids.items() if n_rows > 1))
    scoring = Scoring(job.scoring, references, say)
    names = scoring.fields | names_of_deferred(job, scoring)
    later: dict[int, dict[str, float | None]] = {}
    if is_deferred(scoring.scorers):
        needs_later = [
            _answered(record, fields, scoring)
            for record, fields in _answers(folder, job, names)
            if _text_of(record).strip() and is_deferred(scoring.table_for(fields).scorers)
        ]
        later = deferred_scores(job, scoring, needs_later, folder / FOLDER, stop, say)

    def lines() -> Iterator[ScoreLine]:
        for record, fields in _answers(folder, job, names):
            index, scored = record["index"], scoring.score(_text_of(record), fields, record["id"])
            yield ScoreLine(
                index,
                record.get("input_hash"),
                record["finished_at"],
                scored.prediction,
                {**scored.scores, **later.get(index, {})},
                scored.unscored,
            )

    def before() -> None:
        lock.check()  # a judge may have taken hours
        _forget(folder, job)

    write_scores(folder, lines(), before=before)
    lock.check()
    _remember(folder, job, made_from)
    return table_of(folder, job)


def _first_row(job: JobConfig) -> Mapping[str, Any] | None:
    """The fields of the input's first row; None if it can no longer be read.

    Raises:
        JobError: the first rows all lack a field that the job names.
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
    """The newest ok record of each row, and the row's fields, as ``with_fields`` finds them."""
    ok = (record for record in read_newest(folder / RESULTS) if record["status"] == "ok")
    return with_fields(ok, job, names)


def _answered(record: Mapping[str, Any], fields: Mapping[str, Any], scoring: Scoring) -> Answered:
    text, row_id = _text_of(record), record["id"]
    known, steps = scoring.score(text, fields, row_id), record.get("steps") or {}
    return Answered(record["index"], row_id, fields, text, known, steps)


def _text_of(record: Mapping[str, Any]) -> str:
    """What the scoring reads of an answer: its text, or the label of a class."""
    return str(record.get("label") or record["text"] or "")


def _is_other(folder: Path, job: JobConfig) -> bool:
    """True if some rows of the run may have been scored in another way than ``job``'s."""
    return read_manifest(folder).scoring != scoring_of(job)


def _forget(folder: Path, job: JobConfig) -> None:
    """Mark the run as mixed before its scores are replaced, in case this is killed meanwhile."""
    if _is_other(folder, job):
        manifest = read_manifest(folder)
        manifest.scoring = None
        manifest.write(folder)


def _remember(folder: Path, job: JobConfig, made_from: list[list[int]]) -> None:
    write_job(folder, job_of_run(folder).model_copy(update={"scoring": job.scoring}))
    manifest = read_manifest(folder)
    manifest.scoring, manifest.scored_from = scoring_of(job), made_from
    manifest.write(folder)


def check_scoring(job: JobConfig) -> None:
    """Raises JobError if ``job`` scores nothing."""
    if not job.scoring.is_on:
        raise JobError(
            "the job scores nothing: set [scoring] extract, reference and scorers, in the job file"
            " or by --set scoring.scorers='[\"em\"]' --set scoring.reference=FIELD"
        )


def check_overrides(overrides: Sequence[str]) -> None:
    """Raises JobError if one of them is about more than the scoring of a run, or which run it is."""
    for override in overrides:
        if not override.startswith(("scoring.", "name=", "output.dir=")):
            raise JobError(
                f"--set {override}: the rows are answered already; `score` takes only scoring.…, and"
                " name or output.dir to name the run"
            )


def job_to_score(folder: Path, named: Path | None, overrides: Sequence[str]) -> JobConfig:
    """The job of the run in ``folder``, with the scoring of the job file ``named``, if any.

    Raises:
        JobError: that scoring does not fit the run, whose own ``job.toml`` it becomes a part of.
    """
    if named is None:
        return job_of_run(folder, [o for o in overrides if o.startswith("scoring.")])
    job = job_of_run(folder).model_copy(update={"scoring": load_job(named, overrides).scoring})
    origin = f"{folder}, scored as {named} says"
    JobConfig.model_validate(job.model_dump(), context={"origin": origin})
    return job


def job_of_rows(named: Path | None, folder: Path | None, overrides: Sequence[str]) -> JobConfig:
    """The job whose input has the rows that predictions are for: a job file's, or a run's.

    Raises:
        JobError: neither is given.
    """
    if named is not None:
        return load_job(named, overrides, if_missing={"engine": {"kind": "dry-run"}})
    if folder is None:
        raise JobError(
            "--predictions needs the job: its rows, and how they are scored; name JOB (or a RUN)"
        )
    return job_of_run(folder, overrides)
