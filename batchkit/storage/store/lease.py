"""The right to write a run in a store: one process has it at a time."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from secrets import token_hex
from typing import Any, Literal

from batchkit.errors import HeldRunError, StoreError
from batchkit.storage.store.objects import Objects
from batchkit.storage.store.seals import Chain, Owner, Seal, heartbeat_key
from batchkit.types import utc_now

BEATS = 6  # heartbeats within the time after which a silent writer counts as dead
_LEAST_TIMEOUT_S = 5.0


class Lease:
    """The right to write the run of ``chain``. A thread writes heartbeats until ``close``.

    ``lost`` says who has taken the run over; until then it is "". Any thread may read it.
    """

    def __init__(self, chain: Chain, claimed: Seal, interval_s: float) -> None:
        self.chain, self.owner, self.fence = chain, claimed.owner, claimed.number
        self.lost = ""
        self._claimed, self._interval_s = claimed, interval_s
        self._closed = threading.Event()
        threading.Thread(target=self._beat, name="store-heartbeat", daemon=True).start()

    def is_held(self) -> bool:
        """Look for seals of other processes. Return False if one has taken the run over; ``lost`` then names it.

        Raises:
            StoreError: the store can't be reached.
        """
        last = self.chain.catch_up().last
        assert last is not None
        if last.owner == self.owner:
            return True
        self.lost = (
            f"{self.chain.objects.address}: {last.owner} has taken this run over (seal {last.number}, {last.written_at}), so"
            " this process stops. Rows that it has answered since its last upload are in its local folder only"
        )
        return False

    def add(self, state: Literal["open", "closed"], **fields: Any) -> None:
        """Add a seal, unless the reply to an earlier one was lost and it is there: the chain then has that one. Call
        ``is_held`` afterwards.

        Raises:
            StoreError: the store can't be reached. The seal may have been written.
        """
        number = self.chain.next_number
        more = {"number": number, "state": state, "written_at": utc_now(), **fields}
        self.chain.add(self._claimed.model_copy(update=more))

    @property
    def is_closed(self) -> bool:
        return self.chain.last is not None and self.chain.last.state == "closed"

    def close(self) -> None:
        """Give the run back, if the store can be reached."""
        self._closed.set()
        with suppress(StoreError):
            if not self.is_closed and self.is_held():
                self.add("closed")

    def _beat(self) -> None:
        token, key = self.owner.token, heartbeat_key(self.fence)
        for number in count():
            with suppress(StoreError):  # the next one may arrive
                self.chain.objects.put(key, f"{token} {number}".encode())
            if self._closed.wait(self._interval_s) or self.lost:
                return


@contextmanager
def leased(address: str, interval_s: float, say: Callable[[str], None]) -> Iterator[Lease]:
    """Take over the run at ``address`` for the block. ``say`` gets a line if that takes long.

    Raises:
        JobError: the address can't be used, or the store has no conditional writes.
        HeldRunError: another process writes the run.
        StoreError: the store can't be reached.
    """
    objects = Objects(address)
    chain = Chain(objects).catch_up()
    if chain.last is None:
        objects.check_create()
    lease = _claimed(chain, interval_s, say)
    try:
        yield lease
    finally:
        lease.close()


def timeout_of(interval_s: float) -> float:
    """Return after how many seconds without a sign of life a writer counts as dead."""
    return max(_LEAST_TIMEOUT_S, BEATS * interval_s)


def take_over(chain: Chain) -> None:
    """Take the run of ``chain`` away from its writer, which counts as dead, and close it."""
    last = chain.last
    if last is None or not chain.add(claim := _claiming(chain, _me(), last.timeout_s)):
        chain.catch_up()  # it lives
    else:
        closed = {"number": chain.next_number, "state": "closed", "written_at": utc_now()}
        chain.add(claim.model_copy(update=closed))


def _me() -> Owner:
    return Owner(host=socket.gethostname(), pid=os.getpid(), machine=_machine(), token=token_hex(8))


def _claiming(chain: Chain, owner: Owner, timeout_s: float) -> Seal:
    """Return the seal with which ``owner`` takes the run of ``chain`` over."""
    return Seal(
        number=chain.next_number,
        fence=chain.next_number,
        state="claimed",
        owner=owner,
        timeout_s=timeout_s,
        written_at=utc_now(),
    )


def _claimed(chain: Chain, interval_s: float, say: Callable[[str], None]) -> Lease:
    """Take over the run of ``chain``: at once if no process writes it, or if that process has died on this machine;
    otherwise when it has given no sign of life for its ``timeout_s``, by the clock of this process.

    Raises:
        HeldRunError: another process writes the run.
        StoreError: the store can't be reached.
    """
    me = _me()
    while True:
        last = chain.catch_up().last
        if last is not None and not _is_free(last, me):
            _await_silence(chain, last, say)
        seal = _claiming(chain, me, timeout_of(interval_s))
        if chain.add(seal):
            return Lease(chain, seal, interval_s)


def _machine() -> str:
    """Return an id of this boot of this machine and this namespace of process ids."""
    boot, namespace = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")
    with suppress(OSError):
        return f"{boot.read_text().strip()}/{namespace.stat().st_ino}"
    return ""


def _is_free(last: Seal, me: Owner) -> bool:
    if last.state == "closed":
        return True
    if not me.machine or last.owner.machine != me.machine:
        return False
    return last.owner.pid == me.pid or not Path(f"/proc/{last.owner.pid}").exists()


def _await_silence(chain: Chain, last: Seal, say: Callable[[str], None]) -> None:
    """Wait until the writer of ``last`` has given no sign of life for its timeout. Return early if it has written
    another seal.

    Raises:
        HeldRunError: it lives.
    """
    say(
        f"{chain.objects.address}: {last.owner} was writing this run; waiting up to {last.timeout_s:.0f} s to see whether it"
        " still does"
    )
    first = chain.heartbeat()
    deadline = time.monotonic() + last.timeout_s
    while time.monotonic() < deadline:
        time.sleep(last.timeout_s / BEATS / 2)
        if chain.heartbeat() != first or chain.catch_up().last != last:
            now = chain.catch_up().last
            assert now is not None
            if now.state == "closed":
                return
            raise HeldRunError(
                f"{chain.objects.address}: {now.owner} is writing this run; wait for it, stop it, or give this job another"
                " name"
            )
