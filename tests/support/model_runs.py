"""Runs of a job with a model, each in a process of its own, in a folder of the test."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from subprocess import CompletedProcess, Popen
from typing import Any

import tomlkit

from batchkit.storage.log import RESULTS
from batchkit.storage.newest_lines import read_newest
from tests.support.forks import Fork
from tests.support.own_process import batchkit
from tests.support.rows import write_jsonl

OUTPUT = "output/run"


def write_job(folder: Path, rows: Iterable[Any] | None = None, **tables: Any) -> None:
    """``rows``: those of the job's input, ``rows.jsonl``, unless they are there already."""
    if rows is not None:
        write_jsonl(folder / "rows.jsonl", rows)
    job = {"name": "run", "input": {"path": "rows.jsonl"}, **tables}
    (folder / "job.toml").write_text(tomlkit.dumps(job), encoding="utf-8")


def run_job(
    folder: Path, *args: str, exit_code: int = 0, start: type[Popen[str]] = Fork
) -> CompletedProcess[str]:
    done = batchkit("run", "job.toml", *args, cwd=folder, start=start)
    assert done.returncode == exit_code, done.stderr
    return done


def newest(folder: Path, name: str = "run") -> list[dict[str, Any]]:
    """The newest record of each row."""
    return list(read_newest(folder / "output" / name / RESULTS))


def answered(
    folder: Path, rows: Iterable[Any] | None = None, exit_code: int = 0, **tables: Any
) -> list[dict[str, Any]]:
    """The records of a run of the job with these tables."""
    write_job(folder, rows, **tables)
    run_job(folder, exit_code=exit_code)
    return newest(folder, tables.get("name", "run"))
