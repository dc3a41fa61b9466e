"""An engine in a child process, so that its crashes and memory leaks cannot end the run.

The parent holds no GPU memory. It sends requests over a socket and reads completions, and never waits for a forward
pass. The child reports why the engine dies. If a signal kills the child, its exit code shows the cause.

``isolation/`` starts the child and makes the socket. ``channel.py`` checks the types of all messages; the run unpickles
nothing.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from batchkit.config.tables import JobConfig
from batchkit.engines.base import EngineLoad
from batchkit.engines.faults import EngineDied, Fault, StartFailed, fault_of_exit, with_log
from batchkit.engines.memory import MemoryWatch
from batchkit.engines.process.channel import (
    Abort,
    Channel,
    Close,
    Died,
    NotStarted,
    OfEngine,
    Open,
    Ready,
    Refused,
    Submit,
    Turn,
    Unsendable,
)
from batchkit.engines.process.launcher import DOING, LOG, EngineLog, Launcher
from batchkit.errors import EngineError, JobError, RequestError
from batchkit.isolation.client import Child, Gone
from batchkit.types import Completion, Request, Row

CLOSE_S = 20.0
_KILL_S = 60.0
_WAIT_S = 0.2


class ProcessEngine:
    """The job's engine in a child process, whose output goes to ``engine.log`` in the run folder.

    - ``launcher``: starts the child. By default the engine creates a launcher and closes it at the end.
    - ``memory``: a watch that shows whether the machine ran out of memory. By default, a new watch.

    Raises:
        JobError: The engine's options are invalid.
        StartFailed: The engine could not start.
    """

    def __init__(
        self,
        job: JobConfig,
        launcher: Launcher | None = None,
        *,
        memory: MemoryWatch | None = None,
    ) -> None:
        self._memory = memory or MemoryWatch()
        self._stall_timeout_s = job.run.stall_timeout_s
        self._launcher = launcher or Launcher(job.folder / LOG)
        self._ends_launcher = launcher is None
        self._printed = EngineLog(self._launcher.log)
        self._refused: list[Completion] = []
        self._in_flight: dict[int, Request] = {}
        self._submitted = 0
        self._death: EngineDied | None = None
        self._is_ended = False
        self._process = self._launch(job)
        self._channel = Channel(self._process.connection, OfEngine)
        try:
            self._ready = self._start(job)
            self._load = self._ready.load
            self._last_sign = time.monotonic()
        except BaseException:
            self._end(kill=True)
            raise

    @property
    def max_num_seqs(self) -> int:
        seqs: int = self._ready.limits["max_num_seqs"]
        return seqs

    @property
    def limits(self) -> Mapping[str, Any]:
        return self._ready.limits

    @property
    def versions(self) -> Mapping[str, str]:
        return self._ready.versions

    @property
    def pid(self) -> int:
        return self._process.pid

    def submit(self, request: Request) -> None:
        self._submitted += 1
        self._in_flight[self._submitted] = request
        try:
            bare = msgspec.structs.replace(request, row=Row(request.row.index, "", {}))
            self._send(Submit(self._submitted, bare))
        except Unsendable as error:
            del self._in_flight[self._submitted]
            refusal = RequestError(f"the request can't be sent to the engine: {error}")
            self._refused.append(Completion(request, error=refusal))

    def poll(self, timeout_s: float) -> Sequence[Completion]:
        if self._death is not None:
            raise self._death
        done, self._refused = self._refused, []
        deadline = time.monotonic() + timeout_s
        try:
            self._printed.trim()
            while self._channel.poll(0 if done else max(0.0, deadline - time.monotonic())):
                message = self._channel.recv()
                self._last_sign = time.monotonic()
                if isinstance(message, Died):
                    self._death = self._reported_death(message)
                    break
                done += self._completions(message)
        except (EOFError, OSError):
            self._death = EngineDied(self._exit_fault())
        self._check_sign_of_life()
        if self._death is not None and not done:
            raise self._death
        return done  # if the engine died after these completions, the next poll raises the error

    def abort(self, requests: Sequence[Request]) -> None:
        dropped = set(map(id, requests))
        numbers = [n for n, request in self._in_flight.items() if id(request) in dropped]
        for number in numbers:
            del self._in_flight[number]
        self._send(Abort(numbers))

    def load(self) -> EngineLoad:
        load, self._load = self._load, self._load.without_counts()
        return load

    def close(self) -> None:
        if not self._is_ended:
            self._end(kill=False)

    def _send(self, message: Submit | Abort) -> None:
        """Send a message to the child. If the child is dead, the next ``poll`` raises the cause. Raises Unsendable if a
        value can't be encoded."""
        try:
            self._channel.send(message)
        except BlockingIOError:
            self._stall()  # half a message was sent, so the connection is unusable
        except OSError:
            pass

    def _launch(self, job: JobConfig) -> Child:
        # So far the process has only imported packages, so smaller settings would not help, whatever the cause.
        try:
            child = self._launcher.launch(job.engine.kind)
        except Gone as gone:
            fault = self._fault_of_exit(gone.returncode)
            fault = replace(fault, kind="engine_crash", is_unexplained_kill=False)
            message = f"no process for the engine could be started ({fault})"
            raise StartFailed(message, fault, {}, log=self._launcher.log) from gone
        except EngineError as error:
            fault = Fault("engine_crash", "start", str(error))
            raise StartFailed(str(error), fault, {}, log=self._launcher.log) from error
        # A child that hangs with the GIL held reads nothing, so sending needs a timeout, too.
        limit = struct.pack("ll", max(1, round(job.run.stall_timeout_s)), 0)
        with socket.socket(fileno=os.dup(child.connection.fileno())) as same:
            same.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        return child

    def _start(self, job: JobConfig) -> Ready:
        message: Ready | Refused | NotStarted
        try:
            self._channel.send(Open.of(job))
            message = self._channel.recv()
        except (EOFError, OSError):
            fault = self._exit_fault()
            doing = _doing(self._printed.printed())
            died = f"{job.engine.model}: the engine's process died while {doing} ({fault})"
            raise StartFailed(died, fault, {}, log=self._launcher.log) from None
        if isinstance(message, Ready):
            return message
        if isinstance(message, Refused):
            raise JobError(message.message)
        fault = with_log(message.fault, self._printed.printed())
        raise StartFailed(message.message, fault, message.limits)

    def _completions(self, turn: Turn) -> list[Completion]:
        self._load = turn.load.with_counts_of(self._load)
        return [
            msgspec.structs.replace(completion, request=self._in_flight.pop(number))
            for number, completion in turn.done
            if number in self._in_flight  # otherwise it finished just before it was aborted
        ]

    def _check_sign_of_life(self) -> None:
        silent_s = time.monotonic() - self._last_sign
        if self._death is None and self._in_flight and silent_s >= self._stall_timeout_s:
            self._stall()

    def _stall(self) -> None:
        silent_s = time.monotonic() - self._last_sign
        stacks = self._stacks()
        self._end(kill=True)
        message = (
            f"the engine finished no forward pass for {silent_s:.0f} s (run.stall_timeout_s ="
            f" {self._stall_timeout_s:g}); run.log has the stacks of its threads"
        )
        fault = with_log(Fault("stall", "stall", message), self._printed.printed())
        self._death = EngineDied(fault, stacks=stacks)

    def _reported_death(self, died: Died) -> EngineDied:
        fault = with_log(died.fault, self._printed.printed())
        return EngineDied(fault, request=self._in_flight.get(died.number or 0))

    def _stacks(self) -> str:
        """Return the Python stacks of the child's threads, printed by its faulthandler."""
        before = self._printed.size()
        with contextlib.suppress(OSError):
            os.kill(self._process.pid, signal.SIGUSR1)
        time.sleep(_WAIT_S)  # the child's faulthandler needs a moment to write
        return self._printed.read(before)

    def _exit_fault(self) -> Fault:
        """Return the fault of a child that ended without a message, from its exit code and the end of its log."""
        self._process.has_ended(CLOSE_S)
        self._end(kill=True)
        return self._fault_of_exit(self._process.returncode)

    def _fault_of_exit(self, code: int | None) -> Fault:
        last_words = _last_words(self._printed.printed())
        return fault_of_exit(code, last_words, self._memory.evidence())

    def _end(self, *, kill: bool) -> None:
        self._is_ended = True
        try:
            if not kill:
                with contextlib.suppress(OSError):
                    self._channel.send(Close())
                    self._process.has_ended(CLOSE_S)
            if not self._process.end(_KILL_S):
                raise EngineError(
                    f"the engine's process {self.pid}, or one that it started, can't be ended: it still runs"
                    f" {_KILL_S:.0f} s after SIGKILL, which happens when the GPU's driver hangs"
                )
        finally:
            if self._ends_launcher:
                self._launcher.close()


def _doing(log: str) -> str:
    """Return the last step that the loading engine printed to ``log``, for the message "the engine's process died while
    …"."""
    lines = [line for line in log.splitlines() if line.startswith(DOING)]
    return lines[-1].removeprefix(DOING) if lines else "it loaded"


def _last_words(log: str) -> str:
    """Return the last line of ``log``. After a fatal signal, return the signal's name and the innermost stack frame."""
    lines = [line for line in log.strip().splitlines() if "resource_tracker" not in line]
    for n, line in reversed(list(enumerate(lines))):
        if line.startswith("Fatal Python error: "):
            frames = [frame.strip() for frame in lines[n:] if frame.startswith("  File ")]
            return " ".join([line, *frames[:1]])
    return lines[-1] if lines else ""
