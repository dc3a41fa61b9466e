"""Rows with several generations where the model costs nothing: CPU time for each, and memory of many rows.

    python benchmarks/rollouts.py [--rows 20000] [--open 10000] [--quick]

The dry-run engine answers; everything else is as in any run, and each start is a fresh command. CPU
time is that of the command, less that of one with 100 rows. For the memory, ``--open`` rows are in
flight at once: each asks three times with a growing conversation, and each answer takes seconds; their
number is what the times in the ledger say.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from frame import Ended, Figure, arguments, batchkit, report

FEW = 100
WANTED_MIB = 1024
JOB = """
name = "rollouts"
[input]
path = "rows.jsonl"
[engine]
kind = "dry-run"
"""
PLAIN = '[prompt]\nuser = "Answer: {{ q }}"\n'
STEPS = """
[[steps]]
name = "draft"
prompt.user = "Answer: {{ q }}"
[[steps]]
name = "judge"
prompt.user = "Judge {{ steps.draft.text }}"
[[steps]]
name = "revise"
prompt.user = "Revise {{ steps.draft.text }} after {{ steps.judge.text }}"
"""
ROLLOUT = '[rollout]\nfunction = "solve.py:solve"\n'
SOLVE = """
async def solve(row, generate):
    messages = [{"role": "user", "content": row["q"]}]
    for _ in range(3):
        answer = await generate(messages)
        messages.append({"role": "assistant", "content": answer.text})
        messages.append({"role": "user", "content": "Go on."})
    return answer.text
"""
KINDS = {"one generation": (PLAIN, 1), "3 steps": (STEPS, 3), "rollout of 3": (ROLLOUT, 3)}


def main() -> None:
    args = arguments(__doc__, "5,000 rows", rows=(20_000, 5_000), open=(10_000, 10_000))
    n_rows = args.rows
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "solve.py").write_text(SOLVE)
        costs = cpu_ms(folder, n_rows)
        memory = in_flight(folder, args.open)
    figures = [
        Figure(
            f"{memory['rows_open']:,} rollouts in flight",
            memory["peak_mib"],
            "MiB",
            WANTED_MIB,
            at_most=True,
        )
    ]
    report("rollouts", figures, rows=n_rows, cpu_ms=costs, **memory)


def cpu_ms(folder: Path, n_rows: int) -> dict[str, float]:
    """Return the CPU time of a generation, by kind of job."""
    (folder / "rows.jsonl").write_text("".join(row(n, 40) for n in range(n_rows)))
    print(f"{'job':>16} {'rows/s':>8} {'ms of CPU a generation':>24}")
    costs = {}
    for kind, (tables, generations) in KINDS.items():
        few, many = (run(folder, JOB + tables, "--limit", str(n)) for n in (FEW, n_rows))
        costs[kind] = round(1000 * (many.cpu_s - few.cpu_s) / ((n_rows - FEW) * generations), 4)
        print(f"{kind:>16} {n_rows / many.summary['seconds']:>8,.0f} {costs[kind]:>24.3f}")
    return costs


def in_flight(folder: Path, n_rows: int) -> dict[str, Any]:
    """Return the peak of the run's resident memory, and the number of rows that were open at the
    same time."""
    (folder / "rows.jsonl").write_text("".join(row(n, 2000) for n in range(n_rows)))
    slow = JOB + "options.latency_s = 20.0\n" + ROLLOUT
    settings = ["--set", f"rollout.concurrency={n_rows}", "--set", f"run.max_in_flight={n_rows}"]
    peak_mib = run(folder, slow, *settings).peak_mib
    began: dict[int, str] = {}
    for line in lines(folder, "steps.jsonl"):
        began.setdefault(line["index"], line["finished_at"])
    ended = sorted(line["finished_at"] for line in lines(folder, "results.jsonl"))
    # Rows that had their first answer before any row ended.
    n_open = sum(at < ended[0] for at in began.values())
    print(f"\n{n_open:,} rows open at once: {peak_mib:,.0f} MiB resident at most")
    return {"rows_open": n_open, "peak_mib": round(peak_mib, 1)}


def row(number: int, size: int) -> str:
    return json.dumps({"q": f"{number}: ".ljust(size, "x")}) + "\n"


def lines(folder: Path, name: str) -> list[dict[str, Any]]:
    with (folder / "output/rollouts" / name).open() as file:
        return [json.loads(line) for line in file]


def run(folder: Path, job: str, *args: str) -> Ended:
    (folder / "job.toml").write_text(job)
    return batchkit(folder, "run", "job.toml", "--fresh", *args)


if __name__ == "__main__":
    main()
