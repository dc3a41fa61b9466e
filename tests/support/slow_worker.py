"""A real vLLM worker that takes its time over each step."""

import time
from typing import Any

from vllm.v1.worker.cpu_worker import CPUWorker

STEP_S = 0.2


class SlowWorker(CPUWorker):
    def execute_model(self, *args: Any, **kwargs: Any) -> Any:
        time.sleep(STEP_S)
        return super().execute_model(*args, **kwargs)
