"""A row that kills the engine is found, and alone fails."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from batchkit.engines.faults import EngineDied, Fault, FaultKind
from batchkit.execution.bisection import PROOF, Suspects
from batchkit.execution.supervisor import SupervisedEngine
from batchkit.types import Completion, Request
from tests.support.counted_engines import (
    KINDS,
    SIZES,
    WINDOWS,
    WORLDS,
    World,
    answer_all,
    kinds_of,
    known_kinds,
    requests,
)


@given(WORLDS, SIZES, WINDOWS)
def test_poison_rows_alone_fail(world: World, size: int, window: int) -> None:
    with closing(world.supervise(max_num_seqs=size, max_engine_restarts=1000)) as engine:
        done = answer_all(engine, requests(0, 40), window=window)
        assert engine.restarts == len(world.opened) - 1
    assert kinds_of(done) == known_kinds(world)


@given(st.dictionaries(st.integers(1, 60), KINDS, max_size=PROOF), SIZES, WINDOWS)
def test_deaths_that_do_not_repeat_cost_no_row(
    deaths: dict[int, FaultKind], size: int, window: int
) -> None:
    world = World(dies_at=deaths, a_poll=2)
    with closing(world.supervise(max_num_seqs=size)) as engine:
        assert kinds_of(answer_all(engine, requests(0, 40), window=window)) == {}


@given(WORLDS, SIZES, WINDOWS, st.integers(2, 3))
def test_a_quarantined_row_that_comes_again_runs_alone_and_costs_one_death(
    world: World, size: int, window: int, attempts: int
) -> None:
    world.refuses.clear()
    with closing(world.supervise(max_num_seqs=size, max_engine_restarts=1000)) as engine:
        done = answer_all(engine, requests(0, 40), window=window, attempts=attempts)
    assert kinds_of(done) == known_kinds(world)
    assert Counter(c.request.row.index for c in done) == Counter(range(40)) + Counter(
        dict.fromkeys(world.poison, attempts - 1)
    )
    for index in world.poison:
        last = [group for group in world.groups if index in group][-attempts:]
        assert last == [{index}] * attempts, "each further try alone, and one death for each"


def quarantined(world: World, engine: SupervisedEngine) -> Request:
    """Rows 0 to 7 are through; the one that was found to be poison, to be submitted again."""
    (failed,) = [c.request for c in answer_all(engine, requests(0, 8)) if c.error is not None]
    assert failed.row.index in world.poison
    return replace(failed, attempt=2)


def test_a_quarantined_row_may_be_answered_when_it_comes_again() -> None:
    world = World(poison={2: "oom"})
    with closing(world.supervise()) as engine:
        again = quarantined(world, engine)
        deaths = engine.restarts
        world.poison.clear()  # its images are smaller now
        assert kinds_of(answer_all(engine, [again, *requests(8, 12)])) == {}
        assert engine.restarts == deaths
    assert [group for group in world.groups if group][-2:] == [{2}, {8, 9, 10, 11}]


def test_a_quarantined_row_that_comes_while_others_run_waits_until_they_are_through() -> None:
    world = World(poison={2: "engine_crash"})
    with closing(world.supervise()) as engine:
        again = quarantined(world, engine)
        tried, deaths = len(world.groups), engine.restarts
        world.a_poll = 1
        for request in requests(8, 11):
            engine.submit(request)
        done = list(engine.poll(0.01))
        for request in [again, *requests(11, 13)]:
            engine.submit(request)
        while len(done) < 6:
            done += engine.poll(0.01)
        assert kinds_of(done) == {2: "engine_crash"}
        assert engine.restarts == deaths + 1
    assert world.groups[tried:] == [
        {8, 9, 10}, {9, 10}, {10},
        {2},
        {11, 12}, {12},
    ]  # fmt: skip


def test_new_requests_wait_for_the_end_of_a_search_and_keep_their_order() -> None:
    world = World(poison={2: "engine_crash"})
    with closing(world.supervise()) as engine:
        for request in requests(0, 8):
            engine.submit(request)
        assert engine.poll(0.01) == []
        late = requests(8, 14)
        for request in late[:3]:
            engine.submit(request)
        done: list[Completion] = []
        while len(done) < 8:
            done += engine.poll(0.01)
        assert kinds_of(done) == {2: "engine_crash"}
        assert max(world.submitted) < 8, "none of the late ones ran beside a suspect"
        for request in late[3:]:
            engine.submit(request)
        assert [c.request for c in engine.poll(0.01)] == late
    assert world.submitted[-6:] == list(range(8, 14))


SIDE_BY_SIDE = [  # with rows behind them, from the first of the window to its last
    (768, 384, range(first, first + n))
    for n in (12, 16, 40)
    for first in (int(where * (384 - n)) for where in (0.0, 0.3, 0.5, 0.75, 1.0))
]
AT_THE_END = [(384, 384, range(first, first + 8)) for first in (0, 172, 376)]
SPREAD = [(384, 384, range(12, 384, 24)), (384, 384, range(2, 384, 4)), (60, 60, range(1, 60, 3))]


@pytest.mark.parametrize("kind", ["engine_crash", "oom"])
@pytest.mark.parametrize(("rows", "window", "poison"), [*SIDE_BY_SIDE, *AT_THE_END, *SPREAD])
def test_many_poison_rows_do_not_end_a_run_that_has_sound_rows(
    rows: int, window: int, poison: range, kind: FaultKind
) -> None:
    world = World(poison=dict.fromkeys(poison, kind))
    with closing(world.supervise(max_num_seqs=256)) as engine:
        done = answer_all(engine, requests(0, rows), window=window)
        # Halves for each of them, and a lone row has to be there for every death of a quarantine.
        most = len(poison) * (math.ceil(math.log2(window)) + PROOF) + 1
        assert engine.restarts <= most
    assert kinds_of(done) == known_kinds(world)


@pytest.mark.parametrize("probes", [{"refuses_probes": True}, {"kills_probes": 1}])
def test_a_probe_that_has_no_answer_proves_nothing_and_is_no_row(probes: dict[str, int]) -> None:
    world = World(poison=dict.fromkeys(range(20, 36), "engine_crash"), **probes)
    with closing(world.supervise()) as engine:
        done = answer_all(engine, requests(0, 20))
        done += answer_all(engine, [*requests(20, 36), *requests(36, 40)])
    assert kinds_of(done) == dict.fromkeys(range(20, 36), "engine_crash")


def test_a_row_that_is_proven_by_the_last_death_allowed_is_not_lost() -> None:
    world = World(poison={0: "engine_crash"})
    with closing(world.supervise(max_engine_restarts=2)) as engine:
        assert kinds_of(answer_all(engine, requests(0, 1))) == {0: "engine_crash"}


def test_rows_that_were_quarantined_before_are_run_alone_and_once_however_many() -> None:
    world = World(poison=dict.fromkeys(range(40), "engine_crash"))
    with closing(world.supervise(quarantined=range(40))) as engine:
        assert kinds_of(answer_all(engine, requests(0, 40))) == known_kinds(world)
        assert engine.restarts == 40


def test_the_row_that_the_engine_names_itself_fails_and_the_others_go_on_in_order() -> None:
    world = World()
    rows = requests(0, 6)
    with closing(world.supervise()) as engine:
        for request in rows:
            engine.submit(request)
        fault = Fault("timeout", "preparing the prompt", "no end for 9 s")
        world.dies_with = EngineDied(fault, request=rows[2])
        [failed] = engine.poll(0.01)
        world.dies_with = None
        assert failed.request is rows[2]
        assert failed.error is not None
        assert failed.error.kind == "timeout"
        assert [c.request for c in engine.poll(0.01)] == [*rows[:2], *rows[3:]]


def died(*rows: int, cause: str = "oom", named: int | None = None) -> Step:
    """With these rows in flight: which of them is named as poison."""

    def step(suspects: Suspects[int]) -> None:
        assert suspects.record_death(rows, cause) == named

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
