"""Why an engine died, told by type where a type exists."""

from __future__ import annotations

import errno
import signal
from dataclasses import dataclass
from typing import Literal

from batchkit.errors import EngineError

FaultKind = Literal["oom", "engine_crash", "stall"]

# Types by name: torch is not imported here, and its CUDA and generic classes are one.
_OOM_TYPES = ("OutOfMemoryError", "MemoryError")
# What has no type of its own: the CPU allocator, vLLM's KV cache, and CUDA's libraries.
_OOM_WORDS = (
    "can't allocate memory",
    "out of memory",
    "No available memory for the cache blocks",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "less than requested memory for kv",
    "less than desired GPU memory utilization",
    "less than desired CPU memory utilization",
)


@dataclass(frozen=True, slots=True)
class Fault:
    """One death of an engine. ``type`` is the error's class, or the signal that ended it."""

    kind: FaultKind
    type: str
    message: str

    def __str__(self) -> str:
        return f"{self.type}: {self.message}" if self.message else self.type


class EngineDied(EngineError):
    """The engine is dead; ``fault`` says why. What was in flight comes back no more."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(f"the engine died: {fault}")
        self.fault = fault


def fault_of(error: BaseException) -> Fault:
    """The innermost cause of ``error``, classified."""
    while error.__cause__ is not None:
        error = error.__cause__
    names, message = [base.__name__ for base in type(error).__mro__], str(error)
    is_oom = (
        any(name in _OOM_TYPES for name in names)
        or getattr(error, "errno", None) == errno.ENOMEM
        or any(words in message for words in _OOM_WORDS)
    )
    return Fault("oom" if is_oom else "engine_crash", names[0], message)


def fault_of_exit(code: int | None, last_words: str) -> Fault:
    """A process that ended without saying why. SIGKILL is the kernel's way to free memory."""
    if code == -signal.SIGKILL:
        return Fault("oom", "SIGKILL", "killed from outside, as the kernel does when memory is out")
    how = f"exit code {code}"
    if code is not None and code < 0:
        known = {number.value: number.name for number in signal.Signals}
        how = known.get(-code, f"signal {-code}")
    return Fault("engine_crash", how, last_words)
