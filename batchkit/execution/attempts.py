"""Further attempts of a row within a run: after a failure, with a shorter prompt, or for a missing
answer.

If an attempt that asks for a missing answer fails, the row keeps the answer that it has. An answer
that is not what ``output.parse`` asks for is missing, too.
"""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from msgspec.structs import replace

from batchkit.config.tables import RetryTable
from batchkit.errors import (
    EmptyTextError,
    InvalidOutputError,
    PromptTooLongError,
    RowOutOfMemoryError,
)
from batchkit.rendering.messages import loaded, with_note, with_parts
from batchkit.rendering.sampling import with_temperature
from batchkit.types import Completion, Key, Request, Usage

if TYPE_CHECKING:
    from PIL.Image import Image

_MOST_DOUBLINGS = 60  # longer than any run; a float overflows past 1023


class _Asked(NamedTuple):
    """A row that was asked again: how often, and its last answer, used if no other follows.

    ``answer`` is a failure if no answer was what is asked for.
    """

    times: int
    answer: Completion


class Attempts:
    """Decides for each completion whether its row is settled, and holds the requests to retry.

    ``shorter`` makes a request with a shorter prompt, or returns None if none helps.
    ``finds_nothing`` returns True if an answer lacks what the scoring looks for in it. Used by one
    thread only; ``retried`` counts all further attempts except those with shorter prompts.
    """

    def __init__(
        self,
        retry: RetryTable,
        shorter: Callable[[Request, PromptTooLongError], Request | None],
        finds_nothing: Callable[[Completion], bool] | None,
    ) -> None:
        self._retry = retry
        self._shorter = shorter
        self._finds_nothing = finds_nothing if retry.reask else None
        self._waiting = Waiting()
        self._tries: dict[Key, int] = {}
        self._asked: dict[Key, _Asked] = {}
        self._spent: dict[Key, list[Usage]] = {}
        self.retried = 0

    def __len__(self) -> int:
        """Requests that wait to be submitted again."""
        return len(self._waiting)

    def pop_due(self) -> Request | None:
        """A request that is due for another attempt, if there is one."""
        return self._waiting.pop_due()

    def settle(self, completion: Completion) -> Completion | None:
        """The completion that settles the row, or None if the row is tried again."""
        is_tried_again = self._tries or self._asked or self._spent or self._retry.reask
        if completion.error is None and not is_tried_again:  # as nearly all are
            return completion
        key, settled = completion.request.key, self._settled(completion)
        if settled is None:
            if completion.usage is not None:
                self._spent.setdefault(key, []).append(completion.usage)
            return None
        spent = self._spent.pop(key, None)
        if spent is None:
            return settled
        if settled is not completion and settled.usage is not None:  # an earlier answer is kept
            spent.remove(settled.usage)
            spent += filter(None, [completion.usage])
        return replace(settled, earlier_usage=_sum(spent))

    def _settled(self, completion: Completion) -> Completion | None:
        if self._is_shortened(completion) or self._is_retried(completion):
            return None
        key = completion.request.key
        asked = self._asked.pop(key, None)
        best, times = completion, 0 if asked is None else asked.times
        if completion.error is not None and asked is not None and asked.answer.error is None:
            best = asked.answer
        return None if self._is_asked_again(completion, best, times) else best

    def _is_shortened(self, completion: Completion) -> bool:
        if not isinstance(completion.error, PromptTooLongError):
            return False
        shorter = self._shorter(completion.request, completion.error)
        if shorter is None:
            return False
        if shorter.key in self._asked:  # rendered again, without the note
            shorter = with_note(shorter) or shorter
        self._waiting.add(shorter, wait_s=0)
        return True

    def _is_retried(self, completion: Completion) -> bool:
        key = completion.request.key
        tries = self._tries.pop(key, 0) + 1
        if self._retry.reask and isinstance(completion.error, InvalidOutputError):
            return False  # it is asked again, with the note
        again = next_attempt(completion, tries, self._retry)
        if again is None:
            return False
        self._tries[key] = tries
        self._submit(again, wait_s(tries, self._retry))
        return True

    def _is_asked_again(self, completion: Completion, best: Completion, times: int) -> bool:
        if times >= self._retry.reask or not self._lacks_answer(completion):
            return False
        again = with_note(completion.request) if times == 0 else completion.request
        if again is None:
            return False
        self._asked[completion.request.key] = _Asked(times + 1, best)
        self._submit(next_sampling(again, self._retry), 0)
        return True

    def _lacks_answer(self, completion: Completion) -> bool:
        if completion.error is not None:
            return isinstance(completion.error, InvalidOutputError)
        return self._finds_nothing is not None and self._finds_nothing(completion)

    def _submit(self, request: Request, wait_s: float) -> None:
        self.retried += 1
        self._waiting.add(request, wait_s)


class Waiting:
    """Requests to be submitted again, each when it is due."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._heap: list[tuple[float, int, Request]] = []
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, request: Request, wait_s: float) -> None:
        """Hold ``request`` for ``wait_s`` seconds."""
        heapq.heappush(self._heap, (self._clock() + wait_s, next(self._numbers), request))

    def pop_due(self) -> Request | None:
        """The request that has been due the longest, if one is."""
        if not self._heap or self._heap[0][0] > self._clock():
            return None
        return heapq.heappop(self._heap)[2]


def _sum(spent: Sequence[Usage]) -> Usage | None:
    if not spent:
        return None
    return Usage(
        sum(usage.prompt_tokens for usage in spent),
        sum(usage.completion_tokens for usage in spent),
    )


def next_attempt(completion: Completion, tries: int, retry: RetryTable) -> Request | None:
    """The request to submit again, or None if the failure is final.

    ``tries`` counts the row's tries in this run, including the one that just failed.
    """
    request, error = completion.request, completion.error
    if error is None or not error.retryable or tries >= retry.attempts:
        return None
    if isinstance(error, RowOutOfMemoryError):
        if not request.images:
            return None
        request = with_smaller_images(request)
    again = next_sampling(request, retry)
    is_of_the_model = isinstance(error, EmptyTextError | InvalidOutputError)
    if is_of_the_model and not again.sampling.get("temperature"):
        return None  # greedy: it would be the same again
    return again


def next_sampling(request: Request, retry: RetryTable) -> Request:
    """``request`` with the number and the temperature of its next attempt."""
    attempt = request.attempt + 1
    sampling = with_temperature(request.sampling, attempt, retry)
    return replace(request, sampling=sampling, attempt=attempt)


def wait_s(tries: int, retry: RetryTable) -> float:
    """Seconds before the next try after ``tries`` tries; doubles each time."""
    return retry.backoff_s * 2.0 ** min(tries - 1, _MOST_DOUBLINGS)


def with_smaller_images(request: Request) -> Request:
    """``request`` with every image at half its pixels, the aspect kept."""
    if (pair := request.pair) is not None:
        documents = [with_parts(document, _smaller) for document in pair.documents]
        return replace(
            request, pair=pair._replace(query=with_parts(pair.query, _smaller), documents=documents)
        )
    return replace(request, messages=loaded(list(request.messages or ()), _smaller))


def _smaller(image: Image) -> dict[str, Any]:
    size = max(1, round(image.width / 2**0.5)), max(1, round(image.height / 2**0.5))
    return {"type": "image_pil", "image_pil": image.resize(size)}
