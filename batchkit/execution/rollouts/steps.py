"""``[[steps]]`` as a coroutine: one generation after another, skipped where ``when`` says so."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from batchkit.config.tables import JobConfig, StepTable
from batchkit.errors import EmptyTextError, InvalidOutputError, RowError
from batchkit.execution.rollouts.open_row import OpenRow
from batchkit.rendering.steps import StepsRenderer, with_answers
from batchkit.scoring import Scoring
from batchkit.scoring.parsed import NotJson, parsed
from batchkit.types import Choice, Completion, Row


class Steps:
    """Answers rows of a job with steps."""

    def __init__(self, job: JobConfig, renderer: StepsRenderer) -> None:
        self._steps = job.steps
        self._renderer = renderer
        self._scoring = {
            step.name: Scoring(step.scoring) for step in job.steps if step.scoring.is_on
        }

    async def solve(self, row: OpenRow) -> Completion:
        """The outcome of the row: that of its last step, or of the one that failed."""
        answers: dict[str, dict[str, Any]] = {}
        last: Completion | None = None
        try:
            for step in self._steps:
                seen = with_answers(row.row, answers)
                completion = await self._asked(step, row, seen)
                if completion is None:
                    answers[step.name] = {"skipped": True}
                    continue
                if completion.error is not None:
                    raise completion.error
                last = completion
                answers[step.name] = self._answer(step, completion, row.row)
            if last is None:
                raise EmptyTextError("no step was run: the when of each gave false")
        except RowError as error:
            failed = row.outcome(last, ())
            return replace(failed, error=error, steps=_recorded(answers))
        return replace(row.outcome(last, last.choices), steps=_recorded(answers))

    async def _asked(self, step: StepTable, row: OpenRow, seen: Row) -> Completion | None:
        """None if the step is skipped."""
        renderer = self._renderer

        def render() -> Any:
            return (
                renderer.render_step(step.name, seen, 1) if renderer.runs(step.name, seen) else None
            )

        request = await row.in_thread(render)
        return None if request is None else await row.ask(request, step.name, step.engine)

    def _answer(self, step: StepTable, completion: Completion, row: Row) -> dict[str, Any]:
        """What templates of later steps see; names without a value are left out."""
        first = completion.choices[0]
        found: dict[str, Any] = {
            "text": first.text,
            "reasoning": first.reasoning,
            "tool_calls": first.tool_calls,
            "json": completion.parsed if step.parse is not None else _json(first),
            "choices": [choice.text for choice in completion.choices],
            "finish_reason": first.finish_reason,
        }
        if (scoring := self._scoring.get(step.name)) is not None:
            scored = scoring.score(first.text, row.fields, row.id)
            found |= {"prediction": scored.prediction, "scores": scored.scores}
        return {name: value for name, value in found.items() if value is not None}


def _json(choice: Choice) -> Any:
    try:
        return parsed(choice.text)
    except (NotJson, InvalidOutputError):
        return None


def _recorded(answers: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """``answers`` as a record has them: ``json`` is in the text, and one choice is the text."""
    return {
        name: {
            key: value
            for key, value in answer.items()
            if key != "json" and not (key == "choices" and len(value) == 1)
        }
        for name, answer in answers.items()
    }
