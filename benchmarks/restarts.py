"""The time to replace a dead engine, and the processes, files and memory that fifty dead engines
leave behind.

    python benchmarks/restarts.py [--rounds 3] [--restarts 50] [--quick]

Real vLLM on the demo model. From a SIGKILL of the engine's process to the next engine's first
answer, side by side: forked from the launcher, as in a run, and from a new process that imports
vLLM. Then many restarts of the first kind, counting processes, files and memory before and after.
"""

from __future__ import annotations

import os
import signal
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import psutil
from frame import Figure, arguments, report

from batchkit.commands.demo_model import build_demo_model
from batchkit.config.tables import JobConfig
from batchkit.engines.faults import EngineDied
from batchkit.engines.process.engine import ProcessEngine
from batchkit.engines.process.launcher import LOG, Launcher
from batchkit.types import Request, Row

OPTIONS = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 512,
    "max_num_seqs": 8,
    "kv_cache_memory_bytes": 128 * 2**20,
}


def main() -> None:
    args = arguments(__doc__, "one round, 5 restarts", rounds=(3, 1), restarts=(50, 5))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        build_demo_model(folder / "model", text_only=True)
        engine = {"model": str(folder / "model"), "options": OPTIONS}
        job = JobConfig(engine=engine, output={"dir": str(folder)})
        with closing(Launcher(job.folder / LOG)) as launcher:
            with answering(job, launcher):
                pass  # from here on, the launcher has its libraries
            pairs = [(killed(job, launcher), killed(job, None)) for _ in range(args.rounds)]
            forked, imported = (statistics.median(times) for times in zip(*pairs, strict=True))
            ratio = statistics.median(slow / fast for fast, slow in pairs)
            print(f"restart: forked {forked:.1f} s, imported {imported:.1f} s, ratio {ratio:.1f}")
            before = belongings()
            for _ in range(args.restarts):
                killed(job, launcher)
            after = belongings()
    left = {kind: after[kind] - before[kind] for kind in before}
    print(f"left behind by {args.restarts} restarts: {left}")
    figures = [
        Figure("an engine forked, faster than imported", ratio),
        Figure(f"left behind by {args.restarts} restarts", sum(left.values()), "things"),
    ]
    found = {"forked_s": forked, "anew_s": imported, "ratio": ratio, "left": left}
    report("restarts", figures, restarts=args.restarts, **found)


def killed(job: JobConfig, launcher: Launcher | None) -> float:
    """Return the seconds from the death of one engine to the first answer of the next."""
    with answering(job, launcher) as engine:
        os.kill(engine.pid, signal.SIGKILL)
        began = time.monotonic()
        try:
            while True:
                engine.poll(0.5)
        except EngineDied:
            pass
    with answering(job, launcher):
        return time.monotonic() - began


@contextmanager
def answering(job: JobConfig, launcher: Launcher | None) -> Iterator[ProcessEngine]:
    """Yield an engine that has answered a request."""
    with closing(ProcessEngine(job, launcher)) as engine:
        messages = [{"role": "user", "content": "tell me about tea"}]
        sampling = {"temperature": 0.0, "max_tokens": 8}
        engine.submit(Request(Row(0, "0", {}), messages, None, sampling, ""))
        while not engine.poll(0.5):
            pass
        yield engine


def belongings() -> dict[str, int]:
    """Return the numbers of this process's descendants, open files and threads, and of files in
    shared memory."""
    us = psutil.Process()
    return {
        "processes": len(us.children(recursive=True)),
        "files": us.num_fds() + sum(child.num_fds() for child in us.children()),
        "threads": us.num_threads(),
        "shared_memory": len(list(Path("/dev/shm").iterdir())),
    }


if __name__ == "__main__":
    main()
