"""The prompts of ``[[steps]]``: each is rendered as the prompt of a job of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from batchkit.config.tables import JobConfig
from batchkit.errors import PromptTooLongError
from batchkit.rendering.media import load_image
from batchkit.rendering.messages import Message
from batchkit.rendering.renderer import AdjustSampling, LoadImage, PromptRenderer
from batchkit.rendering.templates.prompt import PathTemplate
from batchkit.types import Completion, Request, Row, RowHint

CANDIDATES = "candidates"
_NO = ("", "false", "no", "none", "0")


class StepsRenderer:
    """As ``PromptRenderer``, for a job with steps; what has no step's name is about the first one.

    Raises:
        JobError: a template or template file of a step can't be used.
    """

    def __init__(
        self,
        job: JobConfig,
        *,
        adjust_sampling: AdjustSampling | None = None,
        load: LoadImage = load_image,
    ) -> None:
        self._by_name = {
            step.name: PromptRenderer(job.of_step(step), adjust_sampling=adjust_sampling, load=load)
            for step in job.steps
        }
        self._first = self._by_name[job.steps[0].name]
        self._when = {
            step.name: PathTemplate(f"steps.{step.name}.when", step.when, job)
            for step in job.steps
            if step.when is not None
        }
        steps = [
            step.model_copy(update={"prompt": self._by_name[step.name].job.prompt})
            for step in job.steps
        ]
        self.job = job.model_copy(update={"steps": steps})
        self.takes_long = any(renderer.takes_long for renderer in self._by_name.values())

    def check_files(self) -> None:
        for renderer in self._by_name.values():
            renderer.check_files()

    def runs(self, step: str, row: Row) -> bool:
        """Whether the step is not skipped; ``row`` as for ``render_step``.

        Raises:
            RowError: its template can't be rendered.
        """
        when = self._when.get(step)
        return when is None or when.render(row.fields).strip().lower() not in _NO

    def step_takes_long(self, step: str) -> bool:
        """True if ``runs`` and ``render_step`` open files, or wait for a process."""
        when, renderer = self._when.get(step), self._by_name[step]
        return renderer.takes_long or renderer.opens_files or bool(when and when.takes_long)

    def render_step(self, step: str, row: Row, attempt: int) -> Request:
        """The request of a step; ``row`` has what ``with_answers`` adds.

        Raises:
            RowError: as ``PromptRenderer.render``.
        """
        return self._by_name[step].render(row, attempt)

    def render(self, row: Row, attempt: int = 1) -> Request:
        return self._first.render(with_answers(row, {}), attempt)

    def render_or_fail(self, row: Row, attempt: int = 1) -> Request | Completion:
        return self._first.render_or_fail(with_answers(row, {}), attempt)

    def messages(self, messages: Any) -> list[Message]:
        return self._first.messages(messages)

    def shortened(self, request: Request, error: PromptTooLongError) -> Request | None:
        assert request.call is not None
        shorter = self._by_name[request.call.step].shortened(request, error)
        return None if shorter is None else replace(shorter, call=request.call)

    def image_sources(self, row: Row) -> list[Any]:
        return self._first.image_sources(with_answers(row, {}))

    def hint(self, row: Row) -> RowHint:
        return self._first.hint(with_answers(row, {}))


Renderer = PromptRenderer | StepsRenderer


def renderer_of(
    job: JobConfig,
    *,
    adjust_sampling: AdjustSampling | None = None,
    load: LoadImage = load_image,
) -> Renderer:
    """What renders the rows of ``job``; raises JobError if a template of it can't be used."""
    made = StepsRenderer if job.steps else PromptRenderer
    return made(job, adjust_sampling=adjust_sampling, load=load)


def with_answers(
    row: Row, answers: Mapping[str, Any], candidates: Sequence[str] | None = None
) -> Row:
    """``row`` with ``answers`` of its steps, by name, as templates see them, and for a step that judges
    the ``candidates``."""
    seen = {"steps": answers} if candidates is None else {"steps": answers, CANDIDATES: candidates}
    return replace(row, fields={**row.fields, **seen})
