"""``input.cross``: each row once for each value, or for each combination of the values of several keys.

The n values of the row at position i are the rows i × n to i × n + n - 1, so that ``Row.index`` is a position that
only depends on the input and on ``cross``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from batchkit.config.cross import Variant, variants
from batchkit.errors import RequestError
from batchkit.types import Row

Skip = Callable[[int], bool]


def crossed(
    cross: Mapping[str, Sequence[Any]], read: Callable[[Skip], Iterator[Row]], skip: Skip
) -> Iterator[Row]:
    """The rows that ``read`` yields, each once for each variant, but those for which ``skip(index)`` is true.

    A row that has a column of one of the names has ``error`` set.
    """
    if not cross:
        yield from read(skip)
        return
    found = variants(cross)
    n = len(found)
    for row in read(lambda index: all(map(skip, range(index * n, index * n + n)))):
        for index, variant in enumerate(found, start=row.index * n):
            if not skip(index):
                yield _of_variant(row, index, variant)


def _of_variant(row: Row, index: int, variant: Variant) -> Row:
    error = row.error
    if error is None and (taken := [name for name in variant.fields if name in row.fields]):
        error = RequestError(
            f"input.cross.{taken[0]}: the row has a column of that name; give the key another one"
        )
    fields = {**row.fields, **variant.fields}
    return replace(row, index=index, id=f"{row.id}/{variant.label}", fields=fields, error=error)
