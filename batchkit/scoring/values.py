"""Extraction of values from text: numbers, one of several choices, a score from 0 to 10."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

_NUMBER = re.compile(
    r"(?<![\w.])[-+]?[$€£¥]?"
    r"(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d{1,3})?"
)
# The quantifiers are possessive, and no match starts inside a number, because otherwise a page of digits would take
# minutes.
_DIGITS = r"(?<!\d)(\d++(?:\.\d++)?+)"
# In order of preference: from a number that is called a score to any number.
_PATTERNS = [
    re.compile(pattern, re.IGNORECASE)
    for pattern in (
        rf"\bscores?\b[\s:=*_\-]*{_DIGITS}",
        rf"\bratings?\b[\s:=*_\-]*{_DIGITS}",
        rf"{_DIGITS}\s*/\s*10\b",
        rf"{_DIGITS}\s+out\s+of\s+10\b",
        rf"\A[\s*]*{_DIGITS}[\s*.]*\Z",
        _DIGITS,
    )
]


def numbers_in(text: str) -> list[float]:
    """Return the numbers in ``text``, in order. ``1,234`` is one number; ``1955,62170`` is two numbers. Whole numbers
    are exact integers."""
    found: list[float] = []
    for match in _NUMBER.findall(text.replace("\u2212", "-")):
        plain = re.sub(r"[,$€£¥+]", "", match)
        if math.isfinite(number := float(plain)):
            found.append(int(plain) if plain.lstrip("-").isdigit() else number)
    return found


def in_digits(number: float) -> str:
    """Format a number from ``numbers_in`` as text."""
    return str(number) if isinstance(number, int) else f"{number:.15g}"


def vote_of(prediction: str, choices: Sequence[str]) -> str | None:
    """Return a key for counting votes. Predictions with the same meaning have the same key.

    With ``choices``, the key is the matching choice, or None if no choice matches. Without ``choices``, the key is the
    number if the prediction is only a number. Otherwise, it is the text in lower case, without extra white space,
    surrounding brackets and quotation marks, and a final full stop.
    """
    if choices:
        return chosen(prediction, choices)
    words = " ".join(prediction.split()).replace("\u2212", "-").casefold()
    plain = words.lstrip("([\"'*` ").rstrip(".)]\"'*` ")
    numbers = numbers_in(plain) if _NUMBER.fullmatch(plain) else []
    return in_digits(numbers[0]) if numbers else plain


def chosen(text: str, choices: Sequence[str]) -> str | None:
    """Return the choice that equals ``text``; otherwise the only choice that ``text`` contains as a separate word.

    Equality ignores case. A choice inside ``text`` must have the same case; if no choice matches, case is ignored,
    except for choices of a single letter, because "a" in a sentence is usually the article.
    """
    plain = text.strip().strip(".()[]\"'*` ")
    for name in choices:
        if plain.casefold() == name.casefold():
            return name
    words = [name for name in choices if len(name) > 1]
    named = _named(text, choices, re.NOFLAG) or _named(text, words, re.IGNORECASE)
    return named[0] if len(named) == 1 else None


def _named(text: str, choices: Sequence[str], flags: re.RegexFlag) -> list[str]:
    return [name for name in choices if re.search(rf"(?<!\w){re.escape(name)}(?!\w)", text, flags)]


def parse_reward(text: str, default: float | None = None) -> float | None:
    """Return the score in ``text``, at most 10; ``default`` if the text has no number. A minus sign is ignored.

    The first of these that ``text`` contains counts: a number after ``Score``, a number after ``Rating``, ``x/10``, ``x
    out of 10``, a number that is the whole text, any number.
    """
    for pattern in _PATTERNS:
        if found := pattern.search(text):
            return min(float(found[1]), 10.0)
    return default
