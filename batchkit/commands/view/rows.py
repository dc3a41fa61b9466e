"""The rows of a run by page: which rows a query means, and what the list shows of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jinja2 import Environment
from jinja2 import TemplateError as JinjaError
from jinja2.meta import find_undeclared_variables

from batchkit.config.tables import JobConfig, PromptTable
from batchkit.runs.columns import Table
from batchkit.runs.index import Index, Snapshot
from batchkit.scoring.metrics import group_name
from batchkit.storage.answers import answers_in_words
from batchkit.storage.lines import failure_kind

OUTCOMES = ("ok", "failed", "unscored", "cut")
SORTS = {"latency": "latency", "tokens": "tokens", "length": "letters"}  # by column
_LISTED = ("index", "id", "status", "prediction", "scores", "usage", "latency_s", "attempt")
_MOST_TEXT, _LONGEST_QUESTION = 500, 1_000
_ASKED = ("question", "query", "instruction", "prompt", "problem", "input", "text")


@dataclass(frozen=True)
class Query:
    """Which rows, and in which order. ``status``: one of ``OUTCOMES``. ``sort``: index, score (of ``scorer``), or one of ``SORTS``.
    ``least`` and ``most`` limit the score; a row without it is then left out."""

    status: str = ""
    kind: str = ""
    group: str = ""
    scorer: str = ""
    least: float | None = None
    most: float | None = None
    text: str = ""
    sort: str = "index"
    descending: bool = False

    def rows(self, snapshot: Snapshot, has_words: Table | None) -> Table:
        """The numbers of the newest entries of the rows, in order; ``has_words``: a mask of entries."""
        chosen = snapshot.newest
        entries = snapshot.entries
        if self.status:
            chosen = chosen[_has_outcome(snapshot, self.status)[chosen]]
        for column, name, names in (
            ("kind", self.kind, snapshot.kinds),
            ("group", self.group, snapshot.groups),
        ):
            if name:
                number = names.index(name) if name in names else -1
                chosen = chosen[entries[column][chosen] == number]
        if self.least is not None or self.most is not None:
            scores = _scores(snapshot, self.scorer)[chosen]
            least = np.float32(-np.inf if self.least is None else self.least)
            most = np.float32(np.inf if self.most is None else self.most)
            chosen = chosen[(scores >= least) & (scores <= most)]
        if has_words is not None:
            chosen = chosen[has_words[chosen]]
        return self._sorted(snapshot, chosen)

    def _sorted(self, snapshot: Snapshot, chosen: Table) -> Table:
        """Rows that are equal stay in the order of the input; those without a score are last."""
        if self.sort == "index":
            return chosen[::-1] if self.descending else chosen
        if self.sort == "score":
            keys = _scores(snapshot, self.scorer)[chosen]
        else:
            keys = snapshot.entries[SORTS[self.sort]][chosen].astype(np.float64)
        found: Table = chosen[np.argsort(-keys if self.descending else keys, kind="stable")]
        return found


class Labels(NamedTuple):
    """What a row is found by in the list: its group, its question, and how it failed.

    ``asked_in``: the fields that the prompt reads; None: any may be the question.
    """

    group_by: str | None
    asked_in: frozenset[str] | None

    def of(self, record: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
        group = group_name(fields.get(self.group_by)) if self.group_by else None
        question = self._question(fields)
        asked = None if question is None else fields[question][:_MOST_TEXT]
        return {"kind": failure_kind(record), "group": group, "asked": asked}

    def _question(self, fields: Mapping[str, Any]) -> str | None:
        """Of the texts that the prompt reads, the one whose name says so, else the longest that is still
        short enough for a question."""
        texts = {
            name: value
            for name, value in fields.items()
            if isinstance(value, str) and (self.asked_in is None or name in self.asked_in)
        }
        short = (name for name, text in texts.items() if len(text) <= _LONGEST_QUESTION)
        by_name = (
            name for word in _ASKED for name in sorted(texts, key=len) if word in name.lower()
        )
        by_length = sorted(short, key=lambda name: (-len(texts[name]), name))
        return next(iter([*by_name, *by_length]), None)


def labels_of(job: JobConfig) -> Labels:
    prompt = job.steps[0].prompt if job.steps else job.prompt
    asked_in = None if job.rollout is not None else frozenset(_read_by(prompt))
    return Labels(job.scoring.group_by, asked_in)


def _read_by(prompt: PromptTable) -> set[str]:
    """Names of the fields that the user's template reads."""
    try:
        path = prompt.user_file
        text = prompt.user if path is None else Path(path).read_text(encoding="utf-8-sig")
        return find_undeclared_variables(Environment().parse(text or ""))
    except (OSError, ValueError, JinjaError):  # the prompt's own problem is shown beside the row
        return set()


@dataclass(frozen=True)
class Side:
    """A run as a list of rows."""

    index: Index
    snapshot: Snapshot
    labels: Labels

    def row(self, number: int) -> dict[str, Any]:
        """What the list shows of a row; ``number``: of its newest entry."""
        record = self.index.record(self.snapshot.entries[number])
        answer = answers_in_words(record)[0] or (record.get("error") or {}).get("message") or ""
        return {
            **{name: record.get(name) for name in _LISTED},
            **self.labels.of(record, record.get("fields") or {}),
            "text": answer if len(answer) <= _MOST_TEXT else answer[: _MOST_TEXT - 1] + "…",
        }


def failures(index: Index, snapshot: Snapshot) -> list[dict[str, Any]]:
    """The rows that have no answer now by kind, the most frequent first: how many, and the message of
    the first."""
    kinds = snapshot.entries["kind"][snapshot.newest]
    counts = np.bincount(kinds, minlength=len(snapshot.kinds))
    found = []
    for number in np.argsort(-counts, kind="stable").tolist():
        if number and counts[number]:
            first = snapshot.newest[np.argmax(kinds == number)]
            record = index.record(snapshot.entries[first])
            found.append(
                {
                    "kind": snapshot.kinds[number],
                    "count": int(counts[number]),
                    "message": (record.get("error") or {}).get("message") or "no answer",
                    "index": record["index"],
                }
            )
    return found


def _has_outcome(snapshot: Snapshot, name: str) -> Table:
    """A mask of the entries."""
    is_ok: Table = snapshot.entries["is_ok"]
    masks: dict[str, Callable[[], Table]] = {
        "ok": lambda: is_ok,
        "failed": lambda: ~is_ok,
        "unscored": lambda: is_ok & np.isnan(snapshot.scores).all(axis=1),
        "cut": lambda: snapshot.entries["is_cut"],
    }
    return masks[name]()


def _scores(snapshot: Snapshot, scorer: str) -> Table:
    if scorer in snapshot.scorers:
        found: Table = snapshot.scores[:, snapshot.scorers.index(scorer)]
        return found
    return np.full(len(snapshot.entries), np.nan, np.float32)
