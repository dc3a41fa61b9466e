"""Likely mistakes in a job, found by looking at its first row."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from batchkit.config.seams import SCORERS
from batchkit.config.suggest import did_you_mean
from batchkit.config.tables import JobConfig, ScoringTable
from batchkit.rendering.steps import CANDIDATES
from batchkit.rendering.templates.prompt import names_in
from batchkit.scoring import fields_of

_NEED_NO_REFERENCE = {"reward", "judge"}  # nor may a scorer of another package


def hints(job: JobConfig, first: Mapping[str, Any]) -> Iterator[str]:
    """A line per likely mistake in lengths, ``sampling_column``, ``output.keep``, the scoring, or what
    templates of steps read; ``first``: a row's fields."""
    for place, its in job.of_each_step():
        yield from (place + hint for hint in _of_generation(its, first))
    has_messages = job.rollout is None and "messages" in first and "tools" in first
    first_step = next(its for _, its in job.of_each_step())
    if first_step.prompt.tools is None and has_messages:
        yield 'prompt.tools: rows have a field "tools", which is not used; set tools = "{{ tools }}"'
    yield from _of_steps(job, first)
    yield from _absent("output.keep", job.output.keep, first)
    if job.scoring.is_on:
        yield from scoring_hints(job.scoring, first)
        yield from _of_judge(job, first)


def _of_judge(job: JobConfig, first: Mapping[str, Any]) -> Iterator[str]:
    """Rows from Python are gone when a judge is asked: it gets what [vars] has by their names."""
    judge = job.scoring.judge
    if judge is None or judge.step is not None or job.input.path is not None:
        return
    read = names_in(job.model_copy(update={"vars": {}}), judge.prompt, ())
    ours = {"prediction", "reference", "text", *job.output.keep, *fields_of(job.scoring)}
    for name in sorted((read & job.vars.keys() & first.keys()) - ours):
        yield (
            f"scoring.judge: rows have a field {name!r}, and [vars] has it, too, which is what the judge"
            " gets, unless output.keep names it"
        )


def _of_generation(job: JobConfig, first: Mapping[str, Any]) -> Iterator[str]:
    most, wanted = job.engine.options.get("max_model_len"), job.sampling.max_tokens
    if job.task == "generate" and isinstance(most, int) and wanted >= most:
        yield (
            f"sampling.max_tokens: {wanted} leaves no room for a prompt, as engine.options.max_model_len"
            f" is {most}, for prompt and answer together; an answer ends where they reach it"
        )
    if (column := job.sampling.sampling_column) is not None:
        yield from _absent("sampling.sampling_column", [column], first)
    has_parser = job.engine.kind != "vllm" or job.engine.tool_call_parser is not None
    if job.prompt.tools is not None and not has_parser:
        yield "prompt.tools: without engine.tool_call_parser, calls stay in the text of the answer"


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
