"""The lines of the logs: a ``Record`` (``types.py``) in ``results.jsonl``, a ``Generation`` in ``steps.jsonl``.

A line is valid if msgspec decodes it as its type. Recovery, ``verify`` and all readers use this module.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import msgspec
import orjson

from batchkit.errors import StoreError
from batchkit.storage import plain_json
from batchkit.types import Count, Counted, LoggedAnswer, Record

LINE_HEAD = b'{"index":'
NO_TEXT = ("embedding", "label", "score", "segments")  # answers that may have no text


class Generation(LoggedAnswer, kw_only=True, omit_defaults=True):
    """One line of ``steps.jsonl``: one generation of a row that has several.

    - ``call``: number of the generation among the row's generations of the same step, from 0.
    - ``replay``: "fresh" if the row may make other requests than the recorded ones when it is run again. This is so if
      some of its generations may be lost, or if another function or another job made them.
    """

    step: str
    call: Count
    engine: str | None = None
    replay: Literal["fresh"] | None = None


Sound = TypeVar("Sound", Record, Generation)
_encoder = msgspec.json.Encoder()
_records = msgspec.json.Decoder(Record)
_generations = msgspec.json.Decoder(Generation)


def encoded(line: Record | Generation) -> bytes:
    """Return ``line`` as one line of JSON, newline included; a lone surrogate is written as ``?``."""
    try:
        return _encoder.encode(line) + b"\n"
    except UnicodeEncodeError:
        # A Raw value was encoded before, for example a row's fields.
        table = msgspec.to_builtins(line, enc_hook=lambda raw: orjson.loads(memoryview(raw)))
        return plain_json.encoded(table)


def record_in(raw: bytes) -> Record | None:
    """Return the record in the line ``raw``, newline included; None if the line is not a record."""
    return _decoded_if_sound(_records, raw)


def generation_in(raw: bytes) -> Generation | None:
    """Return the generation in the line ``raw``, newline included; None if the line is not a generation."""
    return _decoded_if_sound(_generations, raw)


def record_of(raw: bytes) -> dict[str, Any] | None:
    """Return the record in the line ``raw`` as a dict; None if the line is not a record."""
    return None if record_in(raw) is None else orjson.loads(raw)


def whole_record(raw: bytes, path: Path, offset: int) -> dict[str, Any]:
    """Return the record in the line ``raw`` as a dict. Raises StoreError like ``sound_record``."""
    sound_record(raw, path, offset)
    record: dict[str, Any] = orjson.loads(raw)
    return record


def sound_record(raw: bytes, path: Path, offset: int) -> Record:
    """Return the record in the line ``raw``, which begins at byte ``offset`` of ``path``.

    Raises:
        StoreError: the line is damaged.
    """
    try:
        return _decoded(_records, raw)
    except (msgspec.MsgspecError, ValueError) as error:
        raise StoreError(
            f"{path}: the record at byte {offset} is damaged: {error}. `batchkit verify --repair"
            f" {path.parent}` sets the record aside; then run the job again for its row"
        ) from error


def failure_kind(record: Mapping[str, Any]) -> str | None:
    """Return the error kind of a failed record, "empty" for an ok record without content, None for an answer."""
    if record["status"] == "failed":
        return str((record.get("error") or {}).get("kind", "unknown"))
    if any(record.get(name) is not None for name in NO_TEXT):
        return None
    choices = record.get("choices") or [record]
    is_answer = any((c.get("text") or "").strip() or c.get("tool_calls") for c in choices)
    return None if is_answer else "empty"


def tokens_in(line: Counted | Generation) -> tuple[int, int]:
    """Return the prompt tokens and completion tokens of a record or a generation, with those of its earlier
    attempts."""
    prompt_tokens = completion_tokens = 0
    for usage in (line.usage, line.earlier_usage):
        if usage is not None:
            prompt_tokens += usage.prompt_tokens
            completion_tokens += usage.completion_tokens
    return prompt_tokens, completion_tokens


class Spent(NamedTuple):
    """Totals over generations: their number, the number of failed ones, and their tokens."""

    generations: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0

    def with_one(self, generation: Generation) -> Spent:
        prompt_tokens, completion_tokens = tokens_in(generation)
        return Spent(
            self.generations + 1,
            self.failed + (generation.status == "failed"),
            self.prompt_tokens + prompt_tokens,
            self.completion_tokens + completion_tokens,
        )

    def with_tokens_of(self, counted: Spent, there: Spent) -> Spent:
        """Return these totals plus the tokens of a row's generations that are lost.

        - ``counted``: totals of the row's generations according to its record.
        - ``there``: totals of the row's generations that are still in the log.
        """
        return self._replace(
            prompt_tokens=self.prompt_tokens + counted.prompt_tokens - there.prompt_tokens,
            completion_tokens=self.completion_tokens
            + counted.completion_tokens
            - there.completion_tokens,
        )


def _decoded_if_sound(decoder: msgspec.json.Decoder[Sound], raw: bytes) -> Sound | None:
    try:
        return _decoded(decoder, raw) if raw.endswith(b"\n") else None
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None


def _decoded(decoder: msgspec.json.Decoder[Sound], raw: bytes) -> Sound:
    if not raw.isascii():
        raw.decode()  # msgspec does not check the UTF-8 of unknown keys
    return decoder.decode(raw)


_MOST_SHOWN = 20


def answers_in_words(record: Mapping[str, Any]) -> list[str]:
    """Return one text per choice: its text and its tool calls. For a pooling task, return a text about its result."""
    if (label := record.get("label")) is not None:
        likeliest = max(record.get("probabilities") or [], default=None)
        return [label if likeliest is None else f"{label} ({likeliest:.3g})"]
    if (score := record.get("score")) is not None:
        return [_scores(score, record.get("order")) if isinstance(score, list) else f"{score:.4g}"]
    if (entities := record.get("entities")) is not None:
        return [_entities(entities)]
    if (place := record.get("embedding")) is not None:
        tokens = f"{place['tokens']:,} tokens, each " if "tokens" in place else ""
        return [f"embedding of {tokens}{place['dimensions']:,} dimensions"]
    return [choice_in_words(choice) for choice in record.get("choices") or [record]]


def _scores(scores: Sequence[float], order: Sequence[int] | None) -> str:
    """Return the scores of the documents as text, best first."""
    numbers = range(len(scores)) if order is None else order
    return _first_of((f"document {n}: {scores[n]:.4g}" for n in numbers), len(numbers))


def _entities(entities: Sequence[Mapping[str, Any]]) -> str:
    found = (f"{entity['text']} ({entity['label']})" for entity in entities)
    return _first_of(found, len(entities)) or "no entities"


def _first_of(texts: Iterator[str], count: int) -> str:
    shown = [*islice(texts, _MOST_SHOWN)]
    more = count - len(shown)
    return ", ".join([*shown, *([f"… and {more:,} more"] if more else [])])


def calls_in_words(message: Mapping[str, Any]) -> list[str]:
    """Return ``name(arguments)`` for each tool call of a choice or a message."""
    calls = [call.get("function") or {} for call in message.get("tool_calls") or ()]
    return [f"{call.get('name')}({call.get('arguments') or ''})" for call in calls]


def choice_in_words(choice: Mapping[str, Any]) -> str:
    return "\n".join([*filter(None, [choice.get("text")]), *calls_in_words(choice)])


def call_in_words(generation: Mapping[str, Any]) -> str:
    """Return a short name of a generation within its row: the step's name, with the call's number from the second call
    on."""
    step, call = generation.get("step"), generation.get("call") or 0
    if not step:
        return f"call {call + 1}"
    return f"{step}, call {call + 1}" if call else str(step)
