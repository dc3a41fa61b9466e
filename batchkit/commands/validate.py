"""The ``validate`` command and ``run --dry-run``: prepare rows as for the engine, without loading a model."""

from __future__ import annotations

import json
import statistics
from bisect import insort
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

from batchkit.config.masking import masked, masked_text
from batchkit.config.tables import JobConfig
from batchkit.config.terminal import shortened
from batchkit.engines.base import Preflight, RenderedPrompt
from batchkit.engines.registry import open_preflight
from batchkit.errors import JobError, PromptTooLongError, RowError
from batchkit.execution.first_rows import blanks_in, check_columns, check_uses_a_column, hints
from batchkit.execution.rollouts.function import loaded_function
from batchkit.rendering.held_media import HeldMedia
from batchkit.rendering.prefetch import Prefetch
from batchkit.rendering.steps import Renderer, render_or_fail, renderer_of
from batchkit.rendering.tools import ignored_tools
from batchkit.sources import read_rows
from batchkit.sources.input import why_empty
from batchkit.types import Completion, Request, Row

SHOWN = 20
_MOST_SHOWN = 2000  # characters of a row


@dataclass(frozen=True, order=True, slots=True)
class Problem:
    """A row that would fail, with the kind and the message of its error."""

    index: int
    id: str
    kind: str
    message: str


@dataclass(frozen=True, slots=True)
class Validation:
    """The result of ``validate``.

    - ``problems``: the first 20 of the ``failed`` rows.
    - ``prompt_tokens``: exact minimum, median, 99th percentile, maximum and sum; empty if they can't be counted.
    - ``hints``: likely mistakes that make no row fail.
    - ``not_checked``: parts of the job that only a run can check.
    """

    rows: int
    ok: int
    failed: int
    failed_by_kind: dict[str, int]
    problems: list[Problem]
    prompt_tokens: dict[str, float]
    hints: list[str]
    not_checked: list[str]

    @property
    def exit_code(self) -> int:
        return 3 if self.failed else 0

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def to_text(self) -> str:
        tokens = ", ".join(f"{name} {count:,.0f}" for name, count in self.prompt_tokens.items())
        lines = [f"{self.rows:,} rows: {self.ok:,} ok, {self.failed:,} would fail"]
        lines.append(f"prompt tokens: {tokens or ('not counted' if self.ok else 'none')}")
        lines += [*self.not_checked, *self.hints]
        for problem in self.problems:
            row = f"row {problem.index} (id {problem.id})"
            lines.append(f"  {row} {problem.kind}: {problem.message}")
        if self.failed > len(self.problems):
            lines.append(f"  … and {self.failed - len(self.problems):,} more")
        return "\n".join(lines)


def validate(job: JobConfig, rows: int | None = None) -> Validation:
    """Render the first ``rows`` rows (None means all) and check template, media, length and parameters.

    Repeated ids give only a hint, because rows with the same id are all answered. Writes nothing.

    Raises:
        JobError: The job itself is invalid.
    """
    problems: list[Problem] = []
    by_kind: Counter[str] = Counter()
    tokens: list[int] = []
    repeats: dict[int, tuple[int, str]] = {}
    first: Row | None = None
    count, about_tools = 0, ""
    for row, request, prompt, error in checked(
        job, _noting_repeats(islice(read_rows(job.input), rows), repeats)
    ):
        count += 1
        if row.error is None and (first is None or row.index < first.index):
            first = row
        if prompt is not None and prompt.prompt_tokens is not None:
            tokens.append(prompt.prompt_tokens)
        if prompt is not None:
            about_tools = about_tools or ignored_tools(request, prompt.text)
        if error is not None:
            by_kind[error.kind] += 1
            insort(problems, Problem(row.index, row.id, error.kind, masked_text(str(error))))
            del problems[SHOWN:]
    if not count:
        raise JobError(why_empty(job.input))
    failed = by_kind.total()
    if first is not None:
        check_uses_a_column(job, first)
    if failed < count:
        check_columns(read_rows(job.input), job)
    return Validation(
        rows=count,
        ok=count - failed,
        failed=failed,
        failed_by_kind=dict(by_kind),
        problems=problems,
        prompt_tokens=_spread(tokens),
        hints=[
            *([] if first is None else map(masked_text, hints(job, first.fields))),
            *blanks_in(read_rows(job.input.with_filled(frozenset())), job),
            *_of_repeats(repeats),
            *filter(None, [about_tools]),
        ],
        not_checked=[*not_checked(job)],
    )


class CheckedRows(NamedTuple):
    """A row with the request and the prompt that the engine would receive. ``prompt`` is None if the row would fail
    with ``error``, or if the job has a ``[rollout]``, whose function makes the requests."""

    row: Row
    request: Request
    prompt: RenderedPrompt | None
    error: RowError | None


def checked(job: JobConfig, rows: Iterator[Row]) -> Iterator[CheckedRows]:
    """Render and check ``rows``, and yield them in any order.

    Raises:
        JobError: The job itself is invalid.
    """
    renderer, preflights = renderer_of(job), _opened_preflights(job)
    prefetch = Prefetch(
        rows,
        partial(render_or_fail, renderer) if job.rollout is None else _read_only,
        threads=job.run.render_threads,
        ahead=2 * job.run.render_threads,
        held=HeldMedia(job.media.max_memory_bytes),
    )
    with closing(prefetch):
        while not prefetch.exhausted:
            rendered = prefetch.get(timeout_s=1.0)
            if isinstance(rendered, Completion):
                yield CheckedRows(rendered.request.row, rendered.request, None, rendered.error)
            elif rendered is not None:
                prefetch.release(rendered)
                if job.rollout is not None:
                    yield CheckedRows(rendered.row, rendered, None, None)
                    continue
                try:
                    request, prompt = _fitted(rendered, renderer, preflights)
                except RowError as refusal:
                    yield CheckedRows(rendered.row, rendered, None, refusal)
                else:
                    yield CheckedRows(rendered.row, request, prompt, None)


def preview(job: JobConfig, rows: int) -> Iterator[str]:
    """Yield the first ``rows`` rows as text: what the engine would receive, or the row's error.

    For a job with steps, this is the prompt of the first step that is not skipped.

    Raises:
        JobError: The job itself is invalid.
    """
    in_order = job.with_keys(run={"render_threads": 1})
    for row, request, prompt, error in checked(in_order, islice(read_rows(job.input), rows)):
        head = f"--- row {row.index} (id {row.id})"
        if error is not None:
            yield f"{head}\nwould fail, {error.kind}: {masked_text(str(error))}"
        elif prompt is None:
            fields = json.dumps(row.fields, default=str, ensure_ascii=False)
            yield f"{head}\nthe function gets: {shortened(fields, _MOST_SHOWN)}"
        else:
            step = f", step {request.step}" if request.step else ""
            yield f"{head}{step}\n{_shown(job, request, prompt)}"


def _shown(job: JobConfig, request: Request, prompt: RenderedPrompt) -> str:
    sizes = ", ".join(f"{image.size[0]}x{image.size[1]}" for image in request.images)
    clips = "".join(f", {clip.in_words}" for clip in request.all_clips)
    tokens = "uncounted" if prompt.prompt_tokens is None else f"{prompt.prompt_tokens:,}"
    table = "sampling" if job.generates else "pooling"
    tools = ""
    if request.tools:
        choice = request.tool_choice or "auto"
        named = choice["function"]["name"] if isinstance(choice, dict) else choice
        names = ", ".join(tool["function"]["name"] for tool in request.tools)
        tools = f", tools: {names} (tool_choice: {named})"
    return (
        f"{tokens} prompt tokens, images: {sizes or 'none'}{clips}{tools}\n"
        f"{table}: {json.dumps(masked(dict(request.sampling), table))}\n{prompt.text}"
    )


def not_checked(job: JobConfig) -> Iterator[str]:
    """Yield a line for each part of the job that only a run can check."""
    for place, its in job.of_each_step():
        more = sorted(its.sampling.model_extra or {})
        if more and its.engine.kind == "dry-run":
            yield f'{place}sampling: {", ".join(more)} not checked, as engine.kind is "dry-run"'
    if job.rollout is not None:
        yield (
            "[rollout]: rows were read and the function was imported; its requests are known once it"
            " runs"
        )
    if later := [step.name for step in job.steps[1:]]:
        yield (
            f"[[steps]]: rows are checked with their first prompt, of step {job.steps[0].name} unless it is"
            f" skipped. Prompts of {', '.join(later)} contain answers: their templates and parameters are checked, their"
            " lengths and images are not"
        )


def _opened_preflights(job: JobConfig) -> dict[str, Preflight]:
    """Check each step's parameters. Return the preflight of each step, which renders and measures prompts, by step name
    ("" for a job without steps).

    Raises:
        JobError: The parameters are invalid, or the job's function can't be found.
    """
    if job.rollout is not None:
        loaded_function(job.rollout.function)
    opened: dict[str, Preflight] = {}
    by_step: dict[str, Preflight] = {}
    for place, its in job.of_each_step():
        key = repr((its.engine, its.sampling, its.prompt.chat_template_kwargs))
        try:
            opened[key] = opened.get(key) or open_preflight(its)
        except JobError as error:
            if not place:
                raise
            raise JobError(f"{place.removesuffix('.')}: {error}") from error
        by_step[place.removeprefix("steps.").removesuffix(".")] = opened[key]
    return by_step


def _fitted(
    request: Request, renderer: Renderer, preflights: Mapping[str, Preflight]
) -> tuple[Request, RenderedPrompt]:
    """Return the request with its rendered prompt. A prompt that is too long is shortened if the job allows it."""
    preflight = preflights[request.step]
    while True:
        try:
            return request, preflight.render(request)
        except PromptTooLongError as error:
            shorter = renderer.shortened(request, error)
            if shorter is None:
                raise
            request = shorter


def _read_only(row: Row) -> Request | Completion:
    """Return a request without a prompt, for jobs with a ``[rollout]``: only its function knows the prompts."""
    request = Request(row, None, None, {}, input_hash="")
    return request if row.error is None else Completion(request, error=row.error)


def _of_repeats(repeats: Mapping[int, tuple[int, str]]) -> Iterator[str]:
    if repeats:
        row, (first, name) = min(repeats.items())
        yield (
            f"input.id: {len(repeats):,} rows repeat the id of an earlier row; for example, row {row} repeats row {first}"
            f" ({name!r}): each is answered, but can't be found by id"
        )


def _noting_repeats(rows: Iterator[Row], repeats: dict[int, tuple[int, str]]) -> Iterator[Row]:
    """Yield ``rows`` unchanged. For each row with the id of an earlier row, add an entry to ``repeats``.

    An entry is the row's index -> (index of the first row with this id, the id).
    """
    first_of: dict[str, int] = {}
    for row in rows:
        if row.error is None and first_of.setdefault(row.id, row.index) != row.index:
            repeats[row.index] = first_of[row.id], row.id
        yield row


def _spread(tokens: list[int]) -> dict[str, float]:
    if not tokens:
        return {}
    ordered = sorted(tokens)
    return {
        "min": ordered[0],
        "median": statistics.median(ordered),
        "p99": ordered[min(len(ordered) - 1, round(0.99 * len(ordered)))],
        "max": ordered[-1],
        "sum": sum(ordered),
    }
