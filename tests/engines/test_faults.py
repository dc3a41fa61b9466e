"""Why an engine died, recognised from real errors of the libraries that raise them."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from batchkit.engines.faults import (
    EngineDied,
    Fault,
    FaultKind,
    StartFailed,
    fault_of,
    fault_of_exit,
)
from batchkit.errors import EngineError


def raised(call: Callable[[], Any]) -> BaseException:
    """What ``call`` raises, three levels down a chain of causes, as engines hand it on."""
    try:
        try:
            try:
                call()
            except BaseException as error:
                raise RuntimeError("a worker failed") from error
        except RuntimeError as error:
            raise EngineError("vLLM failed: RuntimeError: a worker failed") from error
    except EngineError as error:
        return error
    raise AssertionError("nothing was raised")


def fail_with(error: BaseException) -> Callable[[], None]:
    def fail() -> None:
        raise error

    return fail


def torch_out_of_memory() -> None:
    import torch

    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def torch_allocator() -> None:
    import torch

    torch.empty(2**50, dtype=torch.uint8)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("call", "type_name"),
    [
        (torch_out_of_memory, "OutOfMemoryError"),
        (torch_allocator, "RuntimeError"),
        (lambda: np.empty(2**50, dtype=np.uint8), "MemoryError"),
        (lambda: bytearray(2**62), "MemoryError"),
        (fail_with(OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))), "OSError"),
    ],
)
def test_memory_that_ran_out_is_seen_through_the_causes(
    call: Callable[[], Any], type_name: str
) -> None:
    fault = fault_of(raised(call))
    assert (fault.kind, fault.type) == ("oom", type_name)
    assert fault.message or type_name == "MemoryError"


GPU_CLAIM = (
    "Free memory on device cuda:0 (3.2/79.2 GiB) on startup is less than desired GPU memory"
    " utilization (0.9, 71.3 GiB). Decrease GPU memory utilization or reduce GPU memory used by"
    " other processes."
)
CPU_CLAIM = (
    "Available memory on node 0 (3.2/15.6 GiB) on startup is less than desired CPU memory"
    " utilization (0.9, 14.0 GiB). On the CPU backend, the `--gpu-memory-utilization` flag"
)
CPU_CACHE_CLAIM = (
    "Available memory on node 0 (3.2/15.6 GiB) on kv cache allocation is less than requested"
    " memory for kv (4.0 GiB). Decrease --kv-cache-memory-bytes, VLLM_CPU_KVCACHE_SPACE,"
)
NO_CACHE = "No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when"


@pytest.mark.parametrize(
    ("error", "kind", "is_over_claim", "is_without_cache"),
    [
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling"), "oom", False, False),
        (RuntimeError("HIP error: out of memory"), "oom", False, False),
        *((ValueError(words), "oom", True, False) for words in (GPU_CLAIM, CPU_CLAIM, CPU_CACHE_CLAIM)),
        (ValueError(NO_CACHE), "oom", False, True),
        (ValueError("max_model_len is larger than the model's own"), "engine_crash", False, False),
        (RuntimeError("CUDA error: device-side assert triggered"), "engine_crash", False, False),
        (AssertionError(), "engine_crash", False, False),
        (OSError(errno.ENOENT, "No such file or directory"), "engine_crash", False, False),
    ],
)  # fmt: skip
def test_errors_without_a_type_of_their_own_are_recognised_by_words(
    error: BaseException, kind: FaultKind, is_over_claim: bool, is_without_cache: bool
) -> None:
    fault = fault_of(raised(fail_with(error)))
    assert fault == Fault(kind, type(error).__name__, str(error))
    assert (fault.is_over_claim, fault.is_without_cache) == (is_over_claim, is_without_cache)


def test_the_words_of_an_outer_error_do_not_count() -> None:
    outer = EngineError("the step after we ran out of memory")
    outer.__cause__ = RuntimeError("device-side assert")
    assert fault_of(outer).kind == "engine_crash"


KILLED = "SIGKILL: killed by another process; there is no sign that memory ran out"
MEMORY = "2% of the memory was free shortly before"


@pytest.mark.parametrize(
    ("code", "memory", "kind", "text"),
    [
        (-signal.SIGSEGV, "", "engine_crash", "SIGSEGV: the last words"),
        (-(signal.SIGRTMIN + 1), "", "engine_crash", f"signal {signal.SIGRTMIN + 1}: the last words"),
        (1, "", "engine_crash", "exit code 1: the last words"),
        (0, "", "engine_crash", "exit code 0: the last words"),
        (-signal.SIGKILL, "", "engine_crash", KILLED),
        (None, "", "engine_crash", KILLED),  # its watcher was killed with it
        (-signal.SIGKILL, MEMORY, "oom", f"SIGKILL: killed because memory ran out: {MEMORY}"),
    ],
)  # fmt: skip
def test_a_process_that_says_nothing_is_judged_by_its_exit_code(
    code: int | None, memory: str, kind: FaultKind, text: str
) -> None:
    fault = fault_of_exit(code, "the last words", memory)
    assert (fault.kind, str(fault)) == (kind, text)
    assert fault.is_unexplained_kill == (text == KILLED)


def test_a_fault_is_one_line_and_not_a_long_one() -> None:
    words = "CUDA error:\n  device-side assert\n\ttriggered " + "at x " * 10**5
    fault = fault_of(RuntimeError(words))
    assert str(fault).startswith("RuntimeError: CUDA error: device-side assert triggered at x at x")
    assert "\n" not in str(fault)
    assert len(fault.message) == 1000


def test_an_engine_that_died_or_never_came_up_says_why() -> None:
    died = EngineDied(Fault("engine_crash", "SIGSEGV", ""), stacks="Thread 1")
    assert (str(died), died.stacks) == ("the engine died: SIGSEGV", "Thread 1")
    fault, limits = Fault("oom", "ValueError", NO_CACHE), {"max_num_seqs": 256}
    error = StartFailed("qwen can't be loaded. Free the GPU", fault, limits)
    assert str(error) == "qwen can't be loaded. Free the GPU"
    assert (error.fault, error.limits, error.stacks) == (fault, limits, "")
