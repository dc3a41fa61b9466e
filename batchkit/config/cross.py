"""The combinations of values that ``input.cross`` stands for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple


class Variant(NamedTuple):
    """One combination of values: the columns that it adds to a row, and its part of the row's id."""

    fields: Mapping[str, Any]
    label: str

    @property
    def name(self) -> str:
        """For people."""
        values = {key: "(none)" if value == "" else value for key, value in self.fields.items()}
        return ", ".join(f"{key} = {value}" for key, value in values.items())


def variants(cross: Mapping[str, Sequence[Any]]) -> list[Variant]:
    """In the order of the rows; one that adds nothing if ``cross`` is empty."""
    return [
        Variant(dict(zip(cross, values, strict=True)), "/".join(map(str, values)))
        for values in product(*cross.values())
    ]
