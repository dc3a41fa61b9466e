"""Which failed requests are tried again within a run, and with what temperature."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from batchkit.config import RetryTable
from batchkit.errors import EmptyTextError
from batchkit.types import Completion, Request


def next_attempt(completion: Completion, tries: int, retry: RetryTable) -> Request | None:
    """The request to submit again, or None where the failure is final.

    ``tries`` counts the row's tries in this run, the one that just failed included.
    """
    request, error = completion.request, completion.error
    if error is None or not error.retryable or tries >= retry.attempts:
        return None
    sampling = with_temperature(request.sampling, request.attempt + 1, retry)
    if isinstance(error, EmptyTextError) and not sampling.get("temperature"):
        return None  # greedy: it would be empty again
    return replace(request, sampling=sampling, attempt=request.attempt + 1)


def with_temperature(
    sampling: Mapping[str, Any], attempt: int, retry: RetryTable
) -> Mapping[str, Any]:
    """``sampling`` with the temperature that ``retry.temperatures`` gives for ``attempt``, from 1."""
    if not retry.temperatures:
        return sampling
    last = len(retry.temperatures) - 1
    return {**sampling, "temperature": retry.temperatures[min(attempt - 1, last)]}
