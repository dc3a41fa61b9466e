"""Scorers of word overlap: F1, EM, ROUGE-L and SacreBLEU.

A ``Comparison`` defines how texts are compared. ``scoring.mode`` selects one; docs/scoring.md lists their differences.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

from batchkit.config.installation import how_to_install
from batchkit.config.seams import MODES as SEAM
from batchkit.errors import JobError

MODES = {
    "official": "batchkit.contrib.realhit.official:OFFICIAL",
    "fixed": "batchkit.scoring.overlap:FIXED",
}

_ARTICLE = re.compile(r"\b(?:a|an|the)\b")
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
_NUMBER = re.compile(r"(?<![\w.])-?\d++(?:\.\d++)?+(?:e[-+]?\d{1,2})?(?![\w.]*\d)")
_NO_ANSWER = "#"


class Comparison(NamedTuple):
    """One way to compare texts.

    ``normalise`` prepares both texts, and ``words`` splits a prepared text for ROUGE-L. ``effective_order``: if True,
    SacreBLEU leaves out n-grams that are longer than the text. ``places``: number of decimals to which a row's score in
    percent is rounded; None for no rounding.
    """

    normalise: Callable[[str], str]
    words: Callable[[str], list[str]] = str.split
    effective_order: bool = True
    places: int | None = None


class TextPair(NamedTuple):
    """A normalized prediction and reference."""

    prediction: str
    reference: str


def pair(prediction: str, reference: str, mode: str) -> TextPair:
    """Return both texts normalized for ``mode``. An empty prediction becomes ``#``, which equals no normalized
    reference."""
    how: Comparison = SEAM.load(mode)
    return TextPair(how.normalise(prediction) or _NO_ANSWER, how.normalise(reference))


def f1(texts: TextPair, how: Comparison) -> float:
    """Return the F1 of the two bags of words: 2·precision·recall / (precision + recall)."""
    predicted, right = texts.prediction.split(), texts.reference.split()
    common = (Counter(predicted) & Counter(right)).total()
    return 2 * common / (len(predicted) + len(right)) if common else 0.0


def em(texts: TextPair, how: Comparison) -> float:
    """Return 1 if the texts are equal, otherwise 0."""
    return float(texts.prediction == texts.reference)


def rouge_l(texts: TextPair, how: Comparison) -> float:
    """Return the F-measure of the longest common subsequence of words (Lin 2004). The result equals that of
    ``rouge_score`` exactly."""
    right, predicted = how.words(texts.reference), how.words(texts.prediction)
    common = _common_subsequence(right, predicted)
    if not common:
        return 0.0
    precision, recall = common / len(predicted), common / len(right)
    return 2 * precision * recall / (precision + recall)


def _common_subsequence(one: list[str], other: list[str]) -> int:
    """Return the length of the longest common subsequence of words.

    The algorithm (Hyyrö 2004, Bit-parallel LCS-length computation) needs one bit of memory per word of ``one``, while
    ``rouge_score`` needs 8 bytes per pair of words.
    """
    places: dict[str, int] = {}
    for place, word in enumerate(one):
        places[word] = places.get(word, 0) | 1 << place
    every = open_places = (1 << len(one)) - 1
    for word in other:
        matches = open_places & places.get(word, 0)
        open_places = (open_places + matches | open_places - matches) & every
    return len(one) - open_places.bit_count()


def sacrebleu(texts: TextPair, how: Comparison) -> float:
    """Return the sentence BLEU-4 from 0 to 1, computed by ``sacrebleu`` with the 13a tokenizer and exponential
    smoothing (Post 2018).

    If ``how.effective_order`` is False, a text of fewer than four tokens scores 0, even if both texts are equal.
    """
    bleu = _bleu(how.effective_order)
    return float(bleu.corpus_score([texts.prediction], [[texts.reference]]).score) / 100


OVERLAPS: dict[str, Callable[[TextPair, Comparison], float]] = {
    "f1": f1,
    "em": em,
    "rouge-l": rouge_l,
    "sacrebleu": sacrebleu,
}


def overlap(name: str, texts: TextPair, mode: str) -> float:
    """Return the score of the scorer ``name``, from 0 to 1."""
    how: Comparison = SEAM.load(mode)
    score = OVERLAPS[name](texts, how)
    return score if how.places is None else round(score * 100, how.places) / 100


def preload(name: str, mode: str) -> None:
    """Import the packages of the scorer ``name``, so that the first row does not wait for the imports.

    Raises:
        JobError: A package is not installed.
    """
    from batchkit.scoring.scorers import check_installed

    check_installed(name)
    if name == "rouge-l":
        try:
            SEAM.load(mode).words("")  # the mode may need a package to split words
        except ImportError as error:
            raise JobError(
                f'scoring.mode = "{mode}": rouge-l needs {error.name}: {how_to_install("overlap")}'
            ) from error
    elif name == "sacrebleu":
        _bleu(SEAM.load(mode).effective_order)


def _fixed(text: str) -> str:
    """Return ``text`` in lower case, with numbers rounded to one decimal, and without punctuation and articles."""
    plain = unicodedata.normalize("NFKC", text).lower()
    plain = plain.replace("\u2212", "-").replace("\u2019", "'")
    plain = _THOUSANDS.sub("", plain)
    words, end = [], 0
    for number in _NUMBER.finditer(plain):
        words += _words(plain[end : number.start()])
        is_whole = "." not in number[0] and "e" not in number[0]
        words.append(number[0] if is_whole else f"{round(float(number[0]), 1):.15g}")
        end = number.end()
    return " ".join(words + _words(plain[end:]))


def _words(text: str) -> list[str]:
    """Return the words of ``text`` without articles. The caller has removed the numbers.

    All punctuation separates words, except apostrophes, which are removed.
    """
    parted = re.sub(r"[^\w\s']|_", " ", text).replace("'", "")
    return _ARTICLE.sub(" ", parted).split()


FIXED = Comparison(_fixed)


@cache
def _bleu(effective_order: bool) -> Any:
    from sacrebleu.metrics.bleu import BLEU

    return BLEU(effective_order=effective_order)
