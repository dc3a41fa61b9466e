"""One row that is begun: what it has asked for, and what it was answered."""

from __future__ import annotations

import asyncio
import heapq
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol, TypeVar

from batchkit.config.tables import JobConfig
from batchkit.execution.rollouts.replay import Recorded, Replay, request_hash
from batchkit.rendering.sampling import with_temperature
from batchkit.sources.rowhash import input_hash
from batchkit.storage.steps import completion_of
from batchkit.types import Call, Choice, Completion, Request, Row, Task, Usage

T = TypeVar("T")

Answer = asyncio.Future[Completion]


class Desk(Protocol):
    """What a row needs of ``Rollouts``."""

    def queue(self, request: Request, answer: Answer) -> None:
        """Have ``request`` answered."""

    async def in_thread(self, do: Callable[[], T]) -> T:
        """The result of ``do``, which may take long."""


class OpenRow:
    """Used by the event loop's thread only; others may read ``waiting`` and ``since``.

    ``waiting``: generations that it waits for. ``since``: when it last got one, or began.
    """

    def __init__(self, task: Task, job: JobConfig, desk: Desk) -> None:
        self.task = task
        self._job, self._desk = job, desk
        self._replay = Replay(task, strict=job.output.replay == "strict")
        self._calls = Counter[str]()
        self._recorded: list[tuple[int, Recorded, Request, Answer]] = []
        self._usages: list[Usage] = []
        self._latency_s = 0.0
        self._n_answered = 0
        self.waiting = 0
        self.since = time.monotonic()
        self.coroutine: asyncio.Task[None] | None = None

    @property
    def has_begun(self) -> bool:
        """True once it got an answer."""
        return self._n_answered > 0

    @property
    def row(self) -> Row:
        return self.task.row

    async def in_thread(self, do: Callable[[], T]) -> T:
        return await self._desk.in_thread(do)

    async def ask(self, request: Request, step: str = "", engine: str = "") -> Completion:
        """One generation; a failed one has its error. The engine gets ``request`` unless the ledger
        has its answer.

        Raises:
            ReplayError: the ledger has the answer to another request at this place.
        """
        number = self._calls[step]
        self._calls[step] += 1
        asked = (
            await self.in_thread(lambda: request_hash(request, engine))
            if request.media_bytes
            else request_hash(request, engine)
        )
        attempt = self.task.attempt
        request = replace(
            request,
            call=Call(step, number, asked, engine),
            attempt=attempt,
            sampling=with_temperature(request.sampling, attempt, self._job.retry),
        )
        loop = asyncio.get_running_loop()
        answer: Answer = loop.create_future()
        found = self._replay.find(step, number, asked)
        if found is None:
            self._desk.queue(request, answer)
        else:
            heapq.heappush(self._recorded, (found.place, found, request, answer))
            loop.call_soon(self._answer_recorded)
        self.waiting += 1
        try:
            completion = await answer
        finally:
            self.waiting -= 1
            self.since = time.monotonic()
        self._count(completion)
        return completion

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

    def _answer_recorded(self) -> None:
        """One at a time, in the order in which they came then: calls that run side by side go on as
        they did."""
        _, found, request, answer = heapq.heappop(self._recorded)
        if not answer.done():
            answer.set_result(completion_of(found.line, request))

    def _count(self, completion: Completion) -> None:
        self._n_answered += 1
        self._latency_s += completion.latency_s
        self._usages += filter(None, (completion.usage, completion.earlier_usage))
