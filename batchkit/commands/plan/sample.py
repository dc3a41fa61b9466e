"""Answers a sample of a job's rows, in the job's own run: the rows are done when the run begins.

They run in waves of different sizes with one engine: a few rows to warm it up, some at a small window,
the others at as large a one as they fill. With ``run.workers`` there is one wave, on one worker.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from statistics import median
from typing import NamedTuple

from batchkit.commands import Say
from batchkit.commands.plan.throughput import Wave
from batchkit.commands.trial import scratch_folder, tried
from batchkit.commands.trial.measurement import Answer, answer_of, answers_in
from batchkit.config.tables import JobConfig
from batchkit.engines.process.launcher import LOG
from batchkit.engines.registry import max_num_seqs_of
from batchkit.errors import BudgetError
from batchkit.execution.lane import KeptEngine
from batchkit.execution.start import Options
from batchkit.execution.summary import RunSummary
from batchkit.sources.input import Input
from batchkit.storage.log import RESULTS, STEPS, read_generations
from batchkit.storage.metrics import read_metrics

_WARM_UP = 16  # a row of so many warms the engine up
_SMALL = 4  # a row of so many runs at the small window, at most so many at a time
_DEFAULT_SEQS = 256
_LEAST_USAGE = 0.02  # of the KV cache, to show how many requests fill it


class Sample(NamedTuple):
    """The sampled rows, as they were answered in ``waves``, of which the first warmed the engine up.
    ``running``: how many requests one engine of the job runs at once."""

    waves: Sequence[Wave] = ()
    load_s: float = 0.0
    running: int = 1

    @property
    def measured(self) -> Sequence[Wave]:
        """Without the warm-up, if there is more."""
        return self.waves[1:] or self.waves

    @property
    def rows(self) -> list[Answer]:
        return [row for wave in self.waves for row in wave.rows]

    @property
    def failed(self) -> int:
        """How many of its rows failed."""
        return sum(bool(row.kind) for row in self.rows)


def answer_sample(job: JobConfig, source: Input, rows: Sequence[int], say: Say) -> Sample:
    """Answer ``rows`` of ``source``, which are in random order.

    Raises:
        BatchkitError: as ``start_run``, or a budget is used up. What is answered is kept.
    """
    with scratch_folder("plan") as folder, closing(KeptEngine(folder / LOG)) as kept:
        if job.run.workers is not None:
            running = _running(job, kept)
            wave, ended = _answered(job, source, rows, running, None)
            return Sample([wave], ended.load_seconds, running)
        waves, load_s, running = list[Wave](), 0.0, 1
        for n_th in range(3):
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
    """The first row and the one behind the last of each wave, and how many run at a time: the rows that
    warm the engine up, those at a small window, and the others."""
    warm = max(1, rows // _WARM_UP)
    small = warm + (rows - warm) // _SMALL
    return [
        (0, warm, warm),
        (warm, small, max(1, min((small - warm) // _SMALL, running // 2))),
        (small, rows, max(1, min(rows - small, running))),
    ]


def rows_in_kv_cache(folder: Path, starts_before: int) -> int | None:
    """How many such requests fill the KV cache, by the starts after the first ``starts_before``; None if
    unknown."""
    full = [
        line.running / line.kv_cache_usage
        for line in read_metrics(folder)
        if line.start > starts_before and line.running and line.kv_cache_usage > _LEAST_USAGE
    ]
    return max(1, int(median(full))) if full else None


def _running(job: JobConfig, kept: KeptEngine) -> int:
    """How many requests one engine of the job runs at once."""
    given = job.engine.options.get("max_num_seqs")
    if kept.idle:  # with several, the one that runs the fewest
        seqs = min(loaded.engine.max_num_seqs for loaded in kept.idle.values())
    else:
        usual = max_num_seqs_of(job.engine.kind) or _DEFAULT_SEQS
        seqs = given if isinstance(given, int) else usual
    window = job.run.max_in_flight
    return seqs if window == "auto" else min(seqs, window)


def _answered(
    job: JobConfig, source: Input, rows: Sequence[int], window: int, kept: KeptEngine | None
) -> tuple[Wave, RunSummary]:
    workers = None if kept is not None else 1
    update = {"sample": None, "max_in_flight": window, "workers": workers}
    of_wave = job.model_copy(update={"run": job.run.model_copy(update=update)})
    log, steps = job.folder / RESULTS, job.folder / STEPS
    before, steps_before = (its.stat().st_size if its.exists() else 0 for its in (log, steps))
    options = Options(begun_with=job, command="plan", attempts=dict.fromkeys(rows, 0))
    summary = tried(of_wave, source, options, kept=kept)
    if summary.stopped_by is not None:
        key = summary.stopped_by.partition(" ")[0]
        raise BudgetError(
            f"{summary.stopped_by} stopped the sample before its {len(rows):,} rows were answered. The"
            f" answers that came are kept; raise it (--set {key}=…), or sample fewer rows (--rows)"
        )
    answers = [answer for answer, _ in answers_in(log, before)]
    parts = None
    if job.task == "transcribe":
        lines = read_generations(job.folder, steps_before)
        parts = [answer_of(line.record) for line in lines if line.record is not None]
    n_choices = int(job.params().get("n") or 1)
    return Wave(window, answers, summary.seconds, n_choices, parts), summary
