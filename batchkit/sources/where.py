"""The row filter ``input.where``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from datetime import datetime, time
from typing import Any

from batchkit.errors import InputError
from batchkit.sources.reader import one_of


def is_blank(value: Any) -> bool:
    return value is None or (isinstance(value, str) and not value.strip())


def compile_where(
    where: Mapping[str, Any], filled: Set[str] = frozenset()
) -> Callable[[Mapping[str, Any]], bool]:
    """Return a function that takes a row's fields and returns whether the row matches the filter.

    A row matches if it has every field of ``where`` with the given value, or with one of the values in the given list.
    A value also matches its text, because CSV has no numbers: ``year = 2020`` must find "2020". Midnight matches its
    day, because Excel stores dates as midnight.

    ``filled``: fields that must not be blank.
    """
    allowed = {
        key: (values, {text for value in values for text in _texts(value)})
        for key, value in where.items()
        for values in [value if isinstance(value, list) else [value]]
    }

    def keeps(fields: Mapping[str, Any]) -> bool:
        for key, (values, texts) in allowed.items():
            if key not in fields:
                return False
            found = fields[key]
            if found not in values and texts.isdisjoint(_texts(found)):
                return False
        return not any(name in fields and is_blank(fields[name]) for name in filled)

    return keeps


def check_fields(where: Mapping[str, Any], fields: Mapping[str, Any], path: str) -> None:
    """Raise InputError if the first readable row lacks a field of ``where``, because the name may be misspelled.
    ``fields``: the fields of that row."""
    for key in where:
        if key not in fields:
            raise InputError(
                f"{path}: input.where names {key!r}, but the file's first readable row has no such field;"
                f" {one_of(key, fields)}"
            )


def _texts(value: Any) -> set[str]:
    """Return the texts in which CSV, Excel or Python may write ``value``."""
    text = str(value)
    if isinstance(value, bool):
        return {text, text.lower(), text.upper()}
    if isinstance(value, datetime) and value.time() == time.min:
        return {text, str(value.date())}
    return {text}
