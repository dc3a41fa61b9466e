"""The search for the row that kills an engine: halves, and no more deaths than the logarithm asks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from batchkit.execution.bisection import (
    PROOF,
    PROOF_AMONG_ACCIDENTS,
    Expected,
    Suspects,
    Suspicion,
)
from batchkit.storage.manifest import SuspectGroup
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
            found = suspects.died([r for r in in_flight if r.row.index not in gone], "oom")
            blamed += [found.row.index] if found is not None else []
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


@given(rows_and_poison())
@example((1, {0}))
@example((2, {0}))
@example((2, {0, 1}))
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
    assert found.deaths <= most_deaths(n, len(poison))


@given(rows_and_poison(), st.data())
def test_what_was_answered_before_a_death_is_no_suspect(
    case: tuple[int, set[int]], data: st.DataObject
) -> None:
    n, poison = case
    found = search(n, poison, lambda most: data.draw(st.integers(0, most)))
    assert sorted(found.blamed) == sorted(poison)
    assert sorted(found.answered) == sorted(set(range(n)) - poison), "each of them once"
    assert found.deaths <= most_deaths(n, len(poison))


def test_a_lone_request_is_named_when_two_replays_have_died() -> None:
    suspects, lone = Suspects(), request(7)
    for _ in range(2):
        assert suspects.died([lone], "oom") is None
        assert suspects.next_group() == [lone]
    assert suspects.died([lone], "oom") is lone
    assert not suspects


def test_where_accidents_happen_it_takes_one_death_more() -> None:
    suspects, lone = Suspects(), request(7)
    suspects.died([request(1), request(2)], "oom")
    while suspects.next_group():
        pass  # each is answered: it was an accident
    assert suspects.died([lone], "oom") is None
    for _ in range(PROOF_AMONG_ACCIDENTS - 1):
        assert suspects.next_group() == [lone]
        assert suspects.died([lone], "oom") is None
    assert suspects.next_group() == [lone]
    assert suspects.died([lone], "oom") is lone


def test_where_accidents_are_known_of_the_first_row_takes_one_death_more() -> None:
    suspects, lone = Suspects(among_accidents=True), request(7)
    for _ in range(PROOF_AMONG_ACCIDENTS):
        assert suspects.died([lone], "oom") is None
        assert suspects.next_group() == [lone]
    assert suspects.died([lone], "oom") is lone


def test_deaths_in_different_ways_are_no_proof() -> None:
    suspects, lone = Suspects(), request(7)
    for cause in ("oom", "stall", "oom", "error"):
        assert suspects.died([lone], cause) is None
        assert suspects.next_group() == [lone]
    assert suspects.died([lone], "stall") is lone


def test_a_search_that_found_someone_was_no_accident() -> None:
    suspects, lone, good = Suspects(), request(7), request(8)
    for _ in range(2):
        suspects.died([lone, good], "oom")
        assert suspects.next_group() == [lone]
        assert suspects.died([lone], "oom") is None
        assert suspects.next_group() == [good]
        assert suspects.next_group() == [lone]
        assert suspects.died([lone], "oom") is lone
        assert not suspects.next_group()


@pytest.mark.parametrize("deaths", [1, 2])
def test_a_lone_request_that_survives_its_replay_begins_with_a_clean_slate(deaths: int) -> None:
    suspects, lone = Suspects(), request(7)
    for _ in range(deaths):
        suspects.died([lone], "oom")
        suspects.next_group()
    assert not suspects.next_group(), "it was answered"
    assert not suspects
    assert suspects.died([lone], "oom") is None
    suspects.next_group()
    assert suspects.died([lone], "oom") is None


def test_large_groups_go_first_and_in_their_order() -> None:
    suspects, all_eight = Suspects(), [request(index) for index in range(8)]
    suspects.died(all_eight, "oom")
    sizes = []
    while group := suspects.next_group():
        sizes.append([r.row.index for r in group])
        if len(group) > 1:
            suspects.died(group, "oom")
    assert sizes == [
        [0, 1, 2, 3], [4, 5, 6, 7],
        [0, 1], [2, 3], [4, 5], [6, 7],
        [0], [1], [2], [3], [4], [5], [6], [7],
    ]  # fmt: skip


def test_a_quarantined_row_comes_last_and_alone_and_one_death_names_it() -> None:
    suspects, again = Suspects(), request(9)
    suspects.died([request(0), request(1)], "oom")
    suspects.suspect(again)
    assert [len(suspects.next_group()) for _ in range(2)] == [1, 1]
    assert suspects.next_group() == [again]
    assert suspects.died([again], "oom") is again
    assert not suspects


def test_a_quarantined_row_is_suspect_without_any_death() -> None:
    suspects, again = Suspects(), request(9)
    suspects.suspect(again)
    assert suspects, "new requests are to wait"
    assert suspects.next_group() == [again]
    assert not suspects.next_group(), "it was answered"
    assert not suspects


def test_interposed_requests_go_next_together_and_the_search_goes_on_behind_them() -> None:
    suspects, sound = Suspects(), [request(5), request(6)]
    suspects.died([request(0), request(1)], "oom")
    suspects.interpose(sound)
    assert suspects.next_group() == sound
    assert suspects
    assert [[r.row.index for r in suspects.next_group()] for _ in range(2)] == [[0], [1]]


def test_interposed_requests_are_under_no_suspicion() -> None:
    suspects, again, sound = Suspects(), request(0), request(5)
    suspects.suspect(again)
    suspects.interpose([sound])
    assert suspects.next_group() == [sound]
    assert suspects.died([sound], "oom") is None
    assert suspects.next_group() == [again]
    assert suspects.next_group() == [sound], "one death makes it a suspect, behind the others"
    assert suspects.died([sound], "oom") is sound


def test_a_death_with_nothing_in_flight_names_nobody() -> None:
    suspects = Suspects()
    assert suspects.died([], "oom") is None
    assert not suspects
    assert not suspects.next_group()


def test_a_death_between_two_groups_leaves_the_groups_that_wait() -> None:
    suspects, first, second = Suspects(), request(0), request(1)
    suspects.died([first, second], "oom")
    assert suspects.next_group() == [first]
    assert suspects.died([], "oom") is None, "it was answered just before"
    assert suspects.next_group() == [second]


def test_rows_of_an_earlier_start_are_replayed_in_its_groups() -> None:
    suspects, rows = Suspects(), [request(n) for n in range(5)]
    for row, group in zip(rows, [0, 1, 0, 1, 2], strict=True):
        suspects.recall(row, group, ())
    assert [suspects.next_group() for _ in range(4)] == [
        [rows[0], rows[2]], [rows[1], rows[3]], [rows[4]], (),
    ]  # fmt: skip
    assert suspects.among_accidents, "the death was an accident"


def test_a_row_that_comes_while_its_group_is_replayed_gets_a_group_of_its_own() -> None:
    suspects, first, late = Suspects(), request(0), request(1)
    suspects.recall(first, 0, ())
    assert suspects.next_group() == [first]
    suspects.recall(late, 0, ())
    assert suspects.died([first], "oom") is None
    assert suspects.next_group() == [late]


def test_the_deaths_of_a_lone_row_count_in_the_next_start() -> None:
    suspects, lone = Suspects(), request(7)
    suspects.recall(lone, 3, ("oom",))
    assert suspects.next_group() == [lone]
    assert suspects.died([lone], "oom") is lone


def test_what_is_suspected_survives_its_way_through_json() -> None:
    suspicion = Suspicion({7: "ab", 9: "cd"}, ("oom MemoryError",), is_quarantined=True)
    noted = suspicion.noted().model_dump_json()
    assert Suspicion.known(SuspectGroup.model_validate_json(noted)) == suspicion


def test_what_was_suspected_of_rows_that_have_not_come_is_kept() -> None:
    expected = Expected([Suspicion({1: "a", 2: "b"}), Suspicion({3: "c"}, ("oom",))])
    assert expected.pop(9, "a") is None
    assert expected.pop(1, "another row by now") is None
    found = expected.pop(3, "c")
    assert found is not None
    assert (found.group, found.suspicion.deaths) == (1, ("oom",))
    assert expected.suspicions() == [Suspicion({2: "b"})]


@given(st.integers(0, 300))
def test_a_death_that_does_not_repeat_blames_nobody(n: int) -> None:
    suspects = Suspects()
    in_flight = [request(index) for index in range(n)]
    assert suspects.died(in_flight, "oom") is None
    replayed: list[Request] = []
    while group := suspects.next_group():
        assert suspects, "new requests are to wait"
        replayed += group
    assert replayed == in_flight, "each once, in their order"
    assert not suspects
