"""The sample of ``plan``: rows that are answered in the job's run, so that they need not be answered again.

They run on one engine in waves of different concurrency: a few rows to warm the engine up, some rows in a small window,
and the others in the largest window that they fill. ``throughput.py`` learns from the waves how concurrency changes
speed. With ``workers.count`` there is one wave on one worker.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from statistics import median
from typing import NamedTuple

from batchkit.commands import Say
from batchkit.commands.plan.throughput import Wave
from batchkit.commands.trial.measurement import TimedAnswer, answer_of, answers_in
from batchkit.config.tables import JobConfig
from batchkit.engines.process.launcher import LOG
from batchkit.engines.registry import max_num_seqs_of
from batchkit.errors import BudgetError
from batchkit.execution.engine_pool import EnginePool
from batchkit.execution.run import tried
from batchkit.execution.start import StartOptions
from batchkit.execution.summary import RunSummary
from batchkit.sources.input import Input
from batchkit.storage.log import RESULTS, STEPS, read_generations
from batchkit.storage.metrics import read_metrics

_WARM_UP = 16  # one in 16 rows warms up the engine
_SMALL = 4  # one in 4 rows runs at the small window, which holds at most a quarter of them
_DEFAULT_SEQS = 256
_LEAST_USAGE = 0.02  # minimum KV cache usage to estimate how many requests fill it


class Sample(NamedTuple):
    """The answered rows of the sample, in ``waves``. The first wave warmed up the engine.

    ``load_s``: seconds to load the engine. ``running``: number of concurrent requests of one engine of the job.
    """

    waves: Sequence[Wave] = ()
    load_s: float = 0.0
    running: int = 1

    @property
    def measured(self) -> Sequence[Wave]:
        """The waves without the first one, which warmed up the engine, unless there is only one."""
        return self.waves[1:] or self.waves

    @property
    def rows(self) -> list[TimedAnswer]:
        return [row for wave in self.waves for row in wave.rows]

    @property
    def failed(self) -> int:
        """The number of sampled rows that failed."""
        return sum(bool(row.kind) for row in self.rows)


def answer_sample(job: JobConfig, source: Input, rows: Sequence[int], say: Say) -> Sample:
    """Answer ``rows``, row indexes of ``source`` in random order, and return the answers with their times.

    Raises:
        BatchkitError: The run can't start or stopped (see ``start_run``), or a budget is used up. Finished answers are
            kept.
    """
    with closing(EnginePool(job.folder / LOG)) as kept:
        if job.workers.count is not None:
            running = _running(job, kept)
            wave, ended = _answered(job, source, rows, running, None)
            return Sample([wave], ended.load_seconds, running)
        waves, load_s, running = list[Wave](), 0.0, 1
        for n_th in range(3):
            # Computed again for each wave: the engine's concurrency is known after the first one.
            start, end, window = waves_of(len(rows), running)[n_th]
            if start == end:
                continue
            rows_of = "a row" if end - start == 1 else f"{end - start:,} rows"
            say(f"answering {rows_of} of the sample, {window:,} at a time")
            wave, ended = _answered(job, source, rows[start:end], window, kept)
            waves += [wave] if wave.rows else []
            load_s, running = load_s or ended.load_seconds, _running(job, kept)
    return Sample(waves, load_s, running)


def waves_of(rows: int, running: int) -> list[tuple[int, int, int]]:
    """Return (first row, end row, concurrency) of each wave: warm-up, small window, large window."""
    warm = max(1, rows // _WARM_UP)
    small = warm + (rows - warm) // _SMALL
    return [
        (0, warm, warm),
        (warm, small, max(1, min((small - warm) // _SMALL, running // 2))),
        (small, rows, max(1, min(rows - small, running))),
    ]


def rows_in_kv_cache(folder: Path, starts_before: int) -> int | None:
    """Return how many of the run's requests fill the KV cache; None if unknown.

    ``starts_before``: number of starts of the run to ignore, oldest first.
    """
    full = [
        line.running / line.kv_cache_usage
        for line in read_metrics(folder)
        if line.start > starts_before and line.running and line.kv_cache_usage > _LEAST_USAGE
    ]
    return max(1, int(median(full))) if full else None


def _running(job: JobConfig, kept: EnginePool) -> int:
    """Return the number of concurrent requests of one engine of the job."""
    given = job.engine.options.get("max_num_seqs")
    if kept.idle:  # with several engines, use the smallest value
        seqs = min(loaded.engine.max_num_seqs for loaded in kept.idle.values())
    else:
        usual = max_num_seqs_of(job.engine.kind) or _DEFAULT_SEQS
        seqs = given if isinstance(given, int) else usual
    window = job.run.max_in_flight
    return seqs if window == "auto" else min(seqs, window)


def _answered(
    job: JobConfig, source: Input, rows: Sequence[int], window: int, kept: EnginePool | None
) -> tuple[Wave, RunSummary]:
    workers = None if kept is not None else 1
    of_wave = job.with_keys(
        run={"sample": None, "max_in_flight": window}, workers={"count": workers}
    )
    log, steps = job.folder / RESULTS, job.folder / STEPS
    before, steps_before = (its.stat().st_size if its.exists() else 0 for its in (log, steps))
    options = StartOptions(begun_with=job, command="plan", attempts=dict.fromkeys(rows, 0))
    summary = tried(of_wave, source, options, kept=kept)
    if summary.stopped_by is not None:
        key = summary.stopped_by.partition(" ")[0]
        raise BudgetError(
            f"{summary.stopped_by} stopped the sample before its {len(rows):,} rows were answered. The"
            f" finished answers are kept; raise the limit (--set {key}=…), or sample fewer rows (--rows)"
        )
    answers = [answer for answer, _ in answers_in(log, before)]
    parts = None
    if job.task == "transcribe":
        lines = read_generations(job.folder, steps_before)
        parts = [answer_of(line.record) for line in lines if line.record is not None]
    n_choices = int(job.params().get("n") or 1)
    return Wave(window, answers, summary.seconds, n_choices, parts), summary
