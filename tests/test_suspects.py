"""The search for the row that kills an engine: halves, and no more deaths than the logarithm asks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from hypothesis import example, given
from hypothesis import strategies as st

from batchkit.suspects import Suspects
from batchkit.types import Request, Row


class Search(NamedTuple):
    blamed: list[int]
    answered: list[int]
    deaths: int


def request(index: int) -> Request:
    return Request(Row(index, str(index), {}), None, "tea", {}, "")


def search(
    n: int, poison: set[int], answered_before_death: Callable[[int], int] = lambda most: 0
) -> Search:
    """An engine that dies of each group with a poison row in it, from the first death to the last.

    Up to ``answered_before_death(most)`` of a group's good rows are answered before it dies.
    """
    suspects = Suspects()
    in_flight: Sequence[Request] = [request(index) for index in range(n)]
    blamed: list[int] = []
    answered: list[int] = []
    deaths = 0
    while in_flight:
        good = [r.row.index for r in in_flight if r.row.index not in poison]
        if len(good) < len(in_flight):
            deaths += 1
            gone = good[: answered_before_death(len(good))]
            answered += gone
            found = suspects.died([r for r in in_flight if r.row.index not in gone])
            blamed += [found.row.index] if found is not None else []
        else:
            answered += good
        in_flight = suspects.next_group()
    assert not suspects
    return Search(blamed, answered, deaths)


@st.composite
def rows_and_poison(draw: st.DrawFn) -> tuple[int, set[int]]:
    n = draw(st.integers(1, 200))
    return n, draw(st.sets(st.integers(0, n - 1), min_size=1, max_size=12))


@given(rows_and_poison())
@example((1, {0}))
@example((1024, {0}))
@example((1000, {999}))
@example((64, set(range(64))))
def test_exactly_the_poison_rows_are_named_and_all_others_answered(
    case: tuple[int, set[int]],
) -> None:
    n, poison = case
    found = search(n, poison)
    assert sorted(found.blamed) == sorted(poison)
    assert sorted(found.answered) == sorted(set(range(n)) - poison)
    assert found.deaths <= len(poison) * (math.ceil(math.log2(n)) + 1) + 1


@given(rows_and_poison(), st.data())
def test_what_was_answered_before_a_death_is_no_suspect(
    case: tuple[int, set[int]], data: st.DataObject
) -> None:
    n, poison = case
    found = search(n, poison, lambda most: data.draw(st.integers(0, most)))
    assert sorted(found.blamed) == sorted(poison)
    assert sorted(found.answered) == sorted(set(range(n)) - poison), "each of them once"
    assert found.deaths <= len(poison) * (math.ceil(math.log2(n)) + 1) + 1


def test_a_lone_request_is_replayed_before_it_is_blamed() -> None:
    suspects, lone = Suspects(), request(7)
    assert suspects.died([lone]) is None
    assert suspects.next_group() == [lone]
    assert suspects.died([lone]) is lone
    assert not suspects


def test_a_lone_request_that_survives_its_replay_is_not_blamed_for_a_later_death() -> None:
    suspects, lone = Suspects(), request(7)
    suspects.died([lone])
    suspects.next_group()
    assert suspects.next_group() == []
    assert suspects.died([request(8)]) is None


def test_a_death_with_nothing_in_flight_names_nobody() -> None:
    suspects = Suspects()
    assert suspects.died([]) is None
    assert not suspects
    assert suspects.next_group() == []


def test_a_death_between_two_groups_leaves_the_groups_that_wait() -> None:
    suspects, first, second = Suspects(), request(0), request(1)
    suspects.died([first, second])
    assert suspects.next_group() == [first]
    assert suspects.died([]) is None, "it was answered just before"
    assert suspects.next_group() == [second]


@given(st.integers(0, 300))
def test_a_death_that_does_not_repeat_blames_nobody(n: int) -> None:
    suspects = Suspects()
    in_flight = [request(index) for index in range(n)]
    assert suspects.died(in_flight) is None
    replayed: list[Request] = []
    while group := suspects.next_group():
        assert suspects, "new requests are to wait"
        replayed += group
    assert replayed == in_flight, "each once, in their order"
    assert not suspects
