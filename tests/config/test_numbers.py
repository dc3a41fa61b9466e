"""Numbers, durations and times in texts, which are equal to those of the page."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from batchkit.config.numbers import duration, number, percent, short_count, when
from tests.support.paths import ROOT

CASES: dict[str, list[list[Any]]] = json.loads(
    (ROOT / "tests/page/formats.json").read_text(encoding="utf-8")
)
FORMATS: dict[str, Callable[..., str]] = {
    "short": number,
    "shortCount": short_count,
    "percent": percent,
    "duration": duration,
    "when": when,
}


@pytest.mark.parametrize("name", CASES)
def test_a_format_is_equal_to_that_of_the_page(name: str) -> None:
    """node --test reads the same cases."""
    for given, text in CASES[name]:
        found = FORMATS[name](*(given if isinstance(given, list) else [given]))
        assert found == text, f"{name}({given})"


def test_a_range_of_times_writes_a_shared_day_once() -> None:
    began = "2026-11-21T01:02:03+00:00"
    assert when(began, "2026-11-21T01:02:59+00:00") == "21 November 2026, 01:02 UTC"
    assert when(began, "2026-11-21T05:00:00+00:00") == "21 November 2026, 01:02–05:00 UTC"
    ended = when(began, "2026-11-22T05:00:00+00:00")
    assert ended == "21 November 2026, 01:02 – 22 November 2026, 05:00 UTC"
