"""Progress output: a bar or plain lines on stderr, and ``run.log``."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from io import TextIOWrapper
from pathlib import Path
from typing import Any, NamedTuple

from tqdm.auto import tqdm

from batchkit.config.masking import masked_text
from batchkit.config.numbers import duration
from batchkit.config.terminal import plain
from batchkit.errors import StoreError
from batchkit.execution.load_clock import LoadClock
from batchkit.execution.rate_meter import RateMeter
from batchkit.storage.files import open_log
from batchkit.storage.runfolder import LOG
from batchkit.types import utc_now

_BAR_INTERVAL_S = 0.25
_RATE_SPAN_S = 60.0
_LEAST_BAR = 6  # columns, with the blank in front of it
_NOTEBOOK_COLUMNS = 100
_IS_NOTEBOOK = any(base.__module__ == "tqdm.notebook" for base in tqdm.__mro__)


class State(NamedTuple):
    """The state of a run. Rows are of the whole job, tokens of this start only; ``unfinished_tokens``
    are of answers that have not ended. ``generations``: of rows with several, of all starts."""

    total: int | None
    ok: int
    failed: int
    resumed: int
    in_flight: int
    prompt_tokens: int
    completion_tokens: int
    unfinished_tokens: int
    generations: int = 0

    @property
    def settled(self) -> int:
        return self.ok + self.failed

    @property
    def counts(self) -> tuple[int, int, int]:
        """Rows, prompt tokens, completion tokens so far."""
        completion_tokens = self.completion_tokens + self.unfinished_tokens
        return self.settled, self.prompt_tokens, completion_tokens


class Progress:
    """One per start; used by the processor's thread only.

    Shows a tqdm bar on a terminal and in a notebook, otherwise one plain line per ``interval_s``;
    run.log gets every event and the plain lines in both cases. With ``quiet``, only run.log is written.
    Without ``generates``, the rate of output tokens is left out: there are none.
    """

    def __init__(
        self,
        folder: Path,
        *,
        interval_s: float,
        quiet: bool = False,
        generates: bool = True,
    ) -> None:
        self._path = folder / LOG
        self._log = TextIOWrapper(open_log(self._path), encoding="utf-8", line_buffering=True)
        self._stream = sys.stderr
        self._quiet = quiet
        self._generates = generates
        self._has_bar = not quiet and (self._stream.isatty() or _IS_NOTEBOOK)
        self._interval_s = interval_s
        self._meter: RateMeter | None = None
        self._bar: tqdm[Any] | None = None
        self._clock: LoadClock | None = None
        self._next_line = self._next_bar = 0.0

    def event(self, text: str) -> None:
        """Write one line to run.log and to stderr."""
        self._write(text)
        self._say(text)

    def note(self, text: str) -> None:
        """Write a long text, for example a dump of stacks, indented, to run.log only."""
        self._write(text.strip().replace("\n", "\n    "))

    def update(self, state: State, *, force: bool = False) -> None:
        """Show ``state`` if an update is due; very cheap otherwise."""
        now = time.monotonic()
        if self._meter is None:
            self._meter = RateMeter(now, state.counts, span_s=_RATE_SPAN_S)
            self._next_line = now + self._interval_s
        if self._has_bar and (force or now >= self._next_bar):
            self._next_bar = now + _BAR_INTERVAL_S
            self._draw(state, self._parts(state, now, self._meter))
        if force or now >= self._next_line:
            self._next_line = now + self._interval_s
            line = ", ".join(self._parts(state, now, self._meter))
            self._write(line)
            if not self._has_bar:
                self._say(line)
            self._meter.add(now, state.counts)

    def start_clock(self, text: str) -> None:
        """Show ``text`` and the seconds since, where there is a bar."""
        if self._has_bar:
            self._clock = LoadClock(text, self._stream)

    def stop_clock(self) -> None:
        if self._clock is not None:
            self._clock.close()
            self._clock = None

    def close(self) -> None:
        self.stop_clock()
        if self._bar is not None:
            self._bar.close()
        with suppress(OSError):  # nothing is lost: every line was flushed
            self._log.close()

    def _write(self, line: str) -> None:
        try:
            self._log.write(f"{utc_now()} {plain(masked_text(line))}\n")
        except OSError as error:
            raise StoreError(f"{self._path}: can't write: {error.strerror}") from error

    def _parts(self, state: State, now: float, meter: RateMeter) -> list[str]:
        return _parts(state, meter.per_s(now, state.counts), generates=self._generates)

    def _draw(self, state: State, parts: Sequence[str]) -> None:
        if self._bar is None:
            self._bar = tqdm(
                total=state.total,
                initial=state.settled,
                bar_format="{desc} {bar}",
                file=self._stream,
                dynamic_ncols=True,
            )
        bar = self._bar
        bar.total = state.total
        bar.n = state.settled
        text = _fitting(parts, self._columns() - _LEAST_BAR)
        try:
            bar.set_description_str(text)
        except OSError:
            self._lose_stream()

    def _say(self, text: str) -> None:
        if self._quiet:
            return
        text = plain(masked_text(text))
        try:
            bar = self._bar if self._clock is None else self._clock.bar
            if bar is not None:
                bar.write(f"batchkit: {text}", file=self._stream)
            else:
                print(f"batchkit: {text}", file=self._stream, flush=True)
        except OSError:
            self._lose_stream()

    def _lose_stream(self) -> None:
        """The terminal or the pipe was closed: from now on write to run.log only."""
        self._quiet, self._has_bar = True, False

    def _columns(self) -> int:
        try:
            return os.get_terminal_size(self._stream.fileno()).columns
        except (OSError, ValueError):  # a notebook
            return _NOTEBOOK_COLUMNS


def _parts(state: State, per_s: Sequence[float], *, generates: bool) -> list[str]:
    """For example ``2 failed``, ``1,200 of 3,071 rows``, ``6 min left``, …: what matters most comes
    first. ``per_s``: the rates of ``state.counts`` over the last minute."""
    of = "" if state.total is None else f" of {state.total:,}"
    rows_per_s, prompt_per_s, completion_per_s = per_s
    parts = [f"{state.failed:,} failed", f"{state.settled:,}{of} rows"]
    if state.generations:
        parts.append(f"{state.generations:,} generations")
    if state.total is not None and rows_per_s > 0:
        parts.append(f"{duration((state.total - state.settled) / rows_per_s)} left")
    if generates:
        parts.append(f"{completion_per_s:,.0f} output tok/s")
    return [
        *parts,
        f"{rows_per_s:.1f} rows/s",
        f"{state.in_flight} in flight",
        f"{prompt_per_s:,.0f} prompt tok/s",
    ]


def _fitting(parts: Iterable[str], columns: int) -> str:
    """As many of the first ``parts`` as fit; at least one."""
    text, *others = parts
    for part in others:
        if len(text) + 2 + len(part) > columns:
            break
        text += f", {part}"
    return text
