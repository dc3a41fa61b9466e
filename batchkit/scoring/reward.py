"""Reads a score from 0 to 10 out of what a reward model wrote."""

from __future__ import annotations

import re

# Possessive, and never from the middle of a number: else a page of digits takes minutes.
_NUMBER = r"(?<!\d)(\d++(?:\.\d++)?+)"
# In this order, from what names itself a score to any number at all.
_PATTERNS = [
    re.compile(pattern, re.IGNORECASE)
    for pattern in (
        rf"\bscores?\b[\s:=*_\-]*{_NUMBER}",
        rf"\bratings?\b[\s:=*_\-]*{_NUMBER}",
        rf"{_NUMBER}\s*/\s*10\b",
        rf"{_NUMBER}\s+out\s+of\s+10\b",
        rf"\A[\s*]*{_NUMBER}[\s*.]*\Z",
        _NUMBER,
    )
]


def parse_reward(text: str, default: float | None = None) -> float | None:
    """The score in ``text``, clamped to 0–10; ``default`` where it holds no number.

    Looked for in this order: ``Score``, ``Rating``, ``x/10``, ``x out of 10``, a number that stands
    alone, the first number. A minus sign is not read.
    """
    for pattern in _PATTERNS:
        if found := pattern.search(text):
            return min(float(found[1]), 10.0)
    return default
