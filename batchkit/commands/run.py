"""The ``run`` command: a start of a job's run, then its scores and its exported table."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from batchkit.commands import Say
from batchkit.commands.export import export
from batchkit.commands.export.outputs import format_for
from batchkit.commands.forecast_file import announced, turned_out
from batchkit.commands.score import finish_scoring
from batchkit.commands.score.values import Scores
from batchkit.commands.tuning.known import advised
from batchkit.config.tables import JobConfig
from batchkit.errors import BatchkitError, Interrupted, JobError
from batchkit.execution.run import start_run
from batchkit.execution.signals import StopRequest
from batchkit.execution.start import OnChange, Options
from batchkit.execution.summary import Outcome, notifying


def run_job(
    job: JobConfig,
    *,
    fresh: bool = False,
    on_change: OnChange = "fail",
    skip_from: Path | None = None,
    output: Path | None = None,
    say: Say = print,
) -> Outcome:
    """Run ``job``, or continue it; SIGINT and SIGTERM stop it cleanly.

    ``say`` gets the results of scoring, including the table at the end. When all rows are settled,
    they are exported to ``output``.

    Raises:
        BatchkitError: the run could not begin. What stops it later is in the outcome, and its
            ``exit_code`` says whether it can be continued.
        Interrupted: stopped by a signal before or after rows were in flight.
    """
    output_format = None if output is None else format_for(output, job)
    if output is not None and skip_from is not None:
        raise JobError(
            f"--output {output}: the rows that {skip_from} has would be missing there; leave it out, and"
            " `batchkit export` both runs"
        )
    forecast = None if fresh else announced(job)
    for text in filter(None, (forecast, advised(job))):
        say(text)
    with notifying(job, say) as ended:
        with StopRequest().installed() as stop:
            options = Options(fresh=fresh, on_change=on_change, skip_from=skip_from, command="run")
            outcome = start_run(job, options=options, stop=stop)
            ended(outcome.summary)
            outcome = with_scores(outcome, job, stop, say)
        if outcome.summary.exit in (0, 3) and (took := turned_out(job, outcome.summary)):
            say(took)
        if output is not None and output_format is not None:
            outcome = _exported(outcome, output_format, output, say)
        ended(outcome.summary)
    return outcome


def _exported(outcome: Outcome, name: str, output: Path, say: Say) -> Outcome:
    """Once all rows have finished, write them to ``output``."""
    if outcome.error is not None or outcome.summary.exit not in (0, 3):
        say(
            f"{output}: not written, as the run has not ended; `batchkit export {outcome.summary.folder}` writes"
            " what there is"
        )
        return outcome
    try:
        for file in export(Path(outcome.summary.folder), name, output, say, force=True):
            say(file.to_text())
    except BatchkitError as error:
        return Outcome(replace(outcome.summary, exit=error.exit_code), error)
    return outcome


def with_scores(outcome: Outcome, job: JobConfig, stop: StopRequest, say: Say) -> Outcome:
    """Once all rows have finished, compute the scores that had to wait until then."""
    summary = outcome.summary
    if outcome.error is not None or summary.exit not in (0, 3):
        return outcome
    try:
        table = finish_scoring(Path(summary.folder), job, stop=stop, say=say)
    except BatchkitError as error:
        return Outcome(replace(summary, exit=error.exit_code), error)
    except Interrupted as interrupt:
        return Outcome(replace(summary, exit=128 + interrupt.signum))
    if table is not None:
        say(Scores.of(table, Path(summary.folder)).to_text())
    return outcome
