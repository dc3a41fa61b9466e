"""A check of plug-ins: each request that an engine or a layer of another package takes must come back once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from batchkit.engines.base import Engine, EngineLoad
from batchkit.errors import EngineError
from batchkit.types import Completion, Key, Request


class Outstanding:
    """The requests that a plug-in has taken and not returned.

    - ``plug_in``: the key of the job file that names it, for messages.
    - ``duty``: the rule that shows batchkit which requests the plug-in still has, for messages.
    """

    def __init__(self, plug_in: str, duty: str) -> None:
        self._plug_in, self._duty = plug_in, duty
        # Counters, because runs that share an engine may use the same keys.
        self._open, self._aborted = Counter[tuple[Key, str]](), Counter[tuple[Key, str]]()

    def __bool__(self) -> bool:
        return bool(self._open)

    def add(self, request: Request) -> None:
        self._open[request.key, request.row.id] += 1

    def abort(self, request: Request) -> None:
        """Let ``request`` come back or not."""
        self._remove((request.key, request.row.id), self._open)
        self._aborted[request.key, request.row.id] += 1

    def take_back(self, done: Sequence[Completion]) -> None:
        """Note that the requests of ``done`` came back.

        Raises:
            EngineError: a request came back twice.
        """
        for completion in done:
            key = completion.request.key, completion.request.row.id
            if not (self._remove(key, self._open) or self._remove(key, self._aborted)):
                raise self._fault(key, "came back twice")

    @property
    def lost(self) -> EngineError:
        """The error for a plug-in that has no request left, but has not returned all."""
        return self._fault(next(iter(self._open)), "never came back")

    def _remove(self, key: tuple[Key, str], among: Counter[tuple[Key, str]]) -> bool:
        count = among.pop(key, 0)
        if count > 1:
            among[key] = count - 1
        return count > 0

    def _fault(self, key: tuple[Key, str], fault: str) -> EngineError:
        index = key[0] if isinstance(key[0], int) else key[0][0]
        # A child process has no ids.
        row = f"row {index} (id {key[1]})" if key[1] else f"row {index}"
        return EngineError(
            f"{self._plug_in}: {row} {fault}; correct the code of this plug-in: every request must come back once, and"
            f" {self._duty}"
        )


class CheckedEngine:
    """An engine of another package. It is checked that each request comes back once."""

    def __init__(self, engine: Engine, kind: str) -> None:
        self._engine = engine
        self.max_num_seqs, self.limits = engine.max_num_seqs, engine.limits
        self.versions = engine.versions
        self._open = Outstanding(
            f'engine.kind = "{kind}"',
            "`load()` counts it as running or waiting until `poll()` can return it",
        )
        self._had_none = False  # the engine had no request at the last ``load``

    def submit(self, request: Request) -> None:
        self._had_none = False
        self._open.add(request)
        self._engine.submit(request)

    def poll(self, timeout_s: float) -> Sequence[Completion]:
        done = self._engine.poll(timeout_s)
        self._open.take_back(done)
        if self._open and self._had_none and not done:
            raise self._open.lost
        return done

    def abort(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self._open.abort(request)
        self._engine.abort(requests)

    def load(self) -> EngineLoad:
        load = self._engine.load()
        self._had_none = not (load.running or load.waiting)
        return load

    def close(self) -> None:
        self._engine.close()
