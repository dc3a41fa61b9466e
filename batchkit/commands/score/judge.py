"""``score --judge``: a second job scores the answers of a run.

The judge is an ordinary run whose input is the judged run. Its folder is inside the folder of the judged run. It can be
resumed, and its failed rows are retried. The judge's scores are added to the judged run by row.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from batchkit.commands import Say
from batchkit.commands.retry import due_rows
from batchkit.commands.run import run_job, started
from batchkit.commands.score import Judged, rescored
from batchkit.config.tables import JobConfig
from batchkit.errors import BudgetError, FailedRowsError, Interrupted, JobError
from batchkit.execution.start import OnChange, StartOptions
from batchkit.execution.summary import Outcome
from batchkit.runs.as_input import records_of
from batchkit.runs.compare import RunScores
from batchkit.runs.scores import table_of
from batchkit.scoring import score_names
from batchkit.scoring.metrics import OUT_OF_TEN
from batchkit.storage.job_toml import job_of_run
from batchkit.storage.log import RESULTS
from batchkit.storage.runfolder import claim
from batchkit.storage.score_store import read_scored
from batchkit.types import utc_now


def keys_of_judge(folder: Path) -> dict[str, Any]:
    """Return the keys of a judge's job that follow from the ``folder`` of the judged run.

    The input is only the run's log, so that later scores, such as the judge's own, do not change the input.
    """
    whole = folder.resolve()
    return {
        "input.path": str(whole / RESULTS),
        "input.format": "run",
        "output.dir": str(whole),
    }


def judge_run(
    folder: Path,
    judge: JobConfig,
    *,
    fresh: bool = False,
    on_change: OnChange = "fail",
    say: Say = print,
) -> RunScores:
    """Run or resume ``judge``, a job with the ``keys_of_judge``, and add its scores to those of the run in ``folder``.

    The judge answers only rows that are new or changed since its last start, and rows that failed then. A dry run adds
    no scores.

    Raises:
        JobError: The judge gives no scores, or a score has the name of one of the run's own scores.
        ChangedError: The judge's job has changed, and ``on_change`` is "fail".
        BatchkitError, Interrupted: The judge's run stopped. The next call resumes it.
    """
    names = _names(judge, job_of_run(folder))
    with claim(folder) as lock:
        _run(
            judge, say, fresh=fresh, on_change="requeue-input" if on_change == "fail" else on_change
        )
        if judge.is_trial:
            return RunScores.of(table_of(judge.folder), judge.folder)
        scores = _scores(judge, names)
        judged = Judged([*names.values()], scores)
        found = RunScores.of(rescored(folder, lock, job_of_run(folder), say, judged), folder)
    has_score = any(score is not None for row in scores.values() for score in row.values())
    is_failure = not (has_score or judge.is_dry)
    return found._replace(exit_code=FailedRowsError.exit_code * is_failure)


def _names(judge: JobConfig, job: JobConfig) -> dict[str, str]:
    """Return the names that the judge's scores get in the run, keyed by their names in the judge's job."""
    own = score_names(judge.scoring)
    if not own:
        raise JobError(
            f'{judge.name}: gives no scores; set [scoring] extract = "score" and scorers = ["judge"] in the'
            " judge's job"
        )
    if judge.input.cross:
        raise JobError(
            "input.cross: a judge scores each answer once; leave input.cross out of the judge's job"
        )
    names = {name: judge.name if len(own) == 1 else f"{judge.name}.{name}" for name in own}
    if taken := {*names.values()} & {*score_names(job.scoring)}:
        raise JobError(
            f"{judge.name}: the run already has a score {min(taken)!r}; give the judge another name (--set name=…)"
        )
    return names


def _run(judge: JobConfig, say: Say, *, fresh: bool, on_change: OnChange) -> None:
    """Run the rows of the judge that have no record, then retry rows that failed in earlier starts."""
    began = utc_now()
    _check(run_job(judge, fresh=fresh, on_change=on_change, say=say), judge, say)
    due = due_rows(judge.folder, before=began)
    if due.attempts:
        say(f"retrying {len(due.attempts):,} failed rows of {judge.folder}")
        options = StartOptions(attempts=due.attempts, quarantined=due.quarantined, command="score")
        _check(started(judge, options, (), say, scored_as=judge), judge, say)


def _check(outcome: Outcome, judge: JobConfig, say: Say) -> None:
    """Print the counts of the judge's run. Raise an exception if rows without a record remain."""
    summary = outcome.checked()
    for line in summary.to_text(was_retry=True).splitlines():
        say(line)
    if summary.exit >= 128:
        raise Interrupted(summary.exit - 128)
    if summary.failed:
        say(f"{summary.failed:,} judgements failed; the same command retries them")
    if summary.exit == BudgetError.exit_code:
        why = f"was stopped by {summary.stopped_by}" if summary.stopped_by else "ended early"
        raise BudgetError(
            f"{judge.folder}: the judge {why}, so some answers are not scored; run the same command to continue"
        )


def _scores(judge: JobConfig, names: Mapping[str, str]) -> dict[int, dict[str, float | None]]:
    """Return the judge's scores by the index of the judged row. A row that the judge failed to score has None."""
    scored = {record["index"]: record.get("scores") or {} for record in read_scored(judge.folder)}
    return {
        record["index"]: {name: _share(own, scored[place].get(own)) for own, name in names.items()}
        for place, record in enumerate(records_of(judge.input))
        if place in scored
    }


def _share(scorer: str, score: float | None) -> float | None:
    """Return a score from 0 to 1, which the run's score table shows in percent."""
    return score / 10 if score is not None and scorer in OUT_OF_TEN else score
