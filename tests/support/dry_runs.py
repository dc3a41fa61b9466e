"""Runs of the dry-run engine in the working directory: ``job.toml``, ``in.jsonl``, ``output/a``."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import tomlkit

from batchkit.config.loading import make_job
from batchkit.config.tables import JobConfig
from batchkit.execution.processor import ProductionBatchProcessor
from batchkit.storage.starts import current_manifest, read_history
from tests.support.command_line import Ended, batchkit
from tests.support.jobs import with_tables
from tests.support.rows import read_jsonl, write_jsonl

RUN = Path("output/a")
LOG = RUN / "results.jsonl"
TRIED = """# a job
name = "tried"   # its name
[input]
path = "rows.jsonl"
[prompt]
user = "{{ q }}"
[engine]
kind = "dry-run"
[engine.options]
latency_s = 0.02  # of each request
max_num_seqs = 8  # by hand
"""
"""A job for trials, with comments that an edit has to keep."""
READERS = [  # the commands that read records
    ["export", "--parquet"],
    ["export", "--jsonl"],
    ["retry-failed"],
    ["report"],
    ["compare", "output/a", "output/a"],
    ["merge", "output/a", "--into", "output/b"],
    ["run", "job.toml"],
]


def run(*args: str) -> Ended:
    return batchkit("run", "job.toml", *args)


def shard(number: int, count: int) -> Path:
    """Its run folder."""
    return Path(f"output/a.shard-{number}-of-{count}")


def write_job(**tables: Any) -> None:
    """A table that is None is left out. Equal rows are not copied, because the engine's answer names its row."""
    job: dict[str, Any] = {
        "name": "a",
        "run": {"deduplicate": False},
        "input": {"path": "in.jsonl"},
        "prompt": {"user": "{{ q }}"},
        "engine": {"kind": "dry-run"},
        "output": {"keep": []},
    }
    made = {name: table for name, table in with_tables(job, tables).items() if table is not None}
    Path("job.toml").write_text(tomlkit.dumps(made))


def changed_job(**tables: Any) -> None:
    """The run's own job.toml says this too now, as if somebody else had written it."""
    path = RUN / "job.toml"
    path.write_text(tomlkit.dumps(with_tables(tomlkit.loads(path.read_text()), tables)))


def write_rows(rows: list[dict[str, Any]] | int) -> list[dict[str, Any]]:
    if isinstance(rows, int):
        rows = [{"key": f"k{n}", "q": f"question {n}"} for n in range(rows)]
    write_jsonl(Path("in.jsonl"), rows)
    return rows


def prepare(n: int = 10, **tables: dict[str, Any]) -> None:
    write_rows(n)
    write_job(**tables)


def finished(n: int = 10, **tables: Any) -> None:
    """A run over ``n`` rows, none of which fails."""
    prepare(n, **tables)
    run().ok()


def records(log: Path = LOG) -> list[dict[str, Any]]:
    return read_jsonl(log)


def settled(log: Path = LOG) -> dict[int, str]:
    """Status of each row; fails where a row has two records."""
    read = records(log)
    found = {record["index"]: record["status"] for record in read}
    assert len(found) == len(read)
    return found


def manifest(folder: Path = RUN) -> dict[str, Any]:
    """Return the content of ``manifest.json``, and what ``starts.jsonl`` adds to it."""
    found: dict[str, Any] = json.loads((folder / "manifest.json").read_text())
    history = read_history(folder)
    return (
        found
        | history.model_dump(exclude_unset=True)
        | {"identity": asdict(current_manifest(folder).identity)}
    )


def reductions(folder: Path = RUN, engine: str = "") -> list[dict[str, Any]]:
    """Return the options of ``engine`` that were reduced after out-of-memory errors."""
    noted = read_history(folder).reductions.get(engine)
    return [] if noted is None else noted.options


def status(folder: Path = RUN) -> dict[str, Any]:
    return batchkit("status", str(folder), "--json").json


def verify(folder: Path = RUN) -> dict[str, Any]:
    return batchkit("verify", str(folder), "--json").json


def job(*overrides: str, **tables: Any) -> JobConfig:
    return make_job({"name": "a", "engine": {"kind": "dry-run"}, **tables}, "test", overrides)


def process(rows: Any, **options: Any) -> Any:
    return ProductionBatchProcessor(job(), quiet=True, **options).process(rows)


def rows_that_fail(n: int, every: int) -> None:
    """Every ``every``-th row lacks the field that the template asks for."""
    write_rows([{"other": "x"} if k % every == every - 1 else {"q": f"x {k}"} for k in range(n)])


def n_records() -> int:
    return LOG.read_bytes().count(b"\n") if LOG.exists() else 0
