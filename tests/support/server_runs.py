"""Runs in the working directory that ask a chat server of the tests."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import tomlkit

from batchkit.storage.log import RESULTS
from tests.support.chat_server import MODEL, ChatServer, Refused
from tests.support.command_line import batchkit
from tests.support.dry_runs import RUN
from tests.support.jobs import with_tables
from tests.support.rows import read_jsonl, write_jsonl


def said(text: Any = "fine", finish_reason: Any = "stop", **more: Any) -> dict[str, Any]:
    choice = {"index": 0, "message": {"content": text}, "finish_reason": finish_reason}
    return {"choices": [{**choice, **more}], "usage": {"prompt_tokens": 3, "completion_tokens": 4}}


def counted(prompt_tokens: Any, completion_tokens: Any = 4) -> dict[str, Any]:
    usage = {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens}
    return {**said(), "usage": usage}


def answering(bodies: list[Any]) -> Callable[[str, dict[str, Any]], None]:
    """Row n is answered with ``bodies[n]``; another one as always."""

    def before(text: str, body: dict[str, Any]) -> None:
        n = int(text.split()[-1]) if text.startswith("row ") else len(bodies)
        if n < len(bodies):
            raise bodies[n] if isinstance(bodies[n], Exception) else Refused(200, bodies[n])

    return before


def write_job(server: ChatServer | str, rows: int | list[dict[str, Any]], **tables: Any) -> None:
    """``server``, or the command that starts it. A number of rows have a prompt, too: "row " and the
    number of the row."""
    where = {"server": {"command": server}} if isinstance(server, str) else {"base_url": server.url}
    job: dict[str, Any] = {
        "name": "a",
        "input": {"path": "rows.jsonl"},
        "engine": {"kind": "openai-server", "model": MODEL, **where},
    }
    if isinstance(rows, int):
        job["prompt"] = {"user": "row {{ n }}"}
        rows = [{"n": n} for n in range(rows)]
    write_jsonl(Path("rows.jsonl"), rows)
    Path("job.toml").write_text(tomlkit.dumps(with_tables(job, tables)))


def records(folder: Path = RUN) -> list[dict[str, Any]]:
    """In the order of the rows."""
    return sorted(read_jsonl(folder / RESULTS), key=lambda record: int(record["index"]))


def assert_settled(server: ChatServer) -> None:
    """A second start asks for nothing, the audit is clean, and every export reads the log."""
    asked = len(server.bodies)
    again = batchkit("run", "job.toml")
    assert again.exit_code in (0, 3), again.stderr
    assert len(server.bodies) == asked
    assert not list(RUN.glob("*.torn-*"))
    audit = json.loads(batchkit("verify", "job.toml", "--json").stdout)
    assert (audit["torn_bytes"], audit["lost"], audit["duplicates"]) == (0, 0, 0)
    exported = batchkit("export", "job.toml", "--parquet", "--csv", "--jsonl", "--openai")
    assert exported.exit_code == 0, exported.stderr
    assert pq.read_table(RUN / "results.parquet").num_rows == audit["records"]
