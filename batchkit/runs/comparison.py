"""The result of a comparison: score differences with intervals, and the rows that flipped."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from batchkit.config.numbers import duration, number, when
from batchkit.config.terminal import shortened
from batchkit.runs.answers import AnswerComparison
from batchkit.runs.rates import Rates
from batchkit.scoring.metrics import ALL, ScoreTable, head, markdown
from batchkit.storage.manifest import Manifest
from batchkit.storage.starts import StartNote

RESAMPLES = 1000  # bootstrap resamples
GRADED_STEP = 0.5  # of a score from 0 to 1: the change from which a graded score counts as flipped
REWARD_STEP = 2.0  # the same for scores out of 10
_SHOWN_FLIPS, _SHOWN_WHOLE = 10, 3  # ids, and rows with their texts
_SHOWN_CHARACTERS = 80


@dataclass(frozen=True, slots=True)
class Delta:
    """The difference of one score between a run and the baseline, over the ``n`` rows of a group that are scored in
    both.

    ``delta`` and its 95 % interval ``low`` … ``high`` are in percent points (for reward: points of 10). ``better`` and
    ``worse`` count the rows that flipped. ``group`` is None for all rows.
    """

    run: str
    group: str | None
    scorer: str
    n: int
    delta: float
    low: float
    high: float
    better: int
    worse: int

    @property
    def is_clear(self) -> bool:
        """Return whether the interval excludes 0."""
        return self.low > 0 or self.high < 0


@dataclass(frozen=True, slots=True)
class Flip:
    """A row whose score changed from 0 to 1 or back, or by at least ``GRADED_STEP`` for a graded score.

    ``before`` and ``after`` are the scores, ``answer_before`` and ``answer_after`` the texts in the baseline and in the
    run. ``question``: the row's longest kept text, or "". ``reference``: the right answer, or "".
    """

    run: str
    scorer: str
    id: str
    group: str
    before: float
    after: float
    question: str = ""
    reference: str = ""
    answer_before: str = ""
    answer_after: str = ""


@dataclass(frozen=True, slots=True)
class Comparison:
    """The comparison of runs with a baseline.

    ``runs`` has the names, baseline first; ``tables`` their score tables. Keyed by run name: ``rates`` (tokens, time
    and price), ``answers`` (how the answers of each further run differ), ``origins`` (which model answered, and when).
    ``only_in_baseline`` and ``only_in_run`` count unmatched ids for each further run.
    """

    runs: list[str]
    tables: list[ScoreTable]
    deltas: list[Delta]
    flips: list[Flip]
    only_in_baseline: dict[str, int]
    only_in_run: dict[str, int]
    warnings: list[str]
    origins: dict[str, list[str]]
    rates: Mapping[str, Rates] = field(default_factory=dict)
    answers: Mapping[str, AnswerComparison] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {
            "runs": self.runs,
            "origins": self.origins,
            "tables": {
                name: table.to_json() for name, table in zip(self.runs, self.tables, strict=True)
            },
            "deltas": [asdict(delta) for delta in self.deltas],
            "flips": [asdict(flip) for flip in self.flips],
            "only_in_baseline": self.only_in_baseline,
            "only_in_run": self.only_in_run,
            "rates": {name: found.to_json() for name, found in self.rates.items()},
            "answers": {name: found.to_json() for name, found in self.answers.items()},
            "warnings": self.warnings,
            "resamples": RESAMPLES,
            "heads": {delta.scorer: head(delta.scorer) for delta in self.deltas},
            "method": self.method,
        }

    def to_text(self) -> str:
        """Return Markdown: warnings, the tokens, time and price of each run, and a comparison of each run's scores and
        answers with the baseline."""
        parts = [f"{run}: {', '.join(origin)}" for run, origin in self.origins.items()]
        parts += ["", *(f"- {warning}" for warning in self.warnings)]
        parts += [""] * bool(self.warnings)
        if self.rates:
            rows = [[name, *_rate_cells(found)] for name, found in self.rates.items()]
            parts += [markdown(["run", *_RATE_HEADS], rows), ""]
        has_scores = any(table.names for table in self.tables)
        for run in self.runs[1:]:
            parts += [f"## {run} against {self.runs[0]}", ""]
            if has_scores:
                parts += [self._table(run), ""]
            if self.only_in_baseline[run] or self.only_in_run[run]:
                parts.append(
                    f"Rows only in {self.runs[0]}: {self.only_in_baseline[run]:,}; only in {run}:"
                    f" {self.only_in_run[run]:,}."
                )
            if flips := [*self._flips(run)]:
                parts += [*flips, ""]
            if run in self.answers:
                parts += [*self.answers[run].lines(self.runs[0], run), ""]
        if has_scores:
            parts.append(self.method)
        return "\n".join(parts).rstrip()

    @property
    def method(self) -> str:
        """Return the explanation of the numbers, shown below a table."""
        return (
            "Means are over each run's own scored rows; n and Δ over the rows scored in both. 95 %:"
            f" paired bootstrap, {RESAMPLES:,} resamples; * if the interval excludes 0. Better and worse:"
            f" rows that went from 0 to 1 or back; graded scores by {GRADED_STEP * 100:g} points or"
            f" more (reward: {REWARD_STEP:g})."
        )

    def _mean(self, run: str, group: str | None, scorer: str) -> str:
        table = self.tables[self.runs.index(run)]
        found = table.overall if group is None else table.groups.get(group)
        mean = None if found is None else found.mean(scorer)
        return "–" if mean is None else f"{mean:.2f}"

    def _table(self, run: str) -> str:
        heads = ["", "score", "n", self.runs[0], run, "Δ", "95 %", "better", "worse"]
        rows = []
        for delta in self.deltas:
            if delta.run != run:
                continue
            mark = " *" if delta.is_clear else ""
            rows.append(
                [
                    ALL if delta.group is None else delta.group,
                    head(delta.scorer),
                    str(delta.n),
                    self._mean(self.runs[0], delta.group, delta.scorer),
                    self._mean(run, delta.group, delta.scorer),
                    f"{delta.delta:+.2f}{mark}",
                    f"{delta.low:+.2f} … {delta.high:+.2f}",
                    str(delta.better),
                    str(delta.worse),
                ]
            )
        return markdown(heads, rows) if rows else "No row is scored in both."

    def _flips(self, run: str) -> Iterator[str]:
        """Yield the rows that flipped, by scorer and direction; the first of them with question and answers."""
        flips = [flip for flip in self.flips if flip.run == run]
        for scorer in dict.fromkeys(flip.scorer for flip in flips):
            for way, sign in (("better", 1), ("worse", -1)):
                of_way = [
                    flip
                    for flip in flips
                    if flip.scorer == scorer and (flip.after - flip.before) * sign > 0
                ]
                if not of_way:
                    continue
                ids = ", ".join(flip.id for flip in of_way[:_SHOWN_FLIPS])
                more = f" … ({len(of_way):,} in all)" if len(of_way) > _SHOWN_FLIPS else ""
                yield f"{head(scorer)} {way}: {ids}{more}"
                yield from map(_flip_line, of_way[:_SHOWN_WHOLE])


def _flip_line(flip: Flip) -> str:
    texts = {
        "": flip.question,
        "reference": flip.reference,
        "before": flip.answer_before,
        "after": flip.answer_after,
    }
    shown = [
        f"{name} {json.dumps(shortened(text, _SHOWN_CHARACTERS), ensure_ascii=False)}".strip()
        for name, text in texts.items()
        if text
    ]
    return f"- {flip.id}: {', '.join(shown)}"


_RATE_HEADS = (
    "ok",
    "failed",
    "prompt tok",
    "output tok",
    "time",
    "rows/s",
    "output tok/s",
    "price",
)


def _rate_cells(found: Rates) -> list[str]:
    counts = found.ok, found.failed, found.prompt_tokens, found.completion_tokens
    rates = found.rows_per_s, found.completion_tokens_per_s
    return [
        *(f"{count:,}" for count in counts),
        duration(found.seconds) if found.seconds else "–",
        *("–" if rate is None else number(rate) for rate in rates),
        "–" if found.price is None else f"{found.price:.4g}",
    ]


def origin(manifest: Manifest, starts: Sequence[StartNote]) -> list[str]:
    """Return the model (or the engine, without a model) and the time of the run."""
    model = manifest.model
    name = model.name or manifest.identity.get("engine.kind", "")
    revision = f" at {model.revision}" if model.revision else ""
    time = when(starts[0].started_at, starts[-1].ended_at) if starts else ""
    return [part for part in (f"{name}{revision}", time) if part]
