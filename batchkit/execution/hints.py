"""Likely mistakes in a job, found by looking at its first row."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from batchkit.config.suggest import did_you_mean
from batchkit.config.tables import JobConfig, ScoringTable
from batchkit.scoring import fields_of

_NEED_NO_REFERENCE = {"reward", "judge"}


def hints(job: JobConfig, first: Mapping[str, Any]) -> Iterator[str]:
    """A line per likely mistake in lengths, ``sampling_column``, ``output.keep`` or the scoring;
    ``first``: a row's fields."""
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
    if job.prompt.tools is None and "messages" in first and "tools" in first:
        yield 'prompt.tools: rows have a field "tools", which is not used; set tools = "{{ tools }}"'
    yield from _absent("output.keep", job.output.keep, first)
    if job.scoring.is_on:
        yield from scoring_hints(job.scoring, first)


def scoring_hints(table: ScoringTable, first: Mapping[str, Any] | None) -> Iterator[str]:
    """Like ``hints``, for the scoring alone; ``first`` may be unknown."""
    if first is not None:
        yield from _absent("scoring", sorted(fields_of(table)), first)
    if lost := _without_reference(table):
        need = "needs" if len(lost) == 1 else "need"
        yield (
            f"scoring: {', '.join(lost)} {need} a right answer to compare with: set"
            " scoring.reference or scoring.reference_run"
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
    return sorted(found - _NEED_NO_REFERENCE)
