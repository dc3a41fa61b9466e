"""An engine that runs out of memory comes back smaller, and grows again after a stretch of success."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import pytest

from batchkit.config.tables import JobConfig
from batchkit.engines.faults import StartFailed
from batchkit.engines.memory_ladder import Ladder
from batchkit.errors import EngineError
from batchkit.execution.bisection import PROOF
from batchkit.execution.supervisor import GROWTH_SHARE
from tests.support.counted_engines import (
    AT_LOAD,
    GIB,
    KILLED,
    CountingEngine,
    World,
    answer_all,
    kinds_of,
    requests,
)


def test_memory_that_runs_out_halves_the_batch_until_it_fits_and_that_is_remembered() -> None:
    world = World(over=3)
    with closing(world.supervise(max_num_seqs=16)) as engine:
        assert kinds_of(answer_all(engine, requests(0, 40))) == {}
        assert engine.ladder.steps == [{"max_num_seqs": n} for n in (8, 4, 2)]
        assert engine.max_num_seqs == 2
        assert engine.restarts == 3
    assert world.opened == [16, 8, 4, 2]
    assert (
        "out of memory (OutOfMemoryError: planted): next engine with max_num_seqs = 2" in world.said
    )


def test_a_crash_does_not_make_the_batch_smaller() -> None:
    world = World(dies_at={1: "engine_crash", 2: "stall"})
    with closing(world.supervise()) as engine:
        answer_all(engine, requests(0, 8))
        assert engine.ladder.steps == []
    assert world.opened == [8, 8, 8]


def test_a_kill_without_a_sign_of_memory_does_not_make_the_batch_smaller() -> None:
    world = World(killed_at={1}, a_poll=1)
    with closing(world.supervise()) as engine:
        assert kinds_of(answer_all(engine, requests(0, 40))) == {}
        assert engine.ladder.steps == []
    assert world.opened == [8, 8]
    message = (
        "engine died (engine_crash) with 40 rows in flight: SIGKILL: killed from outside, no sign"
    )
    assert world.said == [f"{message} of memory running out"]


def test_a_second_kill_in_a_row_is_taken_for_memory() -> None:
    world = World(killed_at={1, 20}, a_poll=1)
    with closing(world.supervise()) as engine:
        assert kinds_of(answer_all(engine, requests(0, 40))) == {}
        assert engine.ladder.steps == [{"max_num_seqs": 4}]


@pytest.mark.parametrize("between", ["a stretch of success", "another death"])
def test_kills_that_are_far_apart_are_no_sign_of_memory(between: str) -> None:
    rows = requests(0, 1200 if between == "a stretch of success" else 40)
    far = 1100 if between == "a stretch of success" else 20
    world = World(killed_at={1, far}, a_poll=1)
    if between == "another death":
        world.dies_at = {10: "engine_crash"}
    with closing(world.supervise()) as engine:
        assert kinds_of(answer_all(engine, rows)) == {}
        assert engine.ladder.steps == []


def test_a_row_that_has_its_engine_killed_is_found_and_costs_no_step() -> None:
    world = World(poison={3: "kill"})
    with closing(world.supervise()) as engine:
        assert kinds_of(answer_all(engine, requests(0, 8))) == {3: "oom"}
        assert engine.ladder.steps == []
        assert engine.restarts <= 3 + PROOF


def test_an_engine_that_is_killed_at_load_is_tried_once_more_as_it_was() -> None:
    world = World()
    open_one = world.open

    def killed_at_first(job: JobConfig) -> CountingEngine:
        if not world.failed_loads:
            world.failed_loads.append(job.engine.options["max_num_seqs"])
            raise StartFailed("its process died", KILLED, {})
        return open_one(job)

    world.open = killed_at_first  # type: ignore[method-assign]
    with closing(world.supervise()) as engine:
        assert engine.ladder.steps == []
    assert (world.failed_loads, world.opened) == ([8], [8])


def test_an_engine_that_is_killed_at_every_load_is_made_smaller() -> None:
    world = World(load_error=StartFailed("its process died", KILLED, {}))
    with pytest.raises(StartFailed):
        world.supervise()
    assert world.failed_loads == [8, 8, 4, 2, 1]


@pytest.mark.parametrize("remembered", [[], [{"max_num_seqs": 6}]])
def test_steps_that_a_poison_row_cost_are_taken_back(remembered: list[dict[str, Any]]) -> None:
    world = World(poison={3: "oom"})
    with closing(world.supervise(ladder=Ladder(list(remembered)))) as engine:
        assert kinds_of(answer_all(engine, requests(0, 8))) == {3: "oom"}
        assert engine.ladder.steps == remembered
    assert min(world.opened) < world.opened[0] == world.opened[-1]


def test_steps_of_an_earlier_search_stay_when_a_poison_row_costs_more() -> None:
    world = World(over=4, poison={30: "oom"})
    with closing(world.supervise(max_num_seqs=16)) as engine:
        assert kinds_of(answer_all(engine, requests(0, 40), window=8)) == {30: "oom"}
        assert engine.ladder.steps == [{"max_num_seqs": 8}, {"max_num_seqs": 4}]


def test_a_step_that_no_poison_row_cost_stays() -> None:
    world = World(over=7, poison={3: "engine_crash"})
    with closing(world.supervise(max_num_seqs=16)) as engine:
        assert kinds_of(answer_all(engine, requests(0, 16))) == {3: "engine_crash"}
        assert engine.ladder.steps == [{"max_num_seqs": 8}]
    assert (
        world.said.count(
            "out of memory (OutOfMemoryError: planted): next engine with max_num_seqs = 8"
        )
        == 1
    )


def test_the_engine_grows_by_one_step_between_rows_after_a_stretch_of_success() -> None:
    world = World(a_poll=1)
    ladder = Ladder([{"max_num_seqs": 4}, {"max_num_seqs": 2}], stretch=10)
    with closing(world.supervise(ladder=ladder)) as engine:
        answer_all(engine, requests(0, 40), window=5)
        assert ladder.steps == [], "10 answers for the first step, 20 for the second"
        assert engine.max_num_seqs == 8
    assert world.opened == [2, 4, 8]
    assert world.closed_with == [0, 0, 0], "no row lost what it had generated"
    assert world.submitted == list(range(40)), "none was submitted twice"
    assert world.said == [
        "engine restart: a stretch of success, one step up to max_num_seqs = 4",
        "engine restart: a stretch of success, one step up to the job's own settings",
    ]


@pytest.mark.parametrize("open_s", [0.5, 10])
def test_the_engine_grows_only_when_the_restart_is_a_small_share_of_its_life(open_s: float) -> None:
    world = World(open_s=open_s, a_poll=1)
    with closing(world.supervise(ladder=Ladder([{"max_num_seqs": 4}], stretch=3))) as engine:
        answer_all(engine, requests(0, 250), window=1)
    assert world.opened == [4, 8]
    assert world.polls_at_open == [0, open_s / GROWTH_SHARE]


def test_growth_that_proves_too_much_is_tried_half_as_often() -> None:
    world = World(load_over=4)
    with closing(world.supervise(ladder=Ladder([{"max_num_seqs": 4}], stretch=4))) as engine:
        answer_all(engine, requests(0, 30), window=1)
        assert engine.ladder.steps == [{"max_num_seqs": 4}]
    assert len(world.failed_loads) == 3, "after 4, 8 and 16 answers"
    assert world.opened == [4] * 4


def test_an_engine_that_grew_too_large_is_replaced_between_rows() -> None:
    world = World(host_bytes=GIB, grows_bytes=GIB // 4, a_poll=1)
    with closing(world.supervise(max_host_gb=1.5)) as engine:
        answer_all(engine, requests(0, 30), window=4)
        assert engine.restarts >= 3
    assert set(world.closed_with) == {0}
    assert world.submitted == list(range(30))
    restart = "engine restart: its process holds 1.8 GiB (run.max_host_gb = 1.5)"
    assert world.said.count(restart) == len(world.opened) - 1
    assert world.opened[:3] == [8, 8, 4], "the second time so soon, the batch is made smaller"


def test_no_restart_helps_where_a_new_engine_is_too_large_and_that_is_said_once() -> None:
    world = World(host_bytes=2 * GIB, grows_bytes=GIB // 4, a_poll=1)
    with closing(world.supervise(max_host_gb=1.5)) as engine:
        answer_all(engine, requests(0, 12), window=4)
        assert engine.restarts == 0
    assert world.said == [
        "a new engine already holds 2.2 GiB (run.max_host_gb = 1.5): no restart would help"
    ]


def test_an_engine_whose_size_is_not_known_at_the_first_look_is_not_restarted_for_ever() -> None:
    """A ProcessEngine's load is 0 bytes until its process has reported a first turn."""
    world = World(host_bytes=2 * GIB, first_look=0, a_poll=1)
    with closing(world.supervise(max_host_gb=1.5)) as engine:
        answer_all(engine, requests(0, 12), window=4)
        assert engine.restarts == 0
    assert len(world.said) == 1


def test_what_one_engine_began_with_says_nothing_about_the_next() -> None:
    world = World(host_bytes=2 * GIB, a_poll=1)
    with closing(world.supervise(max_host_gb=1.5)) as engine:
        answer_all(engine, requests(0, 4), window=1)
        assert engine.restarts == 0
        world.host_bytes, world.grows_bytes = GIB, GIB // 4
        world.dies_at = {world.polls + 1: "engine_crash"}
        answer_all(engine, requests(4, 12), window=1)
        assert engine.restarts > 1
    assert world.said[-1] == "engine restart: its process holds 1.8 GiB (run.max_host_gb = 1.5)"


@pytest.mark.parametrize("max_host_gb", [None, 2.5])
def test_an_engine_within_its_memory_is_left_alone(max_host_gb: float | None) -> None:
    world = World(host_bytes=2 * GIB)
    with closing(world.supervise(max_host_gb=max_host_gb)) as engine:
        answer_all(engine, requests(0, 12))
        assert engine.restarts == 0
    assert world.said == []


def test_memory_that_runs_out_at_load_steps_down_until_it_opens() -> None:
    world = World(load_over=2)
    with closing(world.supervise()) as engine:
        assert engine.ladder.steps == [{"max_num_seqs": 4}, {"max_num_seqs": 2}]
        assert engine.restarts == 0
    assert (world.failed_loads, world.opened) == ([8, 4], [2])
    assert world.said == [
        f"out of memory at load (MemoryError: planted): next try with max_num_seqs = {n}"
        for n in (4, 2)
    ]


def test_memory_that_runs_out_at_every_load_ends_with_the_engines_own_error() -> None:
    world = World(load_over=0)
    with pytest.raises(StartFailed, match=r"^can't be loaded$"):
        world.supervise()
    assert world.failed_loads == [8, 4, 2, 1]


@pytest.mark.parametrize(("asked", "tried"), [(None, [None, 128, 64]), (24, [24, 12, 6])])
def test_an_engine_that_dies_at_load_before_it_reported_its_limits_is_halved_too(
    asked: int | None, tried: list[int | None]
) -> None:
    """As when the kernel kills its process: 256 is what vLLM takes where the job says nothing."""
    world = World(load_error=StartFailed("it died while it loaded", AT_LOAD, {}))
    with pytest.raises(StartFailed) as raised:
        world.supervise(max_num_seqs=asked)
    assert raised.value is world.load_error
    assert world.failed_loads[:3] == tried
    assert world.failed_loads[-1] == 1


def test_a_row_alone_that_runs_out_of_memory_gets_fewer_tokens_at_a_time() -> None:
    world = World(dies_at={1: "oom"}, batched_tokens=4096)
    with closing(world.supervise()) as engine:
        assert kinds_of(answer_all(engine, requests(0, 1))) == {}
        assert engine.ladder.steps == [{"max_num_batched_tokens": 2048}]


def test_steps_that_never_helped_are_not_remembered() -> None:
    world = World(dies_at=dict.fromkeys(range(1, 40), "oom"))
    kept: list[Any] = []
    engine = world.supervise(
        max_engine_restarts=3, remember=lambda history: kept.append(list(history.steps))
    )
    with closing(engine), pytest.raises(EngineError):
        answer_all(engine, requests(0, 40))
    assert kept[0] == [{"max_num_seqs": 4}], "at once, lest the kernel end the run as well"
    assert kept[-1] == []
