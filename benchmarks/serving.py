"""`batchkit serve`: against `batchkit run` on the same rows, a short batch beside a long one, and five keys.

    python benchmarks/serving.py [--rows 2000] [--rounds 3] [--quick]

Real vLLM on batchkit-demo, each at its defaults but 32 sequences. Both sides count the seconds with the engine up, as the
run's manifest has them: a batch is a run. What serve does besides (uploads, checks, exports) is in ``turnaround_s``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from openai import OpenAI

CHAT, SHORT, KEYS = "/v1/chat/completions", 10, 5
ENGINE = ("--model", "batchkit-demo", "--set", "engine.options.max_num_seqs=32")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="One round of 300 rows.")
    args = parser.parse_args()
    n_rows, n_rounds = (300, 1) if args.quick else (args.rows, args.rounds)
    with tempfile.TemporaryDirectory() as name:
        found = measure(Path(name), n_rows, n_rounds)
    for key, value in found.items():
        print(f"{key:<40}{value:>10}")
    print(json.dumps({"benchmark": "serving", "rows": n_rows, **found}))


def measure(folder: Path, n_rows: int, n_rounds: int) -> dict[str, Any]:
    (folder / "rows.jsonl").write_bytes(lines(n_rows))
    ratios, turnarounds = [], []
    with serving(folder) as keys:
        one = keys[0]
        ended(one, submit(one, lines(SHORT)))  # the model is loaded
        for _ in range(n_rounds):
            began = time.monotonic()
            batch = ended(one, submit(one, lines(n_rows)))
            turnarounds.append(time.monotonic() - began)
            served_s = seconds_in(folder / "output/serve/batches" / batch)
            command = ["run", *ENGINE, "--input", "rows.jsonl", "--fresh", "--name", "run"]
            ran = subprocess.run(batchkit(*command), cwd=folder, capture_output=True, check=True)
            ratios.append(json.loads(ran.stdout.splitlines()[-1])["seconds"] / served_s)
        alone_s = median_s(one, 3)
        long = submit(one, lines(5 * n_rows))
        until_completed(one, long, n_rows // 10)
        beside_s = median_s(one, 3)
        one.batches.cancel(long)
        shares = shares_of(keys, n_rows)
    return {
        "serve / run, rows a second": round(statistics.median(ratios), 3),
        "turnaround_s": round(statistics.median(turnarounds), 1),
        f"batch of {SHORT} alone, s": round(alone_s, 2),
        f"batch of {SHORT} beside {5 * n_rows}, s": round(beside_s, 2),
        "five keys: least share / largest": round(min(shares) / max(shares), 3),
    }


def shares_of(keys: list[OpenAI], n_rows: int) -> list[int]:
    """Rows of each key's batch, from when all run to when half of all rows are done."""
    batches = [submit(key, lines(n_rows)) for key in keys]

    def done() -> list[int]:
        return [completed(key, batch) for key, batch in zip(keys, batches, strict=True)]

    while min(before := done()) == 0:
        time.sleep(0.05)
    while sum(now := done()) < KEYS * n_rows / 2:
        time.sleep(0.05)
    for key, batch in zip(keys, batches, strict=True):
        key.batches.cancel(batch)
    return [later - first for first, later in zip(before, now, strict=True)]


def median_s(client: OpenAI, times: int) -> float:
    taken = []
    for _ in range(times):
        began = time.monotonic()
        ended(client, submit(client, lines(SHORT)))
        taken.append(time.monotonic() - began)
    return statistics.median(taken)


def lines(n_rows: int) -> bytes:
    """Answers of 4 to 64 tokens."""
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


def ended(client: OpenAI, batch: str) -> str:
    while (found := client.batches.retrieve(batch)).status != "completed":
        assert found.status in ("validating", "in_progress", "finalizing"), found
        time.sleep(0.02)
    return batch


def completed(client: OpenAI, batch: str) -> int:
    counts = client.batches.retrieve(batch).request_counts
    return 0 if counts is None else counts.completed


def until_completed(client: OpenAI, batch: str, n_rows: int) -> None:
    while completed(client, batch) < n_rows:
        time.sleep(0.05)


def seconds_in(run: Path) -> float:
    manifest = json.loads((run / "manifest.json").read_text())
    return float(sum(start["seconds"] for start in manifest["starts"]))


@contextmanager
def serving(folder: Path) -> Iterator[list[OpenAI]]:
    """A client for each key."""
    own = ("serve", *ENGINE, "--port", "0", "--api-key-file", "keys")
    made = [
        subprocess.check_output(batchkit(*own, "--new-key", f"k{n}"), cwd=folder, text=True)
        for n in range(KEYS)
    ]
    command = batchkit(*own)
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        url = server.stdout.readline().split()[-1]
        yield [OpenAI(base_url=url, api_key=key.strip()) for key in made]
        server.terminate()


def batchkit(*args: str) -> list[str]:
    return [sys.executable, "-m", "batchkit", *args]


if __name__ == "__main__":
    main()
