"""The simulated accelerator; the first engine that starts is ten times slower than all others.

    worker_cls = "uneven.UnevenWorker"

``UNEVEN`` is the path of a file that does not exist yet: the engine that creates it is the slow
one.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from accelerator import SimulatedWorker

FIRST = "UNEVEN"
TIMES = 10


class UnevenWorker(SimulatedWorker):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        try:
            Path(os.environ[FIRST]).touch(exist_ok=False)
            for cost in ("step_ms", "token_us", "image_ms"):
                self.costs[cost] *= TIMES
        except FileExistsError:
            pass
