"""The time until batchkit answers: help, status, validate, the first record, and the first token.

    python benchmarks/startup.py [--rounds 3] [--calls 5] [--quick]

Each call is a fresh command, the kinds interleaved; a round's figure is the median of its calls.
The first record is timed from the start of `batchkit run` until it is on disk: with the dry-run
engine, which has nothing to load, and with real vLLM on the demo model (one token per row, so that
it is the first token), against a script of a few lines that does the same with vLLM alone.
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from frame import ENDED, JOB, Figure, arguments, report, spread, write_rows

BATCHKIT = [str(Path(sys.executable).with_name("batchkit"))]
ROWS = 1_000
DRY_RUN = JOB.replace("counting", "dry-run", 1)
VLLM = """
name = "vllm"
[input]
path = "rows.jsonl"
id = "id"
limit = 8
[prompt]
user = "Answer in one sentence: {{ question }}"
[engine]
model = "model"
[engine.options]
dtype = "float32"
enforce_eager = true
max_model_len = 512
max_num_seqs = 8
kv_cache_memory_bytes = 134217728
[sampling]
max_tokens = 1
"""
ALONE = """
import json
from pathlib import Path
from vllm import LLM, SamplingParams

if __name__ == "__main__":
    llm = LLM("model", dtype="float32", enforce_eager=True, max_model_len=512, max_num_seqs=8,
              kv_cache_memory_bytes=134217728)
    rows = [json.loads(line) for line in Path("rows.jsonl").read_text().splitlines()[:8]]
    chats = [[{"role": "user", "content": "Answer in one sentence: " + row["question"]}]
             for row in rows]
    answers = llm.chat(chats, SamplingParams(temperature=0.0, max_tokens=1))
    Path("output/alone").mkdir(parents=True)
    Path("output/alone/results.jsonl").write_text(answers[0].outputs[0].text + "\\n")
"""
HELP, FIRST_RECORD = "batchkit --help", "run, dry-run: first record"
FIRST_TOKEN, BY_ITSELF = "run, vLLM: first token", "vLLM alone: first token"
TARGETS_S = {HELP: 0.3}


def main() -> None:
    args = arguments(
        __doc__,
        "one round of three calls of each command without vLLM",
        rounds=(3, 1),
        calls=(5, 3),
    )
    n_rounds, n_calls = args.rounds, args.calls
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder)
        light: dict[str, Callable[[], float]] = {
            "python -c pass": lambda: whole(folder, [sys.executable, "-c", "pass"]),
            HELP: lambda: whole(folder, [*BATCHKIT, "--help"]),
            "status": lambda: whole(folder, [*BATCHKIT, "status", "done/dry-run"]),
            f"validate, {ROWS:,} rows": lambda: whole(
                folder, [*BATCHKIT, "validate", "dry-run.toml"]
            ),
            FIRST_RECORD: lambda: first(folder, [*BATCHKIT, "run", "dry-run.toml"], "dry-run"),
        }
        heavy: dict[str, Callable[[], float]] = {
            FIRST_TOKEN: lambda: first(folder, [*BATCHKIT, "run", "vllm.toml"], "vllm"),
            BY_ITSELF: lambda: first(folder, [sys.executable, "alone.py"], "alone"),
        }
        found: dict[str, list[float]] = {kind: [] for kind in (*light, *heavy)}
        for _ in range(n_rounds):
            calls: dict[str, list[float]] = {kind: [] for kind in light}
            for _ in range(n_calls):
                for kind, call in light.items():
                    calls[kind].append(call())
            for kind, seconds in calls.items():
                found[kind].append(statistics.median(seconds))
            for kind, call in heavy.items():
                found[kind].append(call())
    medians = table(found)
    ratios = [
        ours / alone for ours, alone in zip(found[FIRST_TOKEN], found[BY_ITSELF], strict=True)
    ]
    ratio = statistics.median(ratios)
    print(f"first token against vLLM alone: {ratio:.2f} × its time ({spread(ratios)})")
    figures = [
        Figure(kind, seconds, "s", TARGETS_S.get(kind), at_most=True)
        for kind, seconds in medians.items()
        if kind != "python -c pass"
    ]
    ratio = round(ratio, 3)
    report("startup", figures, rounds=n_rounds, seconds=medians, first_token_ratio=ratio)


def table(found: dict[str, list[float]]) -> dict[str, float]:
    print(f"{'':>26} {'s':>7} {'spread':>12} {'at most':>8}")
    medians = {kind: round(statistics.median(seconds), 3) for kind, seconds in found.items()}
    for kind, seconds in found.items():
        target = f"{TARGETS_S[kind]:.1f}" if kind in TARGETS_S else ""
        print(f"{kind:>26} {medians[kind]:>7.2f} {spread(seconds):>12} {target:>8}")
    return medians


def whole(folder: Path, command: Sequence[str]) -> float:
    """Return the seconds that ``command`` takes."""
    began = time.perf_counter()
    subprocess.run(command, cwd=folder, stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - began


def first(folder: Path, command: Sequence[str], run: str) -> float:
    """Return the seconds until the log of ``run`` has its first record. The command then runs to
    its end."""
    shutil.rmtree(folder / "output", ignore_errors=True)
    log = folder / "output" / run / "results.jsonl"
    began = time.perf_counter()
    with subprocess.Popen(
        command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    ) as process:
        seconds = None
        while seconds is None and not os.waitid(os.P_PID, process.pid, ENDED):
            if log.exists() and log.stat().st_size:
                seconds = time.perf_counter() - began
            time.sleep(0.002)
        errors = process.communicate()[1]
    if process.returncode or seconds is None:
        raise SystemExit(f"{command}: exit code {process.returncode}\n{errors.decode()[-2000:]}")
    return seconds


def prepare(folder: Path) -> None:
    """Rows, jobs, the demo model, and a finished run in ``done`` for status."""
    for name, text in {"dry-run.toml": DRY_RUN, "vllm.toml": VLLM, "alone.py": ALONE}.items():
        (folder / name).write_text(text)
    write_rows(folder / "rows.jsonl", ROWS)
    whole(folder, [*BATCHKIT, "demo", "model", "model", "--text-only"])
    first(folder, [*BATCHKIT, "run", "dry-run.toml"], "dry-run")
    (folder / "output").rename(folder / "done")


if __name__ == "__main__":
    main()
