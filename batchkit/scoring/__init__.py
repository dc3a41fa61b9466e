"""From an answer's text to its prediction and scores.

A scorer judges one record; a metric (``metrics``) reduces many. A score is a number from 0 to 1
(``reward``: 0 to 10) or None: unscored, which is never the same as 0. Failed rows are never scored.

``chart`` and ``judge`` need more than the record (a sandbox, a second model): their scores are None
here, and ``batchkit.commands.score`` fills them in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple, TypeVar

import orjson

from batchkit.config.seams import SCORERS
from batchkit.config.tables import JobConfig, ScoringTable
from batchkit.config.terminal import bounded
from batchkit.scoring.extract import Unscorable, extracted
from batchkit.scoring.metrics import ERROR_RATES
from batchkit.scoring.overlap import preload
from batchkit.scoring.scorers import score_by
from batchkit.sources.where import compile_where
from batchkit.storage.plain_json import encoded

T = TypeVar("T")

DEFERRED = SCORERS.also
_NO_ANSWER = "[ERROR]"  # how RealHiTBench's harness marks a failure
_BLANK = "the answer has no text"
SCORES_OF = {"chart": ("ecr", "pass")}  # all others: one, with the scorer's own name


class Scored(NamedTuple):
    """What was read from an answer. A score of None: it is unscored; ``unscored``: why, unless it
    just lacks a prediction or a reference."""

    prediction: str | None
    scores: dict[str, float | None]
    unscored: str | None = None


class Scoring:
    """Scores answers as ``table`` says. Immutable.

    ``references``: the right answers by the row's id, if ``reference_run`` supplies them. ``say``
    is called with a message about each row that an extractor or scorer failed on.
    """

    def __init__(
        self,
        table: ScoringTable,
        references: Mapping[str, str | None] | None = None,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._say = say
        self._table = table
        self._rules = [
            (
                compile_where(rule.where),
                table.model_copy(update=rule.model_dump(exclude={"where"}, exclude_none=True)),
            )
            for rule in table.rules
        ]
        self._references = references
        for name in self.scorers:
            preload(name)

    @property
    def scorers(self) -> list[str]:
        """The names of the scorers, over all rules."""
        return scorers_of(self._table)

    @property
    def fields(self) -> set[str]:
        """The fields of a row that are read."""
        return fields_of(self._table)

    def table_for(self, fields: Mapping[str, Any]) -> ScoringTable:
        """The scoring of a row: its first matching rule, merged over the rest."""
        return next((table for fits, table in self._rules if fits(fields)), self._table)

    def score(self, text: str, fields: Mapping[str, Any], row_id: str) -> Scored:
        """The prediction in ``text`` and its scores; never raises for what a model wrote.

            A blank text is unscored, unless its missing words count. The log has one only as the first of several choices, or
        of a recording in which nothing is heard.
        """
        if not text.strip() and not {*ERROR_RATES} & {*self.scorers}:
            return self.score_prediction(None, fields, row_id, [_BLANK])
        table, reasons = self.table_for(fields), list[str]()
        prediction = self._extracted(text, table, row_id, reasons)
        if prediction is None and table.extract == "final-answer" and not reasons:
            prediction = text.strip()
        return self.score_prediction(prediction, fields, row_id, reasons)

    def score_prediction(
        self,
        prediction: str | None,
        fields: Mapping[str, Any],
        row_id: str,
        why: Iterable[str] = (),
    ) -> Scored:
        """Like ``score``, for a prediction that was already extracted; ``why`` it is None."""
        table, reasons = self.table_for(fields), [*why]
        reference = self.reference(fields, row_id)
        scores: dict[str, float | None] = {}
        for name in table.scorers:
            if name in DEFERRED:
                scores |= dict.fromkeys(SCORES_OF.get(name, (name,)))
            else:
                score = partial(score_by, name, prediction, reference, table)
                scores[name] = self._tried(f"the scorer {name}", row_id, score, reasons)
        why_not = bounded("; ".join(dict.fromkeys(reasons)))
        return Scored(prediction, scores, why_not or None)

    def finds_nothing(self, text: str, fields: Mapping[str, Any], row_id: str = "?") -> bool:
        """True if the answer lacks what its extractor looks for."""
        if self.table_for(fields).extract == "final-answer" and text.startswith(_NO_ANSWER):
            return False  # the official code accepts it, so that its calls can be compared
        return self.found(text, fields, row_id) is None

    def found(self, text: str, fields: Mapping[str, Any], row_id: str = "?") -> str | None:
        """What the extractor looks for in the answer; None if it is not there."""
        table = self.table_for(fields)
        if table.default_reward is not None:  # it would replace what is looked for
            table = table.model_copy(update={"default_reward": None})
        return self._extracted(text, table, row_id, [])

    def reference(self, fields: Mapping[str, Any], row_id: str) -> str | None:
        """The right answer, as text; None if there is none."""
        if self._references is not None:
            found: Any = self._references.get(row_id)
        else:
            name = self.table_for(fields).reference
            found = None if name is None else fields.get(name)
        text = None if found is None else _as_text(found)
        return text if text and text.strip() else None

    def _extracted(
        self, text: str, table: ScoringTable, row_id: str, reasons: list[str]
    ) -> str | None:
        extract = partial(extracted, text, table)
        return self._tried(f"the extractor {table.extract}", row_id, extract, reasons)

    def _tried(
        self, who: str, row_id: str, make: Callable[[], T | None], reasons: list[str]
    ) -> T | None:
        """The result of ``make``; if it fails, None, and the reason is added to ``reasons``.

        An answer was paid for: a failure to score it must not lose it.
        """
        try:
            return make()
        except Unscorable as error:
            reason = f"{who}: {error}"
        except Exception as error:
            reason = f"{who} fails: {type(error).__name__}: {error}"
        reasons.append(reason)
        self._say(f"row {row_id}: {reason}; unscored")
        return None


def scoring_of_steps(job: JobConfig) -> dict[str, Scoring]:
    """What reads the answers of each step that has an extractor or scorers of its own."""
    return {step.name: Scoring(step.scoring) for step in job.steps if step.scoring.is_on}


def scorers_of(table: ScoringTable) -> list[str]:
    """The names of the scorers, over all rules, in the order of the job file."""
    return list(dict.fromkeys(name for part in table.parts for name in part.scorers or ()))


def fields_of(table: ScoringTable) -> set[str]:
    """The fields of a row that its scoring reads."""
    read = {name for rule in table.rules for name in rule.where}
    read |= {part.reference for part in table.parts if part.reference is not None}
    return read if table.group_by is None else read | {table.group_by}


def score_names(table: ScoringTable) -> list[str]:
    """The names of the scores that a record has, over all rules, in the order of the job file."""
    names = [score for name in scorers_of(table) for score in SCORES_OF.get(name, (name,))]
    return list(dict.fromkeys(names))


def kept_fields(job: JobConfig) -> list[str]:
    """The row's fields that a record keeps: those of ``output.keep`` and ``input.cross``, and what its scoring reads."""
    read = sorted(fields_of(job.scoring)) if job.scoring.is_on else []
    keep = [] if job.output.keep == "*" else job.output.keep
    return list(dict.fromkeys([*keep, *job.input.cross, *read]))


def _as_text(value: Any) -> str:
    """A field as text, the way a kept one is stored: as JSON, a date without quotes."""
    if isinstance(value, str):
        return value
    text = encoded(value).decode().strip()
    return str(orjson.loads(text)) if text.startswith('"') else text
