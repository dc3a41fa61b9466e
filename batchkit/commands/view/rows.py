"""The rows of a run by page: which rows a query means, and what the list shows of each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from batchkit.runs.columns import Table
from batchkit.runs.index import Index, Snapshot
from batchkit.scoring.metrics import group_name
from batchkit.storage.answers import answers_in_words
from batchkit.storage.lines import failure_kind

OUTCOMES = ("ok", "failed", "unscored", "cut")
SORTS = {"latency": "latency", "tokens": "tokens", "length": "letters"}  # by column
_MOST_TEXT = 500


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


def row_of(index: Index, entry: Any) -> dict[str, Any]:
    """What the list shows of a row; ``entry`` is its newest."""
    record = index.record(entry)
    answer = answers_in_words(record)[0] or (record.get("error") or {}).get("message") or ""
    group_by = index.group_by
    return {
        "index": record["index"],
        "id": record["id"],
        "status": record["status"],
        "kind": failure_kind(record),
        "text": answer if len(answer) <= _MOST_TEXT else answer[: _MOST_TEXT - 1] + "…",
        "prediction": record.get("prediction"),
        "scores": record.get("scores"),
        "group": group_name((record.get("fields") or {}).get(group_by)) if group_by else None,
        "usage": record.get("usage"),
        "latency_s": record.get("latency_s"),
        "attempt": record.get("attempt"),
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
