"""A model of engine speed: the time of a forward pass ("step" in the names here), fitted to the rows of a sample.

In each forward pass, an engine generates one token for each running request. A forward pass takes ``step_s``, plus
``sequence_s`` for each running request, plus ``prompt_token_s`` for each prompt token that it processes. A row also
waits ``row_s``. So a row of L tokens that ran together with r others on average, while P prompt tokens were processed,
took row_s + L·(step_s + r·sequence_s) + P·prompt_token_s. The number of running requests follows from the begin and end
times of the sampled rows.

The time of a whole job is computed from its number of forward passes (``steps_of``) and its tokens.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from batchkit.commands.trial.measurement import TimedAnswer

_TOGETHER_S = 0.02  # requests that begin within this time begin in the same step
_LEAST_S, _TINY = 0.001, 1e-12
_REFITS = 3


class Wave(NamedTuple):
    """Rows that were answered together, at most ``window`` at a time, in a start that took ``took_s`` seconds.

    - ``sequences``: answers per request.
    - ``parts``: for recordings, the generations of their chunks; None for other tasks.
    """

    window: int
    rows: Sequence[TimedAnswer]
    took_s: float
    sequences: int = 1
    parts: Sequence[TimedAnswer] | None = None

    @property
    def requests(self) -> Sequence[TimedAnswer]:
        """The requests that the engine received: the generations of recordings, or the rows."""
        return self.rows if self.parts is None else self.parts

    @property
    def seconds(self) -> float:
        """The time in seconds from the beginning of the first request to the end of the last one."""
        if not self.requests:
            return 0.0
        ended = max(request.ended for request in self.requests)
        return ended - min(request.began for request in self.requests)

    @property
    def lengths(self) -> list[float]:
        """The number of tokens in one answer to each request."""
        return [max(1.0, request.last_tokens / self.sequences) for request in self.requests]


class StepTime(NamedTuple):
    """The coefficients of the speed model, in seconds. The formula is at the top of this module."""

    row_s: float
    step_s: float
    sequence_s: float
    prompt_token_s: float

    def seconds(
        self, steps: float, tokens: float, prompt_tokens: float, rows: float, running: float
    ) -> float:
        """Return the time of ``rows`` rows, ``running`` at a time.

        ``steps``, ``tokens``, ``prompt_tokens``: total numbers of forward passes and tokens that the rows need.
        """
        return (
            self.row_s * (rows / running + 1)
            + self.step_s * steps
            + self.sequence_s * tokens
            + self.prompt_token_s * prompt_tokens
        )


class Points(NamedTuple):
    """Equations to find the coefficients of ``StepTime``: for each measurement, ``parts`` times the coefficients should
    equal ``seconds``."""

    parts: NDArray[np.float64]
    seconds: NDArray[np.float64]


def points_of(waves: Sequence[Wave]) -> Points:
    """Return one equation for each row of ``waves``. The rows must not have waited in the engine's queue.

    A row's concurrency is an average over its forward passes. The number of forward passes in a period depends on the
    coefficients to be found, so the fit is repeated a few times.
    """
    points = _points(waves, StepTime(0.0, 1.0, 0.0, 0.0))
    for _ in range(_REFITS):
        points = _points(waves, fit(points))
    return points


def _points(waves: Sequence[Wave], steps: StepTime) -> Points:
    parts, seconds = list[Any](), list[Any]()
    for wave in waves:
        began = np.array([request.began for request in wave.requests])
        ended = np.array([request.ended for request in wave.requests])
        tokens = np.array(wave.lengths)
        prompts = np.array([request.prompt_tokens for request in wave.requests])
        times = np.unique(np.concatenate((began, ended)))
        runs = (began[:, None] <= times[:-1]) & (ended[:, None] >= times[1:])
        at_once = wave.sequences * runs.sum(axis=0)
        n_steps = np.diff(times) / (steps.step_s + steps.sequence_s * at_once + _TINY)
        beside = (runs @ (n_steps * at_once) + _TINY) / (runs @ n_steps + _TINY)
        since, until = began[:, None] - _TOGETHER_S, ended[:, None]
        read = ((began > since) & (began < until)) @ prompts
        parts.append(np.stack([np.ones(len(tokens)), tokens, tokens * beside, read], axis=1))
        seconds.append(np.maximum(ended - began, _LEAST_S))
    return Points(np.concatenate(parts), np.concatenate(seconds))


def points_of_batches(waves: Sequence[Wave]) -> Points:
    """Return one equation for each wave, for an engine that finishes a batch before it begins the next."""
    steps = [steps_of(wave.lengths, wave.window, in_batches=True) for wave in waves]
    parts = [[0.0, n, sum(wave.lengths), 0.0] for n, wave in zip(steps, waves, strict=True)]
    seconds = np.array([max(wave.seconds, _LEAST_S) for wave in waves])
    return Points(np.array(parts), seconds)


def fit(points: Points) -> StepTime:
    """Return the coefficients with the least sum of squared relative errors. None of them is negative."""
    parts = points.parts / points.seconds[:, None]
    products, aims = parts.T @ parts, parts.sum(axis=0)
    n_parts = len(aims)
    best, least = np.zeros(n_parts), math.inf
    # Non-negative least squares: there are only four coefficients, so every subset of them can be tried.
    for n in range(1, n_parts + 1):
        for columns in combinations(range(n_parts), n):
            own = list(columns)
            square = products[np.ix_(own, own)]
            ridge = np.diag(square.diagonal() * 1e-9 + 1e-300)
            found = np.linalg.solve(square + ridge, aims[own])
            error = float(found @ square @ found - 2 * found @ aims[own])
            if (found >= 0).all() and error < least - 1e-12:
                best, least = np.zeros(n_parts), error
                best[own] = found
    return StepTime(*map(float, best))


def steps_of(lengths: Sequence[float], running: int, *, in_batches: bool = False) -> float:
    """Return the number of forward passes until answers of these ``lengths`` have ended, with ``running`` at a time.

    The next row starts when an answer ends. ``in_batches``: the next rows start only when all answers of a batch have
    ended.
    """
    if in_batches:
        return sum(max(lengths[n : n + running]) for n in range(0, len(lengths), running))
    ends = [0.0] * min(running, len(lengths))
    for length in lengths:
        heapq.heapreplace(ends, ends[0] + length)
    return max(ends, default=0.0)
