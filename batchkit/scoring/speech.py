"""Scorers of transcripts: the share of words (``wer``) or of characters (``cer``) that are wrong, by ``jiwer``, after the
normaliser of Whisper's authors."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import Any

from batchkit.config.installation import how_to_install
from batchkit.config.tables import ScoringTable
from batchkit.errors import JobError
from batchkit.scoring.scorers import of_two


@of_two
def wer(prediction: str, reference: str, table: ScoringTable) -> float | None:
    """Substituted, missing and added words, over the reference's; None if that has none."""
    return _rate("wer", prediction, reference, table)


@of_two
def cer(prediction: str, reference: str, table: ScoringTable) -> float | None:
    """As ``wer``, of characters."""
    return _rate("cer", prediction, reference, table)


def check_installed() -> None:
    """Raises JobError if a package for these scorers is missing."""
    for package in ("jiwer", "transformers"):
        if find_spec(package) is None:
            raise JobError(
                f"scoring.scorers: wer and cer need {package}: {how_to_install('speech')}"
            )


def _rate(name: str, prediction: str, reference: str, table: ScoringTable) -> float | None:
    import jiwer

    normalise = _normaliser(table.normalizer or "basic")
    right, found = normalise(reference).strip(), normalise(prediction).strip()
    return float(getattr(jiwer, name)(right, found)) if right else None


@cache
def _normaliser(name: str) -> Any:
    check_installed()
    from transformers.models.whisper.english_normalizer import (
        BasicTextNormalizer,
        EnglishTextNormalizer,
    )

    return EnglishTextNormalizer({}) if name == "english" else BasicTextNormalizer()
