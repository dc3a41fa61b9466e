"""Who gets how many rows: played through on a clock of its own, without Ray and engines."""

from __future__ import annotations

import heapq
from collections.abc import Collection
from typing import NamedTuple

import pytest

from batchkit.execution.cluster.leases import LeaseHolder, Leases
from batchkit.types import Row, Task


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Played(NamedTuple):
    """``seconds`` until the last row; ``rows`` of each worker; the indices of all ``leases``."""

    seconds: float
    rows: list[int]
    leases: list[tuple[int, list[int]]]
    quarantined: list[int]


def task(index: int) -> Task:
    return Task(Row(index, str(index), {}), 1)


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
    clock = Clock()
    leases = Leases(len(row_s), clock)
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
                heapq.heappush(events, (clock.now + row_s[number], number, "dies", life[number]))
            start = max(clock.now, heapq.heappop(free_at[number]))
            heapq.heappush(free_at[number], start + row_s[number])
            if one.row.index not in poison:
                done = (start + row_s[number], number, f"done {life[number]}", one.row.index)
                heapq.heappush(events, done)

    for holder in leases.holders.values():
        holder.capacity = 2 * at_once
    while True:
        for number in leases.holders:
            hand_out(number)
        if not events:
            break
        clock.now, number, what, detail = heapq.heappop(events)
        holder = leases.holders[number]
        if what == f"done {life[number]}":
            holder.settle([detail])
            settled.append(detail)
            rows[number] += 1
        elif what == "dies" and detail == life[number]:
            life[number] += 1
            guilty = holder.die("worker died")
            if guilty is not None:
                quarantined.append(guilty.row.index)
            free_at[number] = [0.0] * at_once
            heapq.heappush(events, (clock.now + restart_s, number, "up", 0))
        elif what == "up":
            holder.capacity = 2 * at_once
    assert leases.are_settled
    assert not waiting
    assert sorted(settled + quarantined) == list(range(n_rows)), "each row once"
    return Played(clock.now, rows, handed, quarantined)


@pytest.mark.parametrize("row_s", [[0.3, 3.0], [3.0, 0.3], [0.3, 0.3, 3.0], [0.1, 1.0, 0.2, 0.4]])
def test_a_slow_worker_gets_fewer_rows_and_keeps_nobody_waiting(row_s: list[float]) -> None:
    n_rows = 3000
    played = play(n_rows, row_s)
    ideal_s = n_rows / sum(16 / one for one in row_s)
    halves_s = n_rows / len(row_s) * max(row_s) / 16
    assert played.seconds < 1.15 * ideal_s < halves_s / 2


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
    leases = Leases(1, quarantined=[1])
    leases.holders[0].capacity = 8
    new = map(task, range(3))
    first = leases.lease(0, 3, lambda: next(new, None))
    assert [one.row.index for one in first] == [0, 2]
    assert leases.lease(0, 0, lambda: None) == []
    leases.holders[0].settle([0, 2])
    assert [one.row.index for one in leases.lease(0, 0, lambda: None)] == [1]
    assert leases.holders[0].die("worker died") == task(1), "one death proves it"


def test_a_row_that_is_known_to_kill_is_not_lost_beside_rows_that_wait_for_replay() -> None:
    leases = Leases(2, quarantined=[4])
    for holder in leases.holders.values():
        holder.capacity = 4
    new = map(task, range(5))
    assert len(leases.lease(0, 5, lambda: next(new, None))) == 2
    assert len(leases.lease(1, 3, lambda: next(new, None))) == 2
    leases.give_up(0)
    leases.holders[1].settle([2, 3])
    replayed: list[int] = []
    while not replayed or not leases.are_settled:
        group = [one.row.index for one in leases.lease(1, 0, lambda: next(new, None))]
        leases.holders[1].settle(group)
        replayed += group
    assert sorted(replayed) == [0, 1, 4]


def test_what_a_worker_held_that_is_given_up_goes_to_the_others() -> None:
    leases = Leases(2)
    for holder in leases.holders.values():
        holder.capacity = 8
    new = map(task, range(4))
    assert len(leases.lease(0, 4, lambda: next(new, None))) == 2
    leases.holders[0].die("worker died")
    leases.give_up(0)
    assert not leases.are_settled
    replayed = []
    while not leases.are_settled:
        group = [one.row.index for one in leases.lease(1, 0, lambda: None)]
        leases.holders[1].settle(group)
        replayed += group
    assert replayed == [0, 1]


def test_a_lone_row_is_not_lost_however_many_workers_are_given_up() -> None:
    leases = Leases(5)
    for holder in leases.holders.values():
        holder.capacity = 8
    new = iter([task(0)])
    for number in range(4):
        assert [one.row.index for one in leases.lease(number, 1, lambda: next(new, None))] == [0]
        leases.give_up(number)
    assert not leases.are_settled
    assert [one.row.index for one in leases.lease(4, 0, lambda: None)] == [0]


def test_a_rate_counts_only_the_time_in_which_rows_were_held() -> None:
    clock = Clock()
    holder = LeaseHolder(clock)
    assert holder.rate == 0
    holder.take([task(0), task(1)])
    clock.now = 2.0
    holder.settle([0, 1])
    assert holder.rate == pytest.approx(1.0)
    clock.now = 1000.0
    assert holder.rate == pytest.approx(1.0)
    holder.take([task(2)])
    clock.now = 1002.0
    assert holder.rate == pytest.approx(0.5)


def test_a_rate_is_that_of_the_last_half_minute() -> None:
    clock = Clock()
    holder = LeaseHolder(clock)
    for index in range(400):  # ten a second for 20 s, then one a second
        holder.take([task(index)])
        clock.now += 0.1 if index < 200 else 1.0
        holder.settle([index])
    assert holder.rate == pytest.approx(1.0, rel=0.05)
