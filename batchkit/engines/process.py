"""An engine in a process of its own, so that a crash or a leak in it can't take the run with it.

The parent holds no GPU memory and never waits for a step: it sends requests over a socket and reads
what finished. The child says why it dies; where it can't (a signal), its exit code does.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from batchkit.config import JobConfig
from batchkit.engines.base import EngineLoad
from batchkit.engines.messages import Died, Ready, Refused, Turn
from batchkit.errors import EngineError, JobError
from batchkit.faults import EngineDied, Fault, fault_of_exit
from batchkit.types import Completion, Request, Row

LOG = "engine.log"
CLOSE_S = 20.0
_WAIT_S = 0.2
_LAST_WORDS = 2000


class ProcessEngine:
    """The job's engine in a child process. What it prints goes to ``engine.log`` in the run folder.

    Raises:
        JobError: the engine's options can't be right.
        EngineDied: it could not start.
    """

    def __init__(self, job: JobConfig) -> None:
        self._stall_timeout_s = job.run.stall_timeout_s
        self._log = job.folder / LOG
        ours, theirs = socket.socketpair()
        # A child that hangs with Python's lock held takes nothing in: sending must end, too.
        limit = struct.pack("ll", max(1, round(job.run.stall_timeout_s)), 0)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        with theirs, self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "batchkit.engines.child", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[theirs.fileno()],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
        self._connection: Any = Connection(ours.detach())
        self._in_flight: dict[int, Request] = {}
        self._submitted = 0
        self._fault: Fault | None = None
        self._last_sign = time.monotonic()
        self.rss_bytes = 0
        self._load = EngineLoad(0, 0, 0.0, 0)
        try:
            self._ready = self._start(job)
            self._last_sign = time.monotonic()
        except BaseException:
            self._end(kill=True)
            raise

    @property
    def max_num_seqs(self) -> int:
        return self._ready.max_num_seqs

    @property
    def versions(self) -> Mapping[str, str]:
        return self._ready.versions

    @property
    def pid(self) -> int:
        return self._process.pid

    def submit(self, request: Request) -> None:
        self._submitted += 1
        self._in_flight[self._submitted] = request
        # The engine has no use for the row's fields; they stay here.
        bare = replace(request, row=Row(request.row.index, request.row.id, {}))
        try:
            self._connection.send((self._submitted, bare))
        except BlockingIOError:
            self._stall()  # half a message is out: nothing can follow it
        except OSError:
            return  # it is dead: the next poll says why

    def poll(self, timeout_s: float) -> Sequence[Completion]:
        if self._fault is not None:
            raise EngineDied(self._fault)
        done: list[Completion] = []
        deadline = time.monotonic() + timeout_s
        try:
            while self._connection.poll(0 if done else max(0.0, deadline - time.monotonic())):
                message = self._connection.recv()
                self._last_sign = time.monotonic()
                if isinstance(message, Died):
                    self._fault = message.fault
                    break
                done += self._completions(message)
        except (EOFError, OSError):
            self._fault = self._exit_fault()
        self._check_sign_of_life()
        if self._fault is not None and not done:
            raise EngineDied(self._fault)
        return done  # what finished before a death counts; the next poll tells of the death

    def load(self) -> EngineLoad:
        load, self._load = self._load, self._load._replace(preempted=0)
        return load

    def close(self) -> None:
        if self._process.returncode is None:
            self._end(kill=False)

    def _start(self, job: JobConfig) -> Ready:
        self._connection.send(job)
        while not self._connection.poll(_WAIT_S):
            if self._process.poll() is not None and not self._connection.poll(0):
                raise EngineDied(self._exit_fault())
        try:
            message: Ready | Refused = self._connection.recv()
        except (EOFError, OSError):
            raise EngineDied(self._exit_fault()) from None
        if isinstance(message, Ready):
            return message
        if isinstance(message.error, JobError):
            raise message.error
        raise StartFailed(str(message.error), message.fault)

    def _completions(self, turn: Turn) -> list[Completion]:
        preempted = self._load.preempted + turn.load.preempted
        self._load = turn.load._replace(preempted=preempted)
        self.rss_bytes = turn.rss_bytes
        return [
            Completion(
                self._in_flight.pop(done.number),
                done.choices,
                done.usage,
                done.latency_s,
                done.error,
                done.prompt,
            )
            for done in turn.done
        ]

    def _check_sign_of_life(self) -> None:
        silent_s = time.monotonic() - self._last_sign
        if self._fault is not None or not self._in_flight or silent_s < self._stall_timeout_s:
            return
        self._stall()

    def _stall(self) -> None:
        silent_s = time.monotonic() - self._last_sign
        self._dump_stacks()
        self._end(kill=True)
        self._fault = Fault(
            "stall",
            "stall",
            f"no step ended for {silent_s:.0f} s (run.stall_timeout_s ="
            f" {self._stall_timeout_s:g}); its stacks are in {self._log}",
        )

    def _dump_stacks(self) -> None:
        """Into engine.log: Python's own dump, and py-spy's, which sees native frames, if it is there."""
        with contextlib.suppress(OSError):
            self._process.send_signal(signal.SIGUSR1)
        command = ["py-spy", "dump", "--native", "--pid", str(self._process.pid)]
        with self._log.open("ab") as log, contextlib.suppress(OSError, subprocess.TimeoutExpired):
            subprocess.run(command, stdout=log, stderr=log, timeout=30, check=False)
        time.sleep(_WAIT_S)  # faulthandler writes on the child's own time

    def _exit_fault(self) -> Fault:
        """The child hung up without a word: its exit code and the end of its log must do."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=CLOSE_S)
        code = self._process.poll()
        self._end(kill=True)
        return fault_of_exit(code, _tail(self._log))

    def _end(self, *, kill: bool) -> None:
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            if not kill:
                self._connection.send(None)
                self._process.wait(timeout=CLOSE_S)
        with contextlib.suppress(OSError):
            self._process.kill()
        self._process.wait()
        self._connection.close()


class StartFailed(EngineDied):
    """The engine never came up; the message says what to do."""

    def __init__(self, message: str, fault: Fault) -> None:
        EngineError.__init__(self, message)
        self.fault = fault


def _tail(path: Path) -> str:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _LAST_WORDS))
        lines = file.read().decode("utf-8", "replace").strip().splitlines()
    return lines[-1] if lines else ""
