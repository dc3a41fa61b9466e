"""Rows and their ids: the id in the row's field, or a fallback id that no row can have."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from batchkit.errors import RequestError
from batchkit.sources.reader import Broken, one_of, shown
from batchkit.types import Row

_FALLBACK = re.compile(r"no-id:\d+", re.ASCII)


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
    given_id = str(index) if key is None and not others_have_ids else fallback_id(index)
    if isinstance(found, Broken):
        known = row_of(index, found.fields, key, path, others_have_ids=others_have_ids)
        return replace(known, error=found.error)
    if isinstance(found, RequestError):
        return Row(index, given_id, {}, found)
    if key is None:
        return Row(index, given_id, found)
    try:
        row_id = None if found.get(key) is None else str(found[key])
    except Exception as failed:  # a number of more than 4,300 digits, or the object's own code
        text = f"{path} row {index}: input.id is {shown(key)}, which has no text: {failed}"
        return Row(index, fallback_id(index), found, RequestError(text))
    if row_id is not None and not is_fallback(row_id):
        return Row(index, row_id, found)
    problem = "is null" if key in found else f"is missing; {one_of(key, found)}"
    if row_id is not None:
        problem = f"is {row_id!r}, as rows without an id are named; give the row another id"
    error = RequestError(f"{path} row {index}: input.id is {shown(key)}, which {problem}")
    return Row(index, fallback_id(index), found, error)


def fallback_id(index: int) -> str:
    return f"no-id:{index}"


def is_fallback(row_id: str) -> bool:
    """Whether the row had no id of its own."""
    return _FALLBACK.fullmatch(row_id) is not None
