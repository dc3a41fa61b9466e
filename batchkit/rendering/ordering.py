"""The order in which rows go to the engine: similar rows together, long answers first at the end.

Rows of one adapter come together first, since few adapters fit into the engine at once, and what is computed with
one is of no use to another.

The engine caches what it computed for an image or a prompt's beginning only for a while, so rows
that share one should be in flight together. And a long answer that begins last runs alone in the
engine at the end. Both are corrected within a bounded look-ahead; rows that share nothing keep their
order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from os.path import commonprefix
from typing import Any

from batchkit.types import Row, RowHint

LOOK_AHEAD_BYTES = 32 * 2**20  # of the rows' own values
_SAME = 256  # characters that must be equal after the beginning that all rows share
_OF_PART = 8
_NUMBERS = frozenset({int, float, bool, type(None)})
_TEXTS, _LISTS = (str, bytes, bytearray), (list, tuple, set, frozenset)

_Seen = tuple[RowHint, Row, int]  # the last one is the size of the row's own fields


def well_ordered(
    rows: Iterator[Row], hint: Callable[[Row], RowHint], look_ahead: int
) -> Iterator[tuple[Row, int]]:
    """All of ``rows``; ``look_ahead`` are held, and none is overtaken by more than twice as many.

    With each comes a number, the same for rows that follow each other and begin alike. An error from
    reading them is raised once everything read before has been handed out.
    """
    coming: list[_Seen] = []
    lora = ""  # of the row that was handed out last
    going: deque[tuple[int, _Seen]] = deque()
    held_bytes = 0
    broken: Exception | None = None
    try:
        for row in rows:
            n_bytes = size_of(row.fields.values(), LOOK_AHEAD_BYTES)
            coming.append((hint(row), row, n_bytes))
            held_bytes += n_bytes
            while len(coming) + len(going) >= look_ahead or held_bytes >= LOOK_AHEAD_BYTES:
                if not going:
                    going.extend(_alike_together(coming, lora))
                    coming = []
                group, (seen, first, n_bytes) = going.popleft()
                held_bytes -= n_bytes
                lora = seen.lora
                yield first, group
    except Exception as error:
        broken = error
    held = [*(seen for _, seen in going), *coming]
    last = sorted(held, key=lambda seen: -seen[0].max_tokens)
    for _, equally_long in groupby(last, key=lambda seen: seen[0].max_tokens):
        for group, (seen, row, _) in _alike_together(list(equally_long), lora):
            lora = seen.lora
            yield row, group
    if broken is not None:
        raise broken


def _alike_together(rows: Sequence[_Seen], lora: str) -> Iterator[tuple[int, _Seen]]:
    """The rows of one adapter together, those of ``lora`` first; of each, groups of rows that begin alike, in the
    order of their first rows, and a number of each group."""
    by_lora: dict[str, list[_Seen]] = {lora: []}
    for seen in rows:
        by_lora.setdefault(seen[0].lora, []).append(seen)
    for name, its in by_lora.items():
        yield from _of_one_lora(its, name)


def _of_one_lora(rows: Sequence[_Seen], lora: str) -> Iterator[tuple[int, _Seen]]:
    beginnings = [hint.beginning for hint, _, _ in rows]
    shared = len(commonprefix(beginnings))  # noqa: RUF071 - by characters is intended
    groups: dict[str, list[_Seen]] = {}
    for seen in rows:
        groups.setdefault(seen[0].beginning[shared : shared + _SAME], []).append(seen)
    return ((hash((lora, key)), seen) for key, alike in groups.items() for seen in alike)


def size_of(values: Iterable[Any], most: int) -> int:
    """Characters and bytes that ``values`` hold, at any depth; if more than ``most``, some number
    above it.

    Each part of a list counts, whatever it is, so this also ends for a list that contains itself.
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
    """Of an array of NumPy's or another library's."""
    try:
        return int(value.nbytes)
    except Exception:  # the value's own code runs here
        return 0
