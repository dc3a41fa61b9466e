"""Runs of ``[rollout]`` and ``[[steps]]``: by default ``output/a`` in the working directory, answered by a
small server."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import tomlkit

from batchkit.storage.checkpoint import CHECKPOINT
from batchkit.storage.log import RESULTS, STEPS
from tests.support.chat_server import MODEL, ChatServer
from tests.support.command_line import Ended, batchkit
from tests.support.jobs import with_tables
from tests.support.rows import read_jsonl, write_jsonl

RUN = Path("output/a")
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


def write(
    solve: str | None,
    rows: list[dict[str, Any]] | int,
    server: ChatServer | None = None,
    **tables: Any,
) -> None:
    """``solve``: the code of ``solve.py``; None for a job whose steps are in ``tables``. Without a
    server the engine is a dry run."""
    if isinstance(rows, int):
        rows = [{"q": f"q{n}"} for n in range(rows)]
    write_jsonl(Path("rows.jsonl"), rows)
    job: dict[str, Any] = {
        "name": "a",
        "input": {"path": "rows.jsonl"},
        "engine": {"kind": "dry-run"},
    }
    if solve is not None:
        Path("solve.py").write_text(solve)
        job["rollout"] = {"function": "solve.py:solve"}
    if server is not None:
        job["engine"] = {"kind": "openai-server", "model": MODEL, "base_url": server.url}
    Path("job.toml").write_text(tomlkit.dumps(with_tables(job, tables)))


def run(*args: str) -> Ended:
    return batchkit("run", "job.toml", *args)


def records() -> list[dict[str, Any]]:
    """By row; fails if a row has two."""
    found = sorted(read_jsonl(RUN / "results.jsonl"), key=lambda record: record["index"])
    assert len({record["index"] for record in found}) == len(found)
    return found


def generations(run: Path = RUN) -> list[dict[str, Any]]:
    """The ledger's lines; each must be whole."""
    return read_jsonl(run / STEPS) if (run / STEPS).exists() else []


def errors() -> dict[int, str]:
    """Of failed rows: the kind of the error, and its message."""
    return {
        record["index"]: f"{record['error']['kind']}: {record['error']['message']}"
        for record in records()
        if record["status"] == "failed"
    }


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
