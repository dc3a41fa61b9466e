"""Why a start ends before its rows do: a signal, a used-up budget, or too many failures."""

from __future__ import annotations

from collections.abc import Callable

from batchkit.errors import TooManyFailuresError
from batchkit.execution.budgets import Budgets
from batchkit.execution.signals import DRAIN_S, StopRequest
from batchkit.execution.start import Start
from batchkit.execution.tasks import Tasks
from batchkit.types import Usage

_SHARE_FROM = 20  # a share of failed rows says nothing before this many are settled


class Stop:
    """``request``: the signals. ``by``: the budget that stops this start, as
    ``run.max_seconds = 60``; None if none does. ``say`` gets lines for the log."""

    def __init__(
        self, start: Start, request: StopRequest, budgets: Budgets, say: Callable[[str], None]
    ) -> None:
        self.request = request
        self.budgets = budgets
        self.by: str | None = None
        self._start, self._say = start, say
        self._is_announced = False

    def is_asked(self, tokens: Usage) -> bool:
        """No new row begins. ``tokens``: of the whole run, with those of answers that have not ended."""
        if self.by is None:
            self.by = self.budgets.used_up(tokens)
        return self.request.signum is not None or self.by is not None

    def is_over(self, in_flight: int) -> bool:
        """After ``is_asked``: whether what is in flight must be waited for no longer."""
        drain_s = DRAIN_S if self.request.signum is not None else self.budgets.drain_s
        is_due = self.request.is_due or drain_s == 0
        if in_flight and not is_due and not self._is_announced:
            self._is_announced = True
            cause = f" at {self.by}" if self.by else ""
            time_left = "waiting" if drain_s is None else f"up to {drain_s:.0f} s"
            self._say(
                f"stopping{cause}: {time_left} for {in_flight} rows in flight;"
                " interrupt again to stop now"
            )
        return is_due or not in_flight

    def check_failures(self, tasks: Tasks, in_flight: int) -> None:
        """Raises TooManyFailuresError if more rows failed than ``run.fail_on_error`` permits."""
        limit = self._start.job.run.fail_on_error
        if tasks.failed and _is_too_many(tasks, limit, in_flight):
            raise TooManyFailuresError(
                f"{tasks.failed} of {tasks.settled} rows failed; run.fail_on_error ="
                f" {str(limit).lower()} stops the run. What is finished is on disk: see"
                f" `batchkit status {self._start.job.folder}`"
            )


def _is_too_many(tasks: Tasks, limit: bool | float, in_flight: int) -> bool:
    if isinstance(limit, bool):
        return limit
    if isinstance(limit, int):
        return tasks.failed > limit
    # A row that can't be rendered fails at once, while good ones are still in flight.
    begun = tasks.settled + in_flight
    return begun >= _SHARE_FROM and tasks.failed > limit * begun
