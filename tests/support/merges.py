"""Runs of shards, and their merge."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.command_line import Ended, batchkit
from tests.support.dry_runs import records, run, shard
from tests.support.rows import write_jsonl

MERGED = Path("output/merged")
SCORING = {"extract": "text", "reference": "a", "scorers": ["em", "f1"], "group_by": "kind"}


def run_shards(count: int, *args: str) -> list[Path]:
    for number in range(count):
        run("--shard", f"{number}/{count}", *args)
    return [shard(number, count) for number in range(count)]


def merge(*runs: str | Path, into: str | Path = MERGED, partial: bool = False) -> Ended:
    flags = ["--partial"] if partial else []
    return batchkit("merge", *map(str, runs), "--into", str(into), *flags, "--json")


def reported(ended: Ended, *names: str) -> tuple[Any, ...]:
    return tuple(ended.json[name] for name in names)


def files() -> set[str]:
    return {str(path) for path in Path().rglob("*") if path.name != ".lock"}


def rewrite(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change the records of a run, as if it had gone otherwise. Its checkpoint goes."""
    log = folder / "results.jsonl"
    lines = records(log)
    for record in lines:
        change(record)
    write_jsonl(log, lines)
    (folder / "checkpoint.json").unlink(missing_ok=True)
