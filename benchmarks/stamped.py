"""vLLM workers that write two times, in any tool: model loaded, first step.

    worker_cls = "stamped.CpuWorker"              the real one
    worker_cls = "stamped.SimulatedWorker"        accelerator.py

A line each, in the file named by the environment variable ``STAMPS``. The load ends when
``compile_or_warm_up_model`` returns: vLLM's engine calls it last, after weights and KV cache.
"""

from __future__ import annotations

import os
import time
from typing import Any

import accelerator
from vllm.v1.worker.cpu_worker import CPUWorker

STAMPS = "STAMPS"


class Stamped:
    has_stepped = False

    def compile_or_warm_up_model(self) -> Any:
        times = super().compile_or_warm_up_model()
        stamp()
        return times

    def execute_model(self, scheduled: Any, *args: Any, **kwargs: Any) -> Any:
        if scheduled.total_num_scheduled_tokens and not self.has_stepped:
            self.has_stepped = True
            stamp()
        return super().execute_model(scheduled, *args, **kwargs)


class CpuWorker(Stamped, CPUWorker):
    pass


class SimulatedWorker(Stamped, accelerator.SimulatedWorker):
    pass


def stamp() -> None:
    with open(os.environ[STAMPS], "a") as stamps:
        stamps.write(f"{time.time()!r}\n")
