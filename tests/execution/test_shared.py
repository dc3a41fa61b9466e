"""Several seats at one engine, which answers eight requests at once."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from batchkit.config.loading import make_job
from batchkit.engines.dry_run import DryRunEngine
from batchkit.execution.shared_engines import EngineClaim, Seat, SharedEngine
from batchkit.types import Request, Row

ENGINE = {"kind": "dry-run", "options": {"latency_s": 0.01, "max_num_seqs": 8}}


@pytest.fixture
def shared() -> SharedEngine:
    job = make_job({"name": "a", "input": {"path": "in.jsonl"}, "engine": ENGINE}, "test")
    return SharedEngine(DryRunEngine(job), lambda: None)


def waiting(shared: SharedEngine, owner: str, rank: Sequence[int] = (0,), n: int = 100) -> Seat:
    """A seat that has submitted ``n`` requests."""
    seat = shared.seat(EngineClaim(owner, tuple(rank), n))
    for index in range(n):
        seat.submit(Request(Row(index, str(index), {}), None, "Hello", {}, ""))
    return seat


def answered(seats: Sequence[Seat], n: int) -> list[int]:
    """By seat, once there are that many; the seats take turns in asking."""
    while sum(seat.claim.answered for seat in seats) < n:
        for seat in seats:
            seat.poll(0.001)
    return [seat.claim.answered for seat in seats]


def test_keys_get_equal_numbers_of_answers_however_many_batches_they_have(
    shared: SharedEngine,
) -> None:
    seats = [waiting(shared, owner) for owner in ("a", "a", "b", "c")]
    first, second, *others = answered(seats, 120)
    assert max(abs(n - 40) for n in (first + second, *others)) <= 4


def test_of_one_key_the_batch_with_the_fewest_rows_left_goes_first(shared: SharedEngine) -> None:
    long = waiting(shared, "a")
    answered([long], 20)
    short = waiting(shared, "a", n=20)
    answered([short, long], long.claim.answered + 32)  # the engine had twelve of the long one
    assert short.claim.left == 0


def test_a_key_that_comes_later_gets_its_part_at_once(shared: SharedEngine) -> None:
    early = waiting(shared, "early", n=200)
    answered([early], 60)
    late = waiting(shared, "late")
    before = early.claim.answered
    after, of_late = answered([early, late], before + 80)
    assert abs((after - before) - of_late) <= 14  # the engine had twelve of the first already


def test_a_lower_rank_goes_first_and_others_take_what_it_leaves(shared: SharedEngine) -> None:
    usual, urgent = waiting(shared, "a", (0, 1)), waiting(shared, "b", (-1, 1), n=40)
    of_usual, _ = answered([usual, urgent], 20)
    assert of_usual == 0
    _, of_urgent = answered([usual, urgent], 60)
    assert of_urgent == 40
    more = waiting(shared, "b", (-1, 1), n=40)
    usual.claim.rank = (-2, 1)
    _, of_more = answered([usual, more], 70)
    assert of_more == 0


def test_each_seat_gets_its_own_answers_and_one_that_left_takes_none(shared: SharedEngine) -> None:
    stays, leaves = waiting(shared, "a", n=20), waiting(shared, "b", n=20)
    done = [completion.request.row.index for completion in stays.poll(0.001)]
    leaves.leave()
    while len(done) < 20:
        done += [completion.request.row.index for completion in stays.poll(0.01)]
    assert sorted(done) == list(range(20))
    assert shared.seats == [stays]


def test_nothing_else_runs_between_requests_of_a_seat_that_must_run_alone(
    shared: SharedEngine,
) -> None:
    checks, other = shared.seat(EngineClaim("a", (0,), 3)), waiting(shared, "b")
    alone = Request(Row(0, "0", {}), None, "Hello", {}, "", alone=True)
    of_other = []
    for n in range(3):
        checks.submit(alone)
        while checks.claim.answered == n:
            checks.poll(0.001)
            other.poll(0.001)
        other.poll(0.05)  # before the next one is submitted
        of_other.append(other.claim.answered)
    assert of_other == [0, 0, 0]
    checks.leave()
    other.poll(0.05)
    assert other.claim.answered > 0
