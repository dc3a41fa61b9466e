"""``batchkit bench``: measures the requested batch sizes side by side, in several rounds."""

from __future__ import annotations

from collections.abc import Sequence

from batchkit.commands.trial import Say
from batchkit.commands.tuning.rounds import Budget
from batchkit.commands.tuning.table import SizeResult, SizeTable
from batchkit.commands.tuning.trial import Trials, trials_of, with_one_prompt
from batchkit.config.numbers import number
from batchkit.config.tables import JobConfig
from batchkit.errors import JobError

FEW_ROUNDS = 3  # with fewer, the spread means little


def sizes_in(text: str) -> list[int]:
    """``1,4,8`` as numbers, without duplicates.

    Raises:
        JobError: it is not a list of whole numbers from 1 on.
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) for part in parts):
        raise JobError(f"--batch-sizes {text}: write whole numbers from 1 on, as in 1,4,8")
    return list(dict.fromkeys(map(int, parts)))


def bench(
    job: JobConfig,
    batch_sizes: Sequence[int],
    *,
    rounds: int,
    rows: int | None,
    seconds: float,
    say: Say = lambda text: None,
) -> SizeTable:
    """Measure each of ``batch_sizes`` for ``rounds`` rounds of at most ``seconds`` s.

    Each round has its own engine, and the sizes take turns, so that a disturbance of the machine
    affects all of them. If loading takes longer than a round, all rounds of a size run one after
    another in one engine, over further rows.

    Raises:
        JobError: the job itself is invalid, or its input has no rows.
    """
    job = with_one_prompt(job, say)
    with trials_of(job, rows=rows, say=say) as trials:
        _warn(trials, batch_sizes, say)
        for doubt in few_rounds(rounds):
            say(doubt)
        _measure(trials, batch_sizes, rounds, seconds, say)
    return trials.table


def few_rounds(rounds: int) -> list[str]:
    """A warning if the spread over so many rounds means little."""
    if rounds >= FEW_ROUNDS:
        return []
    times = "one round" if rounds == 1 else f"{rounds} rounds"
    return [
        f"only {times} for each batch size: a difference may be chance; give --rounds {FEW_ROUNDS}"
    ]


def _measure(
    trials: Trials, batch_sizes: Sequence[int], rounds: int, seconds: float, say: Say
) -> None:
    left = dict.fromkeys(batch_sizes, rounds)
    at_a_time = 1
    while pending := [size for size in left if left[size] > 0]:
        for size in pending:
            wanted = min(at_a_time, left[size])
            trial = trials.run(size, Budget(seconds, wanted))
            say(_summary(trial))
            left[size] = left[size] - len(trial.rounds) if trial.rounds else 0
            at_a_time = rounds if trial.load_s > seconds else 1


def _warn(trials: Trials, batch_sizes: Sequence[int], say: Say) -> None:
    option = trials.option
    say(f"{option.key}: {option.reason}")
    for size in batch_sizes:
        if size > trials.rows:
            say(f"batch size {size:,} is more than the {trials.rows:,} rows: it is never full")
        elif option.most is not None and size > option.most:
            say(f"batch size {size:,} is never reached: {option.reason}")


def _summary(line: SizeResult) -> str:
    if not line.rounds:
        return f"batch size {line.batch_size:,}: {line.status_text}"
    latency = f"p50 {line.median('p50_ms'):,.0f} ms, p99 {line.median('p99_ms'):,.0f} ms"
    return f"batch size {line.batch_size:,}: {number(line.rows_per_s)} rows/s, {latency}"
