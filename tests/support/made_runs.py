"""Run folders with scores, failures and images, as a model would have made them.

The dry-run engine makes the folder through the command line; then newer records are added to the
ledger with what it can't do: answers worth scoring, and engine failures.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tomlkit
from PIL import Image, ImageDraw

from batchkit.config.loading import load_job
from batchkit.scoring import Scoring
from tests.support.command_line import batchkit
from tests.support.jobs import with_tables

GROUPS = ("Data Analysis", "Fact Checking", "Numerical Reasoning")
KEEP = ["QuestionType", "Question", "FinalAnswer", "FileName"]

Answer = Callable[[int, Mapping[str, Any]], Mapping[str, Any] | str | None]
"""A row's text; or what its record says instead; or None: as the dry-run engine left it."""


def rows(n: int, n_images: int) -> list[dict[str, Any]]:
    return [
        {
            "id": f"q{index}",
            "QuestionType": GROUPS[index % 3],
            "Question": f"What is cell {index} of the table?",
            "FinalAnswer": f"value {index % 7}",
            "FileName": f"table{index % n_images}",
        }
        for index in range(n)
    ]


def draw_tables(folder: Path, n: int, size: tuple[int, int] = (900, 600)) -> None:
    """Something like a table on white, each its own."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(n):
        image = Image.new("RGB", size, "white")
        draw = ImageDraw.Draw(image)
        for y in range(0, size[1], 24):
            draw.line((0, y, size[0], y), fill="gray")
            for x in range(0, size[0], 90):
                draw.text((x + 4, y + 6), f"{(x * 7 + y * 13 + number) % 9973}", fill="black")
        image.save(folder / f"table{number}.png", compress_level=1)


def make_run(
    place: Path,
    table: Sequence[Mapping[str, Any]],
    answer: Answer,
    *,
    name: str = "tables",
    **tables: Any,
) -> Path:
    """The folder of a finished run over ``table``; ``tables`` are laid over its job."""
    place.mkdir(parents=True, exist_ok=True)
    (place / "qa.json").write_text(json.dumps({"queries": list(table)}), encoding="utf-8")
    job: dict[str, Any] = {
        "name": name,
        "input": {"path": "qa.json", "records": "queries", "id": "id"},
        "prompt": {"user": "Look.\n{{ Question }}", "images": ["{{ FileName }}.png"]},
        "media": {"root": "image"},
        "engine": {"kind": "dry-run", "model": "a/model"},
        "run": {"check_rows": 0},
        "output": {"dir": str(place / "output"), "keep": KEEP},
        "scoring": {
            "extract": "final-answer",
            "reference": "FinalAnswer",
            "scorers": ["f1", "em"],
            "group_by": "QuestionType",
        },
    }
    path = place / f"{name}.toml"
    path.write_text(tomlkit.dumps(with_tables(job, tables)), encoding="utf-8")
    done = batchkit("run", path)
    assert done.exit_code in (0, 3), done.stderr
    folder = place / "output" / name
    _answer(folder, table, answer, Scoring(load_job(path).scoring))
    return folder


N = 121
HOSTILE = (
    '<script>window.hacked=1</script><img src=x onerror="window.hacked=2"></script><!-- \u2028'
    ' javascript:window.hacked=3 "quoted" \\ straße ÄRGER\nsecond line'
    "\n[Final Answer]: <img src=x onerror='window.hacked=4'>"
)
TABLE = rows(N, 4)
TABLE[7]["FileName"] = "gone"
TABLE[9]["FinalAnswer"] = ""


def told(index: int, row: Mapping[str, Any]) -> Any:
    """Row 1 is hostile; 2 and 5 fail; 7 has no image; 8 ended at max_tokens, half right; 9 has no reference;
    0, 10 … are wrong."""
    text = f"Reading the table.\n[Final Answer]: {row['FinalAnswer']}"
    special: dict[int, Any] = {
        1: HOSTILE,
        2: failure("timeout"),
        5: failure("oom"),
        8: {"finish_reason": "length", "text": text, "scores": {"f1": 0.5, "em": 0.0}},
        9: "value 2",
    }
    return special.get(index, "[Final Answer]: nothing" if index % 10 == 0 else text)


def golden_run(place: Path, **tables: Any) -> Path:
    """A run of ``TABLE`` that was answered as ``told``."""
    draw_tables(place / "image", 4)
    return make_run(place, TABLE, told, **tables)


def _answer(
    folder: Path, table: Sequence[Mapping[str, Any]], answer: Answer, scoring: Scoring
) -> None:
    log = folder / "results.jsonl"
    lines = []
    for line in log.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        index = record["index"]
        given = answer(index, table[index]) if record["status"] == "ok" else None
        if given is None:
            continue
        record |= {"latency_s": 1 + index % 5, "finished_at": _time(index)}
        if isinstance(given, str):
            scored = scoring.score(given, table[index], record["id"])
            record |= {"text": given, "prediction": scored.prediction, "scores": scored.scores}
            record["usage"] = {"prompt_tokens": 900 + index % 50, "completion_tokens": len(given)}
        else:
            record |= given
        lines.append(json.dumps(record) + "\n")
    with log.open("a", encoding="utf-8") as file:
        file.writelines(lines)


def failure(kind: str) -> dict[str, Any]:
    """What the record of a failed row says."""
    error = {"kind": kind, "type": "RowError", "message": f"it was {kind}", "retryable": True}
    return {"status": "failed", "text": None, "usage": None, "error": error, "scores": {}}


def _time(index: int) -> str:
    hours, rest = divmod(index // 4, 3600)
    return f"2026-11-21T{hours:02}:{rest // 60:02}:{rest % 60:02}.000Z"
