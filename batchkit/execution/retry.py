"""Which failed requests are tried again within a run, when, and what changes."""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from batchkit.config.tables import RetryTable
from batchkit.errors import EmptyTextError, RowOutOfMemoryError
from batchkit.rendering.sampling import with_temperature
from batchkit.types import Completion, Request

_MOST_DOUBLINGS = 60  # longer than any run; a float overflows past 1023


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
    if isinstance(error, EmptyTextError) and not again.sampling.get("temperature"):
        return None  # greedy: it would be empty again
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
    messages = [
        message
        if isinstance(message["content"], str)
        else {**message, "content": [_smaller(part) for part in message["content"]]}
        for message in request.messages or ()
    ]
    return replace(request, messages=messages)


def _smaller(part: Mapping[str, Any]) -> Mapping[str, Any]:
    if part["type"] != "image_pil":
        return part
    image = part["image_pil"]
    size = max(1, round(image.width / 2**0.5)), max(1, round(image.height / 2**0.5))
    return {**part, "image_pil": image.resize(size)}
