"""Jobs with several generations for each row: ``[[steps]]``, three of them, and a ``[rollout]`` of five."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from batchkit.storage.checkpoint import CHECKPOINT
from batchkit.storage.log import RESULTS, STEPS
from tests.support.rows import read_jsonl

THREE = [
    {"name": "draft", "prompt": {"user": "Answer: {{ q }}"}},
    {"name": "judge", "prompt": {"user": "Judge {{ steps.draft.text }}"}},
    {
        "name": "revise",
        "prompt": {"user": "Revise {{ steps.draft.text }} after {{ steps.judge.text }}"},
    },
]
SOLVE = """
async def solve(row, generate):
    draft = await generate(f"Answer: {row['q']}")
    judged = await generate(f"Judge {draft.text}")
    revised = await generate(f"Revise {draft.text} after {judged.text}")
    checks = await generate.many([f"Check {revised.text} once", f"Check {revised.text} twice"])
    return {"answer": revised.text, "checks": [check.text for check in checks]}
"""
CALLS = {
    "steps": [(step["name"], 0) for step in THREE],
    "rollout": [("", number) for number in range(5)],
}


def generations(run: Path) -> list[dict[str, Any]]:
    """The ledger's lines; each must be whole."""
    path = run / STEPS
    return read_jsonl(path) if path.exists() else []


def calls(run: Path) -> Counter[tuple[int, str, int]]:
    """How often the ledger has each call of each row."""
    return Counter((line["index"], line["step"], line["call"]) for line in generations(run))


def each_once(kind: str, n_rows: int) -> Counter[tuple[int, str, int]]:
    """``calls`` of a finished run."""
    return Counter((row, *call) for row in range(n_rows) for call in CALLS[kind])


def cut_back(run: Path, n_generations: int) -> bytes:
    """Make the run folder what it was when a kill left so many generations: without the later ones, and
    without the records of rows that had more. Returns the ledger's bytes."""
    ledger, log = run / STEPS, run / RESULTS
    lines = ledger.read_bytes().splitlines(keepends=True)
    gone = {json.loads(line)["index"] for line in lines[n_generations:]}
    kept = [
        line
        for line in log.read_bytes().splitlines(keepends=True)
        if json.loads(line)["index"] not in gone
    ]
    ledger.write_bytes(b"".join(lines[:n_generations]))
    log.write_bytes(b"".join(kept))
    (run / CHECKPOINT).unlink(missing_ok=True)
    return ledger.read_bytes()
