"""Deferred scores: scores of scorers that run after all rows have finished."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import orjson

from batchkit.commands import Say
from batchkit.config.seams import DEFERRED, is_deferred
from batchkit.config.tables import JobConfig
from batchkit.errors import BatchkitError
from batchkit.scoring import Scoring
from batchkit.scoring.deferred import Answered, DeferredScorer
from batchkit.scoring.scorers import checked

Scores = Mapping[int, Mapping[str, float | None]]
"""Scores by row index, then by name."""


def deferred_scores(
    job: JobConfig, scoring: Scoring, answers: Iterable[Answered], say: Say
) -> dict[int, dict[str, float | None]]:
    """Return the deferred scores of ``answers``, by row index and name."""
    due: dict[tuple[str, bytes], list[Answered]] = {}
    for answered in answers:
        for name, its in scoring.table_for(answered.fields).scorers.items():
            if is_deferred(name):
                due.setdefault((name, orjson.dumps(its)), []).append(answered)
    found: dict[int, dict[str, float | None]] = {}
    for (name, parameters), waiting in due.items():
        for index, scores in _scored(job, name, orjson.loads(parameters), waiting, say).items():
            found.setdefault(index, {}).update(scores)
    return found


def _scored(
    job: JobConfig, name: str, parameters: Mapping[str, Any], answers: Sequence[Answered], say: Say
) -> Scores:
    """Return the scores of the scorer ``name``. If it fails, its answers are unscored, but keep their other scores."""
    scorer: DeferredScorer = DEFERRED.load(name)
    try:
        found = scorer.score(job, answers, say, **parameters)
        return {
            index: {score: checked(made.get(score)) for score in scorer.scores}
            for index, made in found.items()
        }
    except BatchkitError:
        raise
    except Exception as error:  # another package may raise any exception
        reason = f"{type(error).__name__}: {error}"
        say(f"the scorer {name} fails: {reason}; its {len(answers):,} answers are unscored")
        return {}


def fields_of_deferred(job: JobConfig) -> set[str]:
    """Return the row fields that deferred scorers read."""
    return {
        field
        for table in job.scoring.tables
        for name, parameters in table.scorers.items()
        if is_deferred(name)
        for field in DEFERRED.load(name).fields(job, **parameters)
    }
