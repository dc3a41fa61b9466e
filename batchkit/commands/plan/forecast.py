"""The forecast of a job, computed from the lengths of its prompts and a sample of its answers.

Answer lengths have a heavy tail: a few rows in a thousand may have most of the tokens, and a sample of 64 rarely has
one of them. Therefore the plain bootstrap is overconfident: its 90 % intervals contained the true value in 72 % to 89 %
of cases (``benchmarks/LOG.md``).

So the forecast is made many times, each time with random assumptions about the answers (a replicate). A replicate
weights the sampled rows at random, like the Bayesian bootstrap but more unequally. In most replicates, some rows also
have answers longer than any in the sample: about as many rows as one sampled row represents. Their lengths come from a
Pareto distribution up to ``max_tokens``; Hill's estimator finds its index from the longest sampled answers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from operator import mul
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from batchkit.commands.plan.lengths import Lengths
from batchkit.commands.plan.sample import Sample
from batchkit.commands.plan.throughput import (
    StepTime,
    Wave,
    fit,
    points_of,
    points_of_batches,
    steps_of,
)

REPLICATES = 400
_UNEQUAL = 1.5  # factor by which the weights are more unequal than the Bayesian bootstrap's
_TAIL_SHARE = 0.7  # share of replicates with answers longer than the sample's
_OF_TAIL = 16  # the tail is estimated from this many longest answers, at most a quarter of all
_UNBOUNDED = 10.0  # limit as a multiple of the longest answer, if max_tokens is not set
_LEAST_SHAPE, _TINY = 0.2, 1e-12
_QUANTILES = (np.arange(64) + 0.5) / 64


class Replicate(NamedTuple):
    """A random assumption about the answers of all rows.

    A row has length ``lengths[i]`` with probability ``weights[i]``, except the rows of the tail: these have answers
    longer than any in the sample, with Pareto distributed lengths.

    - ``share``: the fraction of all rows that are in the tail.
    - ``heaviness``: 1/α of the distribution. Lengths in the tail range from the longest of ``lengths`` to ``most``.
    """

    lengths: NDArray[np.float64]
    weights: NDArray[np.float64]
    share: float
    heaviness: float
    most: float

    @property
    def mean(self) -> float:
        return self._moment(1)

    @property
    def variance(self) -> float:
        return self._moment(2) - self.mean**2

    def draw(self, n: int, rng: np.random.Generator) -> NDArray[np.float64]:
        """Return random answer lengths for ``n`` rows."""
        drawn: NDArray[np.float64] = rng.choice(self.lengths, n, p=self.weights)
        in_tail = rng.random(n) < self.share
        drawn[in_tail] = self._of_tail(1 - rng.random(int(in_tail.sum())))
        return drawn

    def _moment(self, power: int) -> float:
        inner = float(self.weights @ self.lengths**power)
        outer = float((self._of_tail(_QUANTILES) ** power).mean())
        return (1 - self.share) * inner + self.share * outer

    def _of_tail(self, uniform: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the tail's lengths at the quantiles ``uniform``, where 0 is the longest and 1 the shortest length."""
        longer = self.lengths.max() * uniform**-self.heaviness
        lengths: NDArray[np.float64] = np.minimum(self.most, longer)
        return lengths


def replicates(
    lengths: NDArray[np.float64], most: float | None, rng: np.random.Generator
) -> Iterator[Replicate]:
    """Yield ``REPLICATES`` replicates.

    ``lengths``: lengths of the sampled answers. ``most``: maximum length of an answer, or None.
    """
    n = len(lengths)
    shape = max(_LEAST_SHAPE, (n - 2) / n / _UNEQUAL)
    longest = float(lengths.max())
    most = max(most or _UNBOUNDED * longest, longest)
    for _ in range(REPLICATES):
        weights = rng.gamma(shape, size=n) + _TINY
        weights /= weights.sum()
        odds = rng.exponential() / n if rng.random() < _TAIL_SHARE else 0.0
        yield Replicate(lengths, weights, odds / (1 + odds), _tail_index(lengths, weights), most)


def _tail_index(lengths: NDArray[np.float64], weights: NDArray[np.float64]) -> float:
    """Return Hill's estimate of 1/α, the heaviness of the tail, from the largest ``lengths``."""
    n_top = min(_OF_TAIL, len(lengths) // 4)
    if n_top == 0:
        return 0.5
    order = np.argsort(lengths)[::-1]
    top, least = order[:n_top], max(float(lengths[order[n_top]]), 1.0)
    excess = np.log(np.maximum(lengths[top], least) / least)
    return float(weights[top] @ excess / weights[top].sum())


_DRAWN = 4096  # minimum number of rows drawn; further rows use the steps of a full engine
_LEAST_SPREAD = 0.04  # relative variation of run time from one run to the next
_LEAST_OF_BATCHES = 0.25  # the same if an engine answers in batches, because the model is then fitted to two waves only
_MOST_SPREAD = 0.5
_LEAST_S = 0.001
_LEAST_START_S = 0.3
_PER_DOUBLING = 0.05  # for each doubling from the largest sampled batch to the job's batch


QUANTILES = (0.05, 0.5, 0.95)


class Interval(NamedTuple):
    """A 90 % interval: it contains the true value in 90 % of forecasts. ``expected`` is the median."""

    low: float
    expected: float
    high: float

    def plus(self, known: float, times: float = 1.0) -> Interval:
        return Interval(*(known + times * value for value in self))

    def rounded(self, digits: int) -> dict[str, float]:
        return {name: round(value, digits) for name, value in self._asdict().items()}


NOTHING = Interval(0.0, 0.0, 0.0)


class Rest(NamedTuple):
    """The forecast for the rows without a record, over all engines. ``seconds``: without the time to load the
    engine."""

    prompt_tokens: Interval = NOTHING
    completion_tokens: Interval = NOTHING
    seconds: Interval = NOTHING
    price: Interval = NOTHING


class EngineCount(NamedTuple):
    """The engines of the job: ``workers`` engines, each with ``running`` concurrent requests.

    ``in_batches``: True if an engine finishes one batch before it begins the next (transformers).
    """

    workers: int
    running: int
    in_batches: bool


class Prices(NamedTuple):
    """The prices of a prompt token, of a completion token, and of a second of all GPUs together."""

    prompt_token: float
    completion_token: float
    second: float


def rest_of(
    lengths: Lengths, sample: Sample, engines: EngineCount, prices: Prices, seed: int
) -> Rest:
    """Return the forecast for the rows without a record, from the answered ``sample``."""
    places = {index: place for place, index in enumerate(lengths.indexes.tolist())}
    sampled = [row for row in sample.rows if row.index in places]
    at = [places[row.index] for row in sampled]
    sizes, sampled_sizes, row_s = np.delete(lengths.sizes, at), lengths.sizes[at], lengths.row_s
    n_rest = round((lengths.left - lengths.counted) * lengths.computed) + len(sizes)
    if not n_rest or not sampled:
        return Rest()
    if lengths.unit == "seconds":
        # The engine receives recordings in chunks of fixed length, so each chunk is one request.
        sampled = [part for wave in sample.waves for part in wave.requests if part.index in places]
        if not sampled:
            return Rest()
        seconds = float((sizes if len(sizes) else sampled_sizes).mean()) * n_rest
        n_parts = max(1, round(seconds * len(sampled) / max(_TINY, float(sampled_sizes.sum()))))
        sizes, sampled_sizes = sizes[:0], np.ones(len(sampled))
        n_rest, row_s = n_parts, row_s * n_rest / n_parts
    points = points_of_batches if engines.in_batches else points_of
    steps, first = fit(points(sample.measured)), sample.waves[0]
    rest = _Rest(
        n_rows=n_rest,
        sizes=sizes,
        sampled_sizes=sampled_sizes,
        prompt_tokens=np.array([row.prompt_tokens for row in sampled], dtype=np.float64),
        sequences=first.sequences,
        row_s=row_s,
        start_s=max(_LEAST_START_S, first.took_s - _expected_s(first, steps, engines)),
        spread=_spread(steps, sample, engines),
        engines=engines,
        prices=prices,
    )
    answers = np.array([row.completion_tokens for row in sampled], dtype=np.float64)
    rng = np.random.default_rng(seed)
    drawn = [
        rest.drawn(replicate, steps, rng)
        for replicate in replicates(answers, lengths.most_tokens, rng)
    ]
    return Rest(*(Interval(*found) for found in np.quantile(drawn, QUANTILES, axis=0).T.tolist()))


def _expected_s(wave: Wave, steps: StepTime, engines: EngineCount) -> float:
    at_once = max(1, wave.window // wave.sequences)
    return steps.seconds(
        steps_of(wave.lengths, at_once, in_batches=engines.in_batches),
        sum(wave.lengths) * wave.sequences,
        sum(request.prompt_tokens for request in wave.requests),
        len(wave.requests),
        at_once,
    )


def _spread(steps: StepTime, sample: Sample, engines: EngineCount) -> float:
    """Return how far a forecast time may be off, as a relative error.

    It is the error of the times that ``steps`` predicts for the sample's own waves (rows that ran together). It grows
    with each doubling from the largest batch of these waves to the batch of the job.
    """
    errors = [
        math.log(max(wave.seconds, _LEAST_S) / max(_expected_s(wave, steps, engines), _LEAST_S))
        for wave in sample.measured
    ]
    largest = max(min(wave.window, len(wave.requests)) for wave in sample.measured)
    doublings = max(0.0, math.log2(engines.running / largest))
    least = _LEAST_OF_BATCHES if engines.in_batches else _LEAST_SPREAD
    error = max(least, max(map(abs, errors)) / math.sqrt(2))
    return min(_MOST_SPREAD, math.hypot(error, _PER_DOUBLING * doublings))


class _Rest(NamedTuple):
    """The rows without a record, with everything needed to draw a random forecast for them.

    - ``sizes``: prompt sizes, in ``Lengths.unit``, of the rows that were rendered but are not in the sample.
    - ``sampled_sizes``: the same for the sampled rows (1 for each chunk of a recording).
    - ``prompt_tokens``: the prompt tokens that the engine counted for the sampled rows. They convert sizes to tokens.
    - ``sequences``: answers per request.
    - ``row_s``: seconds to render a row. ``start_s``: seconds until a new engine is warm.
    - ``spread``: how far the forecast time may be off, as a relative error.

    For recordings, each chunk counts as a row, and ``sizes`` is empty.
    """

    n_rows: int
    sizes: NDArray[np.float64]
    sampled_sizes: NDArray[np.float64]
    prompt_tokens: NDArray[np.float64]
    sequences: int
    row_s: float
    start_s: float
    spread: float
    engines: EngineCount
    prices: Prices

    def drawn(
        self,
        replicate: Replicate,
        steps: StepTime,
        rng: np.random.Generator,
    ) -> tuple[float, float, float, float]:
        """Return one random forecast for these rows: prompt tokens, completion tokens, seconds and price."""
        workers, running = self.engines.workers, self.engines.running
        prompt_tokens = self._prompt_tokens(replicate.weights, rng)
        n_drawn = min(self.n_rows, max(_DRAWN, 8 * running * workers))
        drawn, mean = replicate.draw(n_drawn, rng), replicate.mean
        tokens = float(drawn.sum())
        if n_drawn < self.n_rows:
            spread_of_sum = math.sqrt(self.n_rows * max(0.0, replicate.variance))
            tokens = self.n_rows * mean + spread_of_sum * rng.standard_normal()
        at_once = max(1, running * workers // self.sequences)
        n_steps = (
            steps_of(
                np.maximum(1.0, drawn / self.sequences).tolist(),
                at_once,
                in_batches=self.engines.in_batches,
            )
            + (self.n_rows - n_drawn) * max(1.0, mean / self.sequences) / at_once
        )
        seconds = steps.seconds(
            n_steps, tokens / workers, prompt_tokens / workers, self.n_rows, at_once
        )
        seconds *= math.exp(self.spread * rng.standard_normal())
        seconds += self.start_s * rng.uniform(0, 2)
        seconds = max(seconds, self.n_rows * self.row_s / workers)
        found = prompt_tokens, tokens, seconds
        return *found, sum(map(mul, found, self.prices))

    def _prompt_tokens(self, weights: NDArray[np.float64], rng: np.random.Generator) -> float:
        """Estimate the prompt tokens of all rows without a record, in total.

        The size of each rendered row is multiplied by the tokens per unit of size, as measured on the sampled rows. A
        row that was not rendered gets the mean size of the rendered rows. ``weights``: weights of the sampled rows.
        """
        per_size = 1.0
        if (self.prompt_tokens != self.sampled_sizes).any():
            counted = float(weights @ self.sampled_sizes)
            per_size = float(weights @ self.prompt_tokens) / max(1e-9, counted)
        if not len(self.sizes):
            return per_size * self.n_rows * float(weights @ self.sampled_sizes)
        mean = float(self.sizes.mean())
        if len(self.sizes) < self.n_rows:
            mean += float(self.sizes.std()) / math.sqrt(len(self.sizes)) * rng.standard_normal()
        others = self.n_rows - len(self.sizes)
        return per_size * (float(self.sizes.sum()) + others * mean)
