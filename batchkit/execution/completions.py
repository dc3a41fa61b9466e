"""The steps from a completion to a line of a log, for plain rows, steps and rollouts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec import UNSET, Raw, structs
from msgspec.structs import replace

from batchkit.errors import EmptyTextError, InvalidOutputError, ServerError
from batchkit.execution.start import Start
from batchkit.scoring import Scored
from batchkit.scoring.parsed import value_of
from batchkit.storage.ledger import RecordLine, line_of
from batchkit.storage.plain_json import encoded
from batchkit.storage.schema import answer_of, is_count
from batchkit.storage.steps import GenerationLine, generation_line
from batchkit.types import BROKEN_OFF, Choice, Completion, Pooled, Record

SettledLine = RecordLine | GenerationLine
_NO_FIELDS = Raw(b"{}")


def resolved(start: Start, completion: Completion) -> Completion:
    """Return the completion with its choice selected and its JSON parsed, or with an error if the answer is
    incomplete."""
    parses = completion.request.step in start.parsing
    chosen = start.selection.chosen(completion, parses=parses)
    whole = failed_unless_whole(chosen, start.job.output.vector_dtype)
    return parsed_or_failed(whole) if parses else whole


def lacks_answer(start: Start, completion: Completion) -> bool:
    """Return whether the answer is not valid JSON, or scoring finds no prediction in it; ``retry.reask`` may then ask
    again."""
    if completion.error is not None:
        return isinstance(completion.error, InvalidOutputError)
    call, row = completion.request.call, completion.request.row
    scoring = start.scoring if call is None else start.step_scoring.get(call.step)
    if scoring is None:
        return False
    return scoring.finds_nothing(_scored_text(completion), row.fields, row.id)


def to_line(start: Start, completion: Completion) -> SettledLine:
    """Return the log line of ``completion``: a row's scored record, or one of its generations."""
    if completion.request.call is not None:
        return generation_line(completion)
    record = to_record(start, completion)
    pooled = completion.pooled if completion.error is None else None
    if pooled is None:
        return line_of(record)
    return line_of(record, pooled.vector, start.job.output.vector_dtype, pooled.tokens)


def _scored(start: Start, completion: Completion) -> Scored | None:
    if start.scoring is None:
        return None
    if completion.error is not None:
        return Scored(None, {})
    row = completion.request.row
    return start.scoring.score(_scored_text(completion), row.fields, row.id)


def _scored_text(completion: Completion) -> str:
    """Return the text that is scored: the answer's text, or the label of a class."""
    if completion.pooled is not None:
        return completion.pooled.label or ""
    return completion.text


def to_record(start: Start, completion: Completion) -> Record:
    """Return the scored record of the row that ``completion`` settled."""
    job, keep, scored = start.job, start.kept_fields, _scored(start, completion)
    request, error, choice = completion.request, completion.error, completion.choice
    kept = completion.choices if job.keeps_choices or choice is None else [choice]
    transcript = completion.transcript
    return Record(
        **answer_of(completion, kept, of_failed=False),
        fields=_raw({name: request.row.fields.get(name) for name in keep}) if keep else _NO_FIELDS,
        input_hash=request.input_hash,
        parsed=None if error is not None or completion.parsed is None else _raw(completion.parsed),
        prompt=completion.prompt if job.output.prompt else None,
        truncated_tokens=_truncated_tokens(completion),
        endpoint=request.endpoint,
        generations=completion.generations,
        steps=None if completion.steps is None else _raw(completion.steps),
        prediction=UNSET if scored is None else scored.prediction,
        scores=None if scored is None else scored.scores,
        unscored=None if scored is None else scored.unscored,
        dry_run=start.is_dry,
        **({} if error is not None or transcript is None else structs.asdict(transcript)),
        **({} if error is not None or completion.pooled is None else _of_pooled(completion)),
    )


def _raw(value: Any) -> Raw:
    """Return a value for the record, encoded by orjson, because msgspec would write some Python values differently."""
    return Raw(encoded(value)[:-1])


def _of_pooled(completion: Completion) -> dict[str, Any]:
    """Return the record's fields for the answer to a pooling task."""
    pooled, pair = completion.pooled, completion.request.pair
    assert pooled is not None
    scores = pooled.scores
    if scores is None or pair is None:
        return {
            "label": pooled.label,
            "probabilities": pooled.probabilities,
            "entities": pooled.entities,
        }
    if not pair.is_list:
        return {"score": scores[0]}
    return {"score": scores, "order": sorted(range(len(scores)), key=lambda n: -scores[n])}


def _truncated_tokens(completion: Completion) -> int | None:
    cut, usage = completion.request.cut, completion.usage
    if cut is None or usage is None or completion.is_copy:
        return None
    if not (is_count(cut.prompt_tokens) and is_count(usage.prompt_tokens)):
        return None
    tokens = cut.prompt_tokens - usage.prompt_tokens
    return tokens if tokens >= 0 else None  # a server may count differently when it refuses


def failed_unless_whole(completion: Completion, vector_dtype: str = "float32") -> Completion:
    """Return the completion, with an error if its answer is cut off, is blank, or can't be stored.

    Numbers must be finite. The numbers of a vector must also fit into ``vector_dtype``.
    """
    if completion.error is not None:
        return completion
    if completion.pooled is not None:
        if (fault := _fault_of(completion.pooled, vector_dtype)) is None:
            return completion
        return replace(completion, error=InvalidOutputError(fault), pooled=None)
    if completion.selected is not None:  # the selection considers only whole answers
        return completion
    for choice in completion.choices:
        if (reason := choice.finish_reason) in BROKEN_OFF:
            broken = ServerError(f"the answer broke off in the middle (finish_reason {reason})")
            return replace(completion, error=broken)
    if any(choice.is_answer for choice in completion.choices):
        return completion
    return replace(completion, error=_empty(completion.choices))


def _empty(choices: Sequence[Choice]) -> EmptyTextError:
    cut_off = any(choice.reasoning and choice.finish_reason == "length" for choice in choices)
    if cut_off:
        return EmptyTextError(
            "the answer was cut off inside its reasoning (finish_reason length): raise"
            " sampling.max_tokens, or limit the reasoning with sampling.thinking_token_budget"
        )
    reason = choices[0].finish_reason if choices else None
    return EmptyTextError(f"the model answered with no text (finish_reason {reason})")


def _fault_of(pooled: Pooled, vector_dtype: str) -> str | None:
    """Return why the numbers of the answer can't be stored, or None if they can."""
    import numpy as np

    if pooled.vector is None:
        numbers = np.array([*(pooled.probabilities or ()), *(pooled.scores or ())])
    else:
        numbers = np.frombuffer(pooled.vector, "<f4")
    if not np.isfinite(numbers).all():
        return (
            "the model's answer has a number that is not finite (NaN or infinite); a dtype with a larger"
            ' range may help: engine.options.dtype = "bfloat16" or "float32"'
        )
    largest = np.abs(numbers).max(initial=0)
    if pooled.vector is None or largest <= np.finfo(vector_dtype).max:
        return None
    return (
        f"the vector has {largest:,.0f}, which {vector_dtype} can't hold; set output.vector_dtype ="
        ' "float32" (or pooling.use_activation = true)'
    )


def parsed_or_failed(completion: Completion) -> Completion:
    """Return the completion with the JSON value of its answer, or with an error if the answer is not valid JSON."""
    if completion.error is not None or completion.choice is None:
        return completion
    try:
        value = value_of(completion.choice, completion.request.sampling)
    except InvalidOutputError as error:
        return replace(completion, error=error)
    return replace(completion, parsed=value)
