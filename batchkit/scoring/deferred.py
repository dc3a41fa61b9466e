"""Deferred scorers: scorers that run after all rows have finished, over all answers at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from batchkit.config.tables import JobConfig
from batchkit.scoring import Scored

DEFERRED = {"chart": "batchkit.contrib.realhit.chart.scorer"}


@dataclass(frozen=True, slots=True)
class Answered:
    """An answer to score. ``index`` and ``id``: those of its row. ``fields``: the row's fields. ``reference``: the
    correct answer, or None. ``known``: the prediction, and the scores that were already computed."""

    index: int
    id: str
    fields: Mapping[str, Any]
    text: str
    reference: str | None
    known: Scored


class DeferredScorer(Protocol):
    """A module or an object that scores all answers of a run at once."""

    scores: Sequence[str]
    """Names of the scores that this scorer gives. These scores are None until the scorer has run."""

    def fields(self, job: JobConfig, **parameters: Any) -> set[str]:
        """Return the row fields that ``score`` reads, besides the reference. ``Answered.fields`` may lack all other
        fields."""

    def score(
        self,
        job: JobConfig,
        answers: Sequence[Answered],
        say: Callable[[str], None],
        **parameters: Any,
    ) -> Mapping[int, Mapping[str, float | None]]:
        """Return scores from 0 to 1: by ``Answered.index``, then by name. Scores that are left out count as None.

        ``answers``: the answers whose ``scorers`` name this scorer with these parameters; at least one. ``say`` prints
        a line. The keyword-only parameters of this method are the scorer's parameters in the job file; ``fields`` gets
        the same ones.
        """
