"""Rendering for ``[[steps]]``: the prompt of each step is rendered like the prompt of a separate job."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from msgspec.structs import replace

from batchkit.config.suggest import did_you_mean
from batchkit.config.tables import JobConfig, StepTable
from batchkit.errors import (
    EmptyTextError,
    JobError,
    PromptTooLongError,
    RowError,
    TemplateError,
)
from batchkit.rendering.renderer import AdjustSampling, LoadMedia, PromptRenderer
from batchkit.rendering.speech import SpeechRenderer
from batchkit.rendering.templates import RowTemplate
from batchkit.rendering.templates.sandbox import keys_read
from batchkit.sources.rowhash import input_hash
from batchkit.types import Call, Completion, Request, Row, RowHint

STEPS, CANDIDATES = "steps", "candidates"
ANSWER = (
    *("text", "reasoning", "tool_calls", "json", "choices", "selected", "votes", "finish_reason"),
    *("skipped", "prediction", "scores"),
)
"""The keys of an earlier step's answer that templates can read."""
NO_ANSWER = "no step gave an answer: the `when` of every step was false"
_NO = ("", "false", "no", "none", "0")  # values of ``when`` that skip a step


class StepsRenderer:
    """A renderer for a job with steps. It has the interface of ``PromptRenderer``.

    Methods without a parameter ``step`` are about the first step.

    Raises:
        JobError: a template or template file of a step is invalid.
    """

    def __init__(
        self,
        job: JobConfig,
        *,
        adjust_sampling: AdjustSampling | None = None,
        load: LoadMedia | None = None,
    ) -> None:
        self._by_name = {}
        for step in job.steps:
            with _naming(step.name):
                self._by_name[step.name] = PromptRenderer(
                    job.of_step(step),
                    adjust_sampling=adjust_sampling,
                    load=load,
                    chat_template_kwargs=step.prompt.chat_template_kwargs,
                )
        self._first = self._by_name[job.steps[0].name]
        self._when = {
            step.name: RowTemplate(job, f"steps.{step.name}.when", step.when)
            for step in job.steps
            if step.when is not None
        }
        steps = [
            step.model_copy(update={"prompt": self._by_name[step.name].job.prompt})
            for step in job.steps
        ]
        self.job = job.with_keys(steps=steps)
        if found := [*self._misread()]:
            raise JobError("\n".join(found))
        self.takes_long = any(renderer.takes_long for renderer in self._by_name.values())
        self.opens_files = any(renderer.opens_files for renderer in self._by_name.values())
        # A template that reads ``steps`` as a whole or by a method (``steps.items()``) is ambiguous, because its author
        # may mean a column called "steps"; ``check`` refuses rows that have such a column.
        whole = (place for _, place, key, _ in self._reads() if key is None or hasattr(dict, key))
        self._ambiguous = next(whole, None)

    def check(self, row: Row) -> None:
        """Raise TemplateError if a template uses ``steps`` and the row has a field of that name."""
        if self._ambiguous is not None and STEPS in row.fields:
            raise TemplateError(
                f"{self._ambiguous}: the row has a field {STEPS!r}, but in templates this name is for the"
                " answers of [[steps]]; rename the field in the input"
            )

    def runs(self, step: str, row: Row) -> bool:
        """Return whether a step runs for a row: False if the template ``when`` of the step gives false.

        ``row``: the row with the answers of earlier steps (``with_answers``).

        Raises:
            RowError: the template ``when`` can't be rendered.
        """
        when = self._when.get(step)
        return when is None or when.text(row.fields).strip().lower() not in _NO

    def step_takes_long(self, step: str) -> bool:
        """Return True if rendering this step opens files or waits for a process, so that it should run in a thread."""
        when, renderer = self._when.get(step), self._by_name[step]
        return renderer.takes_long or renderer.opens_files or bool(when and when.is_apart)

    def render_step(self, step: str, row: Row) -> Request:
        """Return the request of a step. Its ``input_hash`` is empty.

        ``row``: the row with the answers of earlier steps (``with_answers``).

        Raises:
            RowError: as for ``PromptRenderer.render``.
        """
        return self._by_name[step].render(row, 1, "")

    def render(self, row: Row, attempt: int = 1) -> Request:
        """Return the row's first request: the request of the first step that is not skipped."""
        if row.error is not None:
            raise row.error
        self.check(row)
        answers: dict[str, Any] = {}
        for step in self.job.steps:
            seen = with_answers(row, answers)
            if self.runs(step.name, seen):
                call = Call(step.name, 0, step.engine)
                made = self._by_name[step.name].render(seen, attempt, input_hash(row.fields))
                return replace(made, row=row, call=call)
            answers[step.name] = {"skipped": True}
        raise EmptyTextError(NO_ANSWER)

    def shortened(self, request: Request, error: PromptTooLongError) -> Request | None:
        call = request.call
        assert call is not None
        shorter = self._by_name[call.step].shortened(request, error)
        return None if shorter is None else replace(shorter, call=call)

    def sources(self, row: Row) -> list[tuple[str, Any]]:
        return self._first.sources(with_answers(row, {}))

    def hint(self, row: Row) -> RowHint:
        return self._first.hint(with_answers(row, {}))

    def _misread(self) -> Iterator[str]:
        """Yield a message for each template that uses an unknown step, or an unknown key of a step's answer."""
        for number, place, name, part in self._reads():
            if name is None or hasattr(dict, name):  # steps.items()
                continue
            earlier = {step.name: step for step in self.job.steps[:number]}
            if (problem := _problem(name, part, earlier)) is not None:
                yield f"{place}: steps.{name} {problem}"

    def _reads(self) -> Iterator[tuple[int, str, str | None, str | None]]:
        """Yield (number, place, name, part) for each use of ``steps.name.part`` in a template.

        - ``number``: index of the step that has the template, from 0. ``place``: the template's key in the job file.
        - ``name``: the step whose answer is used. ``part``: the key of that answer. Each is None if it is missing or
          computed, as in ``steps[x]``.
        """
        for number, step in enumerate(self.job.steps):
            for place, source in self._sources(step.name):
                for name, part in keys_read(source, STEPS):
                    yield number, place, name, part

    def _sources(self, step: str) -> Iterator[tuple[str, str]]:
        """Yield the key and the text of each template of a step."""
        if (when := self._when.get(step)) is not None:
            yield when.key, when.source
        for template in self._by_name[step].templates.all:
            yield f"steps.{step}.{template.key}", template.source


@contextmanager
def _naming(step: str) -> Iterator[None]:
    """Add the step's name to a JobError about a template, if the block raises one."""
    try:
        yield
    except JobError as error:
        if not str(error).startswith("prompt."):
            raise
        raise JobError(f"steps.{step}.{error}") from error


def _problem(name: str, part: str | None, earlier: Mapping[str, StepTable]) -> str | None:
    if name not in earlier:
        known = (
            f"; a template can use the steps before its own step: {', '.join(earlier) or 'none'}"
        )
        return f"is not an earlier step{did_you_mean(name, earlier)}{known}"
    if part is not None and part not in ANSWER and not hasattr(dict, part):
        hint = did_you_mean(part, ANSWER) or f"; it has {', '.join(ANSWER)}"
        return f"has no {part!r}{hint}"
    if part in ("prediction", "scores") and not earlier[name].scoring.is_on:
        return f"has no {part!r}, because the step has neither extract nor scorers"
    return None


Renderer = PromptRenderer | StepsRenderer | SpeechRenderer


def renderer_of(
    job: JobConfig,
    *,
    adjust_sampling: AdjustSampling | None = None,
    load: LoadMedia | None = None,
) -> Renderer:
    """Return the renderer for the rows of ``job``. It depends on the job's task, and on whether the job has steps.
    Raises JobError if a template is invalid."""
    made: type[Renderer] = StepsRenderer if job.steps else PromptRenderer
    if job.task == "transcribe":
        made = SpeechRenderer
    return made(job, adjust_sampling=adjust_sampling, load=load)


def render_or_fail(renderer: Renderer, row: Row, attempt: int = 1) -> Request | Completion:
    """Return the rendered request, or a failed Completion with the row's error."""
    try:
        return renderer.render(row, attempt)
    except RowError as error:
        request = Request(row, None, None, {}, input_hash(row.fields), attempt)
        return Completion(request, error=error)


def with_answers(
    row: Row, answers: Mapping[str, Any], candidates: Sequence[str] | None = None
) -> Row:
    """Return ``row`` with the ``answers`` of earlier steps in the field ``steps``.

    If ``candidates`` is given, it becomes the field ``candidates``: the texts from which the step of ``select.step``
    chooses.
    """
    seen = {STEPS: answers} if candidates is None else {STEPS: answers, CANDIDATES: candidates}
    return replace(row, fields={**row.fields, **seen})
