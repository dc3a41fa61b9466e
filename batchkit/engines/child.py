"""The engine's own process: ``python -m batchkit.engines.child FD``.

It opens the job's engine, answers what comes over the socket FD, and says why it dies. It lives no
longer than its parent, and leaves SIGINT and SIGTERM to it.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import queue
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from multiprocessing.connection import Connection

from batchkit.config import JobConfig
from batchkit.engines import load_engine
from batchkit.engines.base import Engine
from batchkit.engines.messages import Died, Done, Ready, Refused, Turn
from batchkit.errors import BatchkitError, EngineError, JobError
from batchkit.faults import fault_of
from batchkit.types import Request

HEARTBEAT_S = 0.5
POLL_S = 0.002  # about one step, so that what comes in meanwhile joins the next
_PR_SET_PDEATHSIG = 1

Inbox = queue.SimpleQueue[tuple[int, Request] | None]


def main() -> None:
    connection = Connection(int(sys.argv[1]))
    _die_with_parent()
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, signal.SIG_IGN)  # both reach the whole group; the parent decides
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    job: JobConfig = connection.recv()
    try:
        engine = load_engine(job)
    except BatchkitError as error:
        refusal = JobError(str(error)) if isinstance(error, JobError) else EngineError(str(error))
        connection.send(Refused(refusal, fault_of(error)))
        return
    connection.send(Ready(engine.max_num_seqs, dict(engine.versions)))
    inbox: Inbox = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(connection, inbox), daemon=True).start()
    try:
        _serve(connection, engine, inbox)
    except EngineError as error:
        connection.send(Died(fault_of(error)))
        os._exit(1)  # the engine's own clean-up may hang now
    engine.close()


def _serve(connection: Connection, engine: Engine, inbox: Inbox) -> None:
    """Until None comes: submit, poll, send what finished. Its sign of life comes from this thread,
    so that it stops when the engine hangs."""
    in_flight: dict[
        int, tuple[int, Request]
    ] = {}  # by the request's address; held, so it stays one
    last_sent = 0.0
    while True:
        for message in _come_in(inbox, wait_s=0 if in_flight else HEARTBEAT_S):
            if message is None:
                return
            in_flight[id(message[1])] = message
            engine.submit(message[1])
        done = [
            Done(
                in_flight.pop(id(c.request))[0], c.choices, c.usage, c.latency_s, c.error, c.prompt
            )
            for c in engine.poll(POLL_S)
        ]
        now = time.monotonic()
        if done or now - last_sent >= HEARTBEAT_S:
            last_sent = now
            connection.send(Turn(done, engine.load(), _rss_bytes()))


def _come_in(inbox: Inbox, wait_s: float) -> Iterator[tuple[int, Request] | None]:
    """All that has come in by now; waits for the first."""
    try:
        yield inbox.get(timeout=wait_s) if wait_s else inbox.get_nowait()
        while True:
            yield inbox.get_nowait()
    except queue.Empty:
        return


def _receive(connection: Connection, inbox: Inbox) -> None:
    """On a thread of its own, so that the parent never waits for a step to end."""
    try:
        while True:
            inbox.put(connection.recv())
    except (EOFError, OSError):
        pass  # the parent is gone
    except Exception:  # a request that can't be read, for want of memory, say
        traceback.print_exc()
    finally:
        os._exit(1)  # without this thread, requests would be lost while signs of life go on


def _rss_bytes() -> int:
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _die_with_parent() -> None:
    """Linux only; elsewhere the closed socket does it, a step later."""
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    except (OSError, AttributeError):
        return


if __name__ == "__main__":
    main()
