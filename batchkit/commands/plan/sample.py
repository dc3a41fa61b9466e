"""Answers a sample of a job's rows, in the job's own run: the rows are done when the run begins.

They run in waves of different sizes with one engine: a few rows to warm it up, some at a small window,
the others at as large a one as they fill. With ``run.workers`` there is one wave, on one worker.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from batchkit.commands.plan.lengths import Say
from batchkit.commands.plan.throughput import Observed, Wave
from batchkit.commands.trial import scratch_folder
from batchkit.config.tables import JobConfig
from batchkit.engines.process.launcher import LOG
from batchkit.engines.registry import max_num_seqs_of
from batchkit.errors import BudgetError, Interrupted
from batchkit.execution.kept_engine import KeptEngine
from batchkit.execution.run import start_run
from batchkit.execution.start import Options
from batchkit.runs.status import counts_of
from batchkit.sources.input import Input
from batchkit.sources.sample import only
from batchkit.storage.checkpoint import Totals
from batchkit.storage.index_set import IndexSet
from batchkit.storage.lines import tokens_in
from batchkit.storage.log import RESULTS, read_lines

_WAVES = 3
_WARM_UP = 16  # a row of so many warms the engine up
_SMALL = 4  # a row of so many runs at the small window, at most so many at a time
_DEFAULT_SEQS = 256


class Sample(NamedTuple):
    """The sampled rows, as they were answered in ``waves``, of which the first warmed the engine up.
    ``running``: how many requests one engine of the job runs at once."""

    waves: Sequence[Wave]
    load_s: float
    running: int

    @property
    def measured(self) -> Sequence[Wave]:
        """Without the warm-up, if there is more."""
        return self.waves[1:] or self.waves

    @property
    def rows(self) -> list[Observed]:
        return [row for wave in self.waves for row in wave.rows]

    @property
    def failed(self) -> int:
        """How many of its rows failed."""
        return sum(not row.is_ok for row in self.rows)

    @property
    def seconds(self) -> float:
        """With the engine up."""
        return sum(wave.took_s for wave in self.waves)


def answer_sample(job: JobConfig, source: Input, rows: Sequence[int], say: Say) -> Sample:
    """Answer ``rows`` of ``source``, which are in random order.

    Raises:
        BatchkitError: as ``start_run``, or a budget is used up. What is answered is kept.
    """
    with scratch_folder("batchkit-plan-") as folder, closing(KeptEngine(folder / LOG)) as kept:
        if job.run.workers is not None:
            running = _running(job, None)
            wave, load_s = _answered(job, source, rows, running, None)
            return Sample([wave], load_s, running)
        waves, load_s, running = list[Wave](), 0.0, 1
        for n_th in range(_WAVES):
            start, end, window = waves_of(len(rows), running)[n_th]
            if start == end:
                continue
            rows_of = "a row" if end - start == 1 else f"{end - start:,} rows"
            say(f"answering {rows_of} of the sample, {window:,} at a time")
            wave, seconds = _answered(job, source, rows[start:end], window, kept)
            waves += [wave] if wave.rows else []
            load_s, running = load_s or seconds, _running(job, kept)
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


def _running(job: JobConfig, kept: KeptEngine | None) -> int:
    """How many requests one engine of the job runs at once."""
    given = job.engine.options.get("max_num_seqs")
    if kept is not None and kept.idle:  # with several, the one that runs the fewest
        seqs = min(loaded.engine.max_num_seqs for loaded in kept.idle.values())
    else:
        usual = max_num_seqs_of(job.engine.kind) or _DEFAULT_SEQS
        seqs = given if isinstance(given, int) else usual
    window = job.run.max_in_flight
    return seqs if window == "auto" else min(seqs, window)


def _answered(
    job: JobConfig, source: Input, rows: Sequence[int], window: int, kept: KeptEngine | None
) -> tuple[Wave, float]:
    """The wave, and the seconds that its start took to load the model."""
    workers = None if kept is not None else 1
    update = {"sample": None, "max_in_flight": window, "workers": workers}
    of_wave = job.model_copy(update={"run": job.run.model_copy(update=update)})
    log = job.folder / RESULTS
    before = log.stat().st_size if log.exists() else 0
    settled = counts_of(job.folder).totals if before else Totals()
    wanted = only(source, IndexSet(rows), of=source.size() or 0, settled=settled)
    options = Options(begun_with=job, command="plan")
    summary = start_run(of_wave, wanted, options, kept=kept).checked()
    if summary.exit in (130, 143):
        raise Interrupted(summary.exit - 128)
    if summary.stopped_by is not None:
        key = summary.stopped_by.partition(" ")[0]
        raise BudgetError(
            f"{summary.stopped_by} stopped the sample before its {len(rows):,} rows were answered. The"
            f" answers that came are kept; raise it (--set {key}=…), or sample fewer rows (--rows)"
        )
    sequences = int(job.params().get("n") or 1)
    observed = [*_observed(log, before, sequences)]
    return Wave(window, observed, summary.seconds), summary.load_seconds


def _observed(log: Path, offset: int, sequences: int) -> Iterator[Observed]:
    """The rows whose record is past ``offset``. An attempt that was not the last is paid for, too."""
    for line in read_lines(log, offset):
        if (record := line.record) is None:
            continue
        prompt_tokens, completion_tokens = tokens_in(record)
        tokens = (record.get("usage") or {}).get("completion_tokens", 0)
        ended = datetime.fromisoformat(record["finished_at"]).timestamp()
        yield Observed(
            index=record["index"],
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            tokens=max(1.0, tokens / sequences),
            sequences=sequences,
            began=ended - record["latency_s"],
            ended=ended,
            is_ok=record["status"] == "ok",
        )
