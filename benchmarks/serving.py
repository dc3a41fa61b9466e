"""`batchkit serve`: against `batchkit run` on the same rows, a short batch beside a long one, and five keys.

    python benchmarks/serving.py [--rounds 3] [--rows 3000] [--setting simulated|CPU|dry-run] [--quick]

Real vLLM on batchkit-demo at its defaults but 64 sequences; simulated, which is the default: a step takes 10 ms and leaves the
host's cores alone (accelerator.py). dry-run has no model: each request takes 50 ms, and the host shows what it does for each row.

Both sides count the seconds with the engine up, as the run's manifest has them: a batch is a run. What serve does besides
(the check of the file, the export, its ticks) is counted by itself: a batch of one row, from its creation to its end.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tomlkit
from frame import HERE, Figure, arguments, batchkit, report, spread
from openai import OpenAI
from sides import COSTS

CHAT, SHORT, KEYS = "/v1/chat/completions", 10, 5
STEP = {"step_ms": 10, "token_us": 0, "image_ms": 0, "median_tokens": 30}
OPTIONS = {"max_num_seqs": 64, "max_model_len": 1024, "kv_cache_memory_bytes": 2**30}
DRY = {"max_num_seqs": 64, "latency_s": 0.05}
SIMULATED = {**OPTIONS, "worker_cls": "accelerator.SimulatedWorker"}
SETTINGS = {
    "simulated": {"model": "batchkit-demo", "options": SIMULATED},
    "CPU": {"model": "batchkit-demo", "options": OPTIONS},
    "dry-run": {"kind": "dry-run", "model": "batchkit-demo", "options": DRY},
}
INPUT = {"path": "rows.jsonl", "format": "openai-batch"}
ENVIRONMENT = {
    **os.environ,
    COSTS: json.dumps(STEP),
    "PYTHONPATH": f"{HERE}{os.pathsep}{HERE.parent}",
    "VLLM_LOGGING_LEVEL": "ERROR",
}


def main() -> None:
    setting = {"setting": {"choices": list(SETTINGS), "default": "simulated"}}
    args = arguments(__doc__, "one round, 300 rows", setting, rounds=(3, 1), rows=(3000, 300))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        job = {"name": "run", "input": INPUT, "engine": SETTINGS[args.setting]}
        (folder / "job.toml").write_text(tomlkit.dumps(job))
        figures = measure(folder, args.rows, args.rounds)
    print(f"{'what':<42}{'found':>10}  wanted")
    for figure in figures:
        at = "" if figure.wanted is None else f"{figure.wanted:.2f} {figure.outcome}"
        print(f"{figure.what:<42}{figure.found:>8.3f} {figure.unit}  {at}".rstrip())
    report("serving", figures, setting=args.setting, rows=args.rows)


def measure(folder: Path, n_rows: int, n_rounds: int) -> list[Figure]:
    (folder / "rows.jsonl").write_bytes(lines(n_rows))
    ratios = []
    with serving(folder) as keys:
        one = keys[0]
        ended(one, submit(one, lines(SHORT)))  # the model is loaded
        for number in range(n_rounds):
            batch = ended(one, submit(one, lines(n_rows)), every_s=1)
            served_s = seconds_in(folder / "output/serve/batches" / batch)
            ran = batchkit(folder, "run", "job.toml", "--fresh", environment=ENVIRONMENT)
            ratios.append(ran.summary["seconds"] / served_s)
            print(f"{number + 1}: served in {served_s:.2f} s, {ratios[-1]:.3f} ×", file=sys.stderr)
        fixed_s, alone_s = median_s(one, 1), median_s(one, SHORT)
        long = submit(one, lines(5 * n_rows))
        until_completed(one, long, n_rows // 10)
        beside_s = median_s(one, SHORT)
        one.batches.cancel(long)
        shares = shares_of(keys, n_rows)
    print(f"ratios {spread(ratios)}; shares {shares}", file=sys.stderr)
    return [
        Figure("rows a second, against batchkit run", statistics.median(ratios), wanted=0.98),
        Figure("a batch of one row", fixed_s, "s"),
        Figure(f"a batch of {SHORT} alone", alone_s, "s"),
        Figure(f"a batch of {SHORT} beside one of {5 * n_rows:,}", beside_s, "s"),
        Figure("five keys: least share / largest", min(shares) / max(shares), wanted=0.9),
    ]


def shares_of(keys: list[OpenAI], n_rows: int) -> list[int]:
    """Rows of each key's batch, from when all run to when half of all rows are done."""
    batches = [submit(key, lines(n_rows)) for key in keys]

    def done() -> list[int]:
        return [completed(key, batch) for key, batch in zip(keys, batches, strict=True)]

    while min(before := done()) == 0:
        time.sleep(0.2)
    while sum(now := done()) < KEYS * n_rows / 2:
        time.sleep(0.2)
    for key, batch in zip(keys, batches, strict=True):
        key.batches.cancel(batch)
    return [later - first for first, later in zip(before, now, strict=True)]


def median_s(client: OpenAI, n_rows: int) -> float:
    """How long a batch takes from its creation to its end."""
    taken = []
    for _ in range(5):
        began = time.monotonic()
        ended(client, submit(client, lines(n_rows)))
        taken.append(time.monotonic() - began)
    return statistics.median(taken)


def lines(n_rows: int) -> bytes:
    """Answers of up to 64 tokens."""
    rows = (
        {
            "custom_id": f"row-{n}",
            "method": "POST",
            "url": CHAT,
            "body": {
                "model": "batchkit-demo",
                "messages": [{"role": "user", "content": f"What is {n}?"}],
                "max_tokens": 4 + 7 * n % 61,
                "min_tokens": 4 + 7 * n % 61,
            },
        }
        for n in range(n_rows)
    )
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def submit(client: OpenAI, content: bytes) -> str:
    file = client.files.create(file=("in.jsonl", content), purpose="batch")
    given: Any = {"endpoint": CHAT, "completion_window": "24h"}
    return client.batches.create(input_file_id=file.id, **given).id


def ended(client: OpenAI, batch: str, every_s: float = 0.02) -> str:
    while (found := client.batches.retrieve(batch)).status != "completed":
        assert found.status in ("validating", "in_progress", "finalizing"), found
        time.sleep(every_s)
    return batch


def completed(client: OpenAI, batch: str) -> int:
    counts = client.batches.retrieve(batch).request_counts
    return 0 if counts is None else counts.completed


def until_completed(client: OpenAI, batch: str, n_rows: int) -> None:
    while completed(client, batch) < n_rows:
        time.sleep(0.2)


def seconds_in(run: Path) -> float:
    manifest = json.loads((run / "manifest.json").read_text())
    return float(sum(start["seconds"] for start in manifest["starts"]))


@contextmanager
def serving(folder: Path) -> Iterator[list[OpenAI]]:
    """A client for each key."""
    own = ("serve", "job.toml", "--port", "0", "--api-key-file", "keys")
    made = [batchkit(folder, *own, "--new-key", f"k{n}").stdout for n in range(KEYS)]
    command = [sys.executable, "-m", "batchkit", *own]
    with subprocess.Popen(
        command, cwd=folder, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        url = server.stdout.readline().split()[-1]
        try:
            yield [OpenAI(base_url=url, api_key=key.strip()) for key in made]
        finally:
            server.terminate()


if __name__ == "__main__":
    main()
