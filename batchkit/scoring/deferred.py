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
    """An answer to score: its text, the fields of its row, the correct answer if there is one, and the scores already
    computed (``known``)."""

    index: int
    id: str
    fields: Mapping[str, Any]
    text: str
    reference: str | None
    known: Scored


class DeferredScorer(Protocol):
    """A scorer of all answers of a run, as a module or an object."""

    scores: Sequence[str]
    """Names of the scores that it gives. They are None until it has run."""

    def fields(self, job: JobConfig, **parameters: Any) -> set[str]:
        """Return the row fields that it reads, besides the reference; an answer has only these fields for certain."""

    def score(
        self,
        job: JobConfig,
        answers: Sequence[Answered],
        say: Callable[[str], None],
        **parameters: Any,
    ) -> Mapping[int, Mapping[str, float | None]]:
        """Return scores from 0 to 1 by the index of the answer, then by name. Scores that are left out are None.

        ``answers`` are those with this scorer and these parameters in ``scorers``; there is at least one. ``say`` prints
        a line. The keyword-only parameters of this method are the scorer's parameters in the job file; ``fields`` gets
        them, too.
        """
