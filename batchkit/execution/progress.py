"""Progress output: a bar or plain lines on stderr, and ``run.log``."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import TextIOWrapper
from pathlib import Path
from typing import Any, NamedTuple, TextIO

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
        """What ``Rates`` are of."""
        return self.settled, self.prompt_tokens, self.completion_tokens


class Rates(NamedTuple):
    """Per second, over the last minute."""

    rows: float
    prompt_tokens: float
    completion_tokens: float


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
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._name = name
        self._path = folder / LOG
        self._log = TextIOWrapper(open_log(self._path), encoding="utf-8", line_buffering=True)
        self._stream = stream or sys.stderr
        self._quiet = quiet
        self._on_terminal = not quiet and self._stream.isatty()
        self._interval_s = interval_s
        self._clock = clock
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
        now = self._clock()
        if self._meter is None:
            self._meter = RateMeter(now, state.counts, span_s=_RATE_SPAN_S)
            self._next_line = now + self._interval_s
        if self._on_terminal and (force or now >= self._next_bar):
            self._next_bar = now + _BAR_INTERVAL_S
            self._draw(state, _rates(self._meter, now, state))
        if force or now >= self._next_line:
            self._next_line = now + self._interval_s
            line = describe(state, _rates(self._meter, now, state))
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
        with _log_errors(self._path):
            self._log.write(f"{utc_now()} {plain(masked_text(line))}\n")

    def _draw(self, state: State, rates: Rates) -> None:
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
            f"{rates.prompt_tokens:,.0f} prompt tok/s, {rates.completion_tokens:,.0f} output tok/s,"
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


@contextmanager
def _log_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StoreError(f"{path}: can't write: {error.strerror}") from error


def _rates(meter: RateMeter, now: float, state: State) -> Rates:
    return Rates(*meter.per_s(now, state.counts))


def describe(state: State, rates: Rates) -> str:
    """One plain line, for example ``1,200 of 3,071 rows, 2 failed, 5.1 rows/s, …, 6 min left``."""
    of = "" if state.total is None else f" of {state.total:,}"
    parts = [
        f"{state.settled:,}{of} rows",
        f"{state.failed:,} failed",
        f"{rates.rows:.1f} rows/s",
        f"{rates.prompt_tokens:,.0f} prompt tok/s",
        f"{rates.completion_tokens:,.0f} output tok/s",
        f"{state.in_flight} in flight",
    ]
    if state.total is not None and rates.rows > 0:
        parts.append(f"{duration((state.total - state.settled) / rates.rows)} left")
    return ", ".join(parts)
