"""The list of a run's rows: queries, pages of results, and the text shown for each row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from jinja2 import TemplateError as JinjaError
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, model_validator

from batchkit.commands.view.search import has_words
from batchkit.config.regular_file import read_text
from batchkit.config.tables import PromptTable
from batchkit.config.terminal import shortened
from batchkit.errors import InputError
from batchkit.rendering.templates.sandbox import fields_read
from batchkit.runs.index import Index, Snapshot, Table
from batchkit.runs.inputs import question_in
from batchkit.runs.reach import Reach
from batchkit.scoring.metrics import group_name
from batchkit.storage.lines import answers_in_words, failure_kind

_SORTS = {"latency": "latency", "tokens": "tokens", "length": "letters"}  # sort key -> column
_LISTED = ("index", "id", "status", "prediction", "scores", "usage", "latency_s", "attempt")
MOST_TEXT = 500


class Page(BaseModel):
    """The part of a list that a request asks for."""

    model_config = ConfigDict(frozen=True)
    offset: int = Field(0, ge=0, lt=2**32)
    limit: int = Field(50, ge=0, le=500)


class Rows(BaseModel):
    """A list of row indexes in a request, written ``3,5,8``."""

    rows: str = Field(pattern=r"^\d{1,10}(,\d{1,10}){0,99}$")

    @property
    def indexes(self) -> list[int]:
        return [int(index) for index in self.rows.split(",")]


class Query(Page):
    """A query for rows of a run, with their order. ``min`` and ``max`` limit the score of ``scorer``; they leave
    unscored rows out."""

    status: Literal["", "ok", "failed", "unscored", "cut"] = ""
    kind: str = ""
    group: str = ""
    scorer: str = ""
    min: FiniteFloat | None = None
    max: FiniteFloat | None = None
    text: str = ""
    sort: Literal["index", "score", "latency", "tokens", "length"] = "index"
    order: Literal["asc", "desc"] = "asc"

    @model_validator(mode="after")
    def _has_scorer(self) -> Query:
        by_score = self.min is not None or self.max is not None or self.sort == "score"
        if by_score and not self.scorer:
            raise ValueError("scorer is missing: min, max and sort=score need the name of a scorer")
        return self

    def rows(self, index: Index, snapshot: Snapshot) -> Table:
        """Return the matching rows in order, as positions of their newest entries in the snapshot."""
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
        if self.min is not None or self.max is not None:
            scores = _scores(snapshot, self.scorer)[chosen]
            least = -np.inf if self.min is None else self.min
            most = np.inf if self.max is None else self.max
            chosen = chosen[(scores >= least) & (scores <= most)]
        if self.text:
            chosen = chosen[has_words(index, snapshot, self.text.lower())[chosen]]
        return self._sorted(snapshot, chosen)

    def _sorted(self, snapshot: Snapshot, chosen: Table) -> Table:
        """Return ``chosen`` in the requested order. Equal rows keep input order; rows without a score come last."""
        is_descending = self.order == "desc"
        if self.sort == "index":
            return chosen[::-1] if is_descending else chosen
        if self.sort == "score":
            keys = _scores(snapshot, self.scorer)[chosen]
        else:
            keys = snapshot.entries[_SORTS[self.sort]][chosen].astype(np.float64)
        found: Table = chosen[np.argsort(-keys if is_descending else keys, kind="stable")]
        return found


class Labels(NamedTuple):
    """The rules for the texts that describe a row in the list: its group, its question, and its kind of failure.
    ``asked_in``: the fields that the prompt uses, among which the question is looked up; None means all fields.
    ``has_images``: the prompt may contain images."""

    group_by: str | None
    asked_in: set[str] | None
    has_images: bool

    def of(self, record: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
        group = group_name(fields.get(self.group_by)) if self.group_by else None
        asked = question_in(fields, self.asked_in)
        return {"kind": failure_kind(record), "group": group, "asked": asked and asked[:MOST_TEXT]}


def labels_of(reach: Reach) -> Labels:
    job = reach.job
    prompt = job.steps[0].prompt if job.steps else job.prompt
    read = None if job.rollout is not None else _read_by(prompt, reach)
    brings_its_own = prompt.user is None and prompt.user_file is None
    return Labels(job.scoring.group_by, read, bool(prompt.images) or brings_its_own)


def _read_by(prompt: PromptTable, reach: Reach) -> set[str]:
    """Return the names of the fields that the template of the user message uses."""
    try:
        if prompt.user_file is None:
            return fields_read(prompt.user or "")
        return fields_read(template_in(prompt.user_file, "prompt.user_file", reach))
    except (InputError, OSError, ValueError, JinjaError):  # the page shows the error with the row
        return set()


def template_in(path: str, key: str, reach: Reach) -> str:
    """Return the text of the template file ``path``, set at ``key`` in the job. Raise InputError if it must not be
    opened."""
    reach.check(key, path)
    return read_text(path)


@dataclass(frozen=True)
class ComparedRun:
    """A run with its index, the snapshot of the index to show, and the labels of its rows."""

    index: Index
    snapshot: Snapshot
    labels: Labels

    def row(self, number: int) -> dict[str, Any]:
        """Return the values of a row that the page's list of rows shows. ``number``: the position in
        ``snapshot.entries`` of the row's newest entry."""
        record = self.index.record(self.snapshot.entries[number])
        answer = answers_in_words(record)[0] or (record.get("error") or {}).get("message") or ""
        return {
            **{name: record.get(name) for name in _LISTED},
            **self.labels.of(record, record.get("fields") or {}),
            "text": shortened(answer, MOST_TEXT),
        }


def _has_outcome(snapshot: Snapshot, name: str) -> Table:
    """Return a mask of the snapshot's entries: True for records with the outcome ``name`` (``Query.status``)."""
    is_ok: Table = snapshot.entries["is_ok"]
    masks: dict[str, Table] = {
        "ok": is_ok,
        "failed": ~is_ok,
        "unscored": is_ok & np.isnan(snapshot.scores).all(axis=1),
        "cut": snapshot.entries["is_cut"],
    }
    return masks[name]


def _scores(snapshot: Snapshot, scorer: str) -> Table:
    if scorer in snapshot.scorers:
        found: Table = snapshot.scores[:, snapshot.scorers.index(scorer)]
        return found
    return np.full(len(snapshot.entries), np.nan, np.float32)
