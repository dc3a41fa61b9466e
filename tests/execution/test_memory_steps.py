"""An engine that runs out of memory comes back smaller, and grows again after a stretch of success."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import closing
from copy import deepcopy
from typing import Any, NamedTuple

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


class Case(NamedTuple):
    """What happens to an engine for ``size`` rows at once; the steps that are taken in the end, and
    ``opened``, the sizes of all engines, where that is certain."""

    world: World
    steps: list[dict[str, int]]
    opened: list[int] | None = None
    failed: dict[int, str] = {}  # noqa: RUF012
    size: int = 8
    rows: int = 40
    window: int = 10**9
    before: Sequence[dict[str, int]] = ()


def to(*sizes: int) -> list[dict[str, int]]:
    return [{"max_num_seqs": size} for size in sizes]


CASES = {
    "too many at once": Case(World(over=3), to(8, 4, 2), [16, 8, 4, 2], size=16),
    "at load": Case(World(load_over=2), to(4, 2), [2]),
    "a row alone": Case(
        World(dies_at={1: "oom"}, batched_tokens=4096), [{"max_num_batched_tokens": 2048}], rows=1
    ),
    "a crash and a stall": Case(World(dies_at={1: "engine_crash", 2: "stall"}), [], [8, 8, 8]),
    "a kill without a sign of memory": Case(World(killed_at={1}, a_poll=1), [], [8, 8]),
    "a second kill in a row": Case(World(killed_at={1, 20}, a_poll=1), to(4), [8, 8, 4]),
    "kills with a stretch of success between them": Case(
        World(killed_at={1, 1100}, a_poll=1), [], [8, 8, 8], rows=1200
    ),
    "kills with another death between them": Case(
        World(killed_at={1, 20}, dies_at={10: "engine_crash"}, a_poll=1), [], [8] * 4
    ),
    "a row that has its engine killed": Case(
        World(poison={3: "kill"}), [], failed={3: "oom"}, rows=8
    ),
    "steps that a poison row cost": Case(World(poison={3: "oom"}), [], failed={3: "oom"}, rows=8),
    "… though an earlier one is remembered": Case(
        World(poison={3: "oom"}), to(6), failed={3: "oom"}, rows=8, before=to(6)
    ),
    "a poison row after steps of an earlier search": Case(
        World(over=4, poison={30: "oom"}), to(8, 4), failed={30: "oom"}, size=16, window=8
    ),
    "a step that no poison row cost": Case(
        World(over=7, poison={3: "engine_crash"}),
        to(8),
        failed={3: "engine_crash"},
        size=16,
        rows=16,
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_memory_that_runs_out_halves_the_batch_and_nothing_else_does(
    case: Case,
) -> None:
    world, steps, opened, failed, size, rows, window, before = deepcopy(case)
    with closing(world.supervise(max_num_seqs=size, ladder=Ladder(before))) as engine:
        assert kinds_of(answer_all(engine, requests(0, rows), window=window)) == failed
        assert engine.ladder.steps == steps
        assert engine.restarts == len(world.opened) - 1
    assert opened is None or world.opened == opened
    if failed:
        assert engine.restarts <= math.log2(rows) + PROOF + 1
    told = [text for text in world.said if text.startswith("out of memory")]
    said = [f"{name} = {value}" for step in steps for name, value in step.items()]
    assert all(any(text.endswith(last) for text in told) for last in said[len(before) :])


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


NO_HELP = "a new engine already holds {} GiB (run.max_host_gb = 1.5): no restart would help"


@pytest.mark.parametrize(
    ("max_host_gb", "holds", "said"),
    [
        (1.5, {"host_bytes": 2 * GIB, "grows_bytes": GIB // 4}, [NO_HELP.format(2.2)]),
        # A ProcessEngine's load is 0 bytes until its process has reported a first turn.
        (1.5, {"host_bytes": 2 * GIB, "first_look": 0}, [NO_HELP.format("2.0")]),
        (None, {"host_bytes": 2 * GIB}, []),
        (2.5, {"host_bytes": 2 * GIB}, []),
    ],
    ids=["too large from the start", "first seen late", "no limit", "within it"],
)
def test_an_engine_is_not_restarted_where_that_helps_nothing(
    max_host_gb: float | None, holds: dict[str, int], said: list[str]
) -> None:
    world = World(a_poll=1, **holds)  # type: ignore[arg-type]
    with closing(world.supervise(max_host_gb=max_host_gb)) as engine:
        answer_all(engine, requests(0, 12), window=4)
        assert engine.restarts == 0
    assert world.said == said


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
