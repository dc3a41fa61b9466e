"""Formatting of numbers, durations and times for people.

``commands/view/format.js`` formats in the same way on the page; ``tests/page/formats.json`` holds test cases for both.
"""

from __future__ import annotations

import math
from datetime import UTC, datetime
from decimal import ROUND_HALF_UP, Context, Decimal


def number(value: float | None) -> str:
    """Format a number: three significant digits below 100, thousands separators from 100 on. None gives an empty
    text."""
    if value is None:
        return ""
    return f"{_whole(value):,}" if value >= 100 else _digits(value, 3)


def short_count(value: int) -> str:
    """Format a count, for example ``12,345`` or ``1.23 M``."""
    if value < 1_000_000:
        return f"{value:,}"
    return f"{_fixed(value / 1e6, 2)} M" if value < 999_995_000 else f"{_fixed(value / 1e9, 2)} G"


def percent(part: int, whole: int) -> str:
    """Format ``part`` of ``whole`` in percent. ``0.0 %`` is returned only if ``part`` is 0, and ``100.0 %`` only if it
    equals ``whole``. Return "" if ``whole`` is 0."""
    if not whole:
        return ""
    text = str(_fixed(100 * part / whole, 1))
    if text == "0.0" and part > 0:
        return "< 0.1 %"
    return "> 99.9 %" if text == "100.0" and part < whole else f"{text} %"


def duration(seconds: float) -> str:
    """Format a duration, for example ``1.3 s``, ``42 s``, ``6 min`` or ``3 h 20 min``."""
    if seconds < 9.95:
        return f"{_digits(seconds, 2)} s"
    whole = _whole(seconds)
    minutes = _whole(whole / 60)
    if whole < 100:
        return f"{whole} s"
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60:,} h {minutes % 60} min"


def _whole(value: float) -> int:
    """Return ``value`` rounded, with half rounded up as in the page's script. Python's ``round`` rounds half to
    even."""
    return math.floor(value + 0.5)


def _fixed(value: float, decimals: int) -> Decimal:
    return Decimal(float(value)).quantize(Decimal(1).scaleb(-decimals), ROUND_HALF_UP)


def _digits(value: float, digits: int) -> str:
    rounded = Context(prec=digits, rounding=ROUND_HALF_UP).create_decimal(float(value))
    return f"{rounded.normalize():f}"


def when(stamp: str | None, until: str | None = None) -> str:
    """Format a time, for example ``21 November 2026, 01:02 UTC``. With ``until``, format the range of the two times; if
    both are on the same day, the day is written once. Return "" if a time is missing or invalid."""
    try:
        moment = datetime.fromisoformat(stamp or "").astimezone(UTC)
        end = datetime.fromisoformat(until).astimezone(UTC) if until else moment
    except ValueError:
        return ""
    day = f"{moment.day} {moment:%B %Y}"
    if f"{moment:%x %H:%M}" == f"{end:%x %H:%M}":
        return f"{day}, {moment:%H:%M} UTC"
    if moment.date() == end.date():
        return f"{day}, {moment:%H:%M}–{end:%H:%M} UTC"
    return f"{day}, {moment:%H:%M} – {end.day} {end:%B %Y, %H:%M} UTC"
