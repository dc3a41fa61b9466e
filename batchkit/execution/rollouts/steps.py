"""``[[steps]]`` as a coroutine: one generation after another. A step whose ``when`` is false is skipped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from typing import Any

from msgspec.structs import replace

from batchkit.config.tables import StepTable
from batchkit.errors import EmptyTextError, InvalidOutputError, RowError
from batchkit.execution.completions import parsed_or_failed
from batchkit.execution.rollouts.open_row import OpenRow
from batchkit.execution.selection import eligible
from batchkit.execution.start import Start
from batchkit.rendering.steps import NO_ANSWER, StepsRenderer, with_answers
from batchkit.scoring.parsed import NotJson, parsed
from batchkit.types import Completion, Request, Row


class Steps:
    """A solver that answers rows of a job with steps."""

    def __init__(self, start: Start) -> None:
        assert isinstance(start.renderer, StepsRenderer)
        self._start, self._renderer = start, start.renderer

    async def solve(self, row: OpenRow) -> Completion:
        """Return the row's outcome: the answer of its last step, the selected candidate, or the error of a failed
        step."""
        answers: dict[str, dict[str, Any]] = {}
        done: list[Completion] = []
        last: Completion | None = None
        try:
            self._renderer.check(row.row)
            for step in self._start.job.steps:
                candidates: list[Completion] | None = None
                if step.name == self._start.job.select.step:
                    if not done:
                        break
                    candidates = self._candidates(done)
                    last = candidates[0]
                texts = None if candidates is None else [each.text for each in candidates]
                seen = with_answers(row.row, answers, texts)
                try:
                    completion = await self._asked(step, row, seen)
                    if completion is None:
                        answers[step.name] = {"skipped": True}
                        continue
                    answers[step.name] = self._answer(step, completion, row.row)
                except RowError as error:
                    raise _named(error, step.name) from error
                if step.answer:
                    done.append(completion)
                    last = completion
                if candidates is not None:
                    last = candidates[self._start.selection.named(completion) or 0]
            if last is None:
                raise EmptyTextError(NO_ANSWER)
        except RowError as error:
            failed = row.outcome(last, ())
            return replace(failed, error=error, steps=self._recorded(answers))
        outcome = row.outcome(last, last.choices)
        return replace(
            outcome, selected=last.selected, votes=last.votes, steps=self._recorded(answers)
        )

    def _candidates(self, done: Sequence[Completion]) -> list[Completion]:
        """Return the answers to select from, one completion each.

        They are the answers of the newest step that has several answers; without such a step, the newest step's answer.
        """
        judged = next((each for each in reversed(done) if len(each.choices) > 1), done[-1])
        parses = judged.request.step in self._start.job.parsing
        chosen = [replace(judged, selected=number) for number in eligible(judged, parses=parses)]
        return [parsed_or_failed(each) if parses else each for each in chosen]

    async def _asked(self, step: StepTable, row: OpenRow, seen: Row) -> Completion | None:
        """Return the step's completion, or None if the step is skipped.

        Raises:
            RowError: the step failed.
        """
        renderer, name = self._renderer, step.name

        def render() -> Request | None:
            return renderer.render_step(name, seen) if renderer.runs(name, seen) else None

        completion = await row.ask(
            render, name, step.engine, takes_long=renderer.step_takes_long(name)
        )
        if completion is not None and completion.error is not None:
            raise completion.error
        return completion

    def _answer(self, step: StepTable, completion: Completion, row: Row) -> dict[str, Any]:
        """Return the values of a step's answer that templates of later steps can use. Values that are None are left
        out."""
        found: dict[str, Any] = {
            "text": completion.text,
            "reasoning": completion.reasoning,
            "tool_calls": completion.tool_calls or None,
            "json": completion.parsed if step.parse is not None else _json(completion.text),
            "choices": [choice.text for choice in completion.choices],
            "selected": completion.selected,
            "votes": completion.votes,
            "finish_reason": completion.finish_reason,
            "skipped": False,
        }
        if (scoring := self._start.step_scoring.get(step.name)) is not None:
            scored = scoring.score(completion.text, row.fields, row.id)
            found |= {"prediction": scored.prediction, "scores": scored.scores}
        return {name: value for name, value in found.items() if value is not None}

    def _recorded(self, answers: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
        """Return ``answers`` as the record stores them: without ``json``, a single choice that repeats the text,
        choices that the job does not keep, and a false ``skipped``."""
        return {
            name: {
                key: value
                for key, value in answer.items()
                if key != "json"
                and (key, value) != ("skipped", False)
                and (key != "choices" or (self._start.job.keeps_choices and len(value) > 1))
            }
            for name, answer in answers.items()
        }


def _named(error: RowError, step: str) -> RowError:
    """Return a copy of the error that names its step."""
    named = copy(error)
    named.args = (f"step {step}: {error}",)
    return named


def _json(text: str) -> Any:
    try:
        return parsed(text)
    except (NotJson, InvalidOutputError):
        return None
