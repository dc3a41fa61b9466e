"""The ``run`` command: a start of a job's run, then its scores and its exports."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from batchkit.commands import Say
from batchkit.commands.at_end import planned, with_exports
from batchkit.commands.forecast_file import announced, turned_out
from batchkit.commands.score import Scores, finish_scoring
from batchkit.commands.tuning.known import advised
from batchkit.config.tables import JobConfig
from batchkit.errors import BatchkitError, Interrupted
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
    they are exported to ``output`` and as ``[output]`` has it, and sent to ``output.upload``.

    Raises:
        BatchkitError: the run could not begin. What stops it later is in the outcome, and its
            ``exit_code`` says whether it can be continued.
        Interrupted: stopped by a signal before or after rows were in flight.
    """
    end = planned(job, output, skip_from)
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
        outcome = with_exports(outcome, end, say)
        ended(outcome.summary)
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
