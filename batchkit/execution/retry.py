"""The layer ``Retry``: retries within a run. A request is retried in three cases:

- It failed for a temporary reason.
- Its prompt was too long; the retry has a shorter one.
- Scoring finds no prediction in its answer, or ``output.parse`` fails, and ``retry.reask`` allows another request. If
  the retry fails, the row keeps its earlier answer.
"""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from batchkit.config.tables import RetryTable
from batchkit.errors import (
    EmptyTextError,
    InvalidOutputError,
    PromptTooLongError,
    RowOutOfMemoryError,
)
from batchkit.execution.completions import lacks_answer, resolved
from batchkit.execution.engine_layer import EngineLayer, asked_again
from batchkit.execution.events import Load
from batchkit.execution.start import Start
from batchkit.rendering.body import with_temperature
from batchkit.rendering.messages import image_part, loaded, with_note, with_parts
from batchkit.types import Clip, Completion, Key, Request, Usage, Video, sum_of

if TYPE_CHECKING:
    from PIL.Image import Image

_MOST_DOUBLINGS = 60  # longer than any run; a float overflows past 1023


@dataclass
class _RetryState:
    """The attempts at one request so far."""

    tries: int = 0  # failed tries since the last ``reask``
    asked: int = 0  # retries because the answer was missing (``retry.reask``)
    answer: Completion | None = None  # the best attempt so far, possibly a failed one
    spent: list[Usage] = field(default_factory=list)  # usage of the attempts that are not returned


class Retry(EngineLayer):
    """The layer that settles requests: each of its completions is final. A request that is retried waits here until its
    backoff ends.

    ``load`` does not count retries with a shorter prompt as retries.
    """

    def __init__(
        self, below: EngineLayer, start: Start, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(below)
        self._start, self._retry, self._clock = start, start.job.retry, clock
        self._waiting: list[tuple[float, int, Request]] = []  # a heap
        # Decides between equal times, because requests can't be compared.
        self._numbers = itertools.count()
        self._rows: dict[Key, _RetryState] = {}
        self._retried = 0

    def resubmit(self) -> None:
        self.below.resubmit()
        while self.below.room > 0 and self._waiting and self._waiting[0][0] <= self._clock():
            self.below.submit(heapq.heappop(self._waiting)[2])

    def poll(self, timeout_s: float) -> Sequence[Completion]:
        done = [self.settle(completion) for completion in self.below.poll(timeout_s)]
        return [completion for completion in done if completion is not None]

    def settle(self, completion: Completion) -> Completion | None:
        """Select the choice of ``completion``, check that it is complete, and parse it. Return the completion that
        settles the request, or None if the request is retried."""
        completion = resolved(self._start, completion)
        # The usual case: nothing was retried and nothing can be asked again.
        if completion.error is None and not (self._rows or self._retry.reask):
            return completion
        key = completion.request.key
        row = self._rows.pop(key, None) or _RetryState()
        if self._retry_later(completion, row):
            row.spent += filter(None, [completion.usage, completion.earlier_usage])
            self._rows[key] = row
            return None
        settled = _best(completion, row)
        row.spent += filter(None, [completion.earlier_usage])  # of a layer below
        if settled is not completion and settled.usage is not None:  # an earlier answer is kept
            row.spent.remove(settled.usage)
            row.spent += filter(None, [completion.usage])
        return replace(settled, earlier_usage=sum_of(row.spent)) if row.spent else settled

    @property
    def load(self) -> Load:
        load = self.below.load
        return load._replace(retried=load.retried + self._retried)

    def _retry_later(self, completion: Completion, row: _RetryState) -> bool:
        """Schedule another attempt at the request if the job allows it. Return True if an attempt is scheduled."""
        if isinstance(completion.error, PromptTooLongError):
            return self._shorten(completion.request, completion.error, row)
        reasks = self._retry.reask and isinstance(completion.error, InvalidOutputError)
        again = None if reasks else next_attempt(completion, row.tries + 1, self._retry)
        if again is not None:
            row.tries += 1
            self._submit(again, wait_s(row.tries, self._retry))
            return True
        return self._reask(completion, row)

    def _shorten(self, request: Request, error: PromptTooLongError, row: _RetryState) -> bool:
        shorter = self._start.renderer.shortened(request, error)
        if shorter is None:
            return False
        if row.asked:  # the shorter prompt was rendered without the note
            shorter = with_note(shorter) or shorter
        self._wait(shorter, 0)
        return True

    def _reask(self, completion: Completion, row: _RetryState) -> bool:
        if row.asked >= self._retry.reask or not lacks_answer(self._start, completion):
            return False
        again = completion.request if row.asked else with_note(completion.request)
        if again is None:
            return False
        row.answer = _best(completion, row)
        row.asked, row.tries = row.asked + 1, 0
        self._submit(next_sampling(again, self._retry), 0)
        return True

    def _submit(self, request: Request, wait_s: float) -> None:
        self._retried += 1
        self._wait(request, wait_s)

    def _wait(self, request: Request, wait_s: float) -> None:
        if request.call is None:  # a generation keeps the hash of the request that its row made
            request = self._start.hashes.hashed(request)
        heapq.heappush(self._waiting, (self._clock() + wait_s, next(self._numbers), request))


def _best(completion: Completion, row: _RetryState) -> Completion:
    """Return this attempt's completion; if this attempt failed, return the row's earlier answer, if there is one."""
    had = row.answer
    return completion if completion.error is None or had is None or had.error else had


def next_attempt(completion: Completion, tries: int, retry: RetryTable) -> Request | None:
    """Return the request to submit again, or None if the failure is final.

    ``tries``: number of tries of the row in this run, including the failed one.
    """
    request, error = completion.request, completion.error
    if error is None or not error.retryable or tries >= retry.attempts:
        return None
    if isinstance(error, RowOutOfMemoryError):
        if not request.images and not any(isinstance(clip, Video) for clip in request.all_clips):
            return None
        request = with_smaller_media(request)
    again = next_sampling(request, retry)
    is_of_the_model = isinstance(error, EmptyTextError | InvalidOutputError)
    if is_of_the_model and not again.sampling.get("temperature"):
        return None  # greedy decoding would give the same answer
    return again


def next_sampling(request: Request, retry: RetryTable) -> Request:
    """Return ``request`` with the attempt number and the sampling temperature of its next attempt."""
    return asked_again(request, with_temperature(request.sampling, request.attempt + 1, retry))


def wait_s(tries: int, retry: RetryTable) -> float:
    """Return the seconds to wait after ``tries`` failed tries. The time doubles with each try."""
    return retry.backoff_s * 2.0 ** min(tries - 1, _MOST_DOUBLINGS)


def with_smaller_media(request: Request) -> Request:
    """Return ``request`` with images at half their pixels (same aspect ratio) and half the frames of each video."""
    if (pair := request.pair) is not None:
        documents = [with_parts(document, _smaller) for document in pair.documents]
        return replace(
            request, pair=pair._replace(query=with_parts(pair.query, _smaller), documents=documents)
        )
    if request.messages is None:
        return replace(request, clips=[_fewer_frames(clip) for clip in request.clips])
    return replace(request, messages=loaded(list(request.messages), _smaller))


def _fewer_frames(clip: Clip) -> Clip:
    return clip.halved() if isinstance(clip, Video) else clip


def _smaller(kind: str, found: Any) -> dict[str, Any]:
    if kind != "image":
        return {"type": kind, kind: _fewer_frames(found)}
    image: Image = found
    size = max(1, round(image.width / 2**0.5)), max(1, round(image.height / 2**0.5))
    return image_part(image.resize(size))
