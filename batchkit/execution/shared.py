"""One engine for several runs that go on beside each other, each in a thread of its own.

Each run has a seat, which is an Engine to it: what it submits waits there until the engine has room, and comes back to it
alone. The next request is one of the lowest rank, of those one of the owner who has the fewest in the engine, and of the owner's
runs one of that with the fewest rows left. So owners who are all busy have equal parts of the engine at any time. A run that ends
or is stopped leaves its seat, and the engine stays.

If the engine dies, nobody knows whose request was at fault, and a search among several runs would suspect innocent
rows. So all runs are to be stopped (``on_death``), and each continued alone for a while: then it searches as any run does.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from batchkit.engines.base import Engine, EngineLoad
from batchkit.engines.process.launcher import Launcher
from batchkit.errors import EngineError
from batchkit.execution.lane import KeptEngine, Loaded, Wanted
from batchkit.execution.window import Window
from batchkit.types import Completion, Request

_SLICE_S = 0.005  # what a run submits while another waits for the engine may wait so long


@dataclass
class Claim:
    """Whose run it is, and its place in the queue: the lowest ``rank`` goes first, and may change while the run works.
    ``rows``: those that it has to answer; ``answered``: requests; ``engine_s``: its part of the engine's time, by its requests
    there."""

    owner: str
    rank: tuple[int, ...]
    rows: int
    answered: int = 0
    engine_s: float = 0.0

    @property
    def left(self) -> int:
        return self.rows - self.answered


class SharedEngines:
    """The engines of several runs. ``on_death`` is called by the thread of a run, once for each engine; it stops the runs
    without waiting for requests in flight, which are lost. ``environment``: of the engines' processes."""

    def __init__(
        self, log: Path, on_death: Callable[[], None], environment: Mapping[str, str]
    ) -> None:
        self._kept, self._on_death = KeptEngine(log), on_death
        self._environment = environment
        self._shared: dict[str, tuple[SharedEngine, Loaded]] = {}
        self._lock = threading.Lock()  # held while a model is loaded: the others wait for it

    def of(self, claim: Claim) -> Share:
        """As one run uses them."""
        return Share(self, claim)

    @property
    def idle(self) -> Mapping[str, Loaded]:
        """The engines that are loaded, in use or not."""
        known = [*self._shared.items()]  # another run's thread may add one meanwhile
        return {name: loaded for name, (shared, loaded) in known if not shared.death}

    def get(self, wanted: Wanted, load: Callable[[Launcher], Loaded], claim: Claim) -> Loaded:
        """A seat at the engine; it is loaded if it is not there, or nobody uses it and it is another."""
        with self._lock:
            shared, loaded = self._shared.pop(wanted.name, (None, None))
            if shared is not None and loaded is not None:
                is_same = wanted.is_met_by(loaded)
                if not shared.is_live() or not (is_same or shared.seats):
                    shared.close()
                    shared = None
            if shared is None or loaded is None:
                environment = {**self._environment, **wanted.environment}
                loaded = load(self._kept.launcher(wanted._replace(environment=environment)))
                shared = SharedEngine(loaded.engine, self._on_death)
            self._shared[wanted.name] = shared, loaded
            return loaded._replace(engine=shared.seat(claim))

    def close(self) -> None:
        """Release what it holds."""
        for shared, _ in self._shared.values():
            shared.close()
        self._kept.close()


@dataclass(frozen=True)
class Share:
    """``Engines`` of one run."""

    engines: SharedEngines
    claim: Claim

    @property
    def idle(self) -> Mapping[str, Loaded]:
        return self.engines.idle

    def get(self, wanted: Wanted, load: Callable[[Launcher], Loaded]) -> Loaded:
        return self.engines.get(wanted, load, self.claim)

    def put(self, name: str, loaded: Loaded, *, is_idle: bool) -> None:
        """The run has ended. What it has in flight is dropped."""
        assert isinstance(loaded.engine, Seat)
        loaded.engine.leave()


class SharedEngine:
    """An engine and its seats. One run at a time, whichever waits for answers, calls the engine for all of them."""

    def __init__(self, engine: Engine, on_death: Callable[[], None]) -> None:
        self.engine, self._on_death = engine, on_death
        self.death: EngineError | None = None
        self.died_shared = False
        self.seats: list[Seat] = []  # replaced as a whole: other threads go through it
        self._lock = threading.Lock()  # of the engine and what is in flight
        self._noting = threading.Lock()  # of the load: nobody waits for the engine to read it
        self._window = Window(engine.max_num_seqs)
        self._in_flight: dict[int, tuple[Seat, Request]] = {}  # by the request's identity
        self._of_owner = Counter[str]()  # of those
        self._load = engine.load()
        self._turned_at = time.monotonic()

    def seat(self, claim: Claim) -> Seat:
        with self._lock:
            self.seats = [*self.seats, seat := Seat(self, claim)]
        return seat

    def leave(self, seat: Seat) -> None:
        with self._lock:
            self.seats = [other for other in self.seats if other is not seat]
            left = [request for one, request in self._in_flight.values() if one is seat]
            for request in left:
                del self._in_flight[id(request)]
                self._count(seat, -1)
            if left and self.death is None:
                self.engine.abort(left)

    def is_live(self) -> bool:
        with self._lock:
            self._turn(0)
        return self.death is None

    def work(self, seat: Seat, until: float) -> None:
        """Until the seat has an answer: give the engine what waits and all seats what it has answered, or wait while another
        run does that."""
        while not seat.inbox and not self.death and (left_s := until - time.monotonic()) > 0:
            if self._lock.acquire(blocking=False):
                try:
                    self._turn(min(_SLICE_S, left_s), seat)
                finally:
                    self._lock.release()
            else:
                seat.called.wait(min(_SLICE_S, left_s))
                seat.called.clear()

    def take_load(self) -> EngineLoad:
        """What happened is reported to one of the runs."""
        with self._noting:
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

    def _turn(self, timeout_s: float, worker: Seat | None = None) -> None:
        if self.death is not None:
            return
        self._charge()
        try:
            self._hand_over()
            for completion in self.engine.poll(timeout_s):
                seat, _ = self._in_flight.pop(id(completion.request), (None, None))
                if seat is None:
                    continue  # its run has left
                self._count(seat, -1)
                seat.claim.answered += 1
                seat.inbox.append(completion)
                if seat is not worker:
                    seat.called.set()
            self._note_load(self.engine.load())
        except EngineError as death:
            self._note_death(death)

    def _charge(self) -> None:
        """Share the time since the last turn among those whose requests the engine had."""
        now, n_in_flight = time.monotonic(), len(self._in_flight)
        for seat in self.seats:
            if seat.in_flight:
                seat.claim.engine_s += (now - self._turned_at) * seat.in_flight / n_in_flight
        self._turned_at = now

    def _hand_over(self) -> None:
        while len(self._in_flight) < self._window.size:
            waiting = [seat for seat in self.seats if seat.waiting]
            if not waiting:
                break
            seat = min(waiting, key=self._place)
            request = seat.waiting.popleft()
            self._count(seat, 1)
            self._in_flight[id(request)] = seat, request
            self.engine.submit(request)

    def _place(self, seat: Seat) -> tuple[Sequence[int], int, int]:
        """The least goes first."""
        return seat.claim.rank, self._of_owner[seat.claim.owner], seat.claim.left

    def _count(self, seat: Seat, number: int) -> None:
        self._of_owner[seat.claim.owner] += number
        seat.in_flight += number

    def _note_load(self, load: EngineLoad) -> None:
        self._window.adapt(load, len(self._in_flight), self.engine.max_num_seqs)
        waiting = load.waiting + sum(len(seat.waiting) for seat in self.seats)
        with self._noting:
            events = [*self._load.events, *load.events]
            preempted = self._load.preempted + load.preempted
            self._load = load._replace(waiting=waiting, preempted=preempted, events=events)

    def _note_death(self, death: EngineError) -> None:
        self.died_shared = len(self.seats) > 1
        self.death = death
        self._on_death()


class Seat:
    """The engine of one run, as ``Engine`` says; used by the run's thread."""

    def __init__(self, shared: SharedEngine, claim: Claim) -> None:
        self._shared, self.claim = shared, claim
        self.waiting, self.inbox = deque[Request](), deque[Completion]()
        self.called = threading.Event()  # another run has put something into the inbox
        self.in_flight = 0
        self.limits, self.versions = shared.engine.limits, shared.engine.versions

    @property
    def max_num_seqs(self) -> int:
        """All of the engine's: the others may have nothing to do."""
        return self._shared.engine.max_num_seqs

    def submit(self, request: Request) -> None:
        self.waiting.append(request)

    def poll(self, timeout_s: float) -> Sequence[Completion]:
        self._shared.work(self, time.monotonic() + timeout_s)
        death = self._shared.death  # read first: all that was answered before is in the inbox
        done = [self.inbox.popleft() for _ in range(len(self.inbox))]
        if death is None or done:
            return done
        if not self._shared.died_shared:
            raise death
        time.sleep(timeout_s)  # this run is about to be stopped
        return []

    def load(self) -> EngineLoad:
        return self._shared.take_load()

    def abort(self, requests: Sequence[Request]) -> None:
        """They are when the run leaves."""

    def leave(self) -> None:
        self._shared.leave(self)

    def close(self) -> None:
        """The supervisor's restart: a run that only ends leaves."""
        self._shared.restart()
        self.leave()
