"""How ``plan`` computes: the time of a step from rows of a sample, and totals from their lengths."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchkit.commands.plan.forecast import replicates
from batchkit.commands.plan.throughput import (
    StepTime,
    Wave,
    fit,
    points_of,
    points_of_batches,
    steps_of,
)
from batchkit.commands.trial.measurement import TimedAnswer


def wave(answers: list[int], window: int, steps: StepTime) -> Wave:
    """Rows of 50 prompt tokens as an engine with these times answers them, to the step."""
    waiting, running = [*enumerate(answers)], dict[int, tuple[int, float]]()
    now, rows = 0.0, list[TimedAnswer]()
    while waiting or running:
        begun = 0
        while waiting and len(running) < window:
            index, tokens = waiting.pop(0)
            running[index] = tokens, now
            begun += 1
        now += steps.step_s + len(running) * steps.sequence_s + 50 * begun * steps.prompt_token_s
        for index, (left, began) in [*running.items()]:
            running[index] = left - 1, began
            if left == 1:
                del running[index]
                rows.append(TimedAnswer(index, began, now, 50, answers[index], answers[index]))
    return Wave(window, rows, now)


@pytest.mark.parametrize(
    "steps",
    [
        StepTime(0, 0.02, 0.0001, 0.00002),
        StepTime(0, 0.005, 0.001, 0),
        StepTime(0, 0.03, 0, 0.0001),
    ],
)
def test_the_time_of_a_step_at_a_large_batch_is_found_from_two_smaller_ones(
    steps: StepTime,
) -> None:
    draw = np.random.default_rng(1)
    answers = [max(1, round(n)) for n in draw.lognormal(4, 0.9, 60)]
    found = fit(points_of([wave(answers[:15], 3, steps), wave(answers[15:], 45, steps)]))
    job = [max(1, round(n)) for n in draw.lognormal(4, 0.9, 2000)]
    n_steps = steps_of(job, 128)
    forecast = found.seconds(n_steps, sum(job), 50 * len(job), len(job), 128)
    assert forecast == pytest.approx(wave(job, 128, steps).seconds, rel=0.1)


def test_batches_that_end_together_are_fitted_as_wholes() -> None:
    steps = StepTime(0, 0.02, 0.001, 0)
    found = fit(points_of_batches([wave([3, 9, 40], 3, steps), wave([5, 5], 2, steps)]))
    assert (found.step_s, found.sequence_s) == pytest.approx((steps.step_s, steps.sequence_s))


@given(st.lists(st.integers(1, 50), min_size=1, max_size=60), st.integers(1, 20))
def test_steps_are_those_of_a_full_engine(lengths: list[int], running: int) -> None:
    steps = steps_of(lengths, running)
    assert steps == wave(lengths, running, StepTime(0, 1.0, 0, 0)).took_s
    assert max(lengths) <= steps <= steps_of(lengths, running, in_batches=True)
    assert steps >= sum(lengths) / running
    assert steps_of(lengths, 1) == sum(lengths)


def test_no_answer_is_longer_than_max_tokens() -> None:
    rng = np.random.default_rng(0)
    lengths = np.array([3.0, 5.0, 90.0, 100.0] * 8)
    drawn = [found.draw(500, rng).max() for found in replicates(lengths, 128, rng)]
    assert 100 < max(drawn) <= 128


def test_answers_that_are_all_alike_leave_no_doubt() -> None:
    rng = np.random.default_rng(0)
    found = replicates(np.full(20, 7.0), 256, rng)
    assert {round(one.mean, 9) for one in found} == {7.0}
