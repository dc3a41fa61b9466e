"""What the adaptive window gains: the same rows with fixed windows and with the adaptive one.

    python benchmarks/window.py [--rounds 3] [--rows 600] [--quick]

Real vLLM on the demo model, max_num_seqs 16, answers heavy-tailed; once with room for all of them
in the KV cache, once with room for about half, so that requests are preempted. Rates are rows/s
with the engine up, relative to the adaptive window in the same round.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

from frame import Figure, arguments, batchkit, report

from batchkit.commands.demo_model import build_demo_model

MAX_NUM_SEQS = 16
WINDOWS = ["auto", "4", "8", "16", "24", "64"]
QUICK_WINDOWS = ["auto", "4", "24", "64"]
KV_BLOCKS = {"ample": 512, "scarce": 24}
JOB = """
name = "window"
[input]
path = "rows.jsonl"
[prompt]
user = "{{ q }}"
[engine]
model = "model"
[engine.options]
dtype = "float32"
enforce_eager = true
max_model_len = 512
max_num_seqs = 16
[sampling]
sampling_column = "params"
"""


def main() -> None:
    args = arguments(__doc__, "one round, few rows and windows", rounds=(3, 1), rows=(600, 300))
    windows = QUICK_WINDOWS if args.quick else WINDOWS
    results: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        build_demo_model(folder / "model", text_only=True)
        (folder / "job.toml").write_text(JOB)
        (folder / "rows.jsonl").write_text(rows(args.rows))
        print(f"{'KV cache':>8} " + " ".join(f"{window:>6}" for window in windows))
        for kv, blocks in KV_BLOCKS.items():
            rates: dict[str, list[float]] = {window: [] for window in windows}
            for number in range(args.rounds):
                for window in windows:
                    rates[window].append(rate(folder, f"{kv}-{window}-{number}", window, blocks))
            results[kv] = {
                window: statistics.median(map(ratio, found, rates["auto"]))
                for window, found in rates.items()
            }
            print(f"{kv:>8} " + " ".join(f"{results[kv][window]:>6.2f}" for window in windows))
    figures = [
        Figure(f"KV cache {kv}: adaptive, against the best fixed", 1 / max(rest.values()))
        for kv, found in results.items()
        for rest in [{window: rate for window, rate in found.items() if window != "auto"}]
    ]
    report("window", figures, max_num_seqs=MAX_NUM_SEQS, **results)


def ratio(found: float, auto: float) -> float:
    return found / auto


def rows(n: int) -> str:
    """Most answers are short, a few are ten times as long."""
    lengths = (6, 9, 12, 16, 24, 8, 96, 11)
    lines: list[dict[str, Any]] = [
        {"q": f"tell me of {i} " + "tea " * (i * 7 % 60), "params": {"max_tokens": lengths[i % 8]}}
        for i in range(n)
    ]
    return "".join(json.dumps(line) + "\n" for line in lines)


def rate(folder: Path, name: str, window: str, blocks: int) -> float:
    settings = {
        "name": name,
        "run.max_in_flight": window,
        "engine.options.num_gpu_blocks_override": blocks,
    }
    words = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    return float(batchkit(folder, "run", "job.toml", *words).summary["rows_per_s"])


if __name__ == "__main__":
    main()
