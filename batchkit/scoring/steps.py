"""Matches with Python's ``re``, and bounds how long that can take from the pattern's parse tree.

At each repetition and each alternative, a match can continue in one of several ways. If nothing
with several ways is repeated, the product of their numbers bounds the work from one start.
"""

from __future__ import annotations

import math
import re
from collections import deque
from functools import lru_cache
from importlib import import_module
from typing import Any, NamedTuple

_ONE_WAY = ("LITERAL", "NOT_LITERAL", "ANY", "IN", "AT", "CATEGORY")
_REPEATS = ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT")


class _Bound(NamedTuple):
    """Steps from one start; ``first``: what a match begins with, if that is known."""

    steps: float
    first: str | None


def most_steps(pattern: str, text: str) -> float:
    """An upper bound of the steps that all matches in ``text`` take; infinite if unknown."""
    steps, first = _bound(pattern, 1 << len(text).bit_length())
    starts = len(text) + 1 if first is None else text.count(first)
    return len(text) + starts * steps


def last_in(pattern: str, text: str) -> str | None:
    """The last match of ``pattern`` in ``text``: its first group, if it has one."""
    last = deque(re.finditer(pattern, text), maxlen=1)
    found: list[str | None] = [match[1 if match.re.groups else 0] for match in last]
    return found[0] if found else None


@lru_cache(maxsize=256)
def _bound(pattern: str, length: int) -> _Bound:
    """For any text shorter than ``length``."""
    tree = import_module("re._parser").parse(pattern)
    op, value = tree[0] if len(tree) else ("", 0)
    is_fixed = str(op) == "LITERAL" and not tree.state.flags & re.IGNORECASE
    return _Bound(_ways(tree, length) * len(pattern), chr(value) if is_fixed else None)


def _ways(nodes: Any, length: int) -> float:
    return math.prod(_ways_of(str(op), value, length) for op, value in nodes)


def _ways_of(op: str, value: Any, length: int) -> float:
    if op in _ONE_WAY:
        return 1
    if op in _REPEATS:
        _, most, repeated = value
        ways = _ways(repeated, length)
        if most == 1:
            return 1 + ways
        return min(most, length) + 1 if ways == 1 and repeated.getwidth()[0] else math.inf
    if op == "SUBPATTERN":
        return _ways(value[-1], length)
    if op == "BRANCH":
        return sum(_ways(branch, length) for branch in value[1])
    return math.inf  # a back-reference, a lookaround, or new in a later Python
