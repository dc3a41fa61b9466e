"""A program with an engine in a process of its own, until it is killed: the job, as JSON, is its argument.

It prints the engine's process id.
"""

from __future__ import annotations

import sys

from batchkit.config.tables import JobConfig
from batchkit.engines.process.engine import ProcessEngine
from tests.support.engine_requests import request


def main() -> None:
    engine = ProcessEngine(JobConfig.model_validate_json(sys.argv[1]))
    engine.submit(request(0, max_tokens=400))
    print(engine.pid, flush=True)
    while True:
        engine.poll(0.05)
