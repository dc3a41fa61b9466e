"""A fake engine that dies of poison rows, and a run that is killed while it searches for them.

``main`` is the command line, with this fake in the place of the dry-run engine. ``BATCHKIT_TEST_FAULTS``
is JSON: ``poison`` are prompts that kill the engine; ``kill_at``: as its so-manieth engine is opened,
the run is killed with SIGKILL. Each engine that was opened is a line of ``engines.txt``.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from batchkit import engines
from batchkit.config.tables import JobConfig
from batchkit.engines.base import EngineLoad
from batchkit.engines.dry_run import open_preflight
from batchkit.engines.faults import EngineDied, Fault
from batchkit.types import Choice, Completion, Request

__all__ = ["open_engine", "open_preflight"]
OPENED = Path("engines.txt")
_opened = 0


class FakeMortalEngine:
    versions: dict[str, str] = {}  # noqa: RUF012
    max_num_seqs = 64
    limits = {"max_num_seqs": 64}  # noqa: RUF012

    def __init__(self, poison: Sequence[str]) -> None:
        self._poison = poison
        self._queue: list[Request] = []

    def submit(self, request: Request) -> None:
        self._queue.append(request)

    def poll(self, timeout_s: float) -> Sequence[Completion]:
        if any(self._text(request) in self._poison for request in self._queue):
            raise EngineDied(Fault("engine_crash", "RuntimeError", "planted"))
        done, self._queue = self._queue, []
        return [Completion(request, [Choice(self._text(request), "stop")]) for request in done]

    def load(self) -> EngineLoad:
        return EngineLoad(len(self._queue), 0, 0.0, 0)

    def close(self) -> None: ...

    def _text(self, request: Request) -> Any:
        assert request.messages is not None
        return request.messages[-1]["content"]


def open_engine(job: JobConfig) -> FakeMortalEngine:
    global _opened
    faults = json.loads(os.environ["BATCHKIT_TEST_FAULTS"])
    _opened += 1
    if _opened == faults.get("kill_at"):
        os.kill(os.getpid(), signal.SIGKILL)
    with OPENED.open("a") as file:
        file.write(f"{os.getpid()}\n")
    return FakeMortalEngine(faults["poison"])


def main() -> None:
    from batchkit.cli import cli

    engines.ENGINES["dry-run"] = "tests.support.fake_mortal_engine"
    cli()


if __name__ == "__main__":
    main()
