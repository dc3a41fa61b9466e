"""Scoring: an extractor reads the prediction from an answer's text, and scorers compare it with the correct answer.

A scorer scores one record; a metric (``metrics``) summarizes the scores of many records. A score is a number, usually
from 0 to 1 (``reward``: 0 to 10; word and character error rates may exceed 1), or None for "unscored", which is never
the same as 0. Failed rows are never scored.

The scores of deferred scorers (``deferred``) are None here; ``batchkit.commands.score`` computes them when all rows
have finished.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, NamedTuple, TypeVar

import orjson

from batchkit.config.seams import DEFERRED, is_deferred
from batchkit.config.tables import JobConfig, ScoringTable
from batchkit.config.terminal import bounded
from batchkit.scoring.extract import Unscorable, extracted
from batchkit.scoring.metrics import ERROR_RATES
from batchkit.scoring.overlap import preload
from batchkit.scoring.scorers import score_by
from batchkit.sources.where import compile_where
from batchkit.storage.plain_json import encoded

T = TypeVar("T")

_BLANK = "the answer has no text"


class Scored(NamedTuple):
    """The prediction in an answer (None if there is none), and its scores by name. A score of None means unscored.

    ``unscored``: the reason why scores are None. It is None if all scores were computed, or if the only reason is that
    the prediction or the reference is missing.
    """

    prediction: str | None
    scores: dict[str, float | None]
    unscored: str | None = None


class Scoring:
    """An object that scores answers by the rules of ``table`` (``[scoring]``). Immutable.

    - ``references``: the correct answers by row id, if ``reference_run`` provides them.
    - ``say``: called with a message each time that an extractor or scorer fails on a row.
    """

    def __init__(
        self,
        table: ScoringTable,
        references: Mapping[str, str | None] | None = None,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._say = say
        self._table = table
        wheres = (compile_where(rule.where) for rule in table.rules)
        self._rules = [*zip(wheres, table.tables[1:], strict=True)]
        self._references = references
        self._later = {name: scores_of(name) for name in self.scorers if is_deferred(name)}
        for name in self.scorers:
            preload(name, table.mode)

    @property
    def scorers(self) -> list[str]:
        """The names of the scorers in ``[scoring]`` and its rules."""
        return scorers_of(self._table)

    @property
    def fields(self) -> set[str]:
        """The row fields that scoring reads."""
        return fields_of(self._table)

    def table_for(self, fields: Mapping[str, Any]) -> ScoringTable:
        """Return the settings for a row: ``[scoring]``, overridden by the first rule that matches the row."""
        return next((table for fits, table in self._rules if fits(fields)), self._table)

    def score(self, text: str, fields: Mapping[str, Any], row_id: str) -> Scored:
        """Return the prediction in ``text`` and its scores. Never raises an exception, whatever the model wrote.

        A blank text is unscored, unless the job has a scorer of error rates, which count missing words. Blank texts
        occur only as one of several choices, or as the transcript of a recording without speech.
        """
        if not text.strip() and not {*ERROR_RATES} & {*self.scorers}:
            return self.score_prediction(None, fields, row_id, [_BLANK])
        table, reasons = self.table_for(fields), list[str]()
        extract = partial(extracted, text, table)
        prediction = self._tried(f"the extractor {table.extractor}", row_id, extract, reasons)
        return self.score_prediction(prediction, fields, row_id, reasons)

    def score_prediction(
        self,
        prediction: str | None,
        fields: Mapping[str, Any],
        row_id: str,
        why: Iterable[str] = (),
    ) -> Scored:
        """Return the scores of a prediction that was already extracted. ``why``: the reasons why the prediction is
        None, if it is."""
        table, reasons = self.table_for(fields), [*why]
        reference = self.reference(fields, row_id)
        scores: dict[str, float | None] = {}
        for name in table.scorers:
            if name in self._later:
                scores |= dict.fromkeys(self._later[name])
            else:
                score = partial(score_by, name, prediction, reference, table)
                scores[name] = self._tried(f"the scorer {name}", row_id, score, reasons)
        why_not = bounded("; ".join(dict.fromkeys(reasons)))
        return Scored(prediction, scores, why_not or None)

    def finds_nothing(self, text: str, fields: Mapping[str, Any], row_id: str = "?") -> bool:
        """Return whether the extractor finds nothing in the answer, so that ``retry.reask`` asks again."""
        return self.found(text, fields, row_id) is None

    def found(self, text: str, fields: Mapping[str, Any], row_id: str = "?") -> str | None:
        """Return the prediction that the extractor finds in the answer, or None. The extractor's default is not
        used."""
        table = self.table_for(fields)
        find = partial(extracted, text, table, may_default=False)
        return self._tried(f"the extractor {table.extractor}", row_id, find, [])

    def reference(self, fields: Mapping[str, Any], row_id: str) -> str | None:
        """Return the correct answer as text, or None if there is none."""
        if self._references is not None:
            found: Any = self._references.get(row_id)
        else:
            name = self.table_for(fields).reference
            found = None if name is None else fields.get(name)
        text = None if found is None else _as_text(found)
        return text if text and text.strip() else None

    def _tried(
        self, who: str, row_id: str, make: Callable[[], T | None], reasons: list[str]
    ) -> T | None:
        """Return the result of ``make``. If ``make`` fails, append the reason to ``reasons``, report it with ``say``,
        and return None.

        No exception is raised, because a failure to score must not lose the answer, which took GPU time.

        - ``who``: the extractor or scorer that ``make`` calls, for the message.
        """
        try:
            return make()
        except Unscorable as error:
            reason = f"{who}: {error}"
        except Exception as error:
            reason = f"{who} fails: {type(error).__name__}: {error}"
        reasons.append(reason)
        self._say(f"row {row_id} is not scored: {reason}")
        return None


def scoring_of_steps(job: JobConfig) -> dict[str, Scoring]:
    """Return the scoring of each step that sets an extractor or scorers."""
    return {step.name: Scoring(step.scoring) for step in job.steps if step.scoring.is_on}


def scorers_of(table: ScoringTable) -> list[str]:
    """Return the names of the scorers in ``table`` and its rules, in the order of the job file."""
    return list(dict.fromkeys(name for each in table.tables for name in each.scorers))


def fields_of(table: ScoringTable) -> set[str]:
    """Return the row fields that scoring by ``table`` reads: for rules, references and groups."""
    read = {name for rule in table.rules for name in rule.where}
    read |= {each.reference for each in table.tables if each.reference is not None}
    return read if table.group_by is None else read | {table.group_by}


def score_names(table: ScoringTable) -> list[str]:
    """Return the names of the scores that records may have by ``table`` and its rules, in the order of the job file."""
    return list(dict.fromkeys(chain.from_iterable(map(scores_of, scorers_of(table)))))


def scores_of(scorer: str) -> Sequence[str]:
    """Return the names of the scores that a scorer gives. A deferred scorer may give several."""
    return tuple(DEFERRED.load(scorer).scores) if is_deferred(scorer) else (scorer,)


def kept_fields(job: JobConfig) -> list[str]:
    """Return the row fields that a record keeps, for ``output.keep``, ``input.cross`` and scoring."""
    read = sorted(fields_of(job.scoring)) if job.scoring.is_on else []
    keep = [] if job.output.keep == "*" else job.output.keep
    return list(dict.fromkeys([*keep, *job.input.cross, *read]))


def _as_text(value: Any) -> str:
    """Return a field's value as text: a text unchanged, any other value as JSON, but a date without quotes."""
    if isinstance(value, str):
        return value
    text = encoded(value).decode().strip()
    return str(orjson.loads(text)) if text.startswith('"') else text
