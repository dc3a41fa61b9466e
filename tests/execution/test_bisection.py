"""The search for the row that kills an engine: halves, and no more deaths than the logarithm asks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchkit.execution.bisection import PROOF, Suspects


class Search(NamedTuple):
    blamed: list[int]
    answered: list[int]
    deaths: int


def search(n: int, poison: set[int], answered_before_death: Callable[[int], int]) -> Search:
    """An engine that dies of each group with a poison row in it, from the first death to the last.

    Up to ``answered_before_death(most)`` of a group's good rows are answered before it dies.
    """
    suspects = Suspects[int]()
    in_flight: Sequence[int] = range(n)
    blamed: list[int] = []
    answered: list[int] = []
    deaths = 0
    while in_flight:
        good = [row for row in in_flight if row not in poison]
        if len(good) < len(in_flight):
            deaths += 1
            gone = good[: answered_before_death(len(good))]
            answered += gone
            found = suspects.died([row for row in in_flight if row not in gone], "oom")
            blamed += [] if found is None else [found]
        else:
            answered += good
        in_flight = suspects.next_group()
    assert not suspects
    return Search(blamed, answered, deaths)


def most_deaths(n: int, poison: int) -> int:
    """What the search may cost; a lone row still has to be there for every death of a quarantine."""
    return poison * (math.ceil(math.log2(n)) + PROOF) + 1


@st.composite
def rows_and_poison(draw: st.DrawFn) -> tuple[int, set[int]]:
    n = draw(st.integers(1, 200))
    return n, draw(st.sets(st.integers(0, n - 1), min_size=1, max_size=12))


@given(rows_and_poison(), st.data())
def test_what_was_answered_before_a_death_is_no_suspect(
    case: tuple[int, set[int]], data: st.DataObject
) -> None:
    n, poison = case
    found = search(n, poison, lambda most: data.draw(st.integers(0, most)))
    assert sorted(found.blamed) == sorted(poison)
    assert sorted(found.answered) == sorted(set(range(n)) - poison), "each of them once"
    assert found.deaths <= most_deaths(n, len(poison))


def died(*rows: int, cause: str = "oom", named: int | None = None) -> Step:
    """With these rows in flight: which of them is named as poison."""

    def step(suspects: Suspects[int]) -> None:
        assert suspects.died(rows, cause) == named

    return step


def replays(*rows: int) -> Step:
    """The next group; none if the search is over."""

    def step(suspects: Suspects[int]) -> None:
        assert [*suspects.next_group()] == [*rows]
        assert bool(suspects) == bool(rows), "new requests wait for the end of the search"

    return step


def does(method: str, *args: Any) -> Step:
    return lambda suspects: getattr(suspects, method)(*args)


Step = Callable[[Suspects[int]], None]
LONE = (died(7), replays(7))
SCRIPTS: dict[str, Sequence[Step]] = {
    "a lone row is named once two replays have died": [*LONE, *LONE, died(7, named=7), replays()],
    "where accidents happen it takes one death more": [
        *(died(1, 2), replays(1), replays(2), replays()),  # both were answered: it was an accident
        *(*LONE, *LONE, *LONE, died(7, named=7)),
    ],
    "deaths in different ways are no proof": [
        *(*LONE, died(7, cause="stall"), replays(7), *LONE, died(7, cause="error"), replays(7)),
        died(7, cause="stall", named=7),
    ],
    "a search that found a row was no accident": [
        *(died(7, 8), replays(7), died(7), replays(8), replays(7), died(7, named=7), replays()),
        *(died(6, 8), replays(6), died(6), replays(8), replays(6), died(6, named=6), replays()),
    ],
    "a lone row that survives its replay begins with a clean slate": [
        *LONE,
        replays(),
        *LONE,
        *LONE,
    ],
    "so does one that survives the second": [*LONE, *LONE, replays(), *LONE, *LONE],
    "large groups go first and in their order": [
        *(died(0, 1, 2, 3, 4, 5, 6), replays(0, 1, 2, 3), died(0, 1, 2, 3), replays(4, 5, 6)),
        *(died(4, 5, 6), replays(0, 1), died(0, 1), replays(2, 3), replays(4, 5), replays(6)),
        *(replays(0), replays(1), replays()),
    ],
    "a quarantined row comes last and alone, and one death names it": [
        *(died(0, 1), does("suspect", 9), replays(0), replays(1), replays(9), died(9, named=9)),
        replays(),
    ],
    "a quarantined row is suspect without any death": [does("suspect", 9), replays(9), replays()],
    "interposed rows go next together, and the search goes on behind them": [
        *(died(0, 1), does("interpose", [5, 6]), replays(5, 6), replays(0), replays(1), replays()),
    ],
    "one death makes an interposed row a suspect, behind the others": [
        *(does("suspect", 0), does("interpose", [5]), replays(5), died(5), replays(0)),
        *(replays(5), died(5, named=5)),
    ],
    "a death with nothing in flight names nobody": [died(), replays()],
    "a death between two groups leaves the groups that wait": [
        *(died(0, 1), replays(0), died(), replays(1), replays()),
    ],
}


@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)
def test_search_goes_as_written(script: Sequence[Step]) -> None:
    suspects = Suspects[int]()
    for step in script:
        step(suspects)
