"""What is tried again within a run, when, how often, and with what changed."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace
from PIL import Image

from batchkit.config.tables import JobConfig, RetryTable
from batchkit.errors import (
    EmptyTextError,
    MediaError,
    PromptTooLongError,
    RequestError,
    RowError,
    RowOutOfMemoryError,
    RowTimeoutError,
    TemplateError,
)
from batchkit.execution.engine_layer import EngineLayer
from batchkit.execution.events import Load
from batchkit.execution.retry import Retry, next_attempt, wait_s, with_temperature
from batchkit.execution.start import Start
from batchkit.types import Completion, Cut, Request, Row


def failed(error: RowError | None, attempt: int = 1, **sampling: Any) -> Completion:
    request = Request(Row(3, "q3", {"a": 1}), None, "text", sampling, "hash", attempt, 12)
    return Completion(request, error=error)


SLOW, BLANK, FULL = RowTimeoutError("slow"), EmptyTextError("blank"), RowOutOfMemoryError("no room")
ALL_NINE = {"attempts": 9, "temperatures": [1.0]}


@pytest.mark.parametrize(
    ("error", "sampling", "retry", "tries", "again"),
    [
        (SLOW, {"temperature": 0.0}, {}, 1, {"temperature": 0.0}),
        (SLOW, {}, {"attempts": 5}, 4, {}),
        (SLOW, {}, {"attempts": 5}, 5, None),
        (SLOW, {}, {"attempts": 1}, 1, None),
        (None, {}, {}, 1, None),
        (TemplateError("bad"), {"temperature": 1.0}, ALL_NINE, 1, None),
        (MediaError("bad"), {"temperature": 1.0}, ALL_NINE, 1, None),
        (PromptTooLongError("bad"), {"temperature": 1.0}, ALL_NINE, 1, None),
        (RequestError("bad"), {"temperature": 1.0}, ALL_NINE, 1, None),
        (FULL, {}, {"attempts": 9}, 1, None),  # without images
        # A greedy answer would be the same again.
        (BLANK, {}, {}, 1, None),
        (BLANK, {"temperature": 0}, {}, 1, None),
        (BLANK, {"temperature": 0.7}, {}, 1, {"temperature": 0.7}),
        (BLANK, {"temperature": 0.0}, {"temperatures": [0.0, 0.9]}, 1, {"temperature": 0.9}),
        (BLANK, {"temperature": 0.9}, {"temperatures": [0.9, 0.0]}, 1, None),
    ],
    ids=str,
)
def test_what_another_try_may_change_is_tried_again(
    error: RowError | None,
    sampling: dict[str, Any],
    retry: dict[str, Any],
    tries: int,
    again: dict[str, Any] | None,
) -> None:
    """retry-failed continues from the record's attempt, here 7, with all its tries still to come."""
    completion = failed(error, 7, **sampling)
    found = next_attempt(completion, tries, RetryTable(**retry))
    assert (None if found is None else found.sampling) == again
    if found is not None:
        before = completion.request
        assert found == replace(before, sampling=found.sampling, attempt=8)
        assert found.media_bytes == 12, "its pixels are still held"


@pytest.mark.parametrize(
    ("attempt", "temperatures", "temperature"),
    [
        *((1, [0.1, 0.5, 0.9], 0.1), (2, [0.1, 0.5, 0.9], 0.5), (3, [0.1, 0.5, 0.9], 0.9)),
        *((9, [0.1, 0.5, 0.9], 0.9), (4, None, 0.3), (4, [], 0.3)),
    ],
)
def test_temperature_goes_by_attempt_and_the_last_serves_on(
    attempt: int, temperatures: list[float] | None, temperature: float
) -> None:
    sampling = {"temperature": 0.3, "top_k": 5}
    found = with_temperature(sampling, attempt, RetryTable(temperatures=temperatures))
    assert found == {"temperature": temperature, "top_k": 5}
    assert sampling == {"temperature": 0.3, "top_k": 5}


# A row that runs out of memory


def out_of_memory(*sizes: tuple[int, int]) -> Completion:
    parts: list[dict[str, Any]] = [
        {"type": "image_pil", "image_pil": Image.new("RGB", size, (250, 20, 90))} for size in sizes
    ]
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [*parts, {"type": "text", "text": "what is it?"}]},
    ]
    request = Request(Row(3, "q3", {}), messages, None, {"top_k": 5}, "hash", 1, 9999, Cut(5, 9, 1))
    return Completion(request, error=RowOutOfMemoryError("no room"))


@pytest.mark.parametrize(
    ("size", "then"),
    [
        *(((1000, 500), (707, 354)), ((640, 480), (453, 339)), ((64, 2000), (45, 1414))),
        # No side gets lost.
        *(((1, 1), (1, 1)), ((1, 90), (1, 64)), ((90, 1), (64, 1)), ((2, 2), (1, 1))),
    ],
)
def test_row_out_of_memory_is_tried_again_with_half_the_pixels_and_all_else_as_it_was(
    size: tuple[int, int], then: tuple[int, int]
) -> None:
    completion = out_of_memory(size, (100, 100))
    before = completion.request
    again = next_attempt(completion, 1, RetryTable())
    assert again is not None
    assert [image.size for image in again.images] == [then, (71, 71)]
    assert again.images[0].mode == "RGB"
    assert again.images[0].getpixel((0, 0)) == (250, 20, 90)
    assert before.images[0].size == size, "what an earlier step made is not changed"
    assert again == replace(before, messages=again.messages, attempt=2)
    assert again.messages is not None
    assert again.messages[0] == {"role": "system", "content": "Be brief."}
    assert again.messages[1]["content"][-1] == {"type": "text", "text": "what is it?"}
    failed_again = Completion(again, error=completion.error)
    third = next_attempt(failed_again, 2, RetryTable(attempts=3))
    assert third is not None
    assert (third.attempt, third.images[1].size) == (3, (50, 50))
    assert next_attempt(failed_again, 2, RetryTable()) is None


def test_row_out_of_memory_whose_messages_have_no_images_is_final() -> None:
    assert next_attempt(out_of_memory(), 1, RetryTable(attempts=9)) is None


# When


class Clock:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Below(EngineLayer):
    """A layer that keeps the requests it gets."""

    room, load = 99, Load()

    def __init__(self) -> None:
        self.got: list[int] = []

    def submit(self, request: Request) -> None:
        self.got.append(request.row.index)

    def resubmit(self) -> None:
        pass


def waiting_for(clock: Clock, **retry: Any) -> tuple[Retry, Below]:
    below = Below()
    return Retry(below, Start.of(JobConfig(engine={"kind": "dry-run"}, retry=retry)), clock), below


def fail(layer: Retry, n: int) -> None:
    request = Request(Row(n, str(n), {}), None, "text", {}, "hash")
    assert layer.settle(Completion(request, error=RowTimeoutError("slow"))) is None


def due(layer: Retry, below: Below) -> list[int]:
    below.got = []
    layer.resubmit()
    return below.got


def test_without_a_wait_the_first_in_is_the_first_out() -> None:
    layer, below = waiting_for(Clock())
    assert due(layer, below) == []
    for n in range(50):
        fail(layer, n)
    assert layer.load.retried == 50
    assert due(layer, below) == list(range(50))
    assert due(layer, below) == []


def test_request_comes_when_it_is_due_and_the_earliest_first() -> None:
    clock = Clock()
    layer, below = waiting_for(clock, attempts=9, backoff_s=1.0)
    for n in range(3):
        fail(layer, n)
        clock.now += 0.25
    assert due(layer, below) == []
    clock.now = 101.25
    assert due(layer, below) == [0, 1]
    fail(layer, 0)
    clock.now = 103.0
    assert due(layer, below) == [2], "one that waits longer holds up no other"
    clock.now = 103.25
    assert due(layer, below) == [0]


def test_each_wait_is_twice_the_last() -> None:
    retry = RetryTable(attempts=9, backoff_s=1.5)
    assert [wait_s(tries, retry) for tries in (1, 2, 3, 4)] == [1.5, 3.0, 6.0, 12.0]
    assert [wait_s(tries, RetryTable()) for tries in (1, 2, 9)] == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("backoff_s", [0.0, 1.0])
def test_very_many_tries_can_be_waited_for(backoff_s: float) -> None:
    assert wait_s(5000, RetryTable(attempts=9999, backoff_s=backoff_s)) >= backoff_s
