"""Verdicts about answers that were computed again: equal, a near tie, or different.

Two computations of one request differ by rounding, since the order of additions depends on the batch. Greedy decoding then
takes another token only where two tokens are about equally likely: their log-probabilities differ by at most 64 times the
machine epsilon of the dtype. Logits of language models are often between 16 and 64, where neighboring numbers differ by 16
to 32 times the epsilon, so this allows a difference of two to four (docs/self-check.md). In float32 the limit is 0.01, because
kernels may compute in TF32.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from operator import eq
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from batchkit.runs.answers import PIECE, SideAnswer, Token, common_prefix
from batchkit.types import Pooled

Kind = Literal["equal", "near_tie", "different"]
# Machine epsilon, as ``torch.finfo`` has it.
_EPS = {"float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}
_GROWTH, _LEAST_TIE = 64, 0.01
_TOKENS_BACK = 4
_LEAST_ERROR = 1e-3  # of vectors and probabilities, relative
_EVIDENCE = float(np.log(1e6))
_VOCABULARY = 2**18  # more tokens than most vocabularies have
_SPECIAL = re.compile(r"<[^<>]*>|\[[A-Z_]+\]|")  # tokens that end an answer, as engines show them


@dataclass(frozen=True, slots=True)
class Verdict:
    """The comparison of an answer with the same request computed alone.

    - ``token``: number, from 0, of the first token that differs; None for vectors and numbers.
    - ``gap``: how much likelier the alone computation found its own token, as a difference of log-probabilities; a lower
      bound if the other token is not among the likeliest. For vectors, 1 − cosine; for probabilities and scores, the
      largest difference. None if unknown.
    - ``batched``, ``alone``: the answers from the first difference on.
    """

    kind: Kind
    token: int | None = None
    gap: float | None = None
    batched: str = ""
    alone: str = ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


EQUAL = Verdict("equal")


def tie_of(dtype: str | None) -> float:
    """Return the largest gap of a near tie for weights of ``dtype``; None, for a server, counts as bfloat16."""
    return max(_LEAST_TIE, _GROWTH * _EPS.get(dtype or "", _EPS["bfloat16"]))


def of_texts(
    batched: SideAnswer, alone: SideAnswer, tie: float, *, is_beginning: bool = False
) -> Verdict:
    """Compare two texts.

    - ``alone``: has ``tokens`` if the engine gives log-probabilities.
    - ``is_beginning``: ``alone`` was ended early, and is compared with the beginning of ``batched``.
    """
    old, new = batched.text, alone.text
    if is_beginning:
        new = new.rstrip(PIECE)  # the last character may be cut
        if old.startswith(new):
            return EQUAL
    elif old == new:
        return EQUAL
    begins = common_prefix(old, new, eq)
    shown = (old[begins : begins + 40], new[begins : begins + 40])
    if (tokens := alone.tokens) is None:
        return Verdict("different", None, None, *shown)
    number = _token_at(tokens, new, begins)
    if number == len(tokens):
        return Verdict("different", number, None, *shown)
    ended = begins == len(old) and batched.finish_reason == "stop"
    gap = _gap(tokens[: number + 1], _starts(tokens, new), old, begins, ended=ended)
    kind: Kind = "near_tie" if gap <= tie else "different"
    return Verdict(kind, number, gap, *shown)


def of_numbers(batched: Pooled, alone: Pooled, dtype: str | None) -> Verdict:
    """Compare two answers of a pooling model: the vectors by their cosine, probabilities and scores by their largest
    difference."""
    tolerance = max(_LEAST_ERROR, 8 * _EPS.get(dtype or "", _EPS["bfloat16"]))
    if batched.vector is not None and alone.vector is not None:
        old, new = (_vectors(its) for its in (batched, alone))
        if old.shape != new.shape:
            return Verdict("different")
        norms = np.linalg.norm(old, axis=1) * np.linalg.norm(new, axis=1)
        cosines = (old * new).sum(axis=1) / np.maximum(norms, np.finfo(float).tiny)
        gap = float(np.max(1 - cosines, initial=0.0))
        return Verdict("equal" if gap <= tolerance**2 / 2 else "different", gap=gap)
    pairs = [(batched.probabilities, alone.probabilities), (batched.scores, alone.scores)]
    if any(len(old or ()) != len(new or ()) for old, new in pairs):
        return Verdict("different")
    # Probabilities are at most 1; logits are larger, and so is their rounding.
    gaps = [
        abs(a - b) / max(1.0, abs(a), abs(b))
        for old, new in pairs
        for a, b in zip(old or (), new or (), strict=True)
    ]
    gap = max(gaps, default=0.0)
    return Verdict("equal" if gap <= tolerance else "different", gap=gap)


def of_drawn(tokens: Sequence[Token], sampling: Mapping[str, Any]) -> Verdict:
    """Judge an answer that was drawn at random, by the log-probabilities that its tokens have alone.

    The answer is different if the model alone would hardly ever draw such tokens. Let q be the probability of a token at the
    temperature. The mean of q^(-1/2) over all tokens, each with its probability, is the sum of q^(1/2) over all tokens. So
    the product of q^(-1/2) / sum over an answer has mean 1, and exceeds a limit L with a probability of at most 1 / L
    (Ville's inequality). L is 10^6. Tokens that the engine does not name count with an upper bound.

    ``sampling``: the parameters of the request. ``gap``: the logarithm of the product.
    """
    temperature = float(sampling.get("temperature") or 1.0)
    evidence = 0.0
    for token in tokens:
        if token.logprob is None or not token.top:
            continue
        logprobs = np.array([*token.top.values()])
        tail = _tail(np.exp(logprobs), temperature)
        total = np.exp(logprobs / temperature).sum() + tail
        q = np.exp(logprobs / temperature) / total
        mean = np.sqrt(q).sum() + np.sqrt(tail / total * _VOCABULARY)
        drawn = token.logprob / temperature - np.log(total)
        evidence += float(-0.5 * drawn - np.log(mean / _kept_share(q, sampling)))
    kind: Kind = "different" if evidence > _EVIDENCE else "equal"
    return Verdict(kind, None, max(0.0, evidence))


def _tail(known: NDArray[np.float64], temperature: float) -> float:
    """Return an upper bound for the sum of p^(1 / ``temperature``) over the tokens that the engine does not name.

    ``known``: the probabilities p of the others.
    """
    left, power = max(0.0, 1.0 - float(known.sum())), 1.0 / temperature
    if power < 1:  # largest if all are equally likely
        return float(left**power * _VOCABULARY ** (1 - power))
    return float(left * known.min() ** (power - 1))


def _kept_share(q: NDArray[np.float64], sampling: Mapping[str, Any]) -> float:
    """Return a lower bound for the share of the probability that ``top_p``, ``top_k`` and ``min_p`` leave."""
    shares = [float(sampling.get("top_p") or 1.0)]
    if (top_k := sampling.get("top_k") or 0) > 0:
        shares.append(float(np.sort(q)[::-1][:top_k].sum()))
    if min_p := sampling.get("min_p"):
        shares.append(float(q[q >= min_p * q.max()].sum()))
    return float(np.prod(shares))


def noise_between(one: Sequence[Token], two: Sequence[Token]) -> float:
    """Return the largest difference of the log-probabilities of two computations of a text, up to the first token that
    differs."""
    found = 0.0
    for a, b in zip(one, two, strict=False):
        if a.text != b.text or a.logprob is None or b.logprob is None:
            break
        found = max(found, abs(a.logprob - b.logprob))
    return found


def _vectors(pooled: Pooled) -> np.ndarray[Any, np.dtype[np.float64]]:
    flat = np.frombuffer(pooled.vector or b"", dtype="<f4").astype(float)
    return flat.reshape(pooled.tokens or 1, -1)


def _starts(tokens: Sequence[Token], text: str) -> list[int]:
    """Return the position in ``text`` at which each token begins, and the end of the last one.

    The tokens' texts may begin with a space that ``text`` lacks.
    """
    joined = "".join(token.text for token in tokens)
    shift = max(0, joined.find(text[:16]))
    return [at - shift for at in accumulate((len(token.text) for token in tokens), initial=0)]


def _token_at(tokens: Sequence[Token], text: str, position: int) -> int:
    """Return the number of the token with the character at ``position``. After the last token, return the number of
    tokens."""
    ends = _starts(tokens, text)[1:]
    return next((n for n, end in enumerate(ends) if end > position), len(tokens))


def _gap(
    tokens: Sequence[Token], starts: Sequence[int], other: str, begins: int, *, ended: bool
) -> float:
    """Return the smallest difference between the log-probabilities of a token and of another one that may have led to the
    answer ``other``.

    The answers differ from the character ``begins`` on. The last of ``tokens`` has this character; but a longer token
    instead of an earlier one may have led there, too. If no likely token fits, the difference is at least the one to the
    least likely token that the engine names. ``ended``: ``other`` ended at ``begins`` by itself.
    """
    gaps = list[float]()
    for n in range(max(0, len(tokens) - _TOKENS_BACK), len(tokens)):
        own, rest, is_last = tokens[n], other[max(0, starts[n]) :], n == len(tokens) - 1
        for text, logprob in own.top.items():
            is_long = len(text) > begins - starts[n]
            fits = bool(text) and rest.startswith(text) and (is_last or is_long)
            is_piece = is_last and PIECE in text and rest[:1] > "\x7f"
            is_end = is_last and ended and _SPECIAL.fullmatch(text) is not None
            if text != own.text and own.logprob is not None and (fits or is_piece or is_end):
                # A penalty or a grammar may have chosen a token that is not the likeliest.
                gaps.append(abs(own.logprob - logprob))
    last = tokens[-1]
    if gaps or last.logprob is None or not last.top:
        return min(gaps, default=float("inf"))
    return abs(last.logprob - min(last.top.values()))
