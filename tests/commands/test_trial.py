"""What a trial measures of the answers that its run gives."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchkit.commands.trial.measurement import (
    Figures,
    Measurement,
    TimedAnswer,
    hung_s,
    idle_of,
    was_short,
)
from batchkit.storage.metrics import Metrics


def answers(*ends: float, latency_s: float = 0.5) -> list[TimedAnswer]:
    return [TimedAnswer(n, end - latency_s, end, 10, 4, 4) for n, end in enumerate(ends)]


def steady(rate: float, n: int) -> list[TimedAnswer]:
    return answers(*((k + 1) / rate for k in range(n)))


def measured(
    found: list[TimedAnswer],
    at_once: int,
    seconds: float = 60,
    *,
    ended: float | None = None,
    is_sample: bool = True,
    **how: Any,
) -> Figures:
    """What a trial measures as its records come, until it is over."""
    trial = measurement_of(found, at_once, seconds, **how)
    figures = trial.figures(found[-1].ended if ended is None else ended, is_sample=is_sample)
    assert figures is not None
    return figures


def measurement_of(
    found: list[TimedAnswer],
    at_once: int,
    seconds: float = 60,
    *,
    rows: int = 10**6,
    first: int | None = None,
) -> Measurement:
    """``first``: the last one of those that were submitted first."""
    submitted = range(at_once) if first is None else [*range(at_once - 1), first]
    trial = Measurement(at_once, seconds, total=rows, first=submitted)
    for each in found:
        if trial.is_over(0.0, each.ended):
            break
        trial.add(each)
    return trial


SLOW_START = answers(*(3.0 + k / 10 for k in range(40)))
SHORT = answers(*(k / 20 for k in range(1, 120)), *(6.0 + k / 10 for k in range(200)))


@pytest.mark.parametrize(
    ("found", "at_once", "how", "rate"),
    [
        (SLOW_START, 8, {"rows": 40}, 10),
        # Of the first eight, one takes 6 s; the short ones that pass meanwhile would look like speed.
        (SHORT, 8, {"seconds": 9, "first": 119}, 10),
        # One of the first twenty has the longest answer of all.
        (steady(100, 1000), 20, {"first": 999}, 100),
    ],
    ids=["a slow start", "short answers first", "the last tenth of the first rows"],
)
def test_measuring_begins_when_the_engine_is_full_and_ends_with_the_rows(
    found: list[TimedAnswer], at_once: int, how: dict[str, Any], rate: float
) -> None:
    figures = measured(found, at_once, **how)
    assert figures.is_typical
    assert figures.rows_per_s == pytest.approx(rate, rel=0.1)
    assert figures.prompt_tokens_per_s == pytest.approx(10 * rate, rel=0.1)
    assert figures.completion_tokens_per_s == pytest.approx(4 * rate, rel=0.1)


def test_a_whole_job_is_measured_as_a_whole() -> None:
    found = measured(SLOW_START, 8, rows=40, ended=20.0, is_sample=False)
    assert found.is_typical
    assert (found.rows, found.seconds) == (40, pytest.approx(4.4)), "from the first row on"


def test_few_rows_are_measured_and_said_to_be_few() -> None:
    found = measured(steady(10, 5), 8, rows=5)
    assert (found.rows, found.is_typical) == (5, False)


def test_rows_that_end_within_one_millisecond_are_measured() -> None:
    found = measured(answers(*[1.0] * 40), 8, rows=40)
    assert found.rows == 24, "after the first eight, until eight are left"
    assert found.rows_per_s == 24_000, "in one millisecond"


def test_nothing_answered_has_no_figures() -> None:
    assert Measurement(4, 1, total=9, first=range(4)).figures(1.0, is_sample=False) is None


@pytest.mark.parametrize(
    ("full_at", "over_at"), [(None, 2.0), (1.5, 3.5)], ids=["it never became full", "it was full"]
)
def test_time_is_up(full_at: float | None, over_at: float) -> None:
    trial = Measurement(4, 2, total=1000, first=range(4))
    for each in answers(*([full_at] * 4 if full_at else [])):
        trial.add(each)
    assert not trial.is_over(0.0, over_at - 0.1)
    assert trial.is_over(0.0, over_at)


@pytest.mark.parametrize(
    ("found", "rows", "tokens", "is_short"),
    [
        (answers(1.0, 1.1), 100, 9, True),
        (answers(1.0, 1.1), 2, 9, False),
        (steady(10, 40), 100, 9, False),
        ([], 100, 9, True),
        ([], 100, 0, False),
    ],
    ids=["not full", "no more rows", "full", "only tokens", "nothing"],
)
def test_a_trial_was_short_if_the_engine_was_still_to_be_filled(
    found: list[TimedAnswer], rows: int, tokens: int, is_short: bool
) -> None:
    trial = measurement_of(found, 8, rows=rows)
    figures = trial.figures(9.0, is_sample=False)
    assert was_short(trial, figures, [at(9.0, unfinished_tokens=tokens)]) == is_short


@settings(deadline=None, max_examples=50)
@given(rate=st.floats(5, 100), at_once=st.integers(1, 16), seconds=st.floats(4, 20))
def test_a_steady_trial_has_its_rate(rate: float, at_once: int, seconds: float) -> None:
    found = measured(steady(rate, int(rate * seconds * 2) + at_once + 1), at_once, seconds)
    assert found.is_typical
    assert found.seconds <= seconds + 1 / rate
    assert found.rows_per_s == pytest.approx(rate, rel=2 / found.rows), "a row more or less"


def test_percentiles_are_of_latency() -> None:
    found = [TimedAnswer(k, k / 10 - k / 1000, k / 10, 1, 1, 1) for k in range(1, 101)]
    each = measured(found, 1, rows=100, is_sample=False)
    assert (each.p50_ms, each.p99_ms) == (pytest.approx(50.0), pytest.approx(99.0))


def at(seconds: float, **figures: Any) -> Metrics:
    time = datetime.fromtimestamp(seconds, UTC).isoformat()
    return Metrics(time, 1, seconds, 0, 0, **figures)


@pytest.mark.parametrize(
    ("latency_s", "figures", "shares"),
    [
        (0.5, {"in_flight": 5, "running": 5}, (3 / 8, 0, 0)),
        (0.5, {"in_flight": 12, "running": 5}, (0, 3 / 8, 0)),
        (0.5, {"in_flight": 6, "running": 5}, (2 / 8, 1 / 8, 0)),
        (1.2, {"in_flight": 12, "running": 3, "kv_cache_usage": 0.99}, (0, 0, 1)),
        (0.8, {"in_flight": 8, "running": 8}, (0, 0, 0)),
        (1.2, {"in_flight": 12, "running": 8}, (0, 0, 0)),
    ],
)
def test_what_the_engine_waits_for(
    latency_s: float, figures: dict[str, Any], shares: tuple[float, ...]
) -> None:
    """Ten rows a second, each of which takes so long, hold so many of its eight places."""
    found = answers(*(k / 10 for k in range(1, 101)), latency_s=latency_s)
    trial = measurement_of(found, 8, rows=10**6)
    lines = [at(0.5, preemptions=1), *(at(s, preemptions=2 * s, **figures) for s in range(2, 9))]
    idle = idle_of(trial, lines)
    assert idle is not None
    assert idle[:3] == pytest.approx(shares, abs=0.02)
    assert idle.running == figures["running"]
    assert idle.preempted == 6, "in the five seconds of its round"
    assert idle_of(trial, lines[:1]) is None, "it was not full yet"


@pytest.mark.parametrize(("least", "over_at"), [(0.0, 6), (9.0, 6), (20.0, 2)])
def test_a_trial_that_is_clearly_behind_ends_early(least: float, over_at: float) -> None:
    """Ten rows a second, of which four run at once: without ``least`` it takes five seconds."""
    trial = Measurement(4, 60, total=1000, first=range(4), least=least)
    ended = next(
        each.ended for each in steady(10, 400) if trial.add(each) or trial.is_over(0.0, each.ended)
    )
    assert ended == pytest.approx(over_at, abs=1)


@pytest.mark.parametrize(
    ("tokens", "in_flight", "silent_s"),
    [((9, 9, 9), 4, 20.0), ((7, 8, 9), 4, 0.0), ((9, 9, 9), 0, 0.0), ((5, 7, 7), 4, 10.0)],
    ids=["hung", "one long answer", "at its end", "hung later: not yet for long enough"],
)
def test_a_trial_whose_engine_generates_nothing_has_hung(
    tokens: tuple[int, ...], in_flight: int, silent_s: float
) -> None:
    trial = Measurement(4, 30, total=100, first=range(4))
    for each in answers(1.0, 2.0, 3.0):
        trial.add(each)
    moved = enumerate(tokens)
    lines = [at(3.0 + 10 * n, in_flight=in_flight, unfinished_tokens=last) for n, last in moved]
    assert hung_s(trial, lines) == (silent_s if silent_s > 15 else 0.0)
