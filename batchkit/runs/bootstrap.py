"""The percentile bootstrap: how far a mean could move by chance."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

_MOST_VALUES = 20_000  # up to so many distinct differences the draws are exact
_DRAWS = 20_000_000  # at a time


def bootstrap_interval(
    differences: NDArray[np.float64], *, resamples: int, rng: np.random.Generator
) -> tuple[float, float]:
    """The 2.5th and 97.5th percentile of the mean over rows drawn with replacement.

    Rows with the same difference are drawn together, as a multinomial: the same distribution,
    without a table of rows × resamples. Beyond 20,000 distinct differences they are rounded to
    0.0001.
    """
    values, counts = np.unique(differences, return_counts=True)
    if len(values) > _MOST_VALUES:
        values, counts = np.unique(np.round(differences, 4), return_counts=True)
    n, means = len(differences), []
    shares = counts / n
    step = max(1, _DRAWS // len(values))
    for start in range(0, resamples, step):
        drawn = rng.multinomial(n, shares, size=min(step, resamples - start))
        means.append(drawn @ values / n)
    low, high = np.percentile(np.concatenate(means), (2.5, 97.5))
    return float(low), float(high)
