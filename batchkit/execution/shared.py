"""One engine for several runs that go on beside each other, each in a thread of its own.

Each run has a seat, which is an Engine to it: what it submits comes back to it alone, and it is told that the engine
runs its share of all requests at once. A run that ends or is stopped leaves its seat, and the engine stays.

If the engine dies, nobody knows whose request was at fault, and a search among several runs would suspect innocent
rows. So all runs are to be stopped (``on_death``), and each continued alone for a while: then it searches as any run does.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from batchkit.engines.base import Engine, EngineLoad
from batchkit.engines.process.launcher import Launcher
from batchkit.errors import EngineError
from batchkit.execution.lane import KeptEngine, Loaded, Wanted
from batchkit.types import Completion, Request

_SLICE_S = 0.005  # one run waits so long for the engine before another may hand over requests


class SharedEngines:
    """Used as ``KeptEngine``, by several runs at once. ``on_death`` is called by the thread of a run, once for each
    engine; it stops the runs without waiting for requests in flight, which are lost."""

    def __init__(self, log: Path, on_death: Callable[[], None]) -> None:
        self._kept, self._on_death = KeptEngine(log), on_death
        self._shared: dict[str, tuple[SharedEngine, Loaded]] = {}
        self._lock = threading.Lock()  # held while a model is loaded: the others wait for it

    @property
    def idle(self) -> Mapping[str, Loaded]:
        """The engines that are loaded, in use or not."""
        known = [*self._shared.items()]  # another run's thread may add one meanwhile
        return {name: loaded for name, (shared, loaded) in known if not shared.death}

    def launcher(self, name: str, environment: Mapping[str, str]) -> Launcher:
        return self._kept.launcher(name, environment)

    def get(self, wanted: Wanted, load: Callable[[], Loaded]) -> Loaded:
        """A seat at the engine; it is loaded if it is not there, or nobody uses it and it is another."""
        with self._lock:
            shared, loaded = self._shared.pop(wanted.name, (None, None))
            if shared is not None and loaded is not None:
                is_same = wanted.is_met_by(loaded)
                if not shared.is_live() or not (is_same or shared.n_seats):
                    shared.close()
                    shared = None
            if shared is None or loaded is None:
                loaded = load()
                shared = SharedEngine(loaded.engine, self._on_death)
            self._shared[wanted.name] = shared, loaded
            return loaded._replace(engine=shared.seat())

    def put(self, name: str, loaded: Loaded, *, is_idle: bool) -> None:
        """The run has ended. What it has in flight is dropped when it comes back."""
        assert isinstance(loaded.engine, Seat)
        loaded.engine.leave()

    def close(self) -> None:
        """Release what it holds."""
        for shared, _ in self._shared.values():
            shared.close()
        self._kept.close()


class SharedEngine:
    """An engine and its seats. Any run's thread calls the engine, for all of them, under the lock."""

    def __init__(self, engine: Engine, on_death: Callable[[], None]) -> None:
        self.engine, self._on_death = engine, on_death
        self.death: EngineError | None = None
        self.died_shared = False
        self._lock = threading.Lock()
        self._seats: list[Seat] = []
        self._submitted: deque[tuple[Seat, Request]] = deque()
        self._in_flight: dict[int, tuple[Seat, Request]] = {}  # by the request's identity
        self._load = engine.load()

    @property
    def n_seats(self) -> int:
        return len(self._seats)

    def seat(self) -> Seat:
        seat = Seat(self)
        self._seats.append(seat)
        return seat

    def leave(self, seat: Seat) -> None:
        if seat in self._seats:
            self._seats.remove(seat)

    def submit(self, seat: Seat, request: Request) -> None:
        """Whoever polls next hands it over: a run that submits never waits for another that polls."""
        self._submitted.append((seat, request))

    def work(self, until: float) -> None:
        """Hand over what was submitted and give out what came back, unless others do that until then."""
        if not self._lock.acquire(timeout=max(0.001, until - time.monotonic())):
            return
        try:
            self._pump(min(_SLICE_S, max(0.0, until - time.monotonic())))
        finally:
            self._lock.release()

    def is_live(self) -> bool:
        self.work(time.monotonic())
        return self.death is None

    def take_load(self) -> EngineLoad:
        """What happened is reported to one of the runs."""
        with self._lock:
            load, self._load = self._load, self._load._replace(preempted=0, events=())
        return load

    def restart(self) -> None:
        """End the engine because a run needs a new one."""
        if self.death is None:
            self._note_death(EngineError("it is to be loaded again"))
        self.close()

    def close(self) -> None:
        with self._lock:
            self.engine.close()

    def _pump(self, timeout_s: float) -> None:
        if self.death is not None:
            return
        try:
            while self._submitted:
                seat, request = self._submitted.popleft()
                self._in_flight[id(request)] = seat, request
                self.engine.submit(request)
            for completion in self.engine.poll(timeout_s):
                seat, _ = self._in_flight.pop(id(completion.request))
                seat.inbox.append(completion)
            load = self.engine.load()
        except EngineError as death:
            self._note_death(death)
            return
        events = [*self._load.events, *load.events]
        preempted = self._load.preempted + load.preempted
        self._load = load._replace(preempted=preempted, events=events)

    def _note_death(self, death: EngineError) -> None:
        self.died_shared = len(self._seats) > 1
        self.death = death
        self._on_death()


class Seat:
    """The engine of one run, as ``Engine`` says; used by the run's thread."""

    def __init__(self, shared: SharedEngine) -> None:
        self._shared = shared
        self.inbox: deque[Completion] = deque()
        self.limits, self.versions = shared.engine.limits, shared.engine.versions

    @property
    def max_num_seqs(self) -> int:
        """Its share of the requests that run at once."""
        return max(1, self._shared.engine.max_num_seqs // max(1, self._shared.n_seats))

    def submit(self, request: Request) -> None:
        self._shared.submit(self, request)

    def poll(self, timeout_s: float) -> Sequence[Completion]:
        until = time.monotonic() + timeout_s
        while True:
            self._shared.work(until)
            done = [self.inbox.popleft() for _ in range(len(self.inbox))]
            if done:
                return done
            if (death := self._shared.death) is not None:
                if not self._shared.died_shared:
                    raise death
                time.sleep(timeout_s)  # this run is about to be stopped
                return []
            if time.monotonic() >= until:
                return []

    def load(self) -> EngineLoad:
        return self._shared.take_load()

    def leave(self) -> None:
        self._shared.leave(self)

    def close(self) -> None:
        """The supervisor's restart: a run that only ends leaves."""
        self._shared.restart()
        self.leave()
