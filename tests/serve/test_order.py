"""Which batches run, and in which rank."""

from __future__ import annotations

import pytest

from batchkit.serve.order import MOST, BatchTurn, Order
from batchkit.serve.store import Stored

NOW = 1_000_000.0


def batch(
    name: str,
    owner: str = "a",
    *,
    left: int = 100,
    priority: int = 0,
    in_s: float = 1e6,
    model: str = "m",
) -> Stored:
    counts = {"total": left + 7, "completed": 5, "failed": 2}
    doc = {
        "id": name,
        "model": model,
        "priority": priority,
        "expires_at": NOW + in_s,
        "request_counts": counts,
    }
    return Stored(owner, doc)


def names(turns: list[BatchTurn]) -> list[str]:
    return [turn.stored.doc["id"] for turn in turns]


@pytest.mark.parametrize(
    ("waiting", "chosen"),
    [
        (
            [batch("long", left=900), batch("short", left=9), batch("other")],
            ["short", "other", "long"],
        ),
        ([batch("low"), batch("high", left=900, priority=1)], ["high", "low"]),
        ([batch("a1"), batch("a2"), batch("a3"), batch("b1", "b")], ["a1", "a2", "b1"]),
        ([batch(name) for name in "edcba"], [*"abcd"]),
        ([batch("late"), batch("sooner", in_s=5e5)], ["sooner", "late"]),
    ],
)
def test_of_a_key_those_with_the_fewest_rows_left_run(
    waiting: list[Stored], chosen: list[str]
) -> None:
    assert names(Order().chosen(waiting, {}, NOW, 4)) == chosen


def test_every_key_has_a_batch_before_one_has_two() -> None:
    waiting = [batch(f"{key}{n}", key) for key in "abcdefghijkl" for n in range(2)]
    assert len({turn.stored.owner for turn in Order().chosen(waiting, {}, NOW, 12)}) == 12
    assert len(Order().chosen(waiting, {}, NOW, 4)) == 4


def test_a_batch_that_would_miss_its_deadline_goes_first_until_it_would_not() -> None:
    order, waiting = Order(), [batch("usual"), batch("close", left=1000, in_s=120)]
    order.note(10, 1.0)  # ten rows a second: 1,000 rows take 100 of the 120 seconds
    assert names(order.chosen(waiting, {}, NOW, MOST)) == ["close", "usual"]
    first, second = order.chosen(waiting, {"close": 500}, NOW, MOST)
    assert first.rank == second.rank


def test_the_rate_of_the_last_minutes_counts() -> None:
    order, waiting = Order(), [batch("usual"), batch("close", left=1000, in_s=120)]
    for rate in (1000, 10):
        for _ in range(600):
            order.note(rate, 1.0)
    assert names(order.chosen(waiting, {}, NOW, MOST)) == ["close", "usual"]


def test_a_model_stays_loaded_until_it_has_no_batch_or_another_is_more_urgent() -> None:
    order, long = Order(), batch("long", left=900)
    order.note(100, 10)
    other = batch("other", model="n", left=5)
    chosen = [names(order.chosen([long], {}, NOW, MOST))]
    chosen.append(names(order.chosen([long, other], {}, NOW, MOST)))
    urgent = batch("urgent", model="n", in_s=200)
    chosen.append(names(order.chosen([long, other, urgent], {}, NOW, MOST)))
    chosen.append(names(order.chosen([long, other], {}, NOW, MOST)))
    chosen.append(names(order.chosen([long], {}, NOW, MOST)))
    first = batch("first", model="n", priority=1)
    chosen.append(names(order.chosen([long, first], {}, NOW, MOST)))
    assert chosen == [["long"], ["long"], ["urgent", "other"], ["other"], ["long"], ["first"]]
