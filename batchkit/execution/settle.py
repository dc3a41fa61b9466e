"""A completion becomes what counts, and then a line of a log: one way for plain rows, steps and rollouts."""

from __future__ import annotations

from batchkit.execution.records import failed_unless_whole, parsed_or_failed, to_record
from batchkit.execution.start import Start
from batchkit.scoring import Scored
from batchkit.storage.ledger import RecordLine, line_of
from batchkit.storage.steps import GenerationLine, generation_line
from batchkit.types import Completion

SettledLine = RecordLine | GenerationLine


def resolved(start: Start, completion: Completion) -> Completion:
    """The completion with the choice that counts and its JSON value, or with an error if that is no
    whole answer. The outcome of a row whose generations were resolved stays as it is."""
    if completion.generations is not None:
        return completion
    parses = completion.request.step in start.job.parsing
    chosen = start.selection.chosen(completion, parses=parses)
    whole = failed_unless_whole(chosen, start.job.output.vector_dtype)
    return parsed_or_failed(whole) if parses else whole


def lacks_answer(start: Start, completion: Completion) -> bool:
    """Whether the scoring finds nothing in the answer, so that ``retry.reask`` may ask again."""
    call, row = completion.request.call, completion.request.row
    scoring = start.scoring if call is None else start.step_scoring.get(call.step)
    if scoring is None:
        return False
    return scoring.finds_nothing(_scored_text(completion), row.fields, row.id)


def settle(start: Start, completion: Completion) -> SettledLine:
    """The line for the log that ``completion`` belongs to: a row's record, or one of its generations."""
    if completion.request.call is not None:
        return generation_line(completion)
    record = to_record(
        completion,
        start.kept_fields,
        with_prompt=start.job.output.prompt,
        with_choices=start.job.keeps_choices,
        scored=_scored(start, completion),
    )
    pooled = completion.pooled if completion.error is None else None
    vector = None if pooled is None else pooled.vector
    return line_of(record, vector, start.job.output.vector_dtype)


def _scored(start: Start, completion: Completion) -> Scored | None:
    if start.scoring is None:
        return None
    if completion.error is not None:
        return Scored(None, {})
    row = completion.request.row
    return start.scoring.score(_scored_text(completion), row.fields, row.id)


def _scored_text(completion: Completion) -> str:
    """What the scoring reads of an answer: its text, or the label of a class."""
    if completion.pooled is not None:
        return completion.pooled.label or ""
    return completion.text
