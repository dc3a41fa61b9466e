"""The place where vLLM's engine core (scheduler and model) runs.

On a GPU the core has its own process, as with ``vllm.LLM``: the Python code of a forward pass may be the bottleneck, and
must not share the GIL with the code that submits requests and reads answers.

On a CPU the core runs in this process, except with very many concurrent requests. A core in its own process starts 10
to 15 s later, because that process imports vLLM again. At best it hides the time of the front end. If the CPU computes
the model, that is about 3 % of the time with 23 million parameters, less with a larger model, and no gain was measured
(benchmarks/LOG.md, 2026-11-30). Therefore the length of the run is not considered.

The variable ``VLLM_ENABLE_V1_MULTIPROCESSING`` overrides this (0: in this process).

An error in the core's process would reach this process without its type, so the core writes its cause of death to a
file.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from batchkit.engines.faults import Fault, fault_of, fault_of_exit
from batchkit.engines.memory import MemoryWatch

_MULTIPROCESSING = "VLLM_ENABLE_V1_MULTIPROCESSING"
_ITS_OWN = "01"  # with "1" vLLM also gives a CPU worker its own process, and the worker's errors lose their type
_CAUSE = "BATCHKIT_CORE_DIED"  # variable with the file's name; the core's process inherits it
_MANY = 512  # concurrent requests: at 1,024 the Python code of a forward pass takes 13 ms, and sharing the GIL cost 8 %
_END_S = 5.0
_LOOK_S = 0.2
# Maximum length of the temporary folder's path; with a longer path, the core runs in this process. vLLM adds 36
# characters for a socket, and the path of a socket has at most 107.
_LONGEST_FOLDER = 70


class CoreWatch:
    """A watch over vLLM's engine core. It decides where the core runs, and finds out why it died. Create the watch
    before the LLM."""

    def __init__(self, max_num_seqs: int) -> None:
        from vllm import envs
        from vllm.platforms import current_platform

        is_light = current_platform.is_cpu() and max_num_seqs < _MANY
        is_here = is_light or len(tempfile.gettempdir()) > _LONGEST_FOLDER
        os.environ.setdefault(_MULTIPROCESSING, "0" if is_here else _ITS_OWN)
        self._memory, self._cause = MemoryWatch(), None
        if envs.VLLM_ENABLE_V1_MULTIPROCESSING:
            number, self._cause = tempfile.mkstemp(prefix="core-", suffix=".json")
            os.close(number)
            os.environ[_CAUSE] = self._cause
            _vllms().process.run_engine_core = staticmethod(run_engine_core)

    def fault_of(self, error: BaseException, llm: Any = None) -> Fault:
        """Return the fault of the core: its own error if it saved one, or the signal that ended it, otherwise the fault
        of ``error``."""
        if self._cause is None:
            return fault_of(error)
        with suppress(OSError, ValueError):
            return Fault(**json.loads(Path(self._cause).read_bytes()))
        manager = getattr(llm and llm.llm_engine.engine_core.resources, "engine_manager", None)
        for process in getattr(manager, "processes", ()):
            process.join(_END_S)
            if (process.exitcode or 0) < 0:
                return fault_of_exit(process.exitcode, "", self._memory.evidence())
        return fault_of(error)

    def close(self) -> None:
        if self._cause is not None:
            Path(self._cause).unlink(missing_ok=True)


def next_outputs(client: Any) -> Any:
    """Return the next outputs of a core in another process. vLLM's own ``get_output`` would wait forever if the core
    was killed.

    Raises:
        Exception: The core died.
    """
    from vllm.v1.engine.exceptions import EngineDeadError

    while True:
        try:
            outputs = client.outputs_queue.get(timeout=_LOOK_S)
        except queue.Empty:
            if client.resources.engine_dead:
                raise EngineDeadError from None
            continue
        if isinstance(outputs, Exception):
            raise client._format_exception(outputs)
        return outputs


def run_engine_core(*args: Any, **kwargs: Any) -> None:
    """Run vLLM's function of the same name in the core's process, and save the error that ends it."""
    _vllms().process._send_engine_dead = _keep_and_send
    try:
        _vllms().run(*args, **kwargs)
    except Exception as error:  # an error while starting, which vLLM does not report as a death
        _keep(error)
        raise


def _keep_and_send(core: Any) -> None:
    if (error := sys.exc_info()[1]) is not None:
        _keep(error)
    _vllms().send_engine_dead(core)


class _Vllms(NamedTuple):
    process: Any
    run: Callable[..., None]
    send_engine_dead: Callable[[Any], None]


@cache
def _vllms() -> _Vllms:
    """Return vLLM's class with its original functions, some of which this module replaces."""
    from vllm.v1.engine.core import EngineCoreProc

    return _Vllms(EngineCoreProc, EngineCoreProc.run_engine_core, EngineCoreProc._send_engine_dead)


def _keep(error: BaseException) -> None:
    cause = Path(os.environ[_CAUSE])
    if not cause.stat().st_size:  # the first error is the cause
        cause.write_text(json.dumps(asdict(fault_of(error))), encoding="utf-8")
