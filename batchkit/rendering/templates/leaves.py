"""A row's own values, such as pictures, that an expression passes on unchanged.

The rendering process has copies of them, and returns their numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_PLAIN = str | bytes | int | float | None


def leaves_of(value: Any) -> list[Any]:
    """The values in the lists and tables of ``value`` that are not plain, in a fixed order."""
    found: list[Any] = []
    seen: set[int] = set()
    waiting = [value]
    while waiting:
        part = waiting.pop()
        if isinstance(part, _PLAIN) or id(part) in seen:
            continue
        seen.add(id(part))
        if isinstance(part, dict):
            waiting += part.values()
        elif isinstance(part, list | tuple):
            waiting += part
        else:
            found.append(part)
    return found


def numbers_of(leaves: Sequence[Any]) -> Mapping[int, int]:
    """Each leaf's number, by its identity."""
    return {id(leaf): number for number, leaf in enumerate(leaves)}


def with_leaves(answer: Any, leaves: Sequence[Any]) -> Any:
    """The ``answer`` of the process; each tuple in it is replaced by the leaf of that number."""
    match answer:
        case tuple():
            return leaves[answer[0]]
        case list():
            return [with_leaves(part, leaves) for part in answer]
        case dict():
            return {key: with_leaves(part, leaves) for key, part in answer.items()}
    return answer
