"""The ``run`` command: starts or resumes a job's run, then computes its scores and writes its exports."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from batchkit.commands import Say
from batchkit.commands.export import export
from batchkit.commands.export.outputs import format_for
from batchkit.commands.export.upload import address_for, send
from batchkit.commands.forecast_file import announced, turned_out
from batchkit.commands.score import finish_scoring
from batchkit.commands.tuning.known import advised
from batchkit.config.masking import UPLOAD
from batchkit.config.tables import JobConfig
from batchkit.errors import BatchkitError, Interrupted, JobError
from batchkit.execution.lane import Engines
from batchkit.execution.run import start_run
from batchkit.execution.start import OnChange, StartOptions
from batchkit.execution.stop import StopRequest
from batchkit.execution.summary import Outcome, notifying
from batchkit.runs.compare import RunScores


def run_job(
    job: JobConfig,
    *,
    fresh: bool = False,
    on_change: OnChange = "fail",
    skip_from: Path | None = None,
    output: Path | None = None,
    kept: Engines | None = None,
    say: Say = print,
) -> Outcome:
    """Run ``job`` or resume it. SIGINT and SIGTERM stop it cleanly.

    Uses an idle engine in ``kept`` if it matches, and returns it there.
    ``say`` receives messages about scoring, exports and the forecast. When every row has a record, the run is
    scored, exported to ``output`` and as ``[output]`` specifies, and sent to ``output.upload``.

    Raises:
        BatchkitError: The run could not begin. Later errors are in the outcome; its ``exit_code`` tells whether the
            run can be resumed.
        Interrupted: A signal arrived before the first request or after the last one.
    """
    end = planned(job, output, skip_from)
    forecast = None if fresh else announced(job)
    for text in filter(None, (forecast, advised(job))):
        say(text)
    options = StartOptions(fresh=fresh, on_change=on_change, skip_from=skip_from, command="run")
    outcome = started(job, options, end, say, scored_as=job, kept=kept)
    if outcome.summary.exit in (0, 3) and (took := turned_out(job, outcome.summary)):
        say(took)
    return outcome


def started(
    job: JobConfig,
    options: StartOptions,
    end: AtEnd,
    say: Say,
    *,
    scored_as: JobConfig,
    kept: Engines | None = None,
) -> Outcome:
    """Run ``job`` with ``options``. When all rows have finished, score them with the job ``scored_as``, and write and
    send the exports of ``end``. The command ``run.on_end`` gets the result. Raises the same exceptions as
    ``run_job``."""
    with notifying(job, say) as ended:
        with StopRequest().installed() as stop:
            outcome = start_run(job, options=options, kept=kept, stop=stop)
            ended(outcome.summary)
            outcome = _with_scores(outcome, scored_as, stop, say)
        outcome = _with_exports(outcome, end, say)
        ended(outcome.summary)
    return outcome


def _with_scores(outcome: Outcome, job: JobConfig, stop: StopRequest, say: Say) -> Outcome:
    """If all rows have finished, compute the scores that are still missing, and return the outcome with the resulting
    exit code."""
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
        scores = RunScores.of(table, Path(summary.folder))
        say(scores.to_text())
        return Outcome(replace(summary, exit=scores.exit_code or summary.exit))
    return outcome


class WantedExport(NamedTuple):
    """An export to write: its format, and its file. Without a path, the file is in the run folder."""

    format: str
    path: Path | None = None

    @property
    def flag(self) -> str:
        """The option of ``batchkit export`` that writes this export, for example ``--csv answers.csv``."""
        return shlex.join([f"--{self.format}", *([] if self.path is None else [str(self.path)])])


class AtEnd(NamedTuple):
    """The exports to write when a run has ended, and the address to send them to."""

    exports: Sequence[WantedExport]
    address: str | None


def planned(job: JobConfig, output: Path | None = None, skip_from: Path | None = None) -> AtEnd:
    """Return the exports to write when ``job`` has run. Raise JobError if one of them is impossible, before any row is
    answered."""
    exports = [WantedExport(name) for name in dict.fromkeys(job.output.export)]
    if output is not None:
        exports.append(WantedExport(format_for(output, job), output))
    if exports and skip_from is not None:
        key = f"--output {output}" if output is not None else "output.export"
        raise JobError(
            f"{key}: the export would lack the rows that {skip_from} has; leave it out, and export both runs with"
            " `batchkit export`"
        )
    if job.output.upload is None or job.is_trial:  # a trial's answers do not come from a model
        return AtEnd(exports, None)
    if not exports:
        raise JobError(
            f'{UPLOAD}: there is no export to send; set output.export, for example to ["parquet"], or give'
            " --output FILE"
        )
    if job.input.shard is not None:
        raise JobError(
            f"{UPLOAD}: each shard would send to the same address; leave it out, then `batchkit merge` the"
            " shards and `batchkit export --upload ADDRESS` the result"
        )
    return AtEnd(exports, address_for(job.output.upload, [wanted.format for wanted in exports]))


def _with_exports(outcome: Outcome, end: AtEnd, say: Say) -> Outcome:
    """Write and send the exports of ``end`` if all rows have finished. A failed upload does not change the run's exit
    code."""
    if not end.exports:
        return outcome
    folder = Path(outcome.summary.folder)
    if outcome.error is not None or outcome.summary.exit not in (0, 3):
        names = ", ".join(str(wanted.path or wanted.format) for wanted in end.exports)
        say(
            f"{names}: not written, because the run has not ended; `batchkit export {folder}` writes the rows so far"
        )
        return outcome
    files: list[Path] = []
    try:
        for wanted in end.exports:
            for file in export(folder, wanted.format, wanted.path, say, force=True):
                say(file.to_text())
                files.append(file.path)
    except BatchkitError as error:
        return Outcome(replace(outcome.summary, exit=error.exit_code), error)
    if end.address is not None:
        _send(files, end, end.address, folder, say)
    return outcome


def _send(files: Sequence[Path], end: AtEnd, address: str, folder: Path, say: Say) -> None:
    try:
        for sent in send(files, address, say):
            say(sent.to_text())
    except BatchkitError as error:
        flags = " ".join(wanted.flag for wanted in end.exports)
        say(f"error: {error}")
        say(
            f"the run is complete, but sending its files failed. To send them again: batchkit export"
            f" {shlex.quote(str(folder))} {flags} (with --upload ADDRESS, to another address than in the job file)"
        )
