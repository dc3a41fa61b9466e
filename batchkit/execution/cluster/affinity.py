"""Gives rows that begin alike to the same worker, whose engine has their beginning in its cache."""

from __future__ import annotations

from collections import defaultdict, deque

from batchkit.rendering.prefetch import Prefetch
from batchkit.types import Task

# Of a longer group another worker gets the next rows: it computes their beginning once more.
MOST_OF_A_GROUP = 64


class PrefixAffinity:
    """The tasks that no worker got yet. Those of a group come one after another in ``tasks``."""

    def __init__(self, tasks: Prefetch[Task, Task]) -> None:
        self._tasks = tasks
        # By the worker's number: rows of its group that came while another asked.
        self._kept: defaultdict[int, deque[Task]] = defaultdict(deque)
        self._group = 0
        self._owner = 0
        self._n_of_group = 0

    def get(self, number: int) -> Task | None:
        """The next row for this worker, None if there is none now."""
        if kept := self._kept[number]:
            return kept.popleft()
        while not self._tasks.broken and (task := self._tasks.get(timeout_s=0)) is not None:
            if (owner := self._owner_of(task, number)) == number:
                return task
            self._kept[owner].append(task)
        if not (self._tasks.exhausted or self._tasks.broken):
            return None
        longest = max(self._kept.values(), key=len)  # its owner may be slow, or dead
        return longest.popleft() if longest else None

    @property
    def n_kept(self) -> int:
        return sum(map(len, self._kept.values()))

    def _owner_of(self, task: Task, asking: int) -> int:
        if not task.group or task.group != self._group or self._n_of_group >= MOST_OF_A_GROUP:
            self._group, self._owner, self._n_of_group = task.group, asking, 0
        self._n_of_group += 1
        return self._owner
