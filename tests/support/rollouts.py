"""Runs of ``[rollout]`` and ``[[steps]]`` in the working directory, answered by a small server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tomlkit

from tests.support.chat_server import MODEL, ChatServer
from tests.support.command_line import Ended, batchkit
from tests.support.jobs import with_tables
from tests.support.rows import read_jsonl, write_jsonl

RUN = Path("output/a")


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


def generations() -> list[dict[str, Any]]:
    return read_jsonl(RUN / "steps.jsonl")


def errors() -> dict[int, str]:
    """Of failed rows: the kind of the error, and its message."""
    return {
        record["index"]: f"{record['error']['kind']}: {record['error']['message']}"
        for record in records()
        if record["status"] == "failed"
    }
