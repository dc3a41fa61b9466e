"""Progress output: a bar or plain lines on stderr, and ``run.log``."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from io import TextIOWrapper
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from batchkit.config.masking import masked_text
from batchkit.config.numbers import duration
from batchkit.config.terminal import plain
from batchkit.errors import StoreError
from batchkit.execution.rate_meter import RateMeter
from batchkit.storage.files import open_log
from batchkit.types import utc_now

LOG = "run.log"
_BAR_INTERVAL_S = 0.25
_RATE_SPAN_S = 60.0


class State(NamedTuple):
    """The state of a run. Rows are of the whole job, tokens of this start only."""

    total: int | None
    ok: int
    failed: int
    resumed: int
    in_flight: int
    prompt_tokens: int
    completion_tokens: int

    @property
    def settled(self) -> int:
        return self.ok + self.failed

    @property
    def counts(self) -> tuple[int, int, int]:
        """Rows, prompt tokens, completion tokens."""
        return self.settled, self.prompt_tokens, self.completion_tokens


class Progress:
    """One per start; used by the processor's thread only.

    Shows a tqdm bar on a terminal, otherwise one plain line per ``interval_s``; run.log gets every
    event and the plain lines in both cases. With ``quiet``, only run.log is written.
    """

    def __init__(
        self,
        folder: Path,
        name: str,
        *,
        interval_s: float,
        quiet: bool = False,
    ) -> None:
        self._name = name
        self._path = folder / LOG
        self._log = TextIOWrapper(open_log(self._path), encoding="utf-8", line_buffering=True)
        self._stream = sys.stderr
        self._quiet = quiet
        self._on_terminal = not quiet and self._stream.isatty()
        self._interval_s = interval_s
        self._meter: RateMeter | None = None
        self._bar: tqdm[Any] | None = None
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
        if self._on_terminal and (force or now >= self._next_bar):
            self._next_bar = now + _BAR_INTERVAL_S
            self._draw(state, self._meter.per_s(now, state.counts))
        if force or now >= self._next_line:
            self._next_line = now + self._interval_s
            line = _line(state, self._meter.per_s(now, state.counts))
            self._write(line)
            if not self._on_terminal:
                self._say(line)
            self._meter.add(now, state.counts)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
        with suppress(OSError):  # nothing is lost: every line was flushed
            self._log.close()

    def _write(self, line: str) -> None:
        try:
            self._log.write(f"{utc_now()} {plain(masked_text(line))}\n")
        except OSError as error:
            raise StoreError(f"{self._path}: can't write: {error.strerror}") from error

    def _draw(self, state: State, per_s: Sequence[float]) -> None:
        if self._bar is None:
            self._bar = tqdm(
                total=state.total,
                initial=state.settled,
                desc=self._name,
                unit="row",
                file=self._stream,
                dynamic_ncols=True,
            )
        bar = self._bar
        bar.total = state.total
        bar.n = state.settled
        bar.set_postfix_str(
            f"{per_s[1]:,.0f} prompt tok/s, {per_s[2]:,.0f} output tok/s,"
            f" {state.in_flight} in flight, {state.failed} failed",
            refresh=False,
        )
        try:
            bar.refresh()
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
        """The terminal or the pipe was closed: from now on write to run.log only."""
        self._quiet, self._on_terminal = True, False


def _line(state: State, per_s: Sequence[float]) -> str:
    """For example ``1,200 of 3,071 rows, 2 failed, 5.1 rows/s, …, 6 min left``. ``per_s``: the rates
    of ``state.counts`` over the last minute."""
    of = "" if state.total is None else f" of {state.total:,}"
    rows_per_s, prompt_per_s, completion_per_s = per_s
    parts = [
        f"{state.settled:,}{of} rows",
        f"{state.failed:,} failed",
        f"{rows_per_s:.1f} rows/s",
        f"{prompt_per_s:,.0f} prompt tok/s",
        f"{completion_per_s:,.0f} output tok/s",
        f"{state.in_flight} in flight",
    ]
    if state.total is not None and rows_per_s > 0:
        parts.append(f"{duration((state.total - state.settled) / rows_per_s)} left")
    return ", ".join(parts)
