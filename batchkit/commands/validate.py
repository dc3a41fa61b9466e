"""``validate`` and ``run --dry-run``: rows as the engine would get them, without the model."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any

from batchkit.config.masking import masked, masked_text
from batchkit.config.tables import JobConfig
from batchkit.engines.base import Preflight, RenderedPrompt
from batchkit.engines.registry import open_preflight
from batchkit.errors import PromptTooLongError, RowError
from batchkit.execution.hints import hints
from batchkit.rendering.prefetch import Prefetch
from batchkit.rendering.steps import Renderer, renderer_of
from batchkit.sources import read_rows
from batchkit.types import Completion, Request, Row

SHOWN = 20


@dataclass(frozen=True, order=True, slots=True)
class Problem:
    """A row that would fail, with the reason."""

    index: int
    id: str
    kind: str
    message: str


@dataclass(frozen=True, slots=True)
class Validation:
    """``problems`` holds the first of the ``failed`` rows; token counts are exact or missing.
    ``hints`` are likely mistakes that fail no row."""

    rows: int
    ok: int
    failed: int
    failed_by_kind: dict[str, int]
    problems: list[Problem]
    prompt_tokens: dict[str, float]
    hints: list[str]

    @property
    def exit_code(self) -> int:
        return 3 if self.failed else 0

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def to_text(self) -> str:
        tokens = ", ".join(f"{name} {count:,.0f}" for name, count in self.prompt_tokens.items())
        lines = [f"{self.rows:,} rows: {self.ok:,} ok, {self.failed:,} would fail"]
        lines.append(f"prompt tokens: {tokens or ('not counted' if self.ok else 'none')}")
        lines += self.hints
        for problem in self.problems:
            row = f"row {problem.index} (id {problem.id})"
            lines.append(f"  {row} {problem.kind}: {problem.message}")
        if self.failed > len(self.problems):
            lines.append(f"  … and {self.failed - len(self.problems):,} more")
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class Preview:
    """One row as the engine would get it, or the error it would fail with.

    ``params`` are of the job's table ``[sampling]`` or ``[pooling]``; ``table`` is its name.
    """

    index: int
    id: str
    prompt: str | None
    prompt_tokens: int | None
    images: list[tuple[int, int]]
    table: str
    params: dict[str, Any]
    error: str | None
    tools: Sequence[str] = ()
    tool_choice: Any = None

    def to_text(self) -> str:
        head = f"--- row {self.index} (id {self.id})"
        if self.error is not None:
            return f"{head}\nwould fail, {self.error}"
        sizes = ", ".join(f"{width}x{height}" for width, height in self.images)
        tokens = "uncounted" if self.prompt_tokens is None else f"{self.prompt_tokens:,}"
        return (
            f"{head}\n{tokens} prompt tokens, images: {sizes or 'none'}{self._tools}\n"
            f"{self.table}: {json.dumps(masked(self.params, self.table))}\n{self.prompt}"
        )

    @property
    def _tools(self) -> str:
        if not self.tools:
            return ""
        choice = self.tool_choice or "auto"
        named = choice["function"]["name"] if isinstance(choice, dict) else choice
        return f", tools: {', '.join(self.tools)} (tool_choice: {named})"


def validate(job: JobConfig, rows: int | None = None) -> Validation:
    """Render and check the first ``rows`` rows (all if None): template, media, length, parameters.

    If two rows have one id, the second is the problem. Writes nothing.

    Raises:
        JobError: the job itself is invalid.
    """
    renderer, preflight = renderer_of(job), open_preflight(job)
    problems: list[Problem] = []
    by_kind: Counter[str] = Counter()
    tokens: list[int] = []
    repeats: dict[int, int] = {}
    first: Row | None = None
    count = 0
    for rendered in _rendered(job, renderer, rows, repeats):
        count += 1
        request = rendered.request if isinstance(rendered, Completion) else rendered
        row = request.row
        error = rendered.error if isinstance(rendered, Completion) else None
        if row.error is None and (first is None or row.index < first.index):
            first = row
        if error is None:
            try:
                _, prompt = _fitted(request, renderer, preflight)
                if prompt.prompt_tokens is not None:
                    tokens.append(prompt.prompt_tokens)
            except RowError as refusal:
                error = refusal
        kind, message = (error.kind, masked_text(str(error))) if error is not None else (None, "")
        if row.index in repeats:
            kind, message = "id", f"row {repeats[row.index]} has the id {row.id!r}, too"
        if kind is not None:
            by_kind[kind] += 1
            problems.append(Problem(row.index, row.id, kind, message))
            if len(problems) > 10 * SHOWN:
                problems = sorted(problems)[:SHOWN]
    failed = by_kind.total()
    return Validation(
        rows=count,
        ok=count - failed,
        failed=failed,
        failed_by_kind={kind: count for kind, count in by_kind.items() if count},
        problems=sorted(problems)[:SHOWN],
        prompt_tokens=_spread(tokens),
        hints=[] if first is None else [masked_text(hint) for hint in hints(job, first.fields)],
    )


def preview(job: JobConfig, rows: int) -> Iterator[Preview]:
    """The first ``rows`` rows as the engine would get them.

    Raises:
        JobError: the job itself is invalid.
    """
    renderer, preflight = renderer_of(job), open_preflight(job)
    table = "sampling" if job.task == "generate" else "pooling"
    for row in islice(read_rows(job.input), rows):
        try:
            request, prompt = _fitted(renderer.render(row), renderer, preflight)
        except RowError as error:
            message = f"{error.kind}: {masked_text(str(error))}"
            yield Preview(row.index, row.id, None, None, [], table, {}, message)
            continue
        yield Preview(
            row.index,
            row.id,
            prompt.text,
            prompt.prompt_tokens,
            [image.size for image in request.images],
            table,
            dict(request.sampling),
            None,
            [tool["function"]["name"] for tool in request.tools or ()],
            request.tool_choice,
        )


def _fitted(
    request: Request, renderer: Renderer, preflight: Preflight
) -> tuple[Request, RenderedPrompt]:
    """The request as the engine would answer it, shortened if too long and the job allows it."""
    while True:
        try:
            return request, preflight.render(request)
        except PromptTooLongError as error:
            shorter = renderer.shortened(request, error)
            if shorter is None:
                raise
            request = shorter


def _rendered(
    job: JobConfig, renderer: Renderer, rows: int | None, repeats: dict[int, int]
) -> Iterator[Request | Completion]:
    """In any order; ``repeats`` maps a row with a repeated id to the first row that has it."""
    prefetch = Prefetch(
        _noting_repeats(islice(read_rows(job.input), rows), repeats),
        renderer.render_or_fail,
        threads=job.run.render_threads,
        ahead=2 * job.run.render_threads,
        max_bytes=job.media.max_memory_bytes,
    )
    with closing(prefetch):
        while not prefetch.exhausted:
            rendered = prefetch.get(timeout_s=1.0)
            if rendered is not None:
                if isinstance(rendered, Request):
                    prefetch.release(rendered)
                yield rendered


def _noting_repeats(rows: Iterator[Row], repeats: dict[int, int]) -> Iterator[Row]:
    first_of: dict[str, int] = {}
    for row in rows:
        if row.error is None and first_of.setdefault(row.id, row.index) != row.index:
            repeats[row.index] = first_of[row.id]
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
