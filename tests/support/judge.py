"""A judge that a chat server of the tests plays, and its job."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tomlkit

from batchkit.commands.score.judge import judge_run, keys_of_judge
from batchkit.config.loading import load_job
from batchkit.execution.start import OnChange
from batchkit.runs.compare import RunScores
from tests.support.chat_server import ChatServer
from tests.support.scored_runs import echo, engine, quiet, scored


class Judge:
    """Answers questions with what they say, and judges by ``verdicts``, one after another."""

    def __init__(self, verdicts: Mapping[str, list[str | Exception]] | None = None) -> None:
        self.verdicts = verdicts or {}
        self.asked: Counter[str] = Counter()
        self.prompts: list[str] = []

    def __call__(self, text: str, body: dict[str, Any]) -> str:
        if not text.startswith("JUDGE "):
            return echo(text, body)
        name = text.split()[1]
        self.prompts.append(text)
        self.asked[name] += 1
        verdicts = self.verdicts.get(name, ["[Score]: 50/100"])
        verdict = verdicts[min(self.asked[name], len(verdicts)) - 1]
        if isinstance(verdict, Exception):
            raise verdict
        return echo(verdict, body)


def judge_file(folder: Path, server: ChatServer, **tables: Any) -> Path:
    """Write the job of a judge. Its input is replaced by the judged run."""
    made: dict[str, Any] = {
        "name": "judge",
        "input": {"path": "a/run"},
        "engine": engine(server),
        "prompt": {"user": "JUDGE {{ id }} {{ prediction }} / {{ a }}"},
        "retry": {"reask": 2, "reask_note": " Say the score."},
        "scoring": {"extract": "score", "scorers": ["judge"]},
    }
    for name, value in tables.items():
        made[name] = {**made.get(name, {}), **value} if isinstance(value, dict) else value
    path = folder / "judge.toml"
    path.write_text(tomlkit.dumps(made), encoding="utf-8")
    return path


def judge_of(run: Path, job: Path, on_change: OnChange = "fail") -> RunScores:
    """Like ``batchkit score RUN --judge JOB``."""
    return judge_run(run, load_job(job, given=keys_of_judge(run)), on_change=on_change, say=quiet)


def judged(folder: Path, name: str = "judge") -> dict[str, float | None]:
    """The judge's score of each row by its id; of a row that nobody judged None."""
    return {row: (scores or {}).get(name) for row, (_, scores) in scored(folder).items()}
