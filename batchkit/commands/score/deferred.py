"""Deferred scores: scores of scorers that run after all rows have finished."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

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
    due: dict[str, list[Answered]] = {}
    for answered in answers:
        for name in filter(is_deferred, scoring.table_for(answered.fields).scorers):
            due.setdefault(name, []).append(answered)
    found: dict[int, dict[str, float | None]] = {}
    for name, waiting in sorted(due.items()):
        for index, scores in _scored(job, name, waiting, say).items():
            found.setdefault(index, {}).update(scores)
    return found


def _scored(job: JobConfig, name: str, answers: Sequence[Answered], say: Say) -> Scores:
    """Return the scores of the scorer ``name``. If it fails, its answers are unscored, but keep their other scores."""
    scorer: DeferredScorer = DEFERRED.load(name)
    try:
        found = scorer.score(job, answers, say)
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


def fields_of_deferred(job: JobConfig, scoring: Scoring) -> set[str]:
    """Return the row fields that deferred scorers read."""
    return {
        field
        for name in filter(is_deferred, scoring.scorers)
        for field in DEFERRED.load(name).fields(job)
    }
