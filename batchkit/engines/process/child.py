"""The code that runs in an engine's own process: it opens the job's engine, answers requests, and reports why the
engine dies.

``isolation/`` forks the process and calls ``main`` with a connection to the run. The connection is a socket without
a name, so only the run and its child processes can use it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import queue
import shutil
import signal
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path

from msgspec.structs import replace

from batchkit.engines.base import BURST_GAP_S, Engine
from batchkit.engines.faults import EngineDied, StartFailed
from batchkit.engines.process.channel import (
    Abort,
    Channel,
    Close,
    Died,
    NotStarted,
    OfRun,
    Ready,
    Refused,
    Submit,
    Turn,
)
from batchkit.engines.process.launcher import SCRATCH
from batchkit.engines.registry import load_engine, preload_engine
from batchkit.errors import JobError
from batchkit.storage.files import OWNER, cache_folder
from batchkit.types import Request, Row

HEARTBEAT_S = 0.5
POLL_S = 0.02  # a request that arrives during a poll may wait this long
BURST_S = 0.05  # maximum time an idle engine collects a burst of requests before it starts

Inbox = queue.SimpleQueue[Submit | Abort | None]
Outbox = queue.SimpleQueue[Turn | Died | None]

# Sent back instead of the request, which the run has.
_KEPT = Request(Row(0, "", {}), None, None, {}, "")


def prepare(kind: str) -> None:
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    _keep_compiled_code()
    preload_engine(kind)
    resource_tracker.ensure_running()  # outside the fork's process group, so that it outlives the fork


def _keep_compiled_code() -> None:
    """Keep torch's compiled code in a cache folder instead of torch's default, the temporary folder."""
    with contextlib.suppress(OSError, RuntimeError):  # RuntimeError: there is no home folder
        place = cache_folder("torchinductor")
        place.mkdir(parents=True, exist_ok=True)
        if os.access(place, os.W_OK):
            os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(place))


def tidy() -> None:
    """Remove shared memory and temporary files that the engine and its workers left behind."""
    # Stopping waits until leftovers are unlinked; Python has no public function for this.
    resource_tracker._resource_tracker._stop()  # type: ignore[attr-defined]
    resource_tracker.ensure_running()
    for left in Path(os.environ[SCRATCH]).iterdir():
        if left.name == OWNER:
            continue
        shutil.rmtree(left, ignore_errors=True) if left.is_dir() else left.unlink(missing_ok=True)


def main(connection: Connection) -> None:
    os.setpgid(0, 0)  # so that processes started by the engine can be killed with it
    _serve_one(Channel(connection, OfRun))


def _serve_one(channel: Channel) -> None:
    """Receive the job, open its engine, and answer requests until the run closes the engine or it dies."""
    try:
        engine = load_engine(channel.recv().job)
    except JobError as error:
        channel.send(Refused(str(error)))
        return
    except StartFailed as error:
        channel.send(NotStarted(str(error), error.fault, error.limits))
        return
    channel.send(Ready(engine.limits, engine.versions, engine.load()))
    inbox: Inbox = queue.SimpleQueue()
    outbox: Outbox = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(channel, inbox), daemon=True).start()
    sender = threading.Thread(target=_send, args=(channel, outbox), daemon=True)
    sender.start()
    if not _serve(inbox, engine, outbox):
        sender.join()
        os._exit(1)  # the dead engine's clean-up might hang
    # vLLM collects garbage three times while closing, which takes 1.5 s; this process exits anyway.
    gc.collect = lambda generation=2: 0
    engine.close()


def _serve(inbox: Inbox, engine: Engine, outbox: Outbox) -> bool:
    """Submit requests, poll, and send completions until the inbox yields None. Return False if the engine died,
    otherwise True.

    This thread also sends the heartbeat, so that the heartbeat stops if the engine hangs.
    """
    # Keyed by id(request), which is unique while this dict holds the request.
    in_flight: dict[int, tuple[int, Request]] = {}
    last_sent = 0.0
    while True:
        for message in _arrived(inbox) if in_flight else _burst(inbox):
            if message is None:
                return True
            if isinstance(message, Abort):
                engine.abort(_dropped(in_flight, message.numbers))
            else:
                in_flight[id(message.request)] = message.number, message.request
                engine.submit(message.request)
        try:
            completions = engine.poll(POLL_S)
        except EngineDied as death:
            number, _ = in_flight.get(id(death.request), (None, None))
            outbox.put(Died(death.fault, number))
            outbox.put(None)
            return False
        done = [
            (in_flight.pop(id(completion.request))[0], replace(completion, request=_KEPT))
            for completion in completions
            if id(completion.request) in in_flight  # otherwise it was aborted
        ]
        now = time.monotonic()
        if done or now - last_sent >= HEARTBEAT_S:
            last_sent = now
            outbox.put(Turn(done, engine.load()))


def _dropped(
    in_flight: dict[int, tuple[int, Request]], numbers: Sequence[int]
) -> Sequence[Request]:
    """Remove the requests with these ``numbers`` from ``in_flight`` and return them."""
    wanted = set(numbers)
    found = [request for number, request in in_flight.values() if number in wanted]
    for request in found:
        del in_flight[id(request)]
    return found


def _arrived(inbox: Inbox) -> Iterator[Submit | Abort | None]:
    """Yield all messages that are in the inbox now."""
    with contextlib.suppress(queue.Empty):
        while True:
            yield inbox.get_nowait()


def _burst(inbox: Inbox) -> Iterator[Submit | Abort | None]:
    """Wait for a message, then yield it and all messages that follow within milliseconds.

    In this way, requests that are sent together start in the same forward pass.
    """
    with contextlib.suppress(queue.Empty):
        yield inbox.get(timeout=HEARTBEAT_S)
        until = time.monotonic() + BURST_S
        while time.monotonic() < until:
            yield inbox.get(timeout=BURST_GAP_S)


def _send(channel: Channel, outbox: Outbox) -> None:
    """Send messages from a separate thread, so that encoding overlaps with the device's work."""
    try:
        while (message := outbox.get()) is not None:
            channel.send(message)
    except Exception:  # the parent has ended, or an answer can't be encoded
        traceback.print_exc()
        os._exit(1)


def _receive(channel: Channel, inbox: Inbox) -> None:
    """Receive messages in a separate thread, so that the run never waits for the end of a forward pass."""
    try:
        while True:
            message = channel.recv()
            inbox.put(None if isinstance(message, Close) else message)
    except (EOFError, ConnectionError):
        pass  # the parent has ended
    except Exception:  # a request can't be decoded, for example for lack of memory
        traceback.print_exc()
    finally:
        os._exit(1)  # without this thread, requests would be lost while heartbeats continue
