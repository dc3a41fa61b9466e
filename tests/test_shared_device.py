"""The rule by which steps of several engines end on the benchmarks' simulated device, in simulated time."""

from __future__ import annotations

import json
import random

import pytest

from benchmarks.shared_device import Device, Submission, ends

A, B = "engine 1", "engine 2"


@pytest.mark.parametrize(
    ("submissions", "expected"),
    [
        ([Submission(0, A, 1, 1.0), Submission(0.5, B, 1, 1.0)], [1.5, 2.0]),
        ([Submission(0, A, 1, 0.25), Submission(0.5, B, 1, 0.75)], [1.0, 1.5]),
        ([Submission(0, f"engine {n}", 2, 0.25) for n in range(4)], [2.0] * 4),
        ([Submission(0, f"engine {n}", 2, 0.25) for n in range(8)], [4.0] * 8),
        ([Submission(0, A, 1, 1.0), Submission(0, B, 1, 0.5)], [1.5, 1.5]),
        ([Submission(0, A, 1, 0.5), Submission(0, B, 4, 0.75)], [1.25, 4.25]),
        ([Submission(0, A, 1, 0.1), Submission(0.5, A, 1, 0.1)], [1.0, 2.0]),
        (
            [Submission(0, "", 1, 0.1), Submission(0.5, "", 1, 0.1), Submission(9, "", 1, 1.0)],
            [1, 2, 10],
        ),
    ],
    ids=[
        "full shares slow each other down",
        "small shares overlap",
        "four quarters fill the device",
        "eight quarters share it",
        "unequal shares slow down by the same factor",
        "the longer one speeds up again",
        "an engine's own steps run one after another",
        "time slicing: one queue",
    ],
)
def test_steps_on_a_shared_device_end(submissions: list[Submission], expected: list[float]) -> None:
    assert ends(submissions) == pytest.approx(expected)


def test_a_shared_device_never_does_more_than_its_throughput_and_is_never_idle_meanwhile() -> None:
    draw = random.Random(0)
    for _ in range(50):
        share = draw.choice([0.25, 0.5, 1.0])
        n_engines, work_s = round(1 / share) + 1, draw.uniform(0.001, 0.1)
        begun = [(0.0, f"{n}") for _ in range(20) for n in range(n_engines)]
        found = ends([Submission(at, queue, work_s, share) for at, queue in begun])
        assert max(found) == pytest.approx(len(begun) * work_s * share)


def test_looking_at_a_shared_device_changes_no_end() -> None:
    draw = random.Random(1)
    device, at, numbers, submissions = Device(), 0.0, [], []
    for _ in range(200):
        at += draw.expovariate(20)
        device.advance(at)
        device = Device(json.loads(device.to_json()))
        if draw.random() < 0.5:
            step = Submission(at, draw.choice("abcd"), draw.uniform(0, 0.2), draw.uniform(0.1, 1))
            numbers.append(device.submit(*step[1:]))
            submissions.append(step)
    device.advance(1e3)
    assert [device.ended[number] for number in numbers] == pytest.approx(ends(submissions))
