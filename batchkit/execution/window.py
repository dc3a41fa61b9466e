"""The layer ``Windowed``, and its window: how many requests are kept in flight.

The engine batches continuously: requests beyond ``max_num_seqs`` only wait in its queue. The window must be so large
that this queue is never empty between two polls. It should not be larger, because each waiting request holds its prompt
and pixels in host memory. So the window

- starts at 1.5 × ``max_num_seqs``;
- grows by a quarter of ``max_num_seqs`` when it is full and the engine's queue is still empty at times, up to 4 ×
  ``max_num_seqs``; but not while the KV cache is full, since more requests would be preempted;
- shrinks by a quarter when memory is short, never below a quarter of ``max_num_seqs`` (other processes may hold the
  memory, and the run must continue);
- shrinks by a quarter when requests were preempted while others waited, never below ``max_num_seqs``: the engine's
  scheduler handles preemption at a cost of about 3 %, while a window too small costs 20 %.

After a change, the window stays unchanged for ``COOLDOWN_S``. This is longer than most requests take, so that the
effect is visible before the next change.

Measured with max_num_seqs 16 and heavy-tailed answer lengths: relative to the adaptive window, a fixed window of 4 gave
0.46 of the throughput, 8 gave 0.68, 16 gave 0.93. From 24 on the noise was larger than the difference, with a full KV
cache and without. So only a small window is costly.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from batchkit.engines.base import Engine, EngineLoad
from batchkit.engines.memory import free_memory_share
from batchkit.execution.engine_layer import EngineLayer
from batchkit.execution.events import Hear, Load, Message
from batchkit.types import Completion, Request

# Shares of max_num_seqs, except CUT: a share of the window.
START, LARGEST, LEAST, STEP, CUT = 1.5, 4.0, 0.25, 0.25, 0.75
COOLDOWN_S = 10.0
LEAST_FREE_MEMORY = 0.08
KV_CACHE_FULL = 0.95
MEMORY_LOOK_S = 1.0


class Window:
    """The limit for requests in flight, ``size``. ``fixed``: a size that never changes; None adapts the size."""

    def __init__(
        self,
        max_num_seqs: int,
        *,
        fixed: int | None = None,
        clock: Callable[[], float] = time.monotonic,
        free_memory: Callable[[], float] = free_memory_share,
    ) -> None:
        self._max_num_seqs = max_num_seqs
        self._fixed = fixed
        self._clock = clock
        self._free_memory = free_memory
        self._rests_until = self._next_look = clock()
        self._free = 1.0
        self.size = fixed or _start(max_num_seqs)

    def adapt(self, load: EngineLoad, n_in_flight: int, max_num_seqs: int) -> str:
        """Change the size if the engine's load requires it. Return a text for the log; "" if the size is unchanged.

        If a restarted engine has another ``max_num_seqs``, the size starts again at 1.5 × this number.
        """
        if self._fixed:
            return ""
        if max_num_seqs != self._max_num_seqs:
            self._max_num_seqs = max_num_seqs
            return self._change(
                _start(max_num_seqs), 1, f"the engine's max_num_seqs is {max_num_seqs} now"
            )
        if self._clock() < self._rests_until:
            return ""
        if (free := self._memory()) < LEAST_FREE_MEMORY:
            least = max(1, int(LEAST * max_num_seqs))
            return self._change(int(self.size * CUT), least, f"{free:.0%} of memory is free")
        if load.preempted and load.waiting:
            reason = f"{load.preempted} requests preempted"
            return self._change(int(self.size * CUT), max_num_seqs, reason)
        has_room = load.kv_cache_usage < KV_CACHE_FULL
        if n_in_flight >= self.size and load.running and load.waiting == 0 and has_room:
            largest = max(2, int(LARGEST * max_num_seqs))
            step = max(1, int(STEP * max_num_seqs))
            return self._change(min(self.size + step, largest), 1, "the engine's queue was empty")
        return ""

    def _memory(self) -> float:
        """Return the share of free memory, read at most once a second because ``adapt`` is called at every poll."""
        if self._clock() >= self._next_look:
            self._next_look = self._clock() + MEMORY_LOOK_S
            self._free = self._free_memory()
        return self._free

    def _change(self, size: int, least: int, reason: str) -> str:
        old, size = self.size, max(size, min(least, self.size), 1)
        if size == old:
            return ""
        self.size = size
        self._rests_until = self._clock() + COOLDOWN_S
        return f"limit of requests in flight {old} → {size}: {reason}"


def _start(max_num_seqs: int) -> int:
    return max(2, int(START * max_num_seqs))


class Windowed(EngineLayer):
    """The lowest layer, directly above the (supervised) engine. It limits the requests in flight.

    - ``fixed``: the limit, if it must not adapt to the load.
    - ``hear``: called when the limit changes.
    """

    def __init__(self, engine: Engine, hear: Hear, fixed: int | None) -> None:
        self._engine, self._hear = engine, hear
        self._window = Window(engine.max_num_seqs, fixed=fixed)
        self._n_in_flight = 0
        self._seen = EngineLoad(0, 0, 0.0, 0)  # the newest load, with the counts since the start

    @property
    def room(self) -> int:
        return self._window.size - self._n_in_flight

    def submit(self, request: Request) -> None:
        self._engine.submit(request)
        self._n_in_flight += 1

    def resubmit(self) -> None:
        """Do nothing: this layer holds no requests back."""

    def poll(self, timeout_s: float) -> Sequence[Completion]:
        done: Sequence[Completion] = ()
        if self._n_in_flight:
            done = self._engine.poll(timeout_s)
            self._n_in_flight -= len(done)
        elif timeout_s:
            time.sleep(timeout_s)  # all requests wait in layers above
        load = self._engine.load()
        self._seen = load.with_counts_of(self._seen)
        if change := self._window.adapt(load, self._n_in_flight, self._engine.max_num_seqs):
            self._hear(Message(change))
        return done

    @property
    def unanswered(self) -> int:
        return self._n_in_flight

    @property
    def load(self) -> Load:
        seen = self._seen
        return Load(
            self._window.size,
            self._n_in_flight,
            seen.running,
            seen.waiting,
            seen.kv_cache_usage,
            seen.preempted,
            seen.unfinished_tokens,
            trouble=seen.trouble,
            drafts=seen.drafts,
            accepted_tokens=seen.accepted_tokens,
        )

    def close(self) -> None:
        """Do nothing: the engine outlives its layers."""
