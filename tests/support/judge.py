"""A judge that a chat server of the tests plays."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from batchkit.config.tables import JobConfig
from tests.support.chat_server import ChatServer, Refused
from tests.support.scored_runs import NUMBER, completion, counted, echo, engine, job, scored


class Judge:
    """Answers questions with what they say, and judges by ``verdicts``, one after another."""

    def __init__(self, verdicts: Mapping[str, list[str | Exception]]) -> None:
        self.verdicts = verdicts
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


def cut_off(text: str) -> Refused:
    """An answer that ``max_tokens`` has cut off."""
    body = completion(text)
    body["choices"][0]["finish_reason"] = "length"
    return Refused(200, body)


def judged_job(folder: Path, server: ChatServer, rows: Any = None, **tables: Any) -> JobConfig:
    judge = {
        "engine": engine(server),
        "prompt": {"user": "JUDGE {{ id }} {{ prediction }} / {{ reference }}"},
        **tables.pop("judge", {}),
    }
    scoring = {**NUMBER, "scorers": ["em", "judge"], "judge": judge, **tables.pop("scoring", {})}
    rows = counted(3) if rows is None else rows
    return job(folder, rows, scoring=scoring, **tables)


def judged(folder: Path) -> dict[str, float | None]:
    """The judge's score of each row by its id; of a row that nobody judged None."""
    return {name: scores.get("judge") for name, (_, scores) in scored(folder).items()}
