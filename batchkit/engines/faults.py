"""Causes of engine deaths, classified by the error's type where a type exists."""

from __future__ import annotations

import errno
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from batchkit.errors import EngineError

if TYPE_CHECKING:
    from pathlib import Path

    from batchkit.types import Request

# vLLM's messages when the error of a worker is only in the log.
_ELSEWHERE_WORDS = (
    "WorkerProc initialization failed",
    "Executor failed",
    "cancelled",
    "See stack trace",
    "See root cause",
)
_LONGEST_MESSAGE = 1000

FaultKind = Literal["oom", "engine_crash", "stall", "timeout"]

# Names of types instead of types, because this module must not import torch.
_OOM_TYPES = ("OutOfMemoryError", "MemoryError")
# Words for errors without a type: the CPU allocator, vLLM's KV cache, CUDA's libraries, llama.cpp.
_OVER_CLAIM_WORDS = (
    "less than requested memory for kv",
    "less than desired GPU memory utilization",
    "less than desired CPU memory utilization",
)
_WITHOUT_CACHE_WORDS = "No available memory for the cache blocks"
# vLLM's message while loading, if the KV cache is too small for one request of full length.
_SHORT_OF_CACHE_WORDS = "is larger than the available KV cache memory"
_OOM_WORDS = (
    "can't allocate memory",
    "Cannot allocate memory",
    "not enough memory: you tried to allocate",
    "out of memory",
    "std::bad_alloc",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "failed to allocate buffer",
    _WITHOUT_CACHE_WORDS,
    *_OVER_CLAIM_WORDS,
)


@dataclass(frozen=True, slots=True)
class Fault:
    """The cause of an engine's death.

    - ``type``: the class of the error, or the signal or exit code that ended the engine.
    - ``is_unexplained_kill``: the engine was killed by SIGKILL, and there is no evidence that memory ran out.
    """

    kind: FaultKind
    type: str
    message: str
    is_unexplained_kill: bool = False

    @property
    def is_over_claim(self) -> bool:
        """True if the engine claimed more memory than was free when it started."""
        return any(words in self.message for words in _OVER_CLAIM_WORDS)

    @property
    def is_without_cache(self) -> bool:
        """True if the model leaves no memory for the KV cache."""
        return _WITHOUT_CACHE_WORDS in self.message

    @property
    def is_short_of_cache(self) -> bool:
        """True if the KV cache is too small for one request of full length; ``kind`` is then not "oom"."""
        return _SHORT_OF_CACHE_WORDS in self.message

    def __str__(self) -> str:
        return f"{self.type}: {self.message}" if self.message else self.type


class EngineDied(EngineError):
    """The death of an engine. Requests that were running do not come back.

    - ``fault``: the cause.
    - ``stacks``: stacks of the engine's threads if a watchdog killed the engine, otherwise "".
    - ``request``: the request that killed the engine; None if unknown.
    """

    def __init__(self, fault: Fault, *, stacks: str = "", request: Request | None = None) -> None:
        super().__init__(f"the engine died: {fault}")
        self.fault = fault
        self.stacks = stacks
        self.request = request


class StartFailed(EngineDied):
    """The failure of an engine to start. ``message`` contains the remedy.

    - ``limits``: options that determine the engine's memory use, if already known.
    - ``log``: file with the engine's output; set if the error's text should name it.
    """

    def __init__(
        self,
        message: str,
        fault: Fault,
        limits: Mapping[str, Any],
        *,
        log: Path | None = None,
    ) -> None:
        super().__init__(fault)
        self.args = (message if log is None else f"{message}; the output is in {log}",)
        self.message = message
        self.limits = limits


def fault_of(error: BaseException) -> Fault:
    """Return the fault for the innermost cause of ``error``."""
    while error.__cause__ is not None:
        error = error.__cause__
    names = [base.__name__ for base in type(error).__mro__]
    message = " ".join(str(error).split())[:_LONGEST_MESSAGE]
    is_oom = (
        any(name in _OOM_TYPES for name in names)
        or getattr(error, "errno", None) == errno.ENOMEM
        or mentions_memory(message)
    )
    return Fault("oom" if is_oom else "engine_crash", names[0], message)


def fault_of_exit(code: int | None, last_words: str, memory: str = "") -> Fault:
    """Return the fault of a process that ended without reporting a cause.

    SIGKILL alone does not show that memory ran out: the kernel sends SIGKILL to free memory, but other programs may
    send it, too.

    - ``code``: exit code; None if it is unknown because the fork server was killed at the same time.
    - ``last_words``: end of the process's output.
    - ``memory``: evidence that memory ran out (``memory.py``), or "".
    """
    if code is None or code == -signal.SIGKILL:
        if memory:
            return Fault("oom", "SIGKILL", f"killed because memory ran out: {memory}")
        message = "killed by another process; there is no sign that memory ran out"
        return Fault("engine_crash", "SIGKILL", message, is_unexplained_kill=True)
    how = f"exit code {code}"
    if code < 0:
        known = {number.value: number.name for number in signal.Signals}
        how = known.get(-code, f"signal {-code}")
    return Fault("oom" if mentions_memory(last_words) else "engine_crash", how, last_words)


def with_log(fault: Fault, log: str) -> Fault:
    """Return ``fault``, or, if ``fault`` names no cause, a fault with the cause found in the engine's ``log``.

    An engine with worker processes only learns that a worker failed or did not answer in time. The worker's error is in
    the log.
    """
    if fault.kind == "oom" or (fault.kind != "stall" and not points_elsewhere(fault.message)):
        return fault
    for line in reversed(log.splitlines()):
        if mentions_memory(line):
            return Fault("oom", fault.type, " ".join(line.split())[:_LONGEST_MESSAGE])
    return fault


def points_elsewhere(text: str) -> bool:
    """Return True if ``text`` only says that the cause was reported elsewhere."""
    return any(words in text for words in _ELSEWHERE_WORDS)


def mentions_memory(text: str) -> bool:
    return any(words in text for words in (*_OOM_WORDS, *_OOM_TYPES))
