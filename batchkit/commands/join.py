"""``run --join``: several machines answer the rows of one job, without a coordinator. They share only ``output.store``."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from secrets import token_hex

from batchkit.commands import Say
from batchkit.commands.merge import merge
from batchkit.commands.run import run_job
from batchkit.config.tables import JobConfig
from batchkit.engines.process.launcher import LOG
from batchkit.errors import HeldRunError, JobError
from batchkit.execution.engine_pool import EnginePool
from batchkit.execution.run import start_run
from batchkit.execution.start import StartOptions
from batchkit.execution.stop import StopRequest
from batchkit.execution.summary import Outcome
from batchkit.sources import never
from batchkit.sources.input import Input, from_job
from batchkit.sources.reader import Skip
from batchkit.storage.store.lease import leased, timeout_of
from batchkit.storage.store.mirror import upload_all
from batchkit.storage.store.objects import Objects
from batchkit.storage.store.ranges import RANGE, Ranges
from batchkit.storage.store.restore import fetch
from batchkit.storage.store.seals import Chain
from batchkit.types import Row

JOINED = ".joined"


def join(job: JobConfig, say: Say) -> Outcome | None:
    """Answer rows of ``job`` together with other processes that run the same command. When all rows are done, one of them
    merges the answers into the run folder of the job. Return the outcome of that run, or of this process's run if it was
    stopped; None if another process merges.

    Raises:
        BatchkitError: as ``run_job``; a JobError if the job has no ``output.store``.
    """
    if job.store is None:
        raise JobError("--join needs output.store, a folder that all machines can reach: set it")
    if job.run.sample is not None:
        raise JobError(
            "run.sample can't be used with --join: use input.limit, or leave one of them out"
        )
    if Chain(Objects(job.store)).catch_up().files:
        say(f"all rows are done, and merged in {job.store}")
        return run_job(job, say=say)
    mine = _part_of(job)
    ranges = Ranges(_objects(job), mine.name, timeout_of(job.run.store_interval_s))
    say(f"joining the run in {job.store}{JOINED} as {mine.name}")
    with StopRequest().installed() as stop:
        mine.folder.parent.mkdir(parents=True, exist_ok=True)
        with closing(EnginePool(mine.folder.parent / LOG)) as kept:
            while True:
                source = _of_ranges(from_job(mine), ranges)
                options = StartOptions(command="run")
                outcome = start_run(mine, source, options, kept=kept, stop=stop)
                if outcome.error is not None or outcome.summary.exit not in (0, 3):
                    return outcome
                ranges.finish()
                if not ranges.take_more():
                    break
        try:
            with leased(job.store, job.run.store_interval_s, say) as lease:
                if not lease.chain.files:
                    _merge(job, mine.name, ranges.workers(), say)
                    upload_all(lease, job.folder)
        except HeldRunError as error:
            say(f"all rows are done; {error}")
            return None
    return run_job(job, say=say)


def _part_of(job: JobConfig) -> JobConfig:
    """Return the job of this process's own run. Rows are not read further ahead than a range, because reading takes
    them."""
    host = re.sub(r"[^A-Za-z0-9-]", "-", socket.gethostname())[:32]
    order = "input" if job.run.order == "input" else "window"
    return job.with_keys(
        name=f"{host}-{os.getpid()}-{token_hex(4)}",
        output={"dir": f"{job.folder}{JOINED}", "store": f"{job.store}{JOINED}", "export": []},
        run={"order": order, "look_ahead": min(RANGE, job.run.look_ahead), "on_end": None},
    )


def _objects(job: JobConfig) -> Objects:
    return Objects(f"{job.store}{JOINED}")


def _of_ranges(source: Input, ranges: Ranges) -> Input:
    """Return ``source`` limited to the rows whose ranges this process has or can take. A look at the first rows
    (``never`` skip one) takes none."""

    def read(skip: Skip) -> Iterator[Row]:
        if skip is never:
            yield from source.read(never)
            return
        yield from source.read(lambda index: not ranges.has(index) or skip(index))
        ranges.end_pass()

    return source._replace(read=read, size=lambda: None)


def _merge(job: JobConfig, mine: str, workers: list[str], say: Say) -> None:
    """Merge the runs of all ``workers`` into the run folder of ``job``. The run of this process comes first, because
    its paths exist on this machine."""
    parts = list[Path]()
    for name in sorted(workers, key=lambda name: name != mine):
        chain = Chain(_objects(job).at(name)).catch_up()
        folder = Path(f"{job.folder}{JOINED}") / name
        if chain.files:
            fetch(chain, folder)
            parts.append(folder)
    say(f"all rows are done; merging the runs of {len(parts)} processes")
    say(merge(parts, job.folder).to_text())
