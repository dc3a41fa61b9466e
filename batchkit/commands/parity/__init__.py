"""The ``parity`` command: answers the same rows greedily on two engines and compares the answers.

Use it before a long run, for a model that was quantized or is new to an engine.
"""

from __future__ import annotations

from collections.abc import Sequence

from batchkit.commands import Say
from batchkit.commands.parity.differences import SideAnswer, difference
from batchkit.commands.parity.findings import Answers, ParityResult, RowFailure
from batchkit.commands.parity.sides import EngineSide, sides_of
from batchkit.commands.trial import scratch_folder, tried
from batchkit.config.tables import JobConfig
from batchkit.engines.process.launcher import LOG
from batchkit.engines.registry import open_preflight
from batchkit.errors import EngineError, InputError, JobError
from batchkit.execution.start import StartOptions
from batchkit.execution.stop import StopRequest
from batchkit.storage.manifest import read_manifest


def parity(
    job: JobConfig,
    engines: str,
    *,
    rows: int,
    tie: float,
    settings: tuple[Sequence[str], Sequence[str]] = ((), ()),
    say: Say = lambda text: None,
) -> ParityResult:
    """Run the first ``rows`` rows on both ``engines`` (``vllm,transformers``), one after the other, and compare the
    answers.

    ``settings``: overrides of ``engine.…`` for each of the two sides. A difference with a gap below ``tie`` is a
    tie. Nothing is written to the run folder.

    Raises:
        JobError: The engines, their settings or the job are invalid. The message names the side.
        InputError: The rows can't be read, there are none, or the two sides read different rows.
        EngineError: An engine could not start, or died. The message names its side and its log.
    """
    if job.task != "generate":
        raise JobError(
            f'task = "{job.task}": parity compares generated texts, and this task has none'
        )
    if job.has_several:
        table = "[rollout]" if job.steps == [] else "[[steps]]"
        raise JobError(
            f"{table}: parity compares two answers to one prompt; with several prompts per row, all prompts after the"
            " first difference would differ, too. Use a job with one prompt, in [prompt]"
        )
    limit = rows if job.input.limit is None else min(rows, job.input.limit)
    job = job.model_copy(update={"input": job.input.model_copy(update={"limit": limit})})
    stop = StopRequest(drain_s=0)
    with stop.installed(), scratch_folder("parity") as folder:
        first, second = sides_of(job, engines, settings, folder)
        _check(second)  # before the first side spends time on loading and answering
        one = _ask(first, stop, say)
        two = _ask(second, stop, say)
    if one.inputs != two.inputs:
        raise InputError(
            f"{job.input.path}: changed after {first} had read it, so {second} answered other rows; run the same"
            " command again without changing the input"
        )
    return _findings(one, two, tie)


def _check(side: EngineSide) -> None:
    try:
        open_preflight(side.job)
    except JobError as error:
        raise JobError(f"{side}: {error}") from error


def _ask(side: EngineSide, stop: StopRequest, say: Say) -> Answers:
    say(f"{side}: starting the engine")
    options = StartOptions(adjust_sampling=side.greedy, quiet=True, command="parity")
    try:
        summary = tried(side.job, None, options, stop=stop)
    except InputError:  # concerns both sides
        raise
    except JobError as error:
        raise JobError(f"{side}: {error}") from error
    except EngineError as error:
        message, log = str(error), side.job.folder / LOG
        if log.exists() and str(log) not in message:
            message += f"; its log is {log}"
        raise EngineError(f"{side}: {message}") from error
    records = {record["index"]: record for record in summary.records()}
    say(f"{side}: {len(records):,} rows in {summary.seconds:.1f} s")
    versions = read_manifest(side.job.folder).last_start.engine
    return Answers(side, records, versions, summary.seconds)


def _findings(one: Answers, two: Answers, tie: float) -> ParityResult:
    differences, failures = [], []
    equal = failed_on_both = 0
    for index, a in sorted(one.records.items()):
        has_failed = one.has_failed(index), two.has_failed(index)
        if all(has_failed):
            failed_on_both += 1
        elif any(has_failed):
            side, record = ("a", a) if has_failed[0] else ("b", two.records[index])
            error = record["error"]
            failures.append(RowFailure(index, a["id"], side, error["kind"], error["message"]))
        else:
            answers = SideAnswer.of(a), SideAnswer.of(two.records[index])
            found = difference(index, a["id"], *answers)
            differences += [] if found is None else [found]
            equal += found is None
    return ParityResult(
        sides=(one, two),
        rows=len(one.records),
        equal=equal,
        differences=sorted(differences, key=lambda found: found.rank),
        failures=failures,
        failed_on_both=failed_on_both,
        tie=tie,
    )
