"""Which worker gets which of the rows that begin alike."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchkit.errors import InputError
from batchkit.execution.cluster.affinity import MOST_OF_A_GROUP, PrefixAffinity
from batchkit.rendering.prefetch import Prefetch
from batchkit.types import Row, Task
from tests.support.waiting import until


def tasks_in(groups: Sequence[int]) -> Iterator[Task]:
    """One after another: for each group its number of rows."""
    for group, size in enumerate(groups, start=1):
        yield from (Task(Row(n, f"{group}-{n}", {}), 1, group) for n in range(size))


def read_ahead(tasks: Iterator[Task]) -> Prefetch[Task, Task]:
    return Prefetch(tasks, lambda task: task, threads=1, ahead=1024, max_bytes=2**20)


def dealt(groups: Sequence[int], asking: Sequence[int]) -> list[tuple[int, Task]]:
    """Who got which task, where the workers ask in turns as ``asking`` says, again and again."""
    got = []
    with closing(read_ahead(tasks_in(groups))) as tasks:
        waiting = PrefixAffinity(tasks)
        while not tasks.exhausted or waiting.n_kept:
            turn = [(number, waiting.get(number)) for number in asking]
            got += [(number, task) for number, task in turn if task is not None]
    return got


@given(st.lists(st.integers(1, 150), max_size=8), st.lists(st.integers(0, 3), min_size=1))
def test_every_row_is_dealt_once(groups: list[int], asking: list[int]) -> None:
    ids = [task.row.id for _, task in dealt(groups, asking)]
    assert sorted(ids) == sorted(task.row.id for task in tasks_in(groups))


def test_rows_that_begin_alike_go_to_one_worker() -> None:
    of = {}
    for number, task in dealt([6] * 40, [0, 1, 1]):
        of.setdefault(task.group, []).append(number)
    whole = [set(numbers) for group, numbers in of.items() if group < 38]  # at the end all help
    assert all(len(numbers) == 1 for numbers in whole)
    assert {0} in whole
    assert {1} in whole


def test_a_long_group_is_shared() -> None:
    workers = [number for number, _ in dealt([10 * MOST_OF_A_GROUP], [0, 1])]
    assert min(workers.count(0), workers.count(1)) >= 2 * MOST_OF_A_GROUP


def test_rows_kept_for_a_worker_that_asks_no_more_are_answered_by_another() -> None:
    with closing(read_ahead(tasks_in([10, 10]))) as tasks:
        waiting = PrefixAffinity(tasks)
        until(lambda: waiting.get(0) is not None)
        got: list[Task] = []
        until(lambda: got.append(waiting.get(1)) or len([*filter(None, got)]) == 19)
        assert waiting.n_kept == 0


def test_rows_read_before_an_error_are_dealt() -> None:
    def broken() -> Iterator[Task]:
        yield from tasks_in([4])
        raise InputError("the rest is unreadable")

    with closing(read_ahead(broken())) as tasks:
        waiting = PrefixAffinity(tasks)
        until(lambda: waiting.get(0) is not None)
        got: list[Task | None] = []
        until(lambda: got.append(waiting.get(1)) or len([*filter(None, got)]) == 3)
        assert tasks.broken
        with pytest.raises(InputError):
            tasks.get(timeout_s=0)
