"""``batchkit parity``: two ordinary runs over the same rows, greedy, and a comparison of their records.

For a model that was quantised or is new to an engine, before it is used for a long run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from batchkit.commands.parity.answers import Answers, answers_of
from batchkit.commands.parity.differences import difference
from batchkit.commands.parity.findings import ParityResult, RowFailure
from batchkit.commands.parity.sides import Side, sides_of
from batchkit.commands.trial import scratch_folder
from batchkit.config.tables import JobConfig
from batchkit.engines.registry import open_preflight
from batchkit.errors import InputError, JobError
from batchkit.execution.signals import StopRequest


def parity(
    job: JobConfig,
    engines: str,
    *,
    rows: int,
    tie: float,
    settings: tuple[Sequence[str], Sequence[str]] = ((), ()),
    say: Callable[[str], None] = lambda text: None,
) -> ParityResult:
    """Run the first ``rows`` rows on both ``engines`` (``vllm,transformers``), one after the other.

    ``settings``: ``engine.…=VALUE`` for one side only, per side. A difference with a gap below
    ``tie`` is a tie. Nothing is written to the run folder.

    Raises:
        JobError: the engines, their settings or the job are invalid; it names the side.
        InputError: the rows can't be read, there are none, or the sides got different ones.
        EngineError: a side could not start, or died; it names the side and the engine's log.
    """
    if job.task != "generate":
        raise JobError(f'task = "{job.task}": parity compares generated texts; there are none')
    if job.has_several:
        table = "[rollout]" if job.steps == [] else "[[steps]]"
        raise JobError(
            f"{table}: parity compares two answers to one prompt; with several, all that follows the first"
            " difference differs, too. Give it a job with the [prompt] of one of them"
        )
    limit = rows if job.input.limit is None else min(rows, job.input.limit)
    job = job.model_copy(update={"input": job.input.model_copy(update={"limit": limit})})
    stop = StopRequest(drain_s=0)
    with stop.installed(), scratch_folder("batchkit-parity-") as folder:
        first, second = sides_of(job, engines, settings, folder)
        _check(second)  # before the first one loads and answers in vain
        one = _ask(first, stop, say)
        if not one.rows:
            raise InputError(f"{job.input.path}: no rows to compare two engines on")
        two = _ask(second, stop, say)
    if _inputs(one) != _inputs(two):
        raise InputError(
            f"{job.input.path}: changed after {first} had read it, so {second} answered other rows;"
            " let it stay as it is, then run the same command again"
        )
    return _findings(one, two, tie)


def _check(side: Side) -> None:
    try:
        open_preflight(side.job)
    except JobError as error:
        raise JobError(f"{side}: {error}") from error


def _ask(side: Side, stop: StopRequest, say: Callable[[str], None]) -> Answers:
    say(f"{side}: starting the engine")
    answers = answers_of(side, stop)
    say(f"{side}: {len(answers.rows):,} rows in {answers.seconds:.1f} s")
    return answers


def _inputs(answers: Answers) -> dict[int, tuple[str, str]]:
    """The id and the hash of each row, by its index."""
    return {index: (answer.id, answer.input_hash) for index, answer in answers.rows.items()}


def _findings(one: Answers, two: Answers, tie: float) -> ParityResult:
    differences, failures = [], []
    equal = failed_on_both = 0
    for index in sorted(one.rows):
        a, b = one.rows[index], two.rows[index]
        if a.error is not None and b.error is not None:
            failed_on_both += 1
        elif error := a.error or b.error:
            side = "b" if a.error is None else "a"
            failures.append(RowFailure(index, a.id, side, error.kind, error.message))
        elif (found := difference(index, a, b)) is not None:
            differences.append(found)
        else:
            equal += 1
    return ParityResult(
        sides=(one, two),
        rows=len(one.rows),
        equal=equal,
        differences=sorted(differences, key=lambda found: found.rank),
        failures=failures,
        failed_on_both=failed_on_both,
        tie=tie,
    )
