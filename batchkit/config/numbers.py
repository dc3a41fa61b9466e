"""Formatting of numbers, durations and times for people."""

from __future__ import annotations

from datetime import datetime


def number(value: float | None) -> str:
    """Format a number: three significant digits below 100, thousands separators from 100 on. None gives an empty
    text."""
    if value is None:
        return ""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def short_count(value: int) -> str:
    """Format a count, for example ``12,345`` or ``1.23 M``."""
    if value < 1_000_000:
        return f"{value:,}"
    return f"{value / 1e6:.2f} M" if value < 1e9 else f"{value / 1e9:.2f} G"


def percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %" if whole else ""


def duration(seconds: float) -> str:
    """Format a duration, for example ``42 s``, ``6 min`` or ``3 h 20 min``."""
    minutes = round(seconds / 60)
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60} min"


def when(stamp: str | None, until: str | None = None) -> str:
    """Format a time, for example ``21 November 2026, 01:02 UTC``. With ``until``, format the range; a shared day is
    written once."""
    try:
        moment = datetime.fromisoformat(stamp or "")
        end = datetime.fromisoformat(until) if until else moment
    except ValueError:
        return ""
    day = f"{moment.day} {moment:%B %Y}"
    if f"{moment:%x %H:%M}" == f"{end:%x %H:%M}":
        return f"{day}, {moment:%H:%M} UTC"
    if moment.date() == end.date():
        return f"{day}, {moment:%H:%M}–{end:%H:%M} UTC"
    return f"{day}, {moment:%H:%M} – {end.day} {end:%B %Y, %H:%M} UTC"
