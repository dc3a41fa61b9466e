"""The order in which rows go to the engine.

- Rows with the same adapter run next to each other, because the engine holds only few adapters at the same time, and
  the prefix cache of one adapter is of no use to another.
- Rows with the same images or the same prefix run next to each other, because the engine caches images and prefixes
  only for a while.
- At the end of the input, rows with the longest expected answers run first, because a long answer that begins last would
  run alone in the engine.

Rows are moved only within a limited look-ahead. Rows with nothing in common keep their order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from os.path import commonprefix
from typing import Any

from batchkit.types import Row, RowHint

LOOK_AHEAD_BYTES = 32 * 2**20  # limit for the total size of the rows held back
_SAME = 256  # characters that must be equal, after the prefix common to all rows
_OF_PART = 8  # bytes counted for each value besides its content
_NUMBERS = frozenset({int, float, bool, type(None)})
_TEXTS, _LISTS = (str, bytes, bytearray), (list, tuple, set, frozenset)

_Seen = tuple[RowHint, Row, int]  # the number: size of the row's fields in bytes


def well_ordered(
    rows: Iterator[Row],
    hint: Callable[[Row], RowHint],
    look_ahead: int,
    expect: Callable[[RowHint], float] = lambda hint: hint.max_tokens,
) -> Iterator[tuple[Row, int]]:
    """Yield all ``rows`` in the order for the engine, each with a group number. Adjacent rows with the same prefix have
    the same number.

    Up to ``look_ahead`` rows are held back, fewer if they exceed ``LOOK_AHEAD_BYTES``. A row is overtaken by at most
    twice ``look_ahead`` rows. An error from reading is raised after all rows read before the error were yielded.

    - ``hint``: forecasts a row's request.
    - ``expect``: returns the expected length of a row's answer.
    """
    coming: list[_Seen] = []
    lora = ""  # adapter of the row yielded last
    going: deque[tuple[int, _Seen]] = deque()
    held_bytes = 0
    broken: list[Exception] = []
    for row in until_broken(rows, broken):
        n_bytes = size_of(row.fields.values(), LOOK_AHEAD_BYTES)
        coming.append((hint(row), row, n_bytes))
        held_bytes += n_bytes
        while len(coming) + len(going) >= look_ahead or held_bytes >= LOOK_AHEAD_BYTES:
            if not going:
                going.extend(_grouped(coming, lora))
                coming = []
            group, (seen, first, n_bytes) = going.popleft()
            held_bytes -= n_bytes
            lora = seen.lora
            yield first, group
    held = [*(seen for _, seen in going), *coming]
    last = sorted(((expect(seen[0]), seen) for seen in held), key=lambda one: -one[0])
    for _, equally_long in groupby(last, key=lambda one: one[0]):
        for group, (seen, row, _) in _grouped([its for _, its in equally_long], lora):
            lora = seen.lora
            yield row, group
    if broken:
        raise broken[0]


def until_broken(rows: Iterable[Row], broken: list[Exception]) -> Iterator[Row]:
    """Yield ``rows``. Add an error from reading to ``broken``, so that the caller can first yield the rows before it."""
    try:
        yield from rows
    except Exception as error:
        broken.append(error)


def _grouped(rows: Sequence[_Seen], lora: str) -> Iterator[tuple[int, _Seen]]:
    """Yield ``rows`` grouped by adapter, then by prompt prefix, each with its group's number. Rows with the adapter
    ``lora`` come first."""
    by_lora: dict[str, list[_Seen]] = {lora: []}
    for seen in rows:
        by_lora.setdefault(seen[0].lora, []).append(seen)
    for name, its in by_lora.items():
        yield from _grouped_by_prefix(its, name)


def _grouped_by_prefix(rows: Sequence[_Seen], lora: str) -> Iterator[tuple[int, _Seen]]:
    """Yield rows of one adapter, grouped by their beginning. A prefix common to all these rows is ignored."""
    beginnings = [hint.beginning for hint, _, _ in rows]
    shared = len(commonprefix(beginnings))  # noqa: RUF071 - by characters is intended
    groups: dict[str, list[_Seen]] = {}
    for seen in rows:
        groups.setdefault(seen[0].beginning[shared : shared + _SAME], []).append(seen)
    return ((hash((lora, key)), seen) for key, alike in groups.items() for seen in alike)


def size_of(values: Iterable[Any], most: int) -> int:
    """Estimate the memory of ``values`` and everything in them, in characters and bytes. Stop counting above ``most``.

    Each value counts at least ``_OF_PART`` bytes, so that counting also stops for a list that contains itself.
    """
    size = 0
    waiting: list[Iterable[Any]] = [values]
    while waiting:
        for value in waiting.pop():
            size += _OF_PART
            if isinstance(value, _TEXTS):
                size += len(value)
            elif type(value) in _NUMBERS:
                pass
            elif isinstance(value, _LISTS):
                waiting.append(value)
            elif isinstance(value, Mapping):
                waiting += (value, value.values())
            else:
                size += _array_bytes(value)
            if size > most:
                return size
    return size


def _array_bytes(value: Any) -> int:
    """Return the bytes of an array of NumPy or another library; 0 for any other value."""
    try:
        return int(value.nbytes)
    except Exception:  # nbytes may be a property that raises anything
        return 0
