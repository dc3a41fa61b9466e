"""How many tokens the answers of all rows have, from those of a sample.

Lengths of answers have a heavy tail: a few rows in a thousand may have most of the tokens, and a
sample of 64 rarely has one of them. So the plain bootstrap is too sure of itself: of its 90 % intervals
72 % to 89 % held the truth (``benchmarks/LOG.md``). Here a replicate weighs the sampled rows at
random, as the Bayesian bootstrap does, but more unequally; and in most replicates a share of the rows has answers longer than any in the sample: as many as one more sampled
row would stand for, their length from a Pareto tail with Hill's index of the longest sampled answers,
up to ``max_tokens``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

REPLICATES = 400
_UNEQUAL = 1.5  # how much more unequal the weights are than the Bayesian bootstrap's
_TAIL_SHARE = 0.7  # of the replicates have answers longer than the sample's
_OF_TAIL = 16  # of the longest answers show how heavy the tail is, at most a quarter of all
_UNBOUNDED = 10.0  # times the longest answer, if there is no max_tokens
_LEAST_SHAPE, _TINY = 0.2, 1e-12
_QUANTILES = (np.arange(64) + 0.5) / 64


class Tail(NamedTuple):
    """Answers longer than the sample's: a ``share`` of all rows, Pareto with ``heaviness`` 1/α, from
    ``longest`` up to ``most``."""

    share: float
    heaviness: float
    longest: float
    most: float

    def at(self, uniform: NDArray[np.float64]) -> NDArray[np.float64]:
        """Their lengths, for numbers between 0 and 1."""
        lengths: NDArray[np.float64] = np.minimum(
            self.most, self.longest * uniform**-self.heaviness
        )
        return lengths


class Replicate(NamedTuple):
    """One guess at all rows: those that are not in the ``tail`` have the length ``lengths[i]`` with the
    probability ``weights[i]``."""

    lengths: NDArray[np.float64]
    weights: NDArray[np.float64]
    tail: Tail

    @property
    def mean(self) -> float:
        return self._moment(1)

    @property
    def variance(self) -> float:
        return self._moment(2) - self.mean**2

    def draw(self, n: int, rng: np.random.Generator) -> NDArray[np.float64]:
        """The lengths of ``n`` rows."""
        drawn: NDArray[np.float64] = rng.choice(self.lengths, n, p=self.weights)
        in_tail = rng.random(n) < self.tail.share
        drawn[in_tail] = self.tail.at(1 - rng.random(int(in_tail.sum())))
        return drawn

    def _moment(self, power: int) -> float:
        inner = float(self.weights @ self.lengths**power)
        outer = float((self.tail.at(_QUANTILES) ** power).mean())
        return (1 - self.tail.share) * inner + self.tail.share * outer


def replicates(
    lengths: NDArray[np.float64], most: float | None, rng: np.random.Generator
) -> Iterator[Replicate]:
    """``lengths``: of the sampled answers; ``most``: the longest that one may get."""
    n = len(lengths)
    shape = max(_LEAST_SHAPE, (n - 2) / n / _UNEQUAL)
    longest = float(lengths.max())
    most = max(most or _UNBOUNDED * longest, longest)
    for _ in range(REPLICATES):
        weights = rng.gamma(shape, size=n) + _TINY
        weights /= weights.sum()
        odds = rng.exponential() / n if rng.random() < _TAIL_SHARE else 0.0
        tail = Tail(odds / (1 + odds), _tail_index(lengths, weights), longest, most)
        yield Replicate(lengths, weights, tail)


def _tail_index(lengths: NDArray[np.float64], weights: NDArray[np.float64]) -> float:
    """Hill's estimate of 1/α: how much heavier than the sample's largest values larger ones are."""
    n_top = min(_OF_TAIL, len(lengths) // 4)
    if n_top == 0:
        return 0.5
    order = np.argsort(lengths)[::-1]
    top, least = order[:n_top], max(float(lengths[order[n_top]]), 1.0)
    excess = np.log(np.maximum(lengths[top], least) / least)
    return float(weights[top] @ excess / weights[top].sum())
