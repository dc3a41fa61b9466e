"""Numbers and times as a person reads them."""

from __future__ import annotations

from datetime import datetime


def number(value: float | None) -> str:
    """Three digits if it is small, with thousands separators if it is large; None is empty."""
    if value is None:
        return ""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def short_count(value: int) -> str:
    """``12,345``, ``1.23 M``."""
    if value < 1_000_000:
        return f"{value:,}"
    return f"{value / 1e6:.2f} M" if value < 1e9 else f"{value / 1e9:.2f} G"


def percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %" if whole else ""


def duration(seconds: float) -> str:
    """``42 s``, ``6 min``, ``3 h 20 min``."""
    minutes = round(seconds / 60)
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60} min"


def when(stamp: str | None, until: str | None = None) -> str:
    """``21 November 2026, 01:02 UTC``; with ``until`` both times, the day once if equal."""
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
