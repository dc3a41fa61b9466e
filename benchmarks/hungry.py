"""A vLLM worker whose steps allocate memory that vLLM's profiling did not see, with the real
allocator.

    worker_cls = "hungry.Worker"

Before each step it asks the device for ``HUNGRY_BYTES`` for each request in it, and gives them back
at once, as a library with buffers of its own would. Where they are not there, the device's own error
ends the step: CUDA's on a GPU, on a CPU that of the kernel, which refuses more than the machine has.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from vllm.platforms import current_platform

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as PlatformWorker
else:
    from vllm.v1.worker.gpu_worker import Worker as PlatformWorker

BYTES = "HUNGRY_BYTES"


class Worker(PlatformWorker):
    def execute_model(self, scheduled: Any, *args: Any, **kwargs: Any) -> Any:
        wanted = len(scheduled.num_scheduled_tokens) * int(os.environ[BYTES])
        if wanted:
            torch.empty(wanted, dtype=torch.uint8, device=self.device)
            if self.device.type == "cuda":
                torch.cuda.empty_cache()  # torch would keep it, and want it no more
        return super().execute_model(scheduled, *args, **kwargs)
