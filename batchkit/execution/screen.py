"""The progress of a run for its user: log lines, a progress bar, ``metrics.jsonl`` and Prometheus."""

from __future__ import annotations

import os
import re
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from io import TextIOWrapper
from typing import Any

from tqdm.auto import tqdm

from batchkit.config.masking import masked_text
from batchkit.config.numbers import duration
from batchkit.config.terminal import plain, shortened
from batchkit.engines.memory import family_bytes, gpu_loads
from batchkit.engines.process.launcher import LOG as ENGINE_LOG
from batchkit.engines.process.launcher import EngineLog
from batchkit.execution.events import Load
from batchkit.execution.prometheus import Show
from batchkit.execution.resume import OpenRun
from batchkit.execution.start import Start
from batchkit.execution.tasks import Tasks
from batchkit.storage.files import disk_errors, open_log
from batchkit.storage.metrics import GpuLoad, Metrics, MetricsLog
from batchkit.storage.runfolder import LOG
from batchkit.types import utc_now

_LOOK_S = 0.25  # between updates of the display
_RECORD_S = 1.0  # between lines of metrics.jsonl
_MACHINE_S = 5.0  # seldom, because reading the host's processes may take some milliseconds
_RATE_SPAN_S = 60.0  # rates are averages over this time
_CLOCK_S, _LINE_S = 1.0, 10.0  # between updates while the model loads, with a bar and without
# The prefix of vLLM's log lines.
_PREFIX = re.compile(r"^(\(\w+ pid=\d+\) )?[A-Z]+ [\d-]+ [\d:]+ \[[^]]+\] ")
_OF_LOAD = set(Load._fields) & set(Metrics.__struct_fields__) - {"kv_cache_usage"}
_IS_NOTEBOOK = any(base.__module__ == "tqdm.notebook" for base in tqdm.__mro__)


class Screen:
    """The display of one start's progress. No decision of the run depends on it. Used by the run's thread.

    - ``began``: monotonic time when the command began.
    - ``export``: called with each line of the metrics.
    """

    def __init__(self, start: Start, run: OpenRun, began: float, export: Show) -> None:
        self._run, self._began, self._export = run, began, export
        self._progress = Progress(start)
        self.say, self.note = self._progress.event, self._progress.note
        self.waiting = self._progress.waiting
        self._log = MetricsLog(run.folder, is_lost=lambda: run.starts.lock.is_lost, say=self.say)
        self._machine = _MachineWatch()
        self._look_s = min(_LOOK_S, start.job.run.checkpoint_interval_s)
        self._next_look = self._next_record = 0.0

    @property
    def is_due(self) -> bool:
        """True if the display needs an update. Cheap, because the main loop reads it in each iteration."""
        return time.monotonic() >= self._next_look

    def show(self, tasks: Tasks, load: Load, *, force: bool = False) -> None:
        """Update the display. ``force``: also write metrics and plain lines that are not due yet."""
        now = time.monotonic()
        self._next_look = now + self._look_s
        metrics = self._metrics(tasks, load, now)
        self._progress.update(metrics, load.trouble, force=force)
        if now >= self._next_record or force:
            self._next_record = now + _RECORD_S
            self._log.append(metrics)
            self._export(metrics)

    def close(self) -> None:
        self._machine.close()
        self._log.close()
        self._progress.close()

    def _metrics(self, tasks: Tasks, load: Load, now: float) -> Metrics:
        ledger, starts, total = self._run.ledger, self._run.starts, tasks.total()
        return Metrics(
            at=utc_now(),
            start=len(starts.history.starts),
            seconds=round(self._log.seconds_before + now - self._began, 3),
            rows_ok=ledger.totals.ok,
            rows_failed=ledger.totals.failed,
            rows_total=None if total is None else total - tasks.elsewhere,
            prompt_tokens=ledger.usage.prompt_tokens,
            completion_tokens=ledger.usage.completion_tokens,
            generations=ledger.steps.spent.generations,
            engine_restarts=starts.last.engine_restarts,
            host_bytes=self._machine.host_bytes,
            gpus=self._machine.gpus,
            kv_cache_usage=round(load.kv_cache_usage, 4),
            **{name: getattr(load, name) for name in _OF_LOAD},
        )


class _MachineWatch:
    """A thread that reads memory and GPU use, because a call of the GPU driver may be slow.

    The run's thread reads the two attributes. Each is replaced as a whole.
    """

    def __init__(self) -> None:
        self.host_bytes: int | None = None
        self.gpus: list[GpuLoad] = []
        self._closed = threading.Event()
        threading.Thread(target=self._watch, name="machine-watch", daemon=True).start()

    def close(self) -> None:
        self._closed.set()

    def _watch(self) -> None:
        while True:
            self.host_bytes = family_bytes(os.getpid()) or None
            self.gpus = gpu_loads()
            if self._closed.wait(_MACHINE_S):
                return


class Progress:
    """A tqdm bar on a terminal or in a notebook; otherwise plain lines, one per checkpoint interval.

    ``run.log`` gets every event and the plain lines in both cases. A quiet start writes only ``run.log``. Tasks that
    generate no text show no rate of output tokens.
    """

    def __init__(self, start: Start) -> None:
        job = start.job
        self._path, self._engine_log = job.folder / LOG, job.folder / ENGINE_LOG
        self._log = TextIOWrapper(open_log(self._path), encoding="utf-8", line_buffering=True)
        self._stream = sys.stderr
        self._quiet, self._generates = start.options.quiet, job.generates
        self._has_bar = not self._quiet and (self._stream.isatty() or _IS_NOTEBOOK)
        self._interval_s = job.run.checkpoint_interval_s
        self._samples: deque[tuple[float, tuple[int, ...]]] = deque()  # of the last minute
        self._bar: tqdm[Any] | None = None
        self._next_line = 0.0

    def event(self, text: str) -> None:
        """Write one line to run.log and to stderr."""
        self._write(text)
        self._say(text)

    def note(self, text: str) -> None:
        """Write a long text, for example stack traces, indented, to run.log only."""
        self._write(text.strip().replace("\n", "\n    "))

    def update(self, metrics: Metrics, trouble: str = "", *, force: bool = False) -> None:
        """Draw the bar, and write a plain line if one is due. ``trouble``: text to show first, for example a server's
        error."""
        now, counts = time.monotonic(), _counts(metrics)
        if not self._samples:
            self._samples.append((now, counts))
            self._next_line = now + self._interval_s
        since, before = self._samples[0]
        seconds = max(now - since, 1e-3)
        # Unfinished answers are lost when their engine dies, so counts may fall; a rate must not be negative.
        per_s = [max(0, n - then) / seconds for n, then in zip(counts, before, strict=True)]
        parts = [trouble] if trouble else []
        parts += _parts(metrics, per_s, generates=self._generates)
        if self._has_bar:
            self._draw(metrics, ", ".join(parts))
        if force or now >= self._next_line:
            self._next_line = now + self._interval_s
            line = ", ".join(parts)
            self._write(line)
            if not self._has_bar:
                self._say(line)
            self._samples.append((now, counts))
            while len(self._samples) > 2 and now - self._samples[1][0] >= _RATE_SPAN_S:
                self._samples.popleft()

    @contextmanager
    def waiting(self, text: str) -> Iterator[None]:
        """Show ``text``, the elapsed seconds and the engine's newest output while the block runs.

        With a progress bar this is one line that disappears; otherwise it is a plain line every few seconds. A thread
        draws the lines, under tqdm's lock.
        """
        began, is_over, before = time.monotonic(), threading.Event(), self._bar
        clock, printed = None, EngineLog(self._engine_log)
        if self._has_bar:
            clock = self._bar = tqdm(
                desc=text, bar_format="{desc}", file=self._stream, leave=False, dynamic_ncols=True
            )

        def tick() -> None:
            with suppress(OSError):  # the terminal was closed
                while not is_over.wait(_LINE_S if clock is None else _CLOCK_S):
                    seconds = duration(time.monotonic() - began)
                    line = ": ".join(filter(None, [f"{text}, {seconds}", _newest(printed)]))
                    if clock is None:
                        self._say(line)
                    else:
                        clock.set_description_str(plain(masked_text(line)))

        ticking = threading.Thread(target=tick, name="load-clock", daemon=True)
        ticking.start()
        try:
            yield
        finally:
            is_over.set()
            ticking.join()
            self._bar = before
            with suppress(OSError):
                if clock is not None:
                    clock.close()

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
        with suppress(OSError):  # no line is lost: each was flushed
            self._log.close()

    def _write(self, line: str) -> None:
        with disk_errors(self._path):
            self._log.write(f"{utc_now()} {plain(masked_text(line))}\n")

    def _draw(self, metrics: Metrics, text: str) -> None:
        settled, *_ = _counts(metrics)
        if self._bar is None:
            self._bar = tqdm(
                total=metrics.rows_total,
                initial=settled,
                bar_format="{desc} {bar}",
                file=self._stream,
                dynamic_ncols=True,
            )
        self._bar.total, self._bar.n = metrics.rows_total, settled
        try:
            self._bar.set_description_str(text)  # tqdm cuts it at the terminal's edge
        except OSError:
            self._lose_stream()

    def _say(self, text: str) -> None:
        if self._quiet:
            return
        text = plain(masked_text(text))
        try:
            if self._bar is not None:
                self._bar.write(f"batchkit: {text}", file=self._stream)
            else:
                print(f"batchkit: {text}", file=self._stream, flush=True)
        except OSError:
            self._lose_stream()

    def _lose_stream(self) -> None:
        """Stop writing to the terminal or pipe, because it was closed. ``run.log`` still gets everything."""
        self._quiet, self._has_bar = True, False


def _newest(log: EngineLog) -> str:
    """Return the last line that the engine has printed to ``log``; "" if it has printed nothing."""
    lines = re.split(r"[\r\n]+", log.printed())
    newest = next((line for line in reversed(lines) if line.strip()), "")
    return shortened(_PREFIX.sub("", newest).strip(), 100)


def _counts(metrics: Metrics) -> tuple[int, int, int]:
    """Return three counts so far: settled rows, prompt tokens and completion tokens."""
    completion_tokens = metrics.completion_tokens + metrics.unfinished_tokens
    return metrics.rows_ok + metrics.rows_failed, metrics.prompt_tokens, completion_tokens


def _parts(metrics: Metrics, per_s: Sequence[float], *, generates: bool) -> list[str]:
    """Return the parts of a progress line, most important first: ``2 failed``, ``1,200 of 3,071 rows``, …

    ``per_s``: rates of rows, prompt tokens and completion tokens over the last minute.
    """
    settled, total = metrics.rows_ok + metrics.rows_failed, metrics.rows_total
    of = "" if total is None else f" of {total:,}"
    rows_per_s, prompt_per_s, completion_per_s = per_s
    parts = [f"{metrics.rows_failed:,} failed", f"{settled:,}{of} rows"]
    if metrics.generations:
        parts.append(f"{metrics.generations:,} generations")
    if total is not None and rows_per_s > 0:
        parts.append(f"{duration((total - settled) / rows_per_s)} left")
    if generates:
        parts.append(f"{completion_per_s:,.0f} output tok/s")
    return [
        *parts,
        f"{rows_per_s:.1f} rows/s",
        f"{metrics.in_flight} in flight",
        f"{prompt_per_s:,.0f} prompt tok/s",
    ]
