"""``[select]``: the choice among the ``n`` answers to a request."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from msgspec.structs import replace

from batchkit.config.tables import JobConfig, ScoringTable
from batchkit.config.tables.parameters import Parameters
from batchkit.errors import InvalidOutputError
from batchkit.rendering.steps import CANDIDATES
from batchkit.scoring import Scoring
from batchkit.scoring.parsed import value_of
from batchkit.scoring.values import vote_of
from batchkit.types import BROKEN_OFF, Completion


class Selection:
    """The rule of ``[select]``, which chooses among the answers of a row or of one of its steps. Immutable.

    Predictions are extracted by the step's own ``extract`` and ``scorers``; without them, by ``[scoring]``.

    ``references``: reference answers by row id, if another run provides them.
    """

    def __init__(self, job: JobConfig, references: Mapping[str, str | None] | None = None) -> None:
        self._select = job.select
        self._scoring = {"": Scoring(self._needed(job.scoring), references)}
        for step in job.steps:
            table = step.scoring if step.has_scoring else job.scoring
            if step.name == job.select.step and step.extract is None:
                table = table.model_copy(update={"extract": {"number": {}}, "rules": []})
            self._scoring[step.name] = Scoring(self._needed(table), references)

    def chosen(self, completion: Completion, *, parses: bool) -> Completion:
        """Return the completion with ``selected`` set, if it has several choices and at least one of them is an answer.

        An answer of ``select.step``, which judges the candidates, gets an error if it names none of them.

        ``parses``: True if the answers must be valid JSON.
        """
        if self._select.by is None or completion.error is not None:
            return completion
        if completion.request.step == self._select.step:
            return self._unless_it_names_none(completion)
        numbers = eligible(completion, parses=parses)
        if len(completion.choices) == 1 or not numbers:
            return completion
        if self._select.by == "majority":
            return self._majority(completion, numbers)
        best = numbers[0]
        if self._select.by == "scorer":
            best = max(numbers, key=lambda number: self._score(completion, number))
        return replace(completion, selected=best)

    def named(self, completion: Completion) -> int | None:
        """Return the position, from 0, of the candidate that the step's answer names; None if it names none."""
        row = completion.request.row
        found = self._of(completion).found(completion.text, row.fields, row.id)
        try:
            place = int(found or "") - 1
        except ValueError:
            return None
        return place if 0 <= place < len(row.fields[CANDIDATES]) else None

    def _needed(self, table: ScoringTable) -> ScoringTable:
        """Return ``table`` with only the scorer whose score decides the choice."""
        name = self._select.scorer
        names = [] if self._select.by != "scorer" else table.scorers if name is None else [name]

        def only(scorers: Parameters) -> Parameters:
            return {name: its for name, its in scorers.items() if name in names}

        rules = [
            rule.model_copy(update={"scorers": only(rule.scorers or {}) or None})
            for rule in table.rules
        ]
        return table.model_copy(update={"scorers": only(table.scorers), "rules": rules})

    def _of(self, completion: Completion) -> Scoring:
        return self._scoring[completion.request.step]

    def _majority(self, completion: Completion, numbers: list[int]) -> Completion:
        """Select the first choice with the most frequent prediction; the first choice if none has a prediction."""
        row, scoring = completion.request.row, self._of(completion)
        choices = scoring.table_for(row.fields).choices
        # By vote: pairs of a choice's number and its prediction.
        cast = defaultdict[str, list[tuple[int, str]]](list)
        for number in numbers:
            found = scoring.found(completion.choices[number].text, row.fields, row.id)
            vote = vote_of(found, choices) if found else None
            if found and vote is not None:
                cast[vote].append((number, found))
        # Of equally frequent predictions, the first is selected.
        most = max(cast.values(), key=len, default=[(numbers[0], "")])
        votes = {same[0][1]: len(same) for same in cast.values()}
        return replace(completion, selected=most[0][0], votes=votes)

    def _score(self, completion: Completion, number: int) -> float:
        row = completion.request.row
        text = completion.choices[number].text
        scores = self._of(completion).score(text, row.fields, row.id).scores
        score = next(iter(scores.values()), None)
        return float("-inf") if score is None else score

    def _unless_it_names_none(self, completion: Completion) -> Completion:
        if not eligible(completion, parses=False) or self.named(completion) is not None:
            return completion
        n_candidates = len(completion.request.row.fields[CANDIDATES])
        message = (
            f"select.step: the answer has no number from 1 to {n_candidates}; check `extract` of step"
            f" {self._select.step!r}, which decides where in the answer batchkit looks for the number"
        )
        return replace(completion, error=InvalidOutputError(message))


def eligible(completion: Completion, *, parses: bool) -> list[int]:
    """Return the numbers of the choices that are complete answers. With ``parses``, they must also be valid JSON."""
    return [
        number
        for number, choice in enumerate(completion.choices)
        if choice.is_answer
        and choice.finish_reason not in BROKEN_OFF
        and (not parses or _is_json(completion, number))
    ]


def _is_json(completion: Completion, number: int) -> bool:
    try:
        value_of(completion.choices[number], completion.request.sampling)
    except InvalidOutputError:
        return False
    return True
