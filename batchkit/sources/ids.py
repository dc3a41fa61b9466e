"""Rows and their ids: the id in the row's field, or a fallback id that no row can have."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from batchkit.errors import RequestError
from batchkit.sources.reader import Broken, one_of, shown
from batchkit.types import Row

_FALLBACK = re.compile(r"no-id:\d+(/.*)?", re.ASCII | re.DOTALL)  # with the values of input.cross


def row_of(
    index: int,
    found: Mapping[str, Any] | Broken | RequestError,
    key: str | None,
    path: str,
    *,
    others_have_ids: bool = False,
) -> Row:
    """The row that a reader ``found``; its id is in the field ``key``, or its index if None.

    A row that can't be read, or lacks its id, has ``error`` set and a fallback id that no other row
    has; a row of the input whose own id has that form fails. A row without ``key`` gets a fallback
    id as well if rows of other files have ids, since one of these may be equal to its index.
    """
    if isinstance(found, Broken):
        known = row_of(index, found.fields, key, path, others_have_ids=others_have_ids)
        return replace(known, error=found.error)
    if key is None or isinstance(found, RequestError):
        is_named_by_index = key is None and not others_have_ids
        given_id = str(index) if is_named_by_index else fallback_id(index)
        if isinstance(found, RequestError):
            return Row(index, given_id, {}, found)
        return Row(index, given_id, found)
    problem = "is null"
    try:
        value = found.get(key)
        if value is not None and not is_fallback(row_id := str(value)):
            return Row(index, row_id, found)
        if value is not None:
            problem = f"is {row_id!r}, as rows without an id are named; give the row another id"
        elif key not in found:
            problem = f"is missing; {one_of(key, found)}"
    except Exception as failed:  # a number of more than 4,300 digits, or the object's own code
        problem = f"has no text: {failed}"
    error = RequestError(f"{path} row {index}: input.id is {shown(key)}, which {problem}")
    return Row(index, fallback_id(index), found, error)


def fallback_id(index: int) -> str:
    return f"no-id:{index}"


def is_fallback(row_id: str) -> bool:
    """Whether the row had no id of its own."""
    return row_id.startswith("no-id:") and _FALLBACK.fullmatch(row_id) is not None
