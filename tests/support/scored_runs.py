"""Jobs that score their answers, and their runs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import tomlkit

from batchkit.commands.run import run_job
from batchkit.config.loading import make_job
from batchkit.config.tables import JobConfig
from batchkit.storage.score_store import read_scored
from tests.support.chat_server import MODEL, ChatServer, Refused
from tests.support.rows import write_jsonl

# What each row is to be answered, and what it is worth, by hand: the first three F1 1, 0 and 3/4
# and EM 1, 0, 0; the fourth has nothing to compare with, and the fifth no prompt.
ROWS = [
    {"id": "q1", "kind": "Facts", "say": "so [Final Answer]: 1955, 62170", "a": "1955, 62170"},
    {"id": "q2", "kind": "Facts", "say": "Final Answer: Yes", "a": "No"},
    {"id": "q3", "kind": "Facts", "say": "[Final Answer]: 35 to 39 years", "a": "35 to 44 years"},
    {"id": "q4", "kind": "Structure", "say": "no marker", "a": ""},
    {"id": "q5", "kind": "Facts", "a": "x"},
]
SCORING = {
    "extract": "final-answer",
    "reference": "a",
    "scorers": ["f1", "em"],
    "group_by": "kind",
}
NUMBER = {"extract": "number", "reference": "a", "scorers": ["em"]}


def completion(text: str) -> dict[str, Any]:
    choice = {"index": 0, "message": {"content": text}, "finish_reason": "stop"}
    return {"choices": [choice], "usage": {"prompt_tokens": 1, "completion_tokens": 1}}


def echo(text: str, body: dict[str, Any]) -> str:
    """The server answers with the prompt, to the letter."""
    raise Refused(200, completion(text))


def table(folder: Path, rows: Iterable[Mapping[str, Any]], **tables: Any) -> dict[str, Any]:
    made: dict[str, Any] = {
        "name": "scored",
        "input": {"path": str(write_jsonl(folder / "rows.jsonl", rows)), "id": "id"},
        "prompt": {"user": "{{ say }}"},
        "media": {"root": str(folder)},
        "engine": {"kind": "dry-run"},
        "output": {"dir": str(folder / "output"), "keep": ["kind", "a"]},
        "scoring": SCORING,
    }
    for name, value in tables.items():
        is_part = isinstance(value, dict) and name != "scoring"
        made[name] = {**made.get(name, {}), **value} if is_part else value
    return made


def job(folder: Path, rows: Iterable[Mapping[str, Any]], **tables: Any) -> JobConfig:
    return make_job(table(folder, rows, **tables), "test")


def engine(server: ChatServer) -> dict[str, Any]:
    return {"kind": "openai-server", "model": MODEL, "base_url": server.url}


def quiet(text: str) -> None:
    """For ``say``: nothing is printed."""


def run(made: JobConfig) -> Path:
    return Path(run_job(made, say=quiet).checked().folder)


def counted(count: int, **more: Any) -> list[dict[str, Any]]:
    """Rows for the dry-run engine: with extract = "number", row n is answered n."""
    return [{"id": f"q{n}", "say": f"{n}?", "a": str(n), "kind": "k", **more} for n in range(count)]


def scored(folder: Path) -> dict[str, Any]:
    """Prediction and scores by id."""
    return {r["id"]: (r.get("prediction"), r.get("scores")) for r in read_scored(folder)}


def write_job(folder: Path, made: JobConfig) -> None:
    """As ``job.toml``, for the command line."""
    content = tomlkit.dumps(json.loads(made.model_dump_json(exclude_none=True)))
    (folder / "job.toml").write_text(content, encoding="utf-8")
