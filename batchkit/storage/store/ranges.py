"""Ranges of rows in a store, which the processes of ``batchkit run --join`` take.

    ranges/00000012-01    who has taken the rows of range 12 first
    ranges/00000012-02    who has taken them again, because the first one died, or was the last that worked
    done/00000012         all rows of range 12 have a record in the store

Each is created only if it does not exist, so that two processes never take the same range at the same time. Beside them, each
process has a separate run with a chain of seals.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from batchkit.errors import StoreError
from batchkit.storage.index_set import IndexSet
from batchkit.storage.log import RESULTS
from batchkit.storage.store.lease import BEATS, take_over
from batchkit.storage.store.objects import Objects
from batchkit.storage.store.seals import Chain, contents_of, indexes_in

RANGE = 256  # rows
_MOST_TRIES = 2  # of a range while its owner lives
_PATIENCE_S = 60.0  # while the store can't be reached
Result = TypeVar("Result")


@dataclass
class _Seen:
    """A run of another process. ``since``: when its ``sign`` of life was new, by this process's clock."""

    chain: Chain
    sign: object = None
    since: float = field(default_factory=time.monotonic)


class Ranges:
    """The ranges of a job's rows, as ``worker``, the name of this process's run below ``objects``, sees and takes them.

    - ``mine``: the ranges that this process has taken and not finished. Ranges are taken until ``end_pass``.
    - ``elsewhere``: rows in them that another process has answered.
    - ``timeout_s``: after these seconds without a sign of life, another process counts as dead.

    Raises (every method):
        StoreError: the store can't be reached, for a minute except at the start.
    """

    def __init__(self, objects: Objects, worker: str, timeout_s: float) -> None:
        self._objects, self._worker, self._timeout_s = objects, worker, timeout_s
        self.mine, self.elsewhere = set[int](), IndexSet()
        self._n_ranges, self._takes = 0, True
        self._taken, self._done = set[int](), set[int]()
        self._seen = dict[str, _Seen]()
        self.look()

    def look(self) -> None:
        """Read the lists of ranges that are taken and done. They may lag behind."""
        self._taken = {int(name.partition("-")[0]) for name in self._objects.names("ranges")}
        self._done = {int(name) for name in self._objects.names("done")}

    def has(self, index: int) -> bool:
        """Return whether this process has to answer a row. Take the row's range if no process has it."""
        number = index // RANGE
        self._n_ranges = max(self._n_ranges, number + 1)
        if self._takes and number not in self.mine and number not in self._taken:
            if _patiently(lambda: self._objects.create(_key(number, 1), self._worker.encode())):
                self.mine.add(number)
            self._taken.add(number)
        return number in self.mine and index not in self.elsewhere

    def end_pass(self) -> None:
        """Take no more ranges: all rows have been read, and another reading must not take ranges that no one runs."""
        self._takes = False

    def finish(self) -> None:
        """Note that all rows of the ranges of this process have a record in the store."""
        for number in sorted(self.mine):
            _patiently(partial(self._objects.put, _done_key(number), self._worker.encode()))
        self._done |= self.mine
        self.mine = set()

    def take_more(self) -> bool:
        """After all ranges were taken once: wait for ranges that are left, and take them. Return False if all rows are
        done.

        A range is left if the process that took it died. If none is left, but others still work, this process takes the
        last of their ranges, too, and the first answer counts.
        """
        return _patiently(self._take_more)

    def _take_more(self) -> bool:
        while True:
            self.look()
            holders = {number: self._holders(number) for number in self._not_done()}
            if not holders:
                return False
            alive = {
                name: self._is_alive(name) for names in holders.values() for name in names[-1:]
            }
            for number, names in holders.items():
                if not names or not alive[names[-1]]:
                    self._take_again(number, names)
            again = [n for n, names in holders.items() if len(names) < _MOST_TRIES]
            if again and not self.mine:
                self._take_again(again[-1], holders[again[-1]])
            if self.mine:
                self._takes = True
                return True
            time.sleep(self._timeout_s / 10)

    def workers(self) -> list[str]:
        """Return the names of the runs of all processes."""
        others = ("ranges", "done")
        return [name for name in self._objects.folders() if name not in others]

    def _take_again(self, number: int, holders: list[str]) -> None:
        if self._objects.create(_key(number, len(holders) + 1), self._worker.encode()):
            self.mine.add(number)
            rows = IndexSet(range(number * RANGE, (number + 1) * RANGE))
            for holder in holders:
                self.elsewhere |= self._settled_by(holder) & rows

    def _not_done(self) -> list[int]:
        missing = [number for number in range(self._n_ranges) if number not in self._done]
        return [number for number in missing if self._objects.get(_done_key(number)) is None]

    def _holders(self, number: int) -> list[str]:
        """Return the processes that have taken a range, the newest last."""
        holders = list[str]()
        while (found := self._objects.get(_key(number, len(holders) + 1))) is not None:
            holders.append(found.decode())
        return holders

    def _is_alive(self, worker: str) -> bool:
        """Return whether a process still works. If it was silent for too long, take its run over, so that it writes no
        more."""
        seen = self._of(worker)
        last = seen.chain.catch_up().last
        sign = (last, seen.chain.heartbeat())
        if sign != seen.sign:
            seen.sign, seen.since = sign, time.monotonic()
        is_closed = last is not None and last.state == "closed"
        # A process closes its run before it notes that its ranges are done.
        if time.monotonic() - seen.since < (
            self._timeout_s / BEATS if is_closed else self._timeout_s
        ):
            return True
        if not is_closed:
            take_over(seen.chain)
        return False

    def _of(self, worker: str) -> _Seen:
        if worker not in self._seen:
            self._seen[worker] = _Seen(Chain(self._objects.at(worker)))
        return self._seen[worker]

    def _settled_by(self, worker: str) -> IndexSet:
        chain = self._of(worker).chain.catch_up()
        settled, rest = IndexSet(), b""
        for _, content in contents_of(chain.objects, chain.files.get(RESULTS, [])):
            whole, _, rest = (rest + content).rpartition(b"\n")
            settled |= IndexSet(indexes_in(whole))
        return settled


def _patiently(call: Callable[[], Result]) -> Result:
    """Return what ``call`` returns. After a failure of the store, try again for a minute."""
    deadline = 0.0
    while True:
        try:
            return call()
        except StoreError:
            deadline = deadline or time.monotonic() + _PATIENCE_S
            if time.monotonic() > deadline:
                raise
            time.sleep(1.0)


def _key(number: int, tries: int) -> str:
    return f"ranges/{number:08}-{tries:02}"


def _done_key(number: int) -> str:
    return f"done/{number:08}"
