"""One start of a run: opens its folder and its input, and runs the main loop."""

from __future__ import annotations

from contextlib import ExitStack, closing
from dataclasses import replace

from batchkit.config.tables import JobConfig
from batchkit.config.tables.input import variants
from batchkit.engines import mps
from batchkit.engines.process.launcher import LOG
from batchkit.engines.registry import open_preflight
from batchkit.errors import BatchkitError, Interrupted, JobError
from batchkit.execution import parity
from batchkit.execution.engine_pool import EnginePool, Pool
from batchkit.execution.engine_turns import grouping_of
from batchkit.execution.loop import Loop
from batchkit.execution.parity import is_greedy
from batchkit.execution.parts_thread import PartsThread
from batchkit.execution.places import places_of
from batchkit.execution.prometheus import exporting
from batchkit.execution.recheck import check_result, recheck
from batchkit.execution.resume import OpenRun, open_run
from batchkit.execution.reuse import check_reuse
from batchkit.execution.screen import Screen
from batchkit.execution.self_check import MOST_ROWS, is_checked
from batchkit.execution.start import Start, StartOptions
from batchkit.execution.stop import Stop, StopRequest
from batchkit.execution.summary import Outcome, RunSummary
from batchkit.execution.tasks import Tasks, shared_ids
from batchkit.runs.listing import near_run
from batchkit.sources.input import Input, from_job
from batchkit.sources.sample import check_countable, sampled
from batchkit.storage.job_toml import check_secrets
from batchkit.storage.runfolder import is_run
from batchkit.storage.score_store import check_one_row_each


def start_run(
    job: JobConfig,
    source: Input | None = None,
    options: StartOptions | None = None,
    *,
    kept: Pool | None = None,
    stop: StopRequest | None = None,
) -> Outcome:
    """Run the rows of ``source`` (default: the job's own input) that have no record yet.

    - ``kept``: loaded engines; an engine that matches the job is reused.
    - ``stop``: a stop request whose signals the caller handles.

    Raises:
        BatchkitError: the run could not begin. An error that stops it later is in the outcome.
    """
    check_secrets(job)
    mps.remove_orphans()
    source = from_job(job) if source is None else source
    if job.run.sample is not None:
        check_countable(source)
    start = Start.of(job, options)
    _check_before(start, source)
    outcome: Outcome | None = None
    try:
        with ExitStack() as held:
            if stop is None:
                stop = held.enter_context(StopRequest().installed())
            outcome = _outcome_of(start, source, stop, kept, held)
            outcome.checked()  # raise inside the block: the code that closes the run needs the error
    except BatchkitError as error:
        if outcome is None or error is not outcome.error:
            raise
    return outcome


def tried(
    job: JobConfig,
    source: Input | None,
    options: StartOptions,
    *,
    kept: Pool | None = None,
    stop: StopRequest | None = None,
) -> RunSummary:
    """Run ``job`` like ``start_run``, but raise an exception if the run did not end normally.

    Raises:
        BatchkitError: The run stopped, or could not begin.
        Interrupted: A signal ended the run.
    """
    summary = start_run(job, source, options, kept=kept, stop=stop).checked()
    if summary.exit >= 128:
        raise Interrupted(summary.exit - 128)
    return summary


def _check_before(start: Start, source: Input) -> None:
    """Raise JobError for mistakes that can be found before the run folder is touched."""
    job, other = start.job, start.options.skip_from
    if other is not None and not is_run(other):
        raise JobError(f"--skip-from {other}: not a run folder{near_run(other)}")
    check_reuse(job)
    if start.references and source.files is not None:
        check_one_row_each(start.references, shared_ids(job, source))
    groups, why, environments = grouping_of(job)
    if job.workers.count is None:
        for group in groups:
            places_of(job, group, environments)  # raises if workers.per_gpu can't be used
    if source.files is None and len(groups) > 1:
        raise JobError(
            f"rows from an iterator can be read only once, but {why}; pass a list of rows"
        )
    if start.options.fresh or start.options.on_change == "new":
        # Report a mistyped option before the folder is moved aside.
        for name in job.engine_names:
            open_preflight(job.with_engine(name))


def _outcome_of(
    start: Start, source: Input, signals: StopRequest, kept: Pool | None, held: ExitStack
) -> Outcome:
    job = start.job
    export = held.enter_context(exporting(job))
    run = held.enter_context(open_run(start, source))
    rows = source
    if job.run.sample is not None:
        totals = run.ledger.totals
        rows = sampled(source, job.input, job.run.sample, seed=job.run.seed, settled=totals)
    screen = Screen(start, run, signals.began, export)
    held.enter_context(closing(screen))
    for text in filter(None, [source.left_out, *run.messages, _sample_of(rows, job)]):
        screen.say(text)
    parts = PartsThread(start, run, screen)
    held.callback(parts.close)
    tasks = Tasks(start, run, rows, screen.say)
    if run.unchecked and tasks.some_are_left():
        if kept is None:  # load the engine once, for the check and for the run
            kept = held.enter_context(closing(EnginePool(run.folder / LOG)))
        _check_answers(start, source, run, screen, signals, kept)
    previous = run.starts.history.starts[-2:-1]
    if any(note.check_is_due for note in previous) and not tasks.some_are_left():
        _check_again(start, source, run, screen, signals, kept)
    stop = Stop(start, run, signals, screen.say)
    outcome = parts.finished(Loop(start, run, tasks, stop, screen, parts, kept).run())
    if rows is source:
        return outcome
    # Tables of the answers list all rows, not only the sample.
    return outcome._replace(summary=replace(outcome.summary, source=source))


def _check_answers(
    start: Start, source: Input, run: OpenRun, screen: Screen, signals: StopRequest, kept: Pool
) -> None:
    """Check that answers are the same with the options in ``run.unchecked``, and note that the run continues with
    them.

    Raises:
        ChangedError: an answer differs.
        Interrupted: a signal ended the check.
    """

    def answer(job: JobConfig, rows: Input) -> None:
        options = StartOptions(command="parity", quiet=True, fresh=True)
        tried(job, rows, options, kept=kept, stop=signals)

    keys = sorted(run.unchecked)
    screen.say(f"{', '.join(keys)} changed, so some rows are answered again and compared")
    with screen.waiting("loading the model and answering rows again"):
        n_rows = parity.check(start, source, keys, answer)
    run.accept(start.job)
    screen.say(f"{n_rows} rows have the same answers as before; the run continues")


def _check_again(
    start: Start,
    source: Input,
    run: OpenRun,
    screen: Screen,
    signals: StopRequest,
    kept: Pool | None,
) -> None:
    """Repeat the self-check at the end of the run, because the start that began it was killed.

    Raises:
        WrongAnswersError: the answers of too many rows differ.
        Interrupted: a signal ended the check.
    """
    job = start.job
    can_be_repeated = not job.has_several and (not job.generates or is_greedy(job))
    if not is_checked(job) or source.files is None or not can_be_repeated:
        return

    def answer(of_check: JobConfig, rows: Input) -> None:
        options = StartOptions(command="self-check", quiet=True, fresh=True)
        tried(of_check, rows, options, kept=kept, stop=signals)

    run.starts.note(check_is_due=True)
    run.starts.save()
    with screen.waiting("an earlier start was killed during its self-check; computing rows again"):
        checked = recheck(job, source, job.self_check.rows or MOST_ROWS, answer)
    run.starts.note(self_check=checked)
    screen.say(checked.in_words())
    check_result(job, checked)
    run.starts.note(check_is_due=False)


def _sample_of(source: Input, job: JobConfig) -> str:
    if source.sample_of is None or job.run.sample is None:
        return ""
    n_rows, n_values = source.sample_of, len(variants(job.input.cross))
    size = min(job.run.sample * n_values, n_rows)
    return (
        f"run.sample: {size:,} of {n_rows:,} rows, drawn at random with run.seed = {job.run.seed}; start"
        " without run.sample to run the rest"
    )
