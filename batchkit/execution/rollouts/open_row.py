"""A row in progress that has several generations: its requests, and their answers from the engine or the ledger."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from msgspec.structs import replace

from batchkit.errors import ReplayError, RowError
from batchkit.execution.completions import resolved
from batchkit.execution.start import Start
from batchkit.rendering.body import with_temperature
from batchkit.sources.rowhash import input_hash
from batchkit.storage.steps import completion_of
from batchkit.types import Call, Choice, Completion, Key, Request, Row, Task, Usage, sum_of

if TYPE_CHECKING:
    from batchkit.execution.rollouts.rollouts import Rollouts
    from batchkit.execution.rollouts.row_loop import Render


class Asked(NamedTuple):
    """A request and the future of its answer."""

    request: Request
    answer: asyncio.Future[Completion]

    @property
    def engine(self) -> str:
        return "" if self.request.call is None else self.request.call.engine


class OpenRow:
    """A row in progress.

    Only the event loop's thread uses it, except for ``pending``, which other threads also use; ``Rollouts._changed``
    guards it.

    - ``pending``: requests without an answer.
    - ``since``: time of the row's last answer; before the first answer, time of its beginning.
    """

    def __init__(self, task: Task, start: Start, rollouts: Rollouts) -> None:
        self.task = task
        self._start, self._rollouts = start, rollouts
        self._replay = Replay(task, strict=start.job.output.replay == "strict")
        self._calls = Counter[str]()
        self._answered: list[tuple[float, Usage | None, Usage | None]] = []
        # The endpoint of the row's batch line, if a step sent that line's body.
        self._endpoint: str | None = None
        self._n_rendering = 0
        self.pending: dict[Key, Asked] = {}
        self.since = time.monotonic()
        self.coroutine: asyncio.Task[None] | None = None

    @property
    def has_begun(self) -> bool:
        """True once the row has received an answer."""
        return bool(self._answered)

    @property
    def row(self) -> Row:
        return self.task.row

    @property
    def is_rendering(self) -> bool:
        """True while a request of the row is being rendered."""
        return self._n_rendering > 0

    @property
    def fault(self) -> ReplayError | None:
        """An error if the row made other requests than before it was interrupted, otherwise None. Valid once the row
        has ended."""
        return self._replay.fault

    def idle_s(self, now: float) -> float:
        """Return for how many seconds the row has waited neither for a generation nor for rendering; 0 while it waits
        for one of them."""
        return 0.0 if self.pending or self._n_rendering else now - self.since

    async def ask(
        self, render: Render, step: str = "", engine: str = "", *, takes_long: bool = True
    ) -> Completion | None:
        """Make a request with ``render``, and return its completion, from the ledger if it was recorded before.

        Returns None if ``render`` returns None, which means that a step is skipped. The completion has ``error`` set if
        the generation failed.

        ``takes_long``: True calls ``render`` in a thread, because it opens files or waits.

        Raises:
            RowError: raised by ``render``.
        """
        call = Call(step, self._calls[step], engine)
        self._calls[step] += 1

        def named() -> Request | None:
            request = render()
            return None if request is None else self._with_call(request, call)

        request = await self._rendered(named) if takes_long else named()
        if request is None:
            return None
        self._endpoint = self._endpoint or request.endpoint
        completion = await self._completion(request)
        self._answered.append((completion.latency_s, completion.usage, completion.earlier_usage))
        if request.media_bytes:  # a function may keep the completion; free the pixels
            completion = replace(completion, request=replace(request, messages=None))
        return completion

    async def opened(self, render: Callable[[], Request]) -> Request:
        """Render a request in a thread, without sending it. Its media count as memory in use until ``close`` is
        called."""
        request = await self._rendered(render)
        assert request is not None
        return request

    def close(self, request: Request) -> None:
        self._rollouts.renders.free(request)

    def failed(self, error: RowError) -> Completion:
        return replace(self.outcome(None, ()), error=error)

    def outcome(self, last: Completion | None, choices: Sequence[Choice]) -> Completion:
        """Return the completion that settles the whole row, with ``choices`` as its answer.

        Usage and latency are sums over the row's generations.

        ``last``: the generation whose prompt and parsed value the row's record gets, or None.
        """
        row = self.task.row
        request = Request(row, None, None, {}, input_hash(row.fields), self.task.attempt)
        return Completion(
            replace(request, endpoint=self._endpoint),
            choices,
            sum_of([usage for _, *usages in self._answered for usage in usages if usage]),
            sum(latency_s for latency_s, *_ in self._answered),
            prompt=None if last is None else last.prompt,
            parsed=None if last is None else last.parsed,
            generations=len(self._answered),
        )

    async def _rendered(self, render: Render) -> Request | None:
        self._n_rendering += 1
        try:
            return await self._rollouts.renders.rendered(render)
        finally:
            self._n_rendering -= 1
            self.since = time.monotonic()

    def _with_call(self, request: Request, call: Call) -> Request:
        """Return ``request`` as generation ``call`` of this row, with the request's hash and the row's attempt
        number."""
        attempt, retry = self.task.attempt, self._start.job.retry
        named = self._start.hashes.hashed(replace(request, call=call))
        sampling = with_temperature(request.sampling, attempt, retry)
        return replace(named, attempt=attempt, sampling=sampling, input_hash=named.request_hash)

    async def _completion(self, request: Request) -> Completion:
        """Return the recorded completion of ``request``; without one, send it to the engine and wait."""
        assert request.call is not None
        request, line = self._replay.find(request)
        if line is None:
            return await self._rollouts.generated(self, request)
        self._rollouts.renders.free(request)
        await asyncio.sleep(0)  # let concurrent calls run first, as they would with an engine
        return resolved(self._start, completion_of(line, request))


class Replay:
    """The recorded generations of one row. After an interruption, each generation answers one request.

    A request is found by a hash of its content, so concurrent calls may come in another order than before. Equal
    requests are counted, so that each gets its own answer (``_hash_of_equal``).

    ``fault`` is set if the row made a new request and left a recorded answer unused. There is no fault

    - in a retry, which gets answers of ``earlier`` attempts, but not their errors;
    - if ``strict`` is False;
    - if lines of the row have ``replay: fresh``: another function made them, or one of them was damaged.
    """

    def __init__(self, task: Task, *, strict: bool) -> None:
        is_fresh = any(line.get("replay") == "fresh" for line in task.known)
        self._strict = strict and task.attempt == 1 and not is_fresh
        self._left: dict[tuple[str, str], Mapping[str, Any]] = {}
        for line in task.known:
            if line["status"] == "ok" or not line.get("earlier"):
                self._left.setdefault((line["step"], line["request_hash"]), line)
        self._taken = {(line["step"], line["call"]) for line in task.known}
        self._asked = Counter[tuple[str, str]]()
        self._new: Call | None = None

    def find(self, request: Request) -> tuple[Request, Mapping[str, Any] | None]:
        """Return ``request`` and its recorded generation.

        If there is no recorded generation, return ``request`` with the next unused number of a call, and None. The
        ledger will store the new generation under this number.
        """
        call = request.call
        assert call is not None
        times = self._asked[call.step, request.request_hash]
        self._asked[call.step, request.request_hash] += 1
        asked = _hash_of_equal(request.request_hash, times)
        if (found := self._left.pop((call.step, asked), None)) is not None:
            return request, found
        self._new = self._new or call
        number = call.number
        while (call.step, number) in self._taken:
            number += 1
        self._taken.add((call.step, number))
        return replace(request, call=call._replace(number=number), request_hash=asked), None

    @property
    def fault(self) -> ReplayError | None:
        """An error if the requests differ from the recorded ones, otherwise None. Valid once the row has ended."""
        if self._new is None or not (self._strict and self._left):
            return None
        return ReplayError(
            f"{self._new.in_words} differs from the requests made before this row was interrupted, so the"
            " rollout's function is not deterministic; let the function depend only on the row and on answers"
            ' (a seed for random numbers, no clock), or set output.replay = "fresh"'
        )


def _hash_of_equal(request_hash: str, times: int) -> str:
    """Return the hash of a request after the row has already made ``times`` equal requests.

    Each of the equal requests gets a different hash, so that several samples of one prompt keep their answers, even if
    some were in flight when the row was interrupted.
    """
    if times == 0:
        return request_hash
    return hashlib.blake2b(f"{request_hash} {times}".encode(), digest_size=16).hexdigest()
