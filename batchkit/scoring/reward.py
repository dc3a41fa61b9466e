"""Reads a score from 0 to 10 from a reward model's text."""

from __future__ import annotations

import re

# Possessive, and never starting inside a number: otherwise a page of digits takes minutes.
_NUMBER = r"(?<!\d)(\d++(?:\.\d++)?+)"
# In this order, from a number that is called a score to any number.
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
    """The score in ``text``, clamped to 0–10; ``default`` if it has no number.

    Searched in this order: ``Score``, ``Rating``, ``x/10``, ``x out of 10``, a number that is the
    whole text, the first number. A minus sign is ignored.
    """
    for pattern in _PATTERNS:
        if found := pattern.search(text):
            return min(float(found[1]), 10.0)
    return default
