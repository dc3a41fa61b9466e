"""Who gets which rows, and how many: played through on a clock of its own, without Ray and engines."""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Collection, Sequence
from typing import NamedTuple

import pytest

from batchkit.execution.cluster.leases import MOST_TO_END_A_GROUP, Leases, RayWorker
from batchkit.types import Row, Task


class Played(NamedTuple):
    """``seconds`` until the last row; ``rows`` of each worker; the indices of all ``leases``."""

    seconds: float
    rows: list[int]
    leases: list[tuple[int, list[int]]]
    quarantined: list[int]


def task(index: int, group: int = 0) -> Task:
    return Task(Row(index, str(index), {}), 1, group)


def leases_of(n_workers: int, quarantined: Collection[int] = ()) -> Leases:
    leases = Leases(quarantined)
    leases.workers |= {number: RayWorker(number) for number in range(n_workers)}
    return leases


def play(
    n_rows: int,
    row_s: list[float],
    *,
    at_once: int = 16,
    known: bool = True,
    poison: Collection[int] = (),
    dies_at: dict[int, float] | None = None,
    restart_s: float = 20.0,
) -> Played:
    """Workers of which the n-th takes ``row_s[n]`` over a row, ``at_once`` side by side.

    A worker that is given a ``poison`` row dies, and is up again after ``restart_s``; so does worker
    n at ``dies_at[n]``.
    """
    now = 0.0
    leases = leases_of(len(row_s))
    waiting = [task(index) for index in reversed(range(n_rows))]
    events: list[tuple[float, int, str, int]] = []  # when, worker, what, row
    free_at = [[0.0] * at_once for _ in row_s]
    settled: list[int] = []
    rows = [0] * len(row_s)
    handed: list[tuple[int, list[int]]] = []
    quarantined: list[int] = []
    life = [0] * len(row_s)
    for number, at in (dies_at or {}).items():
        heapq.heappush(events, (at, number, "dies", life[number]))

    def hand_out(number: int) -> None:
        left = len(waiting) if known else None
        tasks = leases.lease(number, left, lambda: waiting.pop() if waiting else None)
        if not tasks:
            return
        handed.append((number, [one.row.index for one in tasks]))
        for one in tasks:
            if one.row.index in poison:
                heapq.heappush(events, (now + row_s[number], number, "dies", life[number]))
            start = max(now, heapq.heappop(free_at[number]))
            heapq.heappush(free_at[number], start + row_s[number])
            if one.row.index not in poison:
                done = (start + row_s[number], number, f"done {life[number]}", one.row.index)
                heapq.heappush(events, done)

    for worker in leases.workers.values():
        worker.capacity = 2 * at_once
    while True:
        for number in leases.workers:
            hand_out(number)
        if not events:
            break
        now, number, what, detail = heapq.heappop(events)
        worker = leases.workers[number]
        if what == f"done {life[number]}":
            worker.give_back([detail])
            settled.append(detail)
            rows[number] += 1
        elif what == "dies" and detail == life[number]:
            life[number] += 1
            guilty = leases.die(number, "worker died")
            if guilty is not None:
                quarantined.append(guilty.row.index)
            free_at[number] = [0.0] * at_once
            heapq.heappush(events, (now + restart_s, number, "up", 0))
        elif what == "up":
            worker.capacity = 2 * at_once
    assert leases.is_done
    assert not waiting
    assert sorted(settled + quarantined) == list(range(n_rows)), "each row once"
    return Played(now, rows, handed, quarantined)


@pytest.mark.parametrize("row_s", [[0.3, 3.0], [3.0, 0.3], [0.3, 0.3, 3.0], [0.1, 1.0, 0.2, 0.4]])
def test_a_slow_worker_gets_fewer_rows_and_keeps_nobody_waiting(row_s: list[float]) -> None:
    n_rows = 3000
    played = play(n_rows, row_s)
    ideal_s = n_rows / sum(16 / one for one in row_s)
    halves_s = n_rows / len(row_s) * max(row_s) / 16
    assert played.seconds < 1.15 * ideal_s < halves_s / 2


def test_leases_near_the_end_are_shared_by_expected_tokens() -> None:
    """Of two equal workers, one gets the long row, and the other the short ones."""
    leases = leases_of(2)

    def given(number: int, waiting: list[Task], left: int | None) -> list[int]:
        worker = leases.workers[number]
        worker.capacity = 32
        return [
            one.row.index
            for one in leases.lease(number, left, lambda: waiting.pop(0) if waiting else None)
        ]

    for number in (0, 1):  # both have answered as much
        before = [task(100 * number + n) for n in range(1, 9)]
        leases.workers[number].give_back(given(number, before, None))
    rows = [task(0)._replace(tokens=10.0), *(task(1000 + n) for n in range(10))]
    assert given(0, rows, len(rows)) == [0]
    assert given(1, rows, len(rows)) == [1000 + n for n in range(10)]


def test_equal_workers_end_together() -> None:
    played = play(1000, [0.5] * 4)
    assert max(played.rows) - min(played.rows) <= 32
    assert played.seconds < 1.1 * 1000 * 0.5 / 16 / 4
    assert play(8, [1.0, 1.0]).rows == [4, 4], "few rows are shared out from the start"


def test_leases_shrink_to_one_near_the_end() -> None:
    sizes = [len(indices) for _, indices in play(2000, [0.3, 1.0]).leases]
    assert max(sizes) > 8
    assert sizes[-1] == 1
    unknown = play(500, [0.3, 0.6], known=False)
    assert len(unknown.leases[0][1]) == 32, "what it can use, if nobody knows how many are left"


@pytest.mark.parametrize("restart_s", [20.0, 10_000])
def test_what_a_dead_worker_held_is_answered_once_more(restart_s: float) -> None:
    played = play(1000, [0.3, 0.3], dies_at={1: 4.0}, restart_s=restart_s)
    handed = [index for _, indices in played.leases for index in indices]
    again = len(handed) - len(set(handed))
    assert 0 < again <= 32
    assert not played.quarantined
    assert sum(played.rows) == 1000


@pytest.mark.parametrize(
    ("n_rows", "workers", "poison"),
    [(400, 2, [77]), (400, 3, [10, 399]), (5, 2, [4])],
    ids=["one", "two", "every worker at the end of the input"],
)
def test_rows_that_kill_workers_are_found_and_the_others_answered(
    n_rows: int, workers: int, poison: list[int]
) -> None:
    played = play(n_rows, [0.3] * workers, poison=poison)
    assert sorted(played.quarantined) == poison
    for row in poison:
        assert sum(row in indices for _, indices in played.leases) <= 8  # log2 of 32, twice alone


def test_a_row_that_is_known_to_kill_goes_out_alone() -> None:
    leases = leases_of(1, quarantined=[1])
    leases.workers[0].capacity = 8
    new = map(task, range(3))
    first = leases.lease(0, 3, lambda: next(new, None))
    assert [one.row.index for one in first] == [0, 2]
    assert not leases.lease(0, 0, lambda: None)
    leases.workers[0].give_back([0, 2])
    assert [one.row.index for one in leases.lease(0, 0, lambda: None)] == [1]
    assert leases.die(0, "worker died") == task(1), "one death proves it"


@pytest.mark.parametrize("dies", [True, False])
def test_what_a_worker_held_that_is_given_up_goes_to_the_others(dies: bool) -> None:
    """Beside a row that is known to kill."""
    leases = leases_of(2, quarantined=[4])
    for worker in leases.workers.values():
        worker.capacity = 4
    new = map(task, range(5))
    assert len(leases.lease(0, 5, lambda: next(new, None))) == 2
    assert len(leases.lease(1, 3, lambda: next(new, None))) == 2
    if dies:
        leases.die(0, "worker died")
        assert leases.lease(0, 3, lambda: next(new, None)) == (), "its model is not loaded"
    leases.give_up(0)
    assert not leases.is_done
    leases.workers[1].give_back([2, 3])
    replayed: list[int] = []
    while not replayed or not leases.is_done:
        group = [one.row.index for one in leases.lease(1, 0, lambda: next(new, None))]
        leases.workers[1].give_back(group)
        replayed += group
    assert sorted(replayed) == [0, 1, 4]


def test_a_lone_row_is_not_lost_however_many_workers_are_given_up() -> None:
    leases = leases_of(5)
    for worker in leases.workers.values():
        worker.capacity = 8
    new = iter([task(0)])
    for number in range(4):
        assert [one.row.index for one in leases.lease(number, 1, lambda: next(new, None))] == [0]
        leases.give_up(number)
    assert not leases.is_done
    assert [one.row.index for one in leases.lease(4, 0, lambda: None)] == [0]


def dealt(groups: list[int]) -> dict[int, list[int]]:
    """By group, whose numbers of rows are given: which of two equal workers got each row."""
    leases = leases_of(2)
    waiting = deque(task(n, group) for group, size in enumerate(groups, 1) for n in range(size))
    got = defaultdict(list)
    while waiting or leases.n_held:
        for number, worker in leases.workers.items():
            worker.capacity = 8
            for one in leases.lease(number, None, lambda: waiting.popleft() if waiting else None):
                got[one.group].append(number)
            worker.give_back([*worker.held][:3])
    return got


def test_rows_that_begin_alike_go_to_one_worker() -> None:
    got = dealt([6] * 40)
    assert [len(numbers) for numbers in got.values()] == [6] * 40
    assert {tuple(sorted({*numbers})) for numbers in got.values()} == {(0,), (1,)}


def test_a_long_group_is_shared() -> None:
    (workers,) = dealt([10 * MOST_TO_END_A_GROUP]).values()
    assert len(workers) == 10 * MOST_TO_END_A_GROUP
    assert min(workers.count(0), workers.count(1)) >= 2 * MOST_TO_END_A_GROUP


def test_rows_of_a_lost_node_go_to_the_next_worker_that_asks() -> None:
    """Also to one that holds other rows, because they are no suspects. A prefix is still kept together."""
    leases = leases_of(2)
    for worker in leases.workers.values():
        worker.capacity = 4
    new = map(task, range(20))
    assert indexes(leases.lease(0, None, lambda: next(new, None))) == [0, 1, 2, 3]
    assert indexes(leases.lease(1, None, lambda: next(new, None))) == [4, 5, 6, 7]
    leases.workers[0].give_back([1])
    assert leases.lose(0, "its node was lost") is None
    assert leases.n_held == 4 + 3
    leases.workers[1].give_back([4, 5, 6])
    assert indexes(leases.lease(1, None, lambda: next(new, None))) == [0, 2, 3]
    leases.workers[1].give_back([7, 0])
    assert indexes(leases.lease(1, None, lambda: next(new, None))) == [8, 9]


@pytest.mark.parametrize("n_lost", [2, 3])
def test_a_row_whose_nodes_are_lost_again_and_again_is_a_suspect(n_lost: int) -> None:
    leases = leases_of(9)
    for worker in leases.workers.values():
        worker.capacity = 8
    new = iter([task(0)])
    for number in range(n_lost):
        assert indexes(leases.lease(number, None, lambda: next(new, None))) == [0]
        assert leases.lose(number, "its node was lost") is None
    beside = iter([task(1)])
    got = indexes(leases.lease(5, None, lambda: next(beside, None)))
    assert got == ([0, 1] if n_lost == 2 else [0]), "a suspect runs alone"
    if n_lost == 3:
        assert leases.lose(5, "its node was lost") is None
        assert indexes(leases.lease(6, None, lambda: None)) == [0]
        assert leases.lose(6, "its node was lost") == task(0), "twice alone proves it"


def test_rows_of_a_worker_that_leaves_count_no_loss() -> None:
    leases = leases_of(5)
    new = iter([task(0)])
    for number in range(4):
        leases.workers[number].capacity = 8
        assert indexes(leases.lease(number, None, lambda: next(new, None))) == [0]
        leases.leave(number)
    leases.workers[4].capacity = 8
    more = iter([task(1)])
    assert indexes(leases.lease(4, None, lambda: next(more, None))) == [0, 1]


def indexes(tasks: Sequence[Task]) -> list[int]:
    return [one.row.index for one in tasks]
