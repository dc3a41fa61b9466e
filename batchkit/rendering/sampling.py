"""A request's sampling parameters: the job's, then the row's own, then those of the attempt."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from batchkit.config.tables import RetryTable
from batchkit.errors import RequestError
from batchkit.rendering.messages import short
from batchkit.rendering.openai_body import is_null, sampling_of


def row_sampling(
    sampling: Mapping[str, Any], fields: Mapping[str, Any], *, column: str | None, with_body: bool
) -> Mapping[str, Any]:
    """``sampling`` with the parameters of the row's ``body``, if asked for, and of its ``column``. A
    null, which Parquet gives each row that lacks a name of another row, is none; so is NaN, which
    pandas has in its place.

    Raises:
        RequestError: the column is not a table, or the body asks for an unknown format.
    """
    if with_body and isinstance(body := fields.get("body"), Mapping):
        sampling = {**sampling, **sampling_of(body)}
    found = None if column is None else fields.get(column)
    if is_null(found) or (isinstance(found, str) and not found):
        return sampling
    own = found
    if isinstance(own, str):
        try:
            own = orjson.loads(own)
        except orjson.JSONDecodeError:
            own = None
    if not isinstance(own, Mapping):
        raise RequestError(
            f"{column}: found {short(found)}, expected a table of sampling parameters"
        )
    return {**sampling, **{name: value for name, value in own.items() if not is_null(value)}}


def with_temperature(
    sampling: Mapping[str, Any], attempt: int, retry: RetryTable
) -> Mapping[str, Any]:
    """``sampling`` with the temperature that ``retry.temperatures`` gives for ``attempt``, from 1."""
    if not retry.temperatures:
        return sampling
    last = len(retry.temperatures) - 1
    return {**sampling, "temperature": retry.temperatures[min(attempt - 1, last)]}
