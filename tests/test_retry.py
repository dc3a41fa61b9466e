"""What is tried again within a run, how often, and how warm."""

from __future__ import annotations

from typing import Any

import pytest

from batchkit.config import RetryTable
from batchkit.errors import (
    EmptyTextError,
    MediaError,
    PromptTooLongError,
    RequestError,
    RowError,
    RowTimeoutError,
    TemplateError,
)
from batchkit.retry import next_attempt, with_temperature
from batchkit.types import Choice, Completion, Request, Row


def failed(error: RowError | None, attempt: int = 1, **sampling: Any) -> Completion:
    request = Request(Row(3, "q3", {"a": 1}), None, "text", sampling, "hash", attempt, 12)
    return Completion(request, error=error)


def test_timeout_is_tried_again_as_the_next_attempt() -> None:
    again = next_attempt(failed(RowTimeoutError("slow"), temperature=0.0), 1, RetryTable())
    assert again is not None
    assert again.attempt == 2
    before = failed(None, temperature=0.0).request
    assert (again.row, again.prompt, again.input_hash) == (before.row, "text", "hash")
    assert again.media_bytes == 12, "its pixels are still held"
    assert again.sampling == {"temperature": 0.0}


def test_answer_is_not_tried_again() -> None:
    request = failed(None).request
    assert next_attempt(Completion(request, [Choice("x", "stop")]), 1, RetryTable()) is None


@pytest.mark.parametrize("error", [TemplateError, MediaError, PromptTooLongError, RequestError])
def test_rows_own_fault_is_not_tried_again(error: type[RowError]) -> None:
    retry = RetryTable(attempts=9, temperatures=[1.0])
    assert next_attempt(failed(error("bad"), temperature=1.0), 1, retry) is None


@pytest.mark.parametrize("attempts", [1, 2, 5])
def test_tries_are_counted_with_the_first(attempts: int) -> None:
    retry, tries, completion = RetryTable(attempts=attempts), 1, failed(RowTimeoutError("slow"))
    while (again := next_attempt(completion, tries, retry)) is not None:
        tries += 1
        completion = Completion(again, error=RowTimeoutError("slow"))
    assert tries == attempts


def test_tries_of_an_earlier_run_do_not_count() -> None:
    """retry-failed goes on from the record's attempt, with all its tries still to come."""
    again = next_attempt(failed(RowTimeoutError("slow"), attempt=7), 1, RetryTable(attempts=2))
    assert again is not None
    assert again.attempt == 8
    assert next_attempt(Completion(again, error=RowTimeoutError("slow")), 2, RetryTable()) is None


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0}, {"temperature": 0.0}])
def test_blank_greedy_answer_is_final(sampling: dict[str, Any]) -> None:
    assert next_attempt(failed(EmptyTextError("blank"), **sampling), 1, RetryTable()) is None


def test_blank_answer_is_tried_again_where_chance_has_a_part() -> None:
    again = next_attempt(failed(EmptyTextError("blank"), temperature=0.7), 1, RetryTable())
    assert again is not None
    warmer = RetryTable(temperatures=[0.0, 0.9])
    again = next_attempt(failed(EmptyTextError("blank"), temperature=0.0), 1, warmer)
    assert again is not None
    assert again.sampling["temperature"] == 0.9
    colder = RetryTable(temperatures=[0.9, 0.0])
    assert next_attempt(failed(EmptyTextError("blank"), temperature=0.9), 1, colder) is None


@pytest.mark.parametrize(("attempt", "temperature"), [(1, 0.1), (2, 0.5), (3, 0.9), (9, 0.9)])
def test_temperature_goes_by_attempt_and_the_last_serves_on(
    attempt: int, temperature: float
) -> None:
    sampling = {"temperature": 0.3, "top_k": 5}
    found = with_temperature(sampling, attempt, RetryTable(temperatures=[0.1, 0.5, 0.9]))
    assert found == {"temperature": temperature, "top_k": 5}
    assert sampling == {"temperature": 0.3, "top_k": 5}


@pytest.mark.parametrize("temperatures", [None, []])
def test_without_temperatures_the_sampling_stays(temperatures: list[float] | None) -> None:
    sampling = {"temperature": 0.3}
    assert with_temperature(sampling, 4, RetryTable(temperatures=temperatures)) == sampling
