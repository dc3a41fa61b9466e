"""One engine for several runs at the same time, each in its own thread.

Each run has a seat, which implements Engine. A run's requests wait in its seat until the engine has room, and their
completions return only to this seat. These rules decide from which run the next request is taken; a later rule decides
between runs that are equal by the earlier ones:

- the run with the lowest rank;
- the run whose owner has the fewest requests in the engine, so that busy owners get equal shares;
- the run with the fewest rows left.

A run that ends or is stopped leaves its seat, and the engine stays loaded.

If the engine dies, the request at fault is unknown, and a search among several runs would suspect innocent rows. So
``on_death`` stops all runs. The caller then resumes each run alone for a while, and each run searches among its own
rows.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

from batchkit.engines.base import Engine, EngineLoad
from batchkit.engines.process.launcher import Launcher
from batchkit.errors import EngineError
from batchkit.execution.engine_pool import EnginePool, EngineSpec, LoadedEngine, fits
from batchkit.execution.places import Place
from batchkit.execution.window import Window
from batchkit.types import Completion, Request

_SLICE_S = 0.005  # longest poll of a shared engine: requests that other runs submit meanwhile wait for its end
_RESERVED_S = 1.0  # how long an idle engine waits for the next request that must run alone


@dataclass
class EngineClaim:
    """A run's claim to use an engine: who owns the run, and the priority of its requests."""

    owner: str
    rank: tuple[int, ...]  # requests with the lowest rank go first; may change while the run works
    rows: int  # rows to answer
    answered: int = 0  # requests that were answered
    engine_s: float = 0.0  # the engine's time, in proportion to the run's share of its requests

    @property
    def left(self) -> int:
        return self.rows - self.answered


@dataclass(frozen=True)
class SharedEngines:
    """The engines of several runs, as one of these runs sees them. It implements ``Pool``.

    - ``pool``: starts the engines' processes.
    - ``on_death``: called once per dead engine, by a run's thread. It must stop the runs without waiting for requests
      in flight, which are lost.
    - ``environment``: variables of the engines' processes.
    - ``claim``: the owner and the priority of the run (``of``).
    """

    pool: EnginePool
    on_death: Callable[[], None]
    environment: Mapping[str, str]
    claim: EngineClaim | None = None
    _shared: dict[str, tuple[SharedEngine, LoadedEngine]] = field(default_factory=dict)
    # Held while a model is loaded, so that other runs wait for the model.
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def of(self, claim: EngineClaim) -> SharedEngines:
        """Return the same engines as the run with this ``claim`` sees them."""
        return replace(self, claim=claim)

    @property
    def idle(self) -> Mapping[str, LoadedEngine]:
        """The loaded engines, in use or not."""
        known = [*self._shared.items()]  # another run's thread may add one meanwhile
        return {name: loaded for name, (shared, loaded) in known if not shared.death}

    def prepare(self, wanted: EngineSpec, kind: str) -> None:
        """Start to import the libraries of the engine ``wanted`` unless it is loaded."""
        with self._lock:
            if wanted.name not in self._shared:
                self._launcher(wanted).prepare(kind)

    def evict(self, places: Sequence[Place]) -> None:
        """Close engines that no run uses and that would take memory from the engines of ``places``."""
        with self._lock:
            for name, (shared, loaded) in [*self._shared.items()]:
                if not shared.seats and not fits(loaded.spec, places):
                    shared.close()
                    del self._shared[name]

    def cancel(self, name: str) -> None:
        """Kill the process that loads the engine ``name``."""
        self.pool.cancel(name)

    def get(self, wanted: EngineSpec, load: Callable[[Launcher], LoadedEngine]) -> LoadedEngine:
        """Return the run's seat at the engine ``wanted``.

        The engine is loaded if it is missing or dead. It is also loaded again if it differs from ``wanted`` and no run
        uses it.
        """
        assert self.claim is not None
        with self._lock:
            shared, loaded = self._shared.pop(wanted.name, (None, None))
            if shared is not None and loaded is not None:
                is_same = loaded.meets(wanted)
                if not shared.check_alive() or not (is_same or shared.seats):
                    shared.close()
                    shared = None
            if shared is None or loaded is None:
                loaded = load(self._launcher(wanted))
                shared = SharedEngine(loaded.engine, self.on_death)
            self._shared[wanted.name] = shared, loaded
            return loaded._replace(engine=shared.seat(self.claim))

    def put(self, loaded: LoadedEngine, *, is_idle: bool) -> None:
        """Leave the seat at the end of the run; requests in flight are dropped."""
        assert isinstance(loaded.engine, Seat)
        loaded.engine.leave()

    def close(self) -> None:
        for shared, _ in self._shared.values():
            shared.close()
        self.pool.close()

    def _launcher(self, wanted: EngineSpec) -> Launcher:
        environment = {**self.environment, **wanted.environment}
        return self.pool.launcher(wanted._replace(environment=environment))


class SharedEngine:
    """An engine and the seats of its runs. The thread of one run at a time polls the engine for all runs."""

    def __init__(self, engine: Engine, on_death: Callable[[], None]) -> None:
        self.engine, self._on_death = engine, on_death
        self.death: EngineError | None = None
        self.died_shared = False
        self.seats: list[Seat] = []  # replaced as a whole, because other threads iterate over it
        self._lock = threading.Lock()  # guards the engine and the requests in flight
        # Guards the load, which is read without waiting for the engine.
        self._noting = threading.Lock()
        self._window = Window(engine.max_num_seqs)
        # By ``id(request)``, because requests of different runs may have the same key.
        self._in_flight: dict[int, tuple[Seat, Request]] = {}
        self._of_owner = Counter[str]()  # requests in flight, by owner
        # A seat whose request ran alone. Until ``_reserved_until``, only this seat may submit, so that the engine need
        # not drain again before its next request.
        self._reserved_for: Seat | None = None
        self._reserved_until = 0.0
        self._load = engine.load()
        self._turned_at = time.monotonic()

    def seat(self, claim: EngineClaim) -> Seat:
        with self._lock:
            self.seats = [*self.seats, seat := Seat(self, claim)]
        return seat

    def leave(self, seat: Seat) -> None:
        with self._lock:
            self.seats = [other for other in self.seats if other is not seat]
            if self._reserved_for is seat:
                self._reserved_for = None
            left = [request for one, request in self._in_flight.values() if one is seat]
            for request in left:
                del self._in_flight[id(request)]
                self._count(seat, -1)
            if left and self.death is None:
                self.engine.abort(left)

    def check_alive(self) -> bool:
        """Poll the engine once, and return whether it is alive."""
        with self._lock:
            self._turn(0)
        return self.death is None

    def wait_for_answer(self, seat: Seat, until: float) -> None:
        """Wait until ``seat`` has an answer, or until the monotonic time ``until``.

        Meanwhile this thread serves all runs: it submits their waiting requests, polls the engine, and puts the answers
        into the runs' seats. If the thread of another run already does this, this thread only waits.
        """
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
        """Return the load since the last call, so that each event is reported to only one run."""
        with self._noting:
            load, self._load = self._load, self._load.without_counts()._replace(events=())
        return load

    def restart(self) -> None:
        """Close the engine because a run needs a new one."""
        if self.death is None:
            self._note_death(EngineError("the engine must be loaded again"))
        self.close()

    def close(self) -> None:
        with self._lock:
            self.engine.close()

    def _turn(self, timeout_s: float, worker: Seat | None = None) -> None:
        """Submit waiting requests, poll the engine once, and put its answers into the seats.

        ``worker``: the caller's seat. It is not notified of its answers.
        """
        if self.death is not None:
            return
        self._charge()
        try:
            self._hand_over()
            for completion in self.engine.poll(timeout_s):
                seat, _ = self._in_flight.pop(id(completion.request), (None, None))
                if seat is None:
                    continue  # its run has left
                if completion.request.alone:
                    self._reserved_for = seat
                    self._reserved_until = time.monotonic() + _RESERVED_S
                self._count(seat, -1)
                seat.claim.answered += 1
                seat.inbox.append(completion)
                if seat is not worker:
                    seat.called.set()
            self._note_load(self.engine.load())
        except EngineError as death:
            self._note_death(death)

    def _charge(self) -> None:
        """Distribute the time since the last call over the runs' ``engine_s``, in proportion to their requests in the
        engine."""
        now, n_in_flight = time.monotonic(), len(self._in_flight)
        for seat in self.seats:
            if seat.n_in_flight:
                seat.claim.engine_s += (now - self._turned_at) * seat.n_in_flight / n_in_flight
        self._turned_at = now

    def _hand_over(self) -> None:
        while len(self._in_flight) < self._window.size:
            if time.monotonic() > self._reserved_until:
                self._reserved_for = None
            allowed = self.seats if self._reserved_for is None else [self._reserved_for]
            waiting = [seat for seat in allowed if seat.waiting]
            if not waiting or self._is_occupied:
                break
            seat = min(waiting, key=self._priority)
            self._reserved_for = None
            if seat.waiting[0].alone and self._in_flight:
                break
            request = seat.waiting.popleft()
            self._count(seat, 1)
            self._in_flight[id(request)] = seat, request
            self.engine.submit(request)

    @property
    def _is_occupied(self) -> bool:
        """True while the engine computes a request that must run alone."""
        return any(request.alone for _, request in islice(self._in_flight.values(), 1))

    def _priority(self, seat: Seat) -> tuple[bool, Sequence[int], int, int]:
        """Return the sort key of a seat. The next request is taken from the seat with the lowest key. A request that must
        run alone comes first, so that others do not delay it forever."""
        others_first = not seat.waiting[0].alone
        return others_first, seat.claim.rank, self._of_owner[seat.claim.owner], seat.claim.left

    def _count(self, seat: Seat, number: int) -> None:
        self._of_owner[seat.claim.owner] += number
        seat.n_in_flight += number

    def _note_load(self, load: EngineLoad) -> None:
        self._window.adapt(load, len(self._in_flight), self.engine.max_num_seqs)
        waiting = load.waiting + sum(len(seat.waiting) for seat in self.seats)
        with self._noting:
            events = [*self._load.events, *load.events]
            load = load.with_counts_of(self._load)
            self._load = load._replace(waiting=waiting, events=events)

    def _note_death(self, death: EngineError) -> None:
        self.died_shared = len(self.seats) > 1
        self.death = death
        self._on_death()


class Seat:
    """One run's access to a shared engine. It implements ``Engine`` and is used by the run's thread."""

    def __init__(self, shared: SharedEngine, claim: EngineClaim) -> None:
        self._shared, self.claim = shared, claim
        self.waiting, self.inbox = deque[Request](), deque[Completion]()
        self.called = threading.Event()  # another run has put something into the inbox
        self.n_in_flight = 0
        self.limits, self.versions = shared.engine.limits, shared.engine.versions

    @property
    def max_num_seqs(self) -> int:
        """The ``max_num_seqs`` of the engine. It is not divided among the runs, because other runs may be idle."""
        return self._shared.engine.max_num_seqs

    def submit(self, request: Request) -> None:
        self.waiting.append(request)

    def poll(self, timeout_s: float) -> Sequence[Completion]:
        self._shared.wait_for_answer(self, time.monotonic() + timeout_s)
        # Read the death first: the inbox then has all answers that came before the death.
        death = self._shared.death
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
        """Do nothing: ``leave`` aborts the run's requests."""

    def leave(self) -> None:
        self._shared.leave(self)

    def close(self) -> None:
        """Close the engine for all runs. The supervisor calls this before a restart. A run that only ends calls
        ``leave``."""
        self._shared.restart()
        self.leave()
