"""``scoring.mode = "official"``: F1, EM, ROUGE-L and SacreBLEU exactly as RealHiTBench's own code computes them.

The original code is metrics/qa_metrics.py in cspzyy/RealHiTBench, commit 5278fa2. Each row's score is a percentage
rounded to two decimals.
"""

from __future__ import annotations

import re
import string
from functools import cache
from typing import Any

from batchkit.scoring.overlap import Comparison

_DECIMAL = re.compile(r"\b\d+\.\d+\b")
_ARTICLE = re.compile(r"\b(?:a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def _normalised(text: str) -> str:
    """Return ``text`` in lower case, with decimal numbers rounded to one decimal, and without punctuation and
    articles."""
    rounded = _DECIMAL.sub(lambda found: str(round(float(found[0]), 1)), text)
    plain = rounded.lower().translate(_NO_PUNCTUATION)
    return " ".join(_ARTICLE.sub(" ", plain).split())


def _words(text: str) -> list[str]:
    """Return the words of a normalized text. Only a–z and 0–9 count, so ROUGE-L of a text in another script is 0."""
    words: list[str] = _tokenizer().tokenize(text)
    return words


@cache
def _tokenizer() -> Any:
    from rouge_score.tokenizers import DefaultTokenizer  # its import takes a second

    return DefaultTokenizer(False)


OFFICIAL = Comparison(_normalised, _words, effective_order=False, places=2)
