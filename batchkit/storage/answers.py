"""A record's answer as people see it: in a terminal, in a report."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

_MOST_SHOWN = 20


def answers_in_words(record: Mapping[str, Any]) -> list[str]:
    """One for each choice: its text and its tool calls; of a pooling task, what the model found."""
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
    """The best first."""
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
    """``name(arguments)`` for each tool call of a choice or a message."""
    calls = [call.get("function") or {} for call in message.get("tool_calls") or ()]
    return [f"{call.get('name')}({call.get('arguments') or ''})" for call in calls]


def choice_in_words(choice: Mapping[str, Any]) -> str:
    """Its text, and its tool calls."""
    return "\n".join([*filter(None, [choice.get("text")]), *calls_in_words(choice)])


def call_in_words(generation: Mapping[str, Any]) -> str:
    """Which of its row's generations it is: its step, and of several calls which one, from 1."""
    step, call = generation.get("step"), generation.get("call") or 0
    if not step:
        return f"call {call + 1}"
    return f"{step}, call {call + 1}" if call else str(step)
