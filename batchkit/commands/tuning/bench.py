"""``batchkit bench``: measures the requested batch sizes side by side, in several rounds."""

from __future__ import annotations

from collections.abc import Sequence

from batchkit.commands import Say
from batchkit.commands.trial import trials_of
from batchkit.commands.tuning.options import most_of
from batchkit.commands.tuning.table import Sizes, SizeTable
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
    affects all of them. A size that failed is not tried again.

    Raises:
        JobError: the job itself is invalid, or its input has no rows.
    """
    sizes, failed = Sizes(job, say), set[int]()
    if rounds < FEW_ROUNDS:
        say(f"with --rounds {rounds} a difference may be chance; give --rounds {FEW_ROUNDS}")
    with trials_of(job, rows) as trials:
        most, why = most_of(job, trials.rows)
        for size in batch_sizes:
            if size > most:
                say(f"batch size {size:,} is never full: {why}")
        for _ in range(rounds):
            for size in batch_sizes:
                if size not in failed and sizes.run(trials, size, seconds).figures is None:
                    failed.add(size)
    return sizes.table(trials.signum)
