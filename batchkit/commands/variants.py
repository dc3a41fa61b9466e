"""Runs the variants of a job one after the other, and compares them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

from batchkit.commands import Say
from batchkit.commands.run import run_job
from batchkit.config.tables import JobConfig
from batchkit.engines.process.launcher import LOG
from batchkit.execution.engine_pool import EnginePool
from batchkit.execution.start import OnChange
from batchkit.execution.summary import Outcome
from batchkit.runs.compare import compare


def run_variants(
    jobs: Sequence[JobConfig],
    *,
    fresh: bool = False,
    on_change: OnChange = "fail",
    skip_from: Path | None = None,
    say: Say = print,
    ended: Callable[[Outcome], None] = lambda outcome: None,
) -> int:
    """Run or resume each of ``jobs``, compare all of them with the first one, and return the exit code.

    The engine stays loaded between variants with the same ``[engine]``; these run one after the other. ``ended`` is
    called with the outcome of each variant. An interrupted variant ends the command with the variant's exit code; the
    same command then continues with that variant. The exit code is 3 if a variant has failed rows.

    Raises:
        BatchkitError: A variant could not begin, or ``ended`` raises the error that stopped it.
    """
    ordered = _by_engine(jobs)
    folder = Path(ordered[0].output.dir)
    folder.mkdir(parents=True, exist_ok=True)
    exits = list[int]()
    with closing(EnginePool(folder / LOG)) as kept:
        for number, job in enumerate(ordered, start=1):
            say(f"variant {number} of {len(ordered)}: {job.name}, in {job.folder}")
            outcome = run_job(
                job, fresh=fresh, on_change=on_change, skip_from=skip_from, kept=kept, say=say
            )
            ended(outcome)
            exits.append(outcome.summary.exit)
            if exits[-1] not in (0, 3):
                return exits[-1]
    say(compare([job.folder for job in jobs]).to_text())
    return max(exits)


def _by_engine(jobs: Sequence[JobConfig]) -> list[JobConfig]:
    """Return the jobs ordered so that those with the same engines follow each other."""
    engines = [(job.engine, job.engines) for job in jobs]
    return sorted(jobs, key=lambda job: engines.index((job.engine, job.engines)))
