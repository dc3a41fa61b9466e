"""Deferred scores: those of scorers that run after all rows have finished, and judgements of a second model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from batchkit.commands import Say
from batchkit.commands.score.judge import NAMES, judge, judged_by_step, names_read
from batchkit.config.seams import DEFERRED, is_deferred
from batchkit.config.tables import JobConfig
from batchkit.errors import BatchkitError
from batchkit.execution.stop import StopRequest
from batchkit.scoring import Scoring
from batchkit.scoring.deferred import Answered, DeferredScorer
from batchkit.scoring.scorers import checked

Scores = Mapping[int, Mapping[str, float | None]]
"""Scores by row index, then by name."""


def deferred_scores(
    job: JobConfig,
    scoring: Scoring,
    answers: Iterable[Answered],
    judgements: Path,
    stop: StopRequest,
    say: Say,
) -> dict[int, dict[str, float | None]]:
    """Return the deferred scores of ``answers``, by row index and name. ``judgements`` is the folder that stores
    judgements."""
    due: dict[str, list[Answered]] = {}
    for answered in answers:
        for name in filter(is_deferred, scoring.table_for(answered.fields).scorers):
            due.setdefault(name, []).append(answered)
    found: dict[int, dict[str, float | None]] = {}
    for name, waiting in sorted(due.items()):
        if name == "judge":
            made = _judged(job, waiting, judgements, stop, say)
        else:
            made = _scored(job, name, waiting, say)
        for index, scores in made.items():
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


def _judged(
    job: JobConfig, answers: Sequence[Answered], judgements: Path, stop: StopRequest, say: Say
) -> Scores:
    table = job.scoring.judge
    if table is None:
        say(f"{len(answers):,} answers are not judged: set a model or a step in [scoring.judge]")
        return {}
    if table.step is None:
        scores = judge(job, table, answers, judgements, stop, say)
    else:
        scores = judged_by_step(job, table, answers, say)
    return {index: {"judge": score} for index, score in scores.items()}


def names_of_deferred(job: JobConfig, scoring: Scoring) -> set[str]:
    """Return the names that deferred scorers read. They are fields of the row, or names in ``[vars]`` if the row has
    no such field."""
    names: set[str] = set()
    for name in filter(is_deferred, scoring.scorers):
        if name != "judge":
            names |= DEFERRED.load(name).fields(job)
        elif job.scoring.judge is not None:
            names |= names_read(job, job.scoring.judge) - set(NAMES)
    return names
