"""Memory of a run over thousands of recordings: it must not grow with them.

    python benchmarks/clip_memory.py [--rows 5000] [--quick]

Real vLLM on the demo speech model, on the CPU, as in clips.py. Each of 500 recordings is in several rows, under another name
of the same file, so that none is decoded once for two rows. What is shown is what the run itself logs: the memory of all its processes.
"""

from __future__ import annotations

import tempfile
from itertools import islice
from pathlib import Path

from clips import MODEL, OPTIONS, write
from frame import Figure, arguments, report
from sides import read

from batchkit.config.loading import make_job
from batchkit.execution.processor import ProductionBatchProcessor
from batchkit.storage.metrics import read_metrics

RECORDINGS = 500
MOST_GROWTH_MIB = 200  # from a fifth of the rows to the end


def main() -> None:
    args = arguments(__doc__, "few rows", rows=(5000, 250))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        recordings = read(write(folder, min(args.rows, RECORDINGS)))
        names = (
            {**row, "clip": f"{folder}/{'./' * again}{Path(row['clip']).name}"}
            for again in range(args.rows // len(recordings))
            for row in recordings
        )
        table = {
            "name": "memory",
            "prompt": {"chat": False, "user": "{{ q }}", "audios": ["{{ clip }}"]},
            "media": {"root": str(folder)},
            "engine": {"model": MODEL, "options": OPTIONS},
            "sampling": {"temperature": 0, "max_tokens": 88},
            "output": {"dir": str(folder / "output")},
        }
        job = make_job(table, "benchmark", ())
        summary = ProductionBatchProcessor(job, quiet=True).process(islice(names, args.rows))
        seen = [
            (line.rows_ok, line.host_bytes / 2**20)
            for line in read_metrics(job.folder)
            if line.host_bytes is not None and line.rows_ok
        ]
    print(f"{'rows':>6} {'MiB':>6}")
    for rows, mib in seen[:: max(1, len(seen) // 12)]:
        print(f"{rows:>6,} {mib:>6,.0f}")
    early = next(mib for rows, mib in seen if rows >= args.rows // 5)
    growth = Figure(
        "growth", max(mib for _, mib in seen) - early, "MiB", MOST_GROWTH_MIB, at_most=True
    )
    report("clip_memory", [growth], rows=summary.ok, seconds=summary.seconds)


if __name__ == "__main__":
    main()
