"""Scorers: functions that compare a prediction with the correct answer.

A scorer returns a number from 0 to 1 (``reward``: from 0 to 10; ``wer`` and ``cer`` may exceed 1), or None for
"unscored", which is never the same as 0. The correct answer that a scorer gets is None if the row has no correct
answer. CONTRIBUTING.md explains how to add a scorer.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, lru_cache, wraps
from importlib.util import find_spec
from typing import Any, Literal

from pydantic import NonNegativeFloat, PositiveFloat

from batchkit.config.installation import how_to_install
from batchkit.config.seams import SCORERS as SEAM
from batchkit.config.tables import ScoringTable
from batchkit.errors import JobError
from batchkit.scoring.extract import MOST_COMPARED, check_length
from batchkit.scoring.overlap import overlap, pair
from batchkit.scoring.values import chosen, numbers_in, parse_reward

Scorer = Callable[..., float | None]
"""A function of the prediction, the correct answer and the table ``[scoring]``. Its keyword-only parameters are the
scorer's parameters in the job file."""

SCORERS = {
    "f1": "batchkit.scoring.scorers:f1",
    "em": "batchkit.scoring.scorers:em",
    "rouge-l": "batchkit.scoring.scorers:rouge_l",
    "sacrebleu": "batchkit.scoring.scorers:sacrebleu",
    "numeric": "batchkit.scoring.scorers:numeric",
    "choice": "batchkit.scoring.scorers:choice",
    "reward": "batchkit.scoring.scorers:reward",
    "judge": "batchkit.scoring.scorers:judge",
    "wer": "batchkit.scoring.scorers:wer",
    "cer": "batchkit.scoring.scorers:cer",
}

_pair = lru_cache(maxsize=1)(pair)  # all scorers of a row share the normalized texts


def score_by(
    name: str, prediction: str | None, reference: str | None, table: ScoringTable
) -> float | None:
    """Return the score that the scorer ``name`` gives, or None if the row is unscored.

    Raises:
        Unscorable: The prediction or the reference is too long to compare.
    """
    if prediction is None:
        return None
    scorer: Scorer = SEAM.load(name)
    score = scorer(prediction, reference, table, **table.scorers[name])
    return score if name in SCORERS else checked(score)


def checked(score: float | None) -> float | None:
    """Return ``score``, given by a scorer of another package, as a float. Raises ValueError if the score is neither
    None nor from 0 to 1."""
    if score is None:
        return None
    if not 0 <= score <= 1:
        raise ValueError(f"returned {score!r}, expected a number from 0 to 1, or None")
    return float(score)


def of_two(compare: Callable[..., float | None]) -> Scorer:
    """Return a scorer that calls ``compare`` with the prediction and the correct answer. If a row has no correct
    answer, the scorer returns None."""

    @wraps(compare)
    def score(
        prediction: str, reference: str | None, table: ScoringTable, **parameters: Any
    ) -> float | None:
        if reference is None:
            return None
        check_length("prediction", prediction, MOST_COMPARED)
        check_length("reference", reference, MOST_COMPARED)
        return compare(prediction, reference, table, **parameters)

    return score


def _of_words(name: str) -> Scorer:
    return of_two(
        lambda text, right, table: overlap(name, _pair(text, right, table.mode), table.mode)
    )


f1, em = _of_words("f1"), _of_words("em")
rouge_l, sacrebleu = _of_words("rouge-l"), _of_words("sacrebleu")


@of_two
def numeric(
    prediction: str, reference: str, table: ScoringTable, *, tolerance: NonNegativeFloat = 0.01
) -> float | None:
    """Return 1 if prediction and reference have the same numbers in the same order, within the tolerance, otherwise 0.

    Return None if the reference has no number. ``tolerance`` is relative to each number of the reference: 0.01 allows a
    difference of 1 %.
    """
    right, found = numbers_in(reference), numbers_in(prediction)
    if not right:
        return None
    pairs = zip(found, right, strict=False)
    close = (abs(x - y) <= tolerance * abs(y) + 1e-9 for x, y in pairs)
    return float(len(found) == len(right) and all(close))


@of_two
def choice(prediction: str, reference: str, table: ScoringTable) -> float | None:
    """Return 1 if the prediction names the same choice as the reference, otherwise 0.

    Return None if the reference is not one of the choices.
    """
    right = chosen(reference, table.choices)
    return None if right is None else float(chosen(prediction, table.choices) == right)


def reward(prediction: str, reference: str | None, table: ScoringTable) -> float | None:
    return parse_reward(prediction)


def judge(
    prediction: str, reference: str | None, table: ScoringTable, *, max_score: PositiveFloat = 100.0
) -> float | None:
    """Return the first number of the prediction, divided by ``max_score`` and limited to 0 to 1. No reference is
    needed."""
    found = numbers_in(prediction)
    return min(max(found[0] / max_score, 0.0), 1.0) if found else None


_PACKAGES = {  # by scorer: the modules that it needs, and the extra that installs them
    **dict.fromkeys(("wer", "cer"), (("jiwer", "transformers"), "speech")),
    "sacrebleu": (("sacrebleu",), "overlap"),
}


def check_installed(name: str) -> None:
    """Raise JobError if a package for the scorer ``name`` is missing."""
    modules, extra = _PACKAGES.get(name, ((), ""))
    for module in modules:
        if find_spec(module) is None:
            raise JobError(f"scoring.scorers: {name} needs {module}: {how_to_install(extra)}")


def _error_rate(name: str) -> Scorer:
    """Return a scorer for the error rate of a transcript. ``name``: the function of ``jiwer``: "wer" for words, "cer"
    for characters.

    The rate is the number of substituted, missing and added words (or characters), divided by the number of words (or
    characters) in the reference. It is None if the reference has none. Before, both texts are normalized by Whisper's
    own text normalizer.
    """

    @of_two
    def rate(
        prediction: str,
        reference: str,
        table: ScoringTable,
        *,
        normalizer: Literal["english", "basic"] | None = None,
    ) -> float | None:
        import jiwer

        normalise = _normaliser(normalizer or "basic")
        right, found = normalise(reference).strip(), normalise(prediction).strip()
        return float(getattr(jiwer, name)(right, found)) if right else None

    return rate


wer, cer = _error_rate("wer"), _error_rate("cer")


@cache
def _normaliser(name: str) -> Any:
    from transformers.models.whisper.english_normalizer import (
        BasicTextNormalizer,
        EnglishTextNormalizer,
    )

    return EnglishTextNormalizer({}) if name == "english" else BasicTextNormalizer()
