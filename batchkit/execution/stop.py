"""Reasons to end a start early: a signal, a used-up budget, or too many failures.

While rows are in flight, a signal only sets a flag that the loop reads. Before and afterwards, no request is running,
and the signal handler raises Interrupted immediately.

``budget.max_seconds`` counts from the beginning of each start, like a reservation on a cluster. Tokens and price count
over all starts of the run.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from batchkit.config.numbers import number
from batchkit.errors import Interrupted, TooManyFailuresError
from batchkit.execution.places import gpus_of
from batchkit.execution.resume import OpenRun
from batchkit.execution.start import Start
from batchkit.execution.tasks import Tasks
from batchkit.types import Usage

DRAIN_S = 10.0  # for rows in flight after the first SIGINT, or after budget.max_seconds


class StopRequest:
    """A handler for SIGINT and SIGTERM that remembers the stop that they request.

    ``drain_s``: how long running requests may still take after a first SIGINT. After any other signal they are dropped.
    """

    def __init__(self, *, drain_s: float = DRAIN_S) -> None:
        self._drain_s = drain_s
        # When the command began; ``budget.max_seconds`` counts from here.
        self.began = time.monotonic()
        self.signum: int | None = None
        self._deadline = float("inf")
        self._deferred = False

    def ask(self, signum: int, *, drain_s: float) -> None:
        """Request a stop within ``drain_s`` seconds; of two requests, the earlier deadline counts."""
        self.signum = self.signum or signum
        self._deadline = min(self._deadline, time.monotonic() + drain_s)

    @property
    def is_due(self) -> bool:
        """True once the deadline has passed."""
        return time.monotonic() >= self._deadline

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Inside the block, make signals set a flag instead of raising Interrupted."""
        self._deferred = True
        try:
            yield
        finally:
            self._deferred = False

    @contextmanager
    def immediate(self) -> Iterator[None]:
        """Inside the block, make signals raise Interrupted, even within ``deferred``. If a signal came before, raise
        Interrupted now."""
        before, self._deferred = self._deferred, False
        try:
            if self.signum is not None:
                raise Interrupted(self.signum)
            yield
        finally:
            self._deferred = before

    @contextmanager
    def installed(self) -> Iterator[StopRequest]:
        """Handle SIGINT and SIGTERM inside the block.

        Does nothing outside the main thread, where Python allows no signal handlers.
        """
        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        before: dict[int, Any] = {
            signum: signal.signal(signum, self._on_signal)
            for signum in (signal.SIGINT, signal.SIGTERM)
        }
        try:
            yield self
        finally:
            for signum, handler in before.items():
                signal.signal(signum, handler)

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        first = self.signum is None
        # A loop that hangs never reads the flag, so let the next signal end the process.
        if not first:
            signal.signal(signum, signal.SIG_DFL)
        self.ask(signum, drain_s=self._drain_s if first and signum == signal.SIGINT else 0.0)
        if not self._deferred:
            raise Interrupted(signum)


_SHARE_FROM = 20  # with fewer rows, a share of failed rows means nothing


class Stop:
    """The reasons to end this start early, and the decision whether it ends.

    - ``request``: signals received so far.
    - ``by``: the budget that stops this start, for example ``budget.max_seconds = 60``, or None.
    - ``say``: writes a line to the log.
    """

    def __init__(
        self, start: Start, run: OpenRun, request: StopRequest, say: Callable[[str], None]
    ) -> None:
        self.request = request
        self.by: str | None = None
        self._job, self._run, self._say = start.job, run, say
        self._gpu_seconds_before = sum(earlier.gpu_seconds for earlier in run.starts.history.starts)
        self._is_announced = False
        self._gpus, self._gpus_since = gpus_of(self._job), request.began
        self._gpu_seconds_until = 0.0

    def budget_line(self) -> str:
        """Return a line for the log that lists each budget and how much of it is left; "" without budgets."""
        parts = [
            name + (" for this start" if "seconds" in name else f", {number(max(0, left))} left")
            for name, left in self._budgets()
        ]
        return f"budget: {'; '.join(parts)}" if parts else ""

    def price(self, unfinished_tokens: int = 0) -> float | None:
        """Return the price of the run so far, over all starts; None if the job has no price."""
        gpu_seconds = self._gpu_seconds_before + self._gpu_seconds
        return self._job.budget.price_of(self._tokens(unfinished_tokens), gpu_seconds)

    def note_gpus(self) -> None:
        """Note the GPU seconds of this start."""
        self._run.starts.note(gpu_seconds=round(self._gpu_seconds, 3))

    def use_gpus(self, gpus: float) -> None:
        """Set the number of GPUs that this start uses from now on."""
        if gpus != self._gpus:
            self._gpu_seconds_until, self._gpus_since = self._gpu_seconds, time.monotonic()
            self._gpus = gpus

    def check_budgets(self, unfinished_tokens: int = 0) -> bool:
        """Set ``by`` if a budget is used up. Return whether a budget or a signal forbids taking new rows.

        ``unfinished_tokens``: output tokens of running requests, which are added to the used tokens.
        """
        if self.by is None:
            budgets = self._budgets(unfinished_tokens)
            self.by = next((name for name, left in budgets if left <= 0), None)
        return self.has_begun

    @property
    def has_begun(self) -> bool:
        """True once a budget or a signal forbids taking new rows."""
        return self.request.signum is not None or self.by is not None

    def check_drained(self, n_in_flight: int) -> bool:
        """Return whether a start that is stopping may end now, without waiting for more rows.

        The start may end once no row is in flight, or once the time to finish these rows is over. If the start must
        wait, the first call prints for how long.

        ``n_in_flight``: number of requests that still run.
        """
        drain_s = DRAIN_S if self.request.signum is not None else self._drain_s
        is_due = self.request.is_due or drain_s == 0
        if n_in_flight and not is_due and not self._is_announced:
            self._is_announced = True
            cause = f" at {self.by}" if self.by else ""
            time_left = "waiting" if drain_s is None else f"waiting up to {drain_s:.0f} s"
            self._say(
                f"stopping{cause}: {time_left} for {n_in_flight} rows in flight;"
                " interrupt again to stop immediately"
            )
        return is_due or not n_in_flight

    def check_failures(self, tasks: Tasks, n_in_flight: int) -> None:
        """Raise TooManyFailuresError if more rows failed than ``run.fail_on_error`` allows."""
        limit = self._job.run.fail_on_error
        if _is_too_many(tasks, limit, n_in_flight):
            raise TooManyFailuresError(
                f"{tasks.failed} of {tasks.settled} rows failed; run.fail_on_error ="
                f" {str(limit).lower()} stops the run. All finished rows are on disk: see"
                f" `batchkit status {self._job.folder}`"
            )

    def _budgets(self, unfinished_tokens: int = 0) -> Iterator[tuple[str, float]]:
        """Yield the name (as in ``by``) and the remaining amount of each budget that the job has."""
        budget = self._job.budget
        if budget.max_seconds is not None:
            yield f"budget.max_seconds = {budget.max_seconds:g}", budget.max_seconds - self._seconds
        if (most := budget.max_completion_tokens) is not None:
            spent = self._tokens(unfinished_tokens).completion_tokens
            yield f"budget.max_completion_tokens = {most:,}", most - spent
        if budget.max_price is not None:
            price = self.price(unfinished_tokens) or 0.0
            yield f"budget.max_price = {budget.max_price:g}", budget.max_price - price

    @property
    def _drain_s(self) -> float | None:
        """Seconds that rows in flight may still take, if no signal came; None for no limit."""
        most = self._job.budget.max_seconds
        if most is None or self._seconds < most:
            return None
        return max(0.0, most + DRAIN_S - self._seconds)

    @property
    def _gpu_seconds(self) -> float:
        return self._gpu_seconds_until + self._gpus * (time.monotonic() - self._gpus_since)

    @property
    def _seconds(self) -> float:
        return time.monotonic() - self.request.began

    def _tokens(self, unfinished: int) -> Usage:
        """Return the total tokens used by this run, across all starts."""
        usage = self._run.ledger.usage
        return Usage(usage.prompt_tokens, usage.completion_tokens + unfinished)


def _is_too_many(tasks: Tasks, limit: bool | float, n_in_flight: int) -> bool:
    if isinstance(limit, bool):
        return limit
    if isinstance(limit, int):
        return tasks.failed > limit
    # Rows in flight count as begun: a row that can't be rendered fails before good rows are answered.
    begun = tasks.settled + n_in_flight
    return begun >= _SHARE_FROM and tasks.failed > limit * begun
