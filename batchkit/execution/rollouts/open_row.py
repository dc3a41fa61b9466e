"""One row that is begun: what it has asked for, and what it was answered."""

from __future__ import annotations

import asyncio
import heapq
import time
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from msgspec.structs import replace

from batchkit.errors import ReplayError, RowError
from batchkit.execution.rollouts.replay import Recorded, Replay, request_hash
from batchkit.execution.rollouts.threads import Render, RenderRoom
from batchkit.execution.settle import resolved
from batchkit.execution.start import Start
from batchkit.rendering.sampling import with_temperature
from batchkit.sources.rowhash import input_hash
from batchkit.storage.steps import completion_of
from batchkit.types import Call, Choice, Completion, Key, Request, Row, Task, Usage

_QUIET_TURNS = 8  # of the event loop, after which no task that could ask is left that has not


class Asked(NamedTuple):
    """A request, and its answer to come."""

    request: Request
    answer: asyncio.Future[Completion]

    @property
    def engine(self) -> str:
        return "" if self.request.call is None else self.request.call.engine


class Desk(Protocol):
    """What a row needs of ``Rollouts``."""

    renders: RenderRoom

    async def generated(self, row: OpenRow, request: Request) -> Completion:
        """What the engine answers, once that is in the ledger."""


class OpenRow:
    """Used by the event loop's thread only; ``Rollouts`` guards ``pending``, what the row waits for.
    ``since``: when it last got an answer, or began.
    """

    def __init__(self, task: Task, start: Start, desk: Desk) -> None:
        self.task = task
        self._start, self._desk = start, desk
        self._replay = Replay(task, strict=start.job.output.replay == "strict")
        self._calls = Counter[str]()
        self._recorded: list[tuple[int, Recorded, Asked]] = []
        self._n_looks = 0
        self._answered: list[tuple[float, Usage | None, Usage | None]] = []
        self._n_rendering = 0
        self.pending: dict[Key, Asked] = {}
        self.since = time.monotonic()
        self.coroutine: asyncio.Task[None] | None = None

    @property
    def has_begun(self) -> bool:
        """True once it got an answer."""
        return bool(self._answered)

    @property
    def row(self) -> Row:
        return self.task.row

    @property
    def is_stirring(self) -> bool:
        """It renders a request, or has yet to get a recorded answer."""
        return self._n_rendering > 0 or bool(self._recorded)

    @property
    def fault(self) -> ReplayError | None:
        """Set on a row that has ended, and asked for something else than before it was interrupted."""
        return self._replay.fault

    def idle_s(self, now: float) -> float:
        """For how long it has waited for nothing that we do."""
        return 0.0 if self.pending or self._n_rendering else now - self.since

    async def ask(
        self, render: Render, step: str = "", engine: str = "", *, takes_long: bool = True
    ) -> Completion | None:
        """One generation for what ``render`` makes, None if it makes nothing; a failed one has its
        error. The engine gets the request unless the ledger has its answer. ``takes_long``:
        ``render`` opens files, or waits.

        Raises:
            RowError: what ``render`` raises.
        """
        call = Call(step, self._calls[step], "", engine)
        self._calls[step] += 1

        def named() -> Request | None:
            request = render()
            return None if request is None else self._named(request, call)

        request = await self._rendered(named) if takes_long else named()
        if request is None:
            return None
        completion = await self._completion(request)
        self._answered.append((completion.latency_s, completion.usage, completion.earlier_usage))
        if request.media_bytes:  # a function may keep the completion, and not the pixels with it
            completion = replace(completion, request=replace(request, messages=None))
        return completion

    def failed(self, error: RowError) -> Completion:
        """The row's outcome, with ``error``."""
        return replace(self.outcome(None, ()), error=error)

    def outcome(self, last: Completion | None, choices: Sequence[Choice]) -> Completion:
        """The row's, with ``choices`` as its answer; its other parts are those of ``last``."""
        row = self.task.row
        return Completion(
            Request(row, None, None, {}, input_hash(row.fields), self.task.attempt),
            choices,
            _sum([usage for _, *usages in self._answered for usage in usages if usage]),
            sum(latency_s for latency_s, *_ in self._answered),
            prompt=None if last is None else last.prompt,
            parsed=None if last is None else last.parsed,
            generations=len(self._answered),
        )

    async def _rendered(self, render: Render) -> Request | None:
        self._n_rendering += 1
        try:
            return await self._desk.renders.rendered(render)
        finally:
            self._n_rendering -= 1
            self.since = time.monotonic()
            self._answer_when_quiet()

    def _named(self, request: Request, call: Call) -> Request:
        """``request`` as this row's generation ``call``, at the row's attempt."""
        attempt, asked = self.task.attempt, request_hash(request, self._start.job, call.engine)
        sampling = with_temperature(request.sampling, attempt, self._start.job.retry)
        call = call._replace(request_hash=asked)
        return replace(request, call=call, attempt=attempt, sampling=sampling, input_hash=asked)

    async def _completion(self, request: Request) -> Completion:
        """The recorded one, or what the engine answers."""
        assert request.call is not None
        call, found = self._replay.find(request.call)
        if found is None:
            self._answer_when_quiet()
            return await self._desk.generated(self, replace(request, call=call))
        self._desk.renders.free(request)
        asked = Asked(request, asyncio.get_running_loop().create_future())
        heapq.heappush(self._recorded, (found.place, found, asked))
        self._answer_when_quiet()
        return await asked.answer

    def _answer_when_quiet(self) -> None:
        """Give the next recorded answer once all that runs side by side has had time to ask: an engine
        would have answered later than that. ``[[steps]]`` ask one after another."""
        if self._recorded:
            self._n_looks += 1
            self._look(self._n_looks, 0 if self._start.job.steps else _QUIET_TURNS)

    def _look(self, number: int, turns: int) -> None:
        """They are given in the order in which they came then: calls that run side by side go on as they
        did."""
        if number != self._n_looks or self._n_rendering:
            return  # it has asked since then, or will, and that looks again itself
        if turns:
            asyncio.get_running_loop().call_soon(self._look, number, turns - 1)
            return
        _, found, (request, answer) = heapq.heappop(self._recorded)
        if not answer.done():
            answer.set_result(resolved(self._start, completion_of(found.line, request)))
        self._answer_when_quiet()


def _sum(usages: Sequence[Usage]) -> Usage | None:
    if not usages:
        return None
    thought = [usage.reasoning_tokens for usage in usages if usage.reasoning_tokens is not None]
    return Usage(
        sum(usage.prompt_tokens for usage in usages),
        sum(usage.completion_tokens for usage in usages),
        sum(thought) if thought else None,
    )
