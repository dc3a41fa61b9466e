"""Error messages for tables of the job that only this engine knows, in the job file's terms."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from batchkit.config.tables import Table
from batchkit.config.type_names import in_words
from batchkit.engines.request_checks import near


def problems_with(table: type[Table], values: Mapping[str, Any]) -> list[str]:
    """One line for each wrong name, starting with it; empty if ``values`` make a ``table``."""
    try:
        table.model_validate(values)
    except ValidationError as error:
        first: dict[str, str] = {}
        for detail in error.errors():  # each member of a union reports an error
            name = str(detail["loc"][0]) if detail["loc"] else ""
            first.setdefault(name, _problem(table, name, detail))
        return list(first.values())
    return []


def _problem(table: type[Table], name: str, detail: Mapping[str, Any]) -> str:
    if detail["type"] == "value_error":
        told = str(detail["msg"]).removeprefix("Value error, ")
        return f"{name}: {told}" if name else told
    if detail["type"] == "extra_forbidden":
        known = list(table.model_fields)
        hint = near(name, known) or f"; it knows {', '.join(known)}"
        return f'{name}: kind = "transformers" has no such name{hint}'
    field = table.model_fields[name]
    found = detail["input"]
    return f"{name}: found {found!r}, expected {in_words(field.annotation, field.metadata)}"
