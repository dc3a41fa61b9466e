"""The ``run`` command: starts or resumes a job's run, then computes its scores and writes its exports."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from batchkit.commands import Say
from batchkit.commands.export import export
from batchkit.commands.export.outputs import check_folder, check_table, output_target
from batchkit.commands.forecast_file import announced, turned_out
from batchkit.commands.score import finish_scoring
from batchkit.commands.tuning.known import advised
from batchkit.config.export_target import PARTS, Target, target_of
from batchkit.config.tables import JobConfig
from batchkit.errors import BatchkitError, Interrupted, JobError, UploadError
from batchkit.execution.engine_pool import Pool
from batchkit.execution.run import start_run
from batchkit.execution.start import OnChange, StartOptions
from batchkit.execution.stop import StopRequest
from batchkit.execution.summary import Outcome, notifying
from batchkit.runs.compare import RunScores
from batchkit.storage.remote import check_address
from batchkit.storage.runfolder import claim
from batchkit.storage.score_store import SCORES
from batchkit.storage.store.lease import leased
from batchkit.storage.store.mirror import upload_all


def run_job(
    job: JobConfig,
    *,
    fresh: bool = False,
    on_change: OnChange = "fail",
    skip_from: Path | None = None,
    output: str | None = None,
    kept: Pool | None = None,
    say: Say = print,
) -> Outcome:
    """Run ``job`` or resume it. SIGINT and SIGTERM stop it cleanly.

    When every row has a record, the run is scored, and exported to ``output`` and as ``output.export`` specifies.

    - ``kept``: loaded engines. A matching idle engine is used, and put back at the end.
    - ``say``: receives messages about scoring, exports and the forecast.

    Raises:
        BatchkitError: The run could not begin. Later errors are in the outcome; its ``exit_code`` tells whether the
            run can be resumed.
        Interrupted: A signal arrived before the first request or after the last one.
    """
    exports = planned(job, output, skip_from)
    forecast = None if fresh else announced(job)
    for text in filter(None, (forecast, advised(job))):
        say(text)
    options = StartOptions(fresh=fresh, on_change=on_change, skip_from=skip_from, command="run")
    outcome = started(job, options, exports, say, scored_as=job, kept=kept)
    if outcome.summary.exit in (0, 3) and (took := turned_out(job, outcome.summary)):
        say(took)
    return outcome


def started(
    job: JobConfig,
    options: StartOptions,
    exports: Sequence[Target],
    say: Say,
    *,
    scored_as: JobConfig,
    kept: Pool | None = None,
) -> Outcome:
    """Run ``job`` with ``options``. When all rows have finished, score them with the job ``scored_as``, and write
    ``exports``. The command ``run.on_end`` gets the result. Raises the same exceptions as ``run_job``."""
    parts = [str(target.place) for target in exports if target.format == PARTS]
    exports = [target for target in exports if target.format != PARTS]
    options = replace(options, parts=parts)
    with notifying(job, say) as ended:
        with StopRequest().installed() as stop:
            outcome = start_run(job, options=options, kept=kept, stop=stop)
            ended(outcome.summary)
            outcome = _with_scores(outcome, scored_as, say)
            if job.store is not None and (job.folder / SCORES).exists():
                _upload_scores(job, job.store, say)
        outcome = _with_unsent(_with_exports(outcome, exports, say), say)
        ended(outcome.summary)
    return outcome


def _upload_scores(job: JobConfig, store: str, say: Say) -> None:
    """Upload the scores, which are computed after the run has given its folder in the store back."""
    with claim(job.folder), leased(store, job.run.store_interval_s, say) as lease:
        upload_all(lease, job.folder)


def _with_scores(outcome: Outcome, job: JobConfig, say: Say) -> Outcome:
    """If all rows have finished, compute the scores that are still missing, and return the outcome with the resulting
    exit code."""
    summary = outcome.summary
    if outcome.error is not None or summary.exit not in (0, 3):
        return outcome
    try:
        table = finish_scoring(Path(summary.folder), job, say=say)
    except BatchkitError as error:
        return outcome._replace(summary=replace(summary, exit=error.exit_code), error=error)
    except Interrupted as interrupt:
        return outcome._replace(summary=replace(summary, exit=128 + interrupt.signum))
    if table is not None:
        say(RunScores.of(table, Path(summary.folder)).to_text())
    return outcome


def _with_unsent(outcome: Outcome, say: Say) -> Outcome:
    """Report folders that lack their last parts. The exit code becomes 1, because the same command writes the rest."""
    for error in outcome.unsent:
        if outcome.error is not None:
            say(f"error: {error}")
        else:
            outcome = outcome._replace(summary=replace(outcome.summary, exit=1), error=error)
    return outcome


def planned(
    job: JobConfig, output: str | None = None, skip_from: Path | None = None
) -> list[Target]:
    """Return the exports of a run. Raise JobError before the run begins if one is impossible."""
    targets = [target_of(text) for text in dict.fromkeys(job.output.export)]
    if job.is_trial:  # the answers of a trial do not come from a model
        targets = [one for one in targets if not one.is_remote and one.format != PARTS]
    if output is not None:
        targets.append(output_target(output, job))
    if targets and skip_from is not None:
        key = f"--output {output}" if output is not None else "output.export"
        raise JobError(
            f"{key}: can't be used with --skip-from, because the export would lack the rows that {skip_from} has; remove"
            f" {key}, then export both runs with `batchkit export`"
        )
    for target in targets:
        is_option = output is not None and target is targets[-1]
        key = "--output" if is_option else "output.export"
        if target.format == PARTS:
            check_folder(str(target.place), job)
        else:
            check_table(target, key)
        if target.place is not None and target.is_remote:
            check_address(target.place, key)
    placed = next((target for target in targets if target.place is not None), None)
    if placed is not None and job.input.shard is not None:
        raise JobError(
            f"output.export: {placed}: each shard would write the same file; leave it out, then `batchkit merge` the"
            " shards and `batchkit export` the result"
        )
    return targets


def _with_exports(outcome: Outcome, targets: Sequence[Target], say: Say) -> Outcome:
    """Write the exports if all rows have finished. An export that fails stops no other export."""
    if not targets:
        return outcome
    folder = Path(outcome.summary.folder)
    if outcome.error is not None or outcome.summary.exit not in (0, 3):
        names = ", ".join(map(str, targets))
        say(
            f"{names}: not written, because the run has not ended; `batchkit export {folder}` writes the rows so far"
        )
        return outcome
    for target in targets:
        try:
            for file in export(folder, target, say, force=True):
                say(file.to_text())
        except BatchkitError as error:
            # After a failed upload, the run itself is complete. The caller prints the error of the outcome.
            if isinstance(error, UploadError) or outcome.error is not None:
                say(f"error: {error}")
            else:
                failed = replace(outcome.summary, exit=error.exit_code)
                outcome = outcome._replace(summary=failed, error=error)
    return outcome
