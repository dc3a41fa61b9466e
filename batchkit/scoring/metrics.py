"""Metrics: summaries of the scores of many records, in one table.

The mean of a score is the arithmetic mean over the rows that have this score. Unscored and failed rows are counted
separately and never count as 0. Scores from 0 to 1 are shown in percent; rewards, from 0 to 10, are not converted.
"""

from __future__ import annotations

import math
import statistics
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from batchkit.config.terminal import shortened

OUT_OF_TEN = ("reward",)
ERROR_RATES = ("wer", "cer")
"""Scores for which lower is better."""
ALL = "all"
_MOST_REASONS = 20
_FEW = 3  # rows; if fewer rows all have the score 0, this is no sign of a mistake
_NAMES = {
    "f1": "F1",
    "em": "EM",
    "rouge-l": "ROUGE-L",
    "sacrebleu": "SacreBLEU",
    "judge": "GPT_EVAL",
    "ecr": "ECR",
    "pass": "PASS",
    "wer": "WER",
    "cer": "CER",
}


@dataclass
class Group:
    """The scores of a group of rows."""

    scored: int = 0  # number of rows with at least one score
    unscored: int = 0  # number of answered rows without any score
    failed: int = 0  # number of failed rows
    # Values by score name, in percent (reward: from 0 to 10).
    scores: dict[str, array[float]] = field(default_factory=dict)
    # Number of answered rows that lack a score, by score name.
    unscored_by: dict[str, int] = field(default_factory=dict)
    # Number of rows, by the reason why a score is missing.
    unscored_because: dict[str, int] = field(default_factory=dict)

    def add(self, record: Mapping[str, Any]) -> None:
        if record["status"] != "ok":
            self.failed += 1
            return
        scores: Mapping[str, float | None] = record.get("scores") or {}
        is_scored = False
        for name, score in scores.items():
            values = self.scores.setdefault(name, array("d"))
            if score is None:
                self.unscored_by[name] = self.unscored_by.get(name, 0) + 1
            else:
                is_scored = True
                values.append(score if name in OUT_OF_TEN else score * 100)
        if reason := record.get("unscored"):
            kept = len(self.unscored_because) < _MOST_REASONS or reason in self.unscored_because
            reason = reason if kept else "other reasons"
            self.unscored_because[reason] = self.unscored_because.get(reason, 0) + 1
        self.scored += is_scored
        self.unscored += not is_scored

    def mean(self, name: str) -> float | None:
        """Return the mean of the score ``name`` in percent (reward: from 0 to 10); None if no row has this score."""
        values = self.scores.get(name)
        return round(math.fsum(values) / len(values), 10) if values else None

    def to_json(self, names: Sequence[str]) -> dict[str, Any]:
        more = {
            "unscored_by": self.unscored_by,
            "unscored_because": self.unscored_because,
            "spread": {
                name: _spread(self.scores[name]) for name in OUT_OF_TEN if self.scores.get(name)
            },
        }
        return {
            "n": self.scored,
            **{name: self.mean(name) for name in names if name in self.scores},
            "unscored": self.unscored,
            "failed": self.failed,
            **{name: found for name, found in more.items() if found},
        }


@dataclass
class ScoreTable:
    """The scores of each group (by name), and of all rows (``overall``). ``names``: the names of the scores, in the
    order of the columns."""

    groups: dict[str, Group]
    overall: Group
    names: list[str]
    confusion: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """Number of answers by reference, then by prediction, if answers are one of several choices."""
    first_wrong: tuple[str, str] | None = None
    """Prediction and reference of the first row whose exact match (EM) is 0."""

    @property
    def total(self) -> int:
        return self.overall.scored + self.overall.unscored + self.overall.failed

    def to_json(self) -> dict[str, Any]:
        return {
            "total": self.total,
            "scored": self.overall.scored,
            "unscored": self.overall.unscored,
            "failed": self.overall.failed,
            "metrics": {name: group.to_json(self.names) for name, group in self.groups.items()},
            "overall": self.overall.to_json(self.names),
            **({"confusion": self.confusion} if self.confusion else {}),
            **self._extremes(),
        }

    def to_text(self) -> str:
        """Return a Markdown table: one line per group, the last one for all rows."""
        heads = ["", "n", *map(head, self.names), "unscored", "failed"]
        rows = [self._line(name, group) for name, group in self.groups.items()]
        rows.append(self._line(ALL, self.overall))
        lines = [markdown(heads, rows)]
        lines += [self._spread_text(name) for name in OUT_OF_TEN if name in self.overall.scores]
        lines += [self._confusion_text()] * bool(self.confusion)
        exact = self.overall.scores.get("em", ())
        if self.first_wrong is not None and len(exact) >= _FEW and not any(exact):
            prediction, reference = map(shortened, self.first_wrong)
            lines.append(
                f"EM is 0 for all {len(exact):,} rows; in the first, the prediction is {prediction!r} and the"
                f" reference {reference!r}"
            )
        because = self.overall.unscored_because.items()
        lines += [f"unscored, {count:,} rows: {reason}" for reason, count in because]
        if not self.names and self.overall.unscored and not because:
            lines.append(
                "nothing is scored: set [scoring] extract, reference and scorers in the job file, then"
                " `batchkit score JOB.toml`"
            )
        return "\n".join(lines)

    def _line(self, name: str, group: Group) -> list[str]:
        means = [_shown(group.mean(score)) for score in self.names]
        return [name, str(group.scored), *means, str(group.unscored), str(group.failed)]

    def _confusion_text(self) -> str:
        """Return a table with a line for each reference and a column for each prediction."""
        predictions = sorted({name for counts in self.confusion.values() for name in counts})
        heads = ["right answer \\ prediction", *predictions]
        rows = [
            [name, *(str(counts.get(prediction, 0)) for prediction in predictions)]
            for name, counts in sorted(self.confusion.items())
        ]
        return f"\n{markdown(heads, rows)}"

    def _spread_text(self, name: str) -> str:
        groups = {**self.groups, ALL: self.overall}
        spreads = {
            label: _spread(values)
            for label, group in groups.items()
            if (values := group.scores.get(name))
        }
        heads = [name, "mean", "std", "median", "min", "max", "count"]
        rows = [
            [label, *(_shown(found[part]) for part in heads[1:-1]), f"{found['count']:g}"]
            for label, found in spreads.items()
        ]
        ends = "".join(f"\n{kind}: {group}" for kind, group in self._extremes().items())
        return f"\n{markdown(heads, rows)}{ends}"

    def _extremes(self) -> dict[str, str]:
        """Return the groups with the best and the worst mean, if there are rewards."""
        means = {
            label: mean
            for label, g in self.groups.items()
            if (mean := g.mean(OUT_OF_TEN[0])) is not None
        }
        if not means:
            return {}
        return {
            "best": max(means, key=means.__getitem__),
            "worst": min(means, key=means.__getitem__),
        }


def tabulate(records: Iterable[Mapping[str, Any]], group_by: str | None) -> ScoreTable:
    """Return the score table of ``records``, which have the keys ``status``, ``scores`` and ``fields``. ``group_by``:
    the field whose values group the rows; None for no groups."""
    groups: dict[str, Group] = {}
    overall = Group()
    for record in records:
        overall.add(record)
        if group_by is not None:
            value = (record.get("fields") or {}).get(group_by)
            groups.setdefault(group_name(value), Group()).add(record)
    return ScoreTable(dict(sorted(groups.items())), overall, in_order(overall.scores))


def in_order(names: Iterable[str]) -> list[str]:
    """Return the ``names`` of scores in the order of the score table's columns."""
    order = {name: place for place, name in enumerate(_NAMES)}
    return sorted(names, key=lambda name: order.get(name, len(order)))


def group_name(value: Any) -> str:
    """Return the name of the group of rows that have ``value`` in the field ``scoring.group_by``."""
    return "(none)" if value in (None, "") else str(value)


def head(name: str) -> str:
    """Return the heading of a score's column."""
    return _NAMES.get(name, name)


def markdown(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table whose columns are aligned even as plain text: the first column on the left, all others on
    the right."""
    table = [
        [cell.replace("|", "\\|").replace("\n", " ") for cell in row] for row in (heads, *rows)
    ]
    widths = [max(3, *(len(row[n]) for row in table)) for n in range(len(heads))]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    lines = [
        [row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))]
        for row in table
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in [lines[0], rule, *lines[1:]])


def _spread(values: Sequence[float]) -> dict[str, float]:
    """Return mean, standard deviation, median, range and count of ``values``. ``std`` is the population's standard
    deviation, as in the harness of the reward benchmark."""
    return {
        "mean": statistics.fmean(values),
        "std": statistics.pstdev(values),
        "median": statistics.median(values),
        "min": min(values),
        "max": max(values),
        "count": len(values),
    }


def _shown(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"
