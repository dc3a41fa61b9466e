"""`batchkit serve`: against `batchkit run` and `vllm run-batch` on the same rows, a short batch beside a long one, five keys.

    python benchmarks/serving.py [--rounds 3] [--rows 3000] [--setting simulated|CPU|dry-run] [--quick]

Real vLLM on batchkit-demo at its defaults but 64 sequences; simulated, which is the default: a step takes 10 ms and leaves the
host's cores alone (accelerator.py). dry-run has no model: each request takes 50 ms, and the host shows what it does for each row.

Against `batchkit run` both sides count the seconds with the engine up, as the run's manifest has them: a batch is a run. What
serve does besides (the check of the file, the export) is counted by itself: a batch of one row, from its creation to its end.
Against `vllm run-batch` serve's clock runs from the upload to the end of the batch, with the model loaded; that of run-batch from
the loaded model to its last line (stamped.py).
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
from commands import STAMPS
from frame import HERE, Figure, arguments, batchkit, report, spread
from openai import OpenAI
from run_batch import RUN_BATCH, run_batch
from sides import COSTS

CHAT, SHORT, KEYS, OF_KEY = "/v1/chat/completions", 10, 5, 1500
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
        figures = measure(folder, args.setting, args.rows, args.rounds)
    print(f"{'what':<42}{'found':>10}  wanted")
    for figure in figures:
        at = "" if figure.wanted is None else f"{figure.wanted:.2f} {figure.outcome}"
        print(f"{figure.what:<42}{figure.found:>8.3f} {figure.unit}  {at}".rstrip())
    report("serving", figures, setting=args.setting, rows=args.rows)


def measure(folder: Path, setting: str, n_rows: int, n_rounds: int) -> list[Figure]:
    (folder / "rows.jsonl").write_bytes(lines(n_rows))
    ratios, others = list[float](), list[float]()
    with serving(folder) as keys:
        one = keys[0]
        ended(one, submit(one, lines(SHORT)))  # the model is loaded
        for number in range(n_rounds):
            began = time.monotonic()
            batch = ended(one, submit(one, lines(n_rows)), every_s=0.2)
            whole_s = time.monotonic() - began
            served_s = seconds_in(folder / "output/serve/batches" / batch)
            ran = batchkit(folder, "run", "job.toml", "--fresh", environment=ENVIRONMENT)
            ratios.append(ran.summary["seconds"] / served_s)
            if setting != "dry-run":
                others.append(run_batch_s(folder, setting) / whole_s)
            print(f"{number + 1}: served in {served_s:.2f} s", ratios[-1], others, file=sys.stderr)
        fixed_s, alone_s = median_s(one, 1), median_s(one, SHORT)
        long = submit(one, lines(10 * n_rows))
        until_completed(one, long, n_rows // 10)
        beside_s = median_s(one, SHORT)
        one.batches.cancel(long)
        shares = shares_of(keys)
    print(f"ratios {spread(ratios)}; shares {shares}", file=sys.stderr)
    return [
        Figure("rows a second, against batchkit run", statistics.median(ratios), wanted=0.98),
        *(
            Figure(f"against {RUN_BATCH}", statistics.median(others), wanted=1.05)
            for _ in others[:1]
        ),
        Figure("a batch of one row", fixed_s, "s"),
        Figure(f"a batch of {SHORT} alone", alone_s, "s"),
        Figure(f"a batch of {SHORT} beside one of {10 * n_rows:,}", beside_s, "s"),
        Figure("five keys: least share / largest", min(shares) / max(shares), wanted=0.9),
    ]


def run_batch_s(folder: Path, setting: str) -> float:
    """Return run-batch's seconds from the loaded model to the last line of its answers."""
    worker = f"stamped.{'SimulatedWorker' if setting == 'simulated' else 'CpuWorker'}"
    options = {**OPTIONS, "served_model_name": "batchkit-demo", "worker_cls": worker}
    tool = run_batch(str(HERE.parent / "batchkit/demo_model"))
    stamps, answers = folder / "stamps", folder / "answers.jsonl"
    stamps.unlink(missing_ok=True)
    subprocess.run(
        tool.command(folder / "rows.jsonl", options, folder),
        cwd=folder,
        env={**ENVIRONMENT, STAMPS: str(stamps)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        check=True,
    )
    loaded, _ = map(float, stamps.read_text().split())
    assert len(answers.read_text().splitlines()) == len(
        (folder / "rows.jsonl").read_text().splitlines()
    )
    return answers.stat().st_mtime - loaded


def shares_of(keys: list[OpenAI]) -> list[int]:
    """Rows of each key's batch, from when all run, and what the first of them had in the engine before has gone, to when half
    of all rows are done."""
    batches = [submit(key, lines(OF_KEY)) for key in keys]

    def done() -> list[int]:
        return [completed(key, batch) for key, batch in zip(keys, batches, strict=True)]

    while min(before := done()) < SHORT:
        time.sleep(0.2)
    while sum(now := done()) < KEYS * OF_KEY / 2:
        time.sleep(0.2)
    for key, batch in zip(keys, batches, strict=True):
        key.batches.cancel(batch)
    return [later - first for first, later in zip(before, now, strict=True)]


def median_s(client: OpenAI, n_rows: int) -> float:
    """Return the median seconds that a batch takes from its creation to its end."""
    taken = []
    for _ in range(5):
        began = time.monotonic()
        ended(client, submit(client, lines(n_rows)))
        taken.append(time.monotonic() - began)
    return statistics.median(taken)


def lines(n_rows: int) -> bytes:
    """Return a batch file whose answers have up to 64 tokens."""
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
    """Start the server, and yield a client for each key."""
    own = ("serve", "job.toml", "--port", "0", "--api-key-file", "keys")
    made = [batchkit(folder, *own, "--new-key", f"k{n}").stdout for n in range(KEYS)]
    command = [sys.executable, "-m", "batchkit", *own]
    with subprocess.Popen(
        command,
        cwd=folder,
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as server:
        assert server.stdout is not None
        url = server.stdout.readline().split()[-1]
        try:
            yield [OpenAI(base_url=url, api_key=key.strip()) for key in made]
        finally:
            server.terminate()


if __name__ == "__main__":
    main()
