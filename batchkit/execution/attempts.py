"""Further attempts of a row within a run: after a failure, with a shorter prompt, or for a missing
answer.

If an attempt that asks for a missing answer fails, the row keeps the answer that it has. An answer
that is not what ``output.parse`` asks for is missing, too.
"""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Callable
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
from batchkit.execution.settle import lacks_answer
from batchkit.execution.start import Start
from batchkit.rendering.body import with_temperature
from batchkit.rendering.messages import image_part, loaded, with_note, with_parts
from batchkit.types import Clip, Completion, Key, Request, Usage, Video, sum_of

if TYPE_CHECKING:
    from PIL.Image import Image

_MOST_DOUBLINGS = 60  # longer than any run; a float overflows past 1023


@dataclass
class _Further:
    """The further attempts of one row: ``tries`` that failed, in a row; how often it was ``asked`` for a
    missing answer, and the ``answer`` that it has, or the failure if no answer was what is asked for;
    and what was ``spent``."""

    tries: int = 0
    asked: int = 0
    answer: Completion | None = None
    spent: list[Usage] = field(default_factory=list)


class Attempts:
    """Decides for each completion whether its row is settled, and holds the requests to retry.

    Used by one thread; ``retried`` counts all further attempts except those with shorter prompts.
    """

    def __init__(self, start: Start, clock: Callable[[], float] = time.monotonic) -> None:
        self._start, self._retry, self._clock = start, start.job.retry, clock
        self._waiting: list[tuple[float, int, Request]] = []  # a heap
        self._numbers = itertools.count()
        self._rows: dict[Key, _Further] = {}
        self.retried = 0

    def __len__(self) -> int:
        """Requests that wait to be submitted again."""
        return len(self._waiting)

    def pop_due(self) -> Request | None:
        """The request that has been due the longest, if one is."""
        if not self._waiting or self._waiting[0][0] > self._clock():
            return None
        return heapq.heappop(self._waiting)[2]

    def settle(self, completion: Completion) -> Completion | None:
        """The completion that settles the request, or None if it is tried again."""
        if completion.error is None and not (self._rows or self._retry.reask):  # as nearly all are
            return completion
        key = completion.request.key
        row = self._rows.pop(key, None) or _Further()
        if self._is_tried_again(completion, row):
            if completion.usage is not None:
                row.spent.append(completion.usage)
            self._rows[key] = row
            return None
        settled = _best(completion, row)
        if settled is not completion and settled.usage is not None:  # an earlier answer is kept
            row.spent.remove(settled.usage)
            row.spent += filter(None, [completion.usage])
        return replace(settled, earlier_usage=sum_of(row.spent)) if row.spent else settled

    def _is_tried_again(self, completion: Completion, row: _Further) -> bool:
        if isinstance(completion.error, PromptTooLongError):
            return self._is_shortened(completion.request, completion.error, row)
        is_asked_again = self._retry.reask and isinstance(completion.error, InvalidOutputError)
        again = None if is_asked_again else next_attempt(completion, row.tries + 1, self._retry)
        if again is not None:
            row.tries += 1
            self._submit(again, wait_s(row.tries, self._retry))
            return True
        return self._is_asked_again(completion, row)

    def _is_shortened(self, request: Request, error: PromptTooLongError, row: _Further) -> bool:
        shorter = self._start.renderer.shortened(request, error)
        if shorter is None:
            return False
        if row.asked:  # rendered again, without the note
            shorter = with_note(shorter) or shorter
        self._wait(shorter, 0)
        return True

    def _is_asked_again(self, completion: Completion, row: _Further) -> bool:
        if row.asked >= self._retry.reask or not self._lacks_answer(completion):
            return False
        again = completion.request if row.asked else with_note(completion.request)
        if again is None:
            return False
        row.answer = _best(completion, row)
        row.asked, row.tries = row.asked + 1, 0
        self._submit(next_sampling(again, self._retry), 0)
        return True

    def _lacks_answer(self, completion: Completion) -> bool:
        if completion.error is not None:
            return isinstance(completion.error, InvalidOutputError)
        return lacks_answer(self._start, completion)

    def _submit(self, request: Request, wait_s: float) -> None:
        self.retried += 1
        self._wait(request, wait_s)

    def _wait(self, request: Request, wait_s: float) -> None:
        heapq.heappush(self._waiting, (self._clock() + wait_s, next(self._numbers), request))


def _best(completion: Completion, row: _Further) -> Completion:
    """An earlier answer, if this attempt failed."""
    had = row.answer
    return completion if completion.error is None or had is None or had.error else had


def next_attempt(completion: Completion, tries: int, retry: RetryTable) -> Request | None:
    """The request to submit again, or None if the failure is final.

    ``tries`` counts the row's tries in this run, including the one that just failed.
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


def with_smaller_media(request: Request) -> Request:
    """``request`` with every image at half its pixels, the aspect kept, and every other frame of a video."""
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
