"""Scorers of word overlap: F1, EM, ROUGE-L and SacreBLEU, as RealHiTBench computes them.

``official`` gives exactly the scores of its code (metrics/qa_metrics.py in cspzyy/RealHiTBench 5278fa2): each
row's score is a percentage rounded to two decimals. ``fixed`` does not round, and parses numbers;
docs/scoring.md lists the differences.
"""

from __future__ import annotations

import re
import string
import unicodedata
from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any, Literal, NamedTuple

Mode = Literal["official", "fixed"]

_DECIMAL = re.compile(r"\b\d+\.\d+\b")
_ARTICLE = re.compile(r"\b(?:a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
_NUMBER = re.compile(r"(?<![\w.])-?\d++(?:\.\d++)?+(?:e[-+]?\d{1,2})?(?![\w.]*\d)")
_NO_ANSWER = "#"


class TextPair(NamedTuple):
    """A normalized prediction and reference."""

    prediction: str
    reference: str


def normalise(text: str, mode: Mode) -> str:
    """Return ``text`` normalized for comparison: decimals to one place, no case, punctuation or articles."""
    return _official(text) if mode == "official" else _fixed(text)


def pair(prediction: str, reference: str, mode: Mode) -> TextPair:
    """Return both texts normalized. An empty prediction becomes ``#``, which matches nothing."""
    return TextPair(normalise(prediction, mode) or _NO_ANSWER, normalise(reference, mode))


def f1(texts: TextPair, mode: Mode) -> float:
    """Return the F1 of the two bags of words: 2·precision·recall / (precision + recall)."""
    predicted, right = texts.prediction.split(), texts.reference.split()
    common = (Counter(predicted) & Counter(right)).total()
    return 2 * common / (len(predicted) + len(right)) if common else 0.0


def em(texts: TextPair, mode: Mode) -> float:
    """Return 1 if the texts are equal, otherwise 0."""
    return float(texts.prediction == texts.reference)


def rouge_l(texts: TextPair, mode: Mode) -> float:
    """Return the F-measure of the longest common subsequence of words (Lin 2004), by ``rouge_score``.

    Its tokenizer keeps only a–z and 0–9, so a text in another script scores 0 in ``official``.
    """
    words_in, fmeasure = _rouge(mode)
    right, predicted = words_in(texts.reference), words_in(texts.prediction)
    if not right or not predicted:
        return 0.0
    common = _common_subsequence(right, predicted)
    return float(fmeasure(common / len(predicted), common / len(right)))


def _common_subsequence(one: list[str], other: list[str]) -> int:
    """Return the length of the longest common subsequence of words.

    It needs one bit per word of ``one`` (Hyyrö 2004, Bit-parallel LCS-length computation); the table of ``rouge_score``
    needs 8 bytes per pair of words.
    """
    places: dict[str, int] = {}
    for place, word in enumerate(one):
        places[word] = places.get(word, 0) | 1 << place
    every = open_places = (1 << len(one)) - 1
    for word in other:
        matches = open_places & places.get(word, 0)
        open_places = (open_places + matches | open_places - matches) & every
    return len(one) - open_places.bit_count()


def sacrebleu(texts: TextPair, mode: Mode) -> float:
    """Return sentence BLEU-4 by ``sacrebleu``: 13a tokens, exponential smoothing (Post 2018).

    ``official`` uses no effective order, so a text of fewer than four tokens scores 0, even if equal.
    """
    return float(_bleu(mode).corpus_score([texts.prediction], [[texts.reference]]).score) / 100


OVERLAPS: dict[str, Callable[[TextPair, Mode], float]] = {
    "f1": f1,
    "em": em,
    "rouge-l": rouge_l,
    "sacrebleu": sacrebleu,
}


def overlap(name: str, texts: TextPair, mode: Mode) -> float:
    """Return the score of the scorer ``name``, from 0 to 1."""
    score = OVERLAPS[name](texts, mode)
    return round(score * 100, 2) / 100 if mode == "official" else score


def preload(name: str) -> None:
    """Import the packages of the scorer ``name``, so that the first row does not wait for them.

    Raises:
        JobError: A package is not installed.
    """
    if name == "rouge-l":
        _rouge("official")
    elif name == "sacrebleu":
        _bleu("official")
    elif name in ("wer", "cer"):
        from batchkit.scoring.scorers import check_installed

        check_installed()


def _official(text: str) -> str:
    rounded = _DECIMAL.sub(lambda found: str(round(float(found[0]), 1)), text)
    plain = rounded.lower().translate(_NO_PUNCTUATION)
    return " ".join(_ARTICLE.sub(" ", plain).split())


def _fixed(text: str) -> str:
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
    """Return the words of a text without numbers. Commas and slashes separate words; apostrophes do not."""
    parted = re.sub(r"[^\w\s']|_", " ", text).replace("'", "")
    return _ARTICLE.sub(" ", parted).split()


@cache
def _rouge(mode: Mode) -> Any:
    """Return two functions of ``rouge_score``: one splits a text into words, the other computes the F-measure."""
    from rouge_score.scoring import fmeasure
    from rouge_score.tokenizers import DefaultTokenizer

    return (DefaultTokenizer(False).tokenize if mode == "official" else str.split), fmeasure


@cache
def _bleu(mode: Mode) -> Any:
    from sacrebleu.metrics.bleu import BLEU

    return BLEU(effective_order=mode == "fixed")
