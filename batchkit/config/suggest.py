"""What a mistyped name probably should have been."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(name: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The name in ``known`` most like ``name``; None if none is alike (``cutoff``: 1 is equal)."""
    return next(iter(difflib.get_close_matches(name, [*known], n=1, cutoff=cutoff)), None)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A suggestion to end a message about an unknown ``name`` with; empty if there is none."""
    near = nearest(name, known)
    return "" if near is None else f"; did you mean {near!r}?"
