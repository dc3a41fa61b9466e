"""The first rows, looked at before the model is loaded: a mistake in the job shows within seconds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from batchkit.config.seams import SCORERS
from batchkit.config.suggest import did_you_mean
from batchkit.config.tables import JobConfig, ScoringTable
from batchkit.errors import JobError, MediaError, RowError, WrongTaskError
from batchkit.rendering.steps import CANDIDATES, Renderer
from batchkit.rendering.templates.prompt import names_in
from batchkit.scoring import fields_of
from batchkit.types import Completion, Row

_NEED_NO_REFERENCE = {"reward", "judge"}  # nor may a scorer of another package


def check_first_rows(rows: Iterator[Row], job: JobConfig, renderer: Renderer) -> Sequence[Row]:
    """Take rows from ``rows`` until one can be rendered, or fails as no other does, but at most
    ``run.check_rows``: usually one. Returns those taken.

    Workers on Ray may see media that this process can't, so a failure by them means nothing then; what a
    rollout asks is known once it runs.

    Raises:
        JobError: they all fail alike.
    """
    taken: list[Row] = []
    first: RowError | None = None
    if job.rollout is not None:
        return taken
    while len(taken) < job.run.check_rows and (row := next(rows, None)) is not None:
        taken.append(row)
        rendered = renderer.render_or_fail(row)
        error = rendered.error if isinstance(rendered, Completion) else None
        if error is None or (first is not None and _reason(error) != _reason(first)):
            return taken
        first = first or error
    is_elsewhere = job.run.workers is not None and isinstance(first, MediaError)
    is_enough = len(taken) == job.run.check_rows or isinstance(first, WrongTaskError)
    if first is not None and is_enough and not is_elsewhere:
        raise JobError(
            f"row {taken[0].index} (id {taken[0].id}): {first.kind}: {first}\nAll of the first"
            f" {len(taken)} rows fail like this, so the model was not loaded. Correct the job or"
            " its input and run the same command again; if other rows are good, --set"
            " run.check_rows=0 runs them"
        )
    return taken


def _reason(error: RowError) -> tuple[str, str]:
    """Equal for errors that differ only in the file or the line that they begin with."""
    message = str(error)
    return error.kind, message.partition(": ")[2] or message


def hints(job: JobConfig, first: Mapping[str, Any]) -> Iterator[str]:
    """A line per likely mistake in lengths, ``sampling_column``, ``output.keep``, the scoring, or what
    templates of steps read; ``first``: a row's fields."""
    for place, its in job.of_each_step():
        yield from (place + hint for hint in _of_generation(its, first))
    yield from _of_steps(job, first)
    yield from _absent("output.keep", job.output.keep, first)
    if job.scoring.is_on:
        yield from scoring_hints(job.scoring, first)


def _of_generation(job: JobConfig, first: Mapping[str, Any]) -> Iterator[str]:
    most, wanted = job.engine.options.get("max_model_len"), job.sampling.max_tokens
    if job.task == "generate" and isinstance(most, int) and wanted >= most:
        yield (
            f"sampling.max_tokens: {wanted} leaves no room for a prompt, as engine.options.max_model_len"
            f" is {most}, for prompt and answer together; an answer ends where they reach it"
        )
    if (column := job.sampling.sampling_column) is not None:
        yield from _absent("sampling.sampling_column", [column], first)


def _of_steps(job: JobConfig, first: Mapping[str, Any]) -> Iterator[str]:
    ours = {"steps", CANDIDATES} if job.select.step is not None else {"steps"}
    for name in ours & first.keys() if job.steps else ():
        yield f"[[steps]]: rows have a field {name!r}, and templates get what batchkit means by that name"
    for n, step in enumerate(job.steps):
        key, prompt = f"steps.{step.name}", step.prompt if n else None  # the first is rendered
        when = [] if step.when is None else [step.when]
        names = names_in(job.of_step(step), prompt, when) - ours
        yield from _absent(key, sorted(names), first)
        if step.scoring.is_on:
            yield from scoring_hints(step.scoring, first, key)


def scoring_hints(
    table: ScoringTable, first: Mapping[str, Any] | None, key: str = "scoring"
) -> Iterator[str]:
    """Like ``hints``, for the scoring alone, which is at ``key``; ``first`` may be unknown."""
    if first is not None:
        yield from _absent(key, sorted(fields_of(table)), first)
    if lost := _without_reference(table):
        need = "needs" if len(lost) == 1 else "need"
        or_run = " or scoring.reference_run" * (key == "scoring")
        yield (
            f"{key}: {', '.join(lost)} {need} a right answer to compare with: set {key}.reference{or_run}"
        )


def _absent(key: str, names: Iterable[str], first: Mapping[str, Any]) -> Iterator[str]:
    """A field that the first row lacks is probably misspelt, but may just be rare."""
    for name in names:
        if name not in first:
            hint = did_you_mean(name, map(str, first))
            yield f"{key}: the first row has no field {name!r}{hint}"


def _without_reference(table: ScoringTable) -> list[str]:
    """Scorers of those parts of ``[scoring]`` that name no reference."""
    if table.reference_run is not None:
        return []
    found = {
        name
        for part in table.parts
        if (part.reference or table.reference) is None
        for name in (table.scorers if part.scorers is None else part.scorers)
    }
    known = {*SCORERS.also, *SCORERS.own}
    return sorted(found & known - _NEED_NO_REFERENCE)
