"""One row that is begun: what it has asked for, and what it was answered."""

from __future__ import annotations

import asyncio
import heapq
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import Any, Protocol, TypeVar
from weakref import WeakSet

from batchkit.config.tables import JobConfig
from batchkit.errors import ReplayError, RowError
from batchkit.execution.rollouts.replay import Recorded, Replay, hash_of_equal, request_hash
from batchkit.rendering.sampling import with_temperature
from batchkit.sources.rowhash import input_hash
from batchkit.storage.steps import completion_of
from batchkit.types import Call, Choice, Completion, Key, Request, Row, Task, Usage

T = TypeVar("T")

Answer = asyncio.Future[Completion]

_ORDER_S = 0.05  # how long a recorded answer waits for those that came before it
_QUIET_TURNS = 8  # of the event loop, after which no task that could ask is left that has not


class Desk(Protocol):
    """What a row needs of ``Rollouts``."""

    def queue(self, row: OpenRow, request: Request) -> Answer:
        """Have ``request`` answered."""

    def unqueue(self, row: OpenRow, request: Request, answer: Answer) -> None:
        """Forget that the row waits for ``answer``. One that was recorded is not queued, and another request
        may be queued under the same key."""

    def runs_alone(self, row: OpenRow) -> bool:
        """Whether no other code of the row runs that may ask."""

    def loading(self) -> AbstractAsyncContextManager[None]:
        """Within it pixels are decoded and queued."""

    async def in_thread(self, do: Callable[[], T]) -> T:
        """The result of ``do``, which may take long."""


class OpenRow:
    """Used by the event loop's thread only; ``Rollouts`` guards ``pending``, the answers that the row
    waits for, and ``stuck``: the engines of those that wait for one that is not loaded. ``since``: when
    it last got one, or began.
    """

    def __init__(self, task: Task, job: JobConfig, desk: Desk) -> None:
        self.task = task
        self._job, self._desk = job, desk
        self._replay = Replay(task, strict=job.output.replay == "strict")
        self._calls = Counter[str]()
        self._asked = Counter[tuple[str, str]]()
        self._recorded: list[tuple[int, Recorded, Request, Answer]] = []
        self._next_place = 0
        self._usages: list[Usage] = []
        self._latency_s = 0.0
        self._n_begun = self._n_answered = self._n_rendering = 0
        self.pending: dict[Key, Answer] = {}
        self.stuck: dict[Key, str] = {}
        self.since = time.monotonic()
        self.coroutine: asyncio.Task[None] | None = None
        self.tasks = WeakSet[asyncio.Task[Any]]()
        """Those that its function has started, directly or not."""
        self.diverged: ReplayError | None = None
        """Set if the row has asked for something else than before it was interrupted."""

    @property
    def has_begun(self) -> bool:
        """True once it got an answer."""
        return self._n_answered > 0

    @property
    def row(self) -> Row:
        return self.task.row

    @property
    def is_stirring(self) -> bool:
        """It renders a request, or has yet to get a recorded answer."""
        return self._n_rendering > 0 or bool(self._recorded)

    def idle_s(self, now: float) -> float:
        """For how long it has waited for nothing that we do."""
        return 0.0 if self.pending or self._n_rendering else now - self.since

    async def ask(
        self,
        render: Callable[[], Request | None],
        step: str = "",
        engine: str = "",
        *,
        takes_long: bool = True,
    ) -> Completion | None:
        """One generation for what ``render`` makes, None if it makes nothing; a failed one has its
        error. The engine gets the request unless the ledger has its answer. ``takes_long``:
        ``render`` opens files, or waits.

        Raises:
            ReplayError: the ledger has the answer to another request at this place.
            RowError: what ``render`` raises.
        """
        number = self._calls[step]
        self._calls[step] += 1
        if not takes_long:
            request = self._named(render(), step, number, engine)
            begun = None if request is None else self._begun(request, self._n_rendering)
        else:
            self._n_rendering += 1
            try:
                async with self._desk.loading():
                    request = await self._desk.in_thread(
                        lambda: self._named(render(), step, number, engine)
                    )
                    others = self._n_rendering - 1
                    begun = None if request is None else self._begun(request, others)
            finally:
                self._n_rendering -= 1
                self.since = time.monotonic()
        if begun is None:
            return None
        request, answer = begun
        try:
            completion = await answer
        finally:
            self._desk.unqueue(self, request, answer)
        self._count(completion)
        if request.media_bytes:  # a function may keep the completion, and not the pixels with it
            completion = replace(completion, request=replace(request, messages=None))
        return completion

    def failed(self, error: RowError) -> Completion:
        """The row's outcome, with ``error``."""
        return replace(self.outcome(None, ()), error=error)

    def outcome(self, last: Completion | None, choices: Sequence[Choice]) -> Completion:
        """The row's, with ``choices`` as its answer; its other parts are those of ``last``."""
        row = self.task.row
        request = Request(row, None, None, {}, input_hash(row.fields), self.task.attempt)
        usage = None
        if self._usages:
            thought = [usage.reasoning_tokens for usage in self._usages]
            known = [tokens for tokens in thought if tokens is not None]
            usage = Usage(
                sum(usage.prompt_tokens for usage in self._usages),
                sum(usage.completion_tokens for usage in self._usages),
                sum(known) if known else None,
            )
        return Completion(
            request,
            choices,
            usage,
            self._latency_s,
            prompt=None if last is None else last.prompt,
            parsed=None if last is None else last.parsed,
            generations=self._n_answered,
        )

    def _named(
        self, request: Request | None, step: str, number: int, engine: str
    ) -> Request | None:
        """``request`` as this row's generation of that number, at the row's attempt."""
        if request is None:
            return None
        attempt, asked = self.task.attempt, request_hash(request, self._job, engine)
        sampling = with_temperature(request.sampling, attempt, self._job.retry)
        call = Call(step, number, asked, engine)
        return replace(request, call=call, attempt=attempt, sampling=sampling, input_hash=asked)

    def _begun(self, request: Request, n_rendering: int) -> tuple[Request, Answer]:
        """The answer to ``request``: the recorded one, or one that the engine will give to the request as
        it is returned. ``n_rendering``: others that are being rendered."""
        call = request.call
        assert call is not None
        self._n_begun += 1
        times = self._asked[call.step, call.request_hash]
        self._asked[call.step, call.request_hash] += 1
        asked = hash_of_equal(call.request_hash, times)
        try:
            others = n_rendering or self.pending or self.stuck or self._recorded
            is_alone = not others and self._desk.runs_alone(self)
            found = self._replay.find(call.step, call.number, asked, is_alone=is_alone)
        except ReplayError as error:
            self.diverged = self.diverged or error
            raise
        if found is None:
            number = self._replay.new_number(call.step, call.number)
            if times or number != call.number:
                call = call._replace(number=number, request_hash=asked)
                request = replace(request, call=call)
            self._answer_when_quiet()
            return request, self._desk.queue(self, request)
        answer: Answer = asyncio.get_running_loop().create_future()
        heapq.heappush(self._recorded, (found.place, found, request, answer))
        self._answer_when_quiet()
        return request, answer

    def _answer_when_quiet(self) -> None:
        """Give the next recorded answer once all that runs side by side has had time to ask: an engine
        would have answered later than that. ``[[steps]]`` ask one after another."""
        if self._recorded:
            self._look_again(self._n_begun, 0 if self._job.steps else _QUIET_TURNS)

    def _look_again(self, n_begun: int, turns: int) -> None:
        if n_begun != self._n_begun:
            return  # it has asked since then, and that looks again itself
        if turns:
            asyncio.get_running_loop().call_soon(self._look_again, n_begun, turns - 1)
        else:
            self._answer_recorded()

    def _answer_recorded(self) -> None:
        """In the order in which they came then: calls that run side by side go on as they did. One
        that came after others which were not asked for again waits a moment for those."""
        if self._recorded and self._recorded[0][0] <= self._next_place:
            place, found, request, answer = heapq.heappop(self._recorded)
            self._next_place = max(self._next_place, place + 1)
            if not answer.done():
                answer.set_result(completion_of(found.line, request))
            self._answer_when_quiet()
        elif self._recorded:
            asyncio.get_running_loop().call_later(
                _ORDER_S, self._skip_to, self._next_place, self._recorded[0][0]
            )

    def _skip_to(self, was: int, place: int) -> None:
        """Those before ``place`` are not asked for, if none has come since ``_next_place`` ``was``."""
        if self._next_place == was:
            self._next_place = place
            self._answer_recorded()

    def _count(self, completion: Completion) -> None:
        self._n_answered += 1
        self._latency_s += completion.latency_s
        self._usages += filter(None, (completion.usage, completion.earlier_usage))
