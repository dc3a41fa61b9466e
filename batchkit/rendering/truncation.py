"""Cuts a row's longest text in the middle, so that a prompt that was too long fits.

How many tokens a text has, only the engine knows; so a cut is estimated from what the last prompt
came to, tried, and made larger where it was not enough. Two or three prompts do it.

An estimate never takes away more than seven eighths of what the last one kept: where the middle of
a text has far fewer tokens than its ends, the estimate goes too far. A prompt may be refused though
it should fit by its count, as by a server that counts the whole answer in: then half is kept. Every
cut is shorter than the one before, and a row is cut ``_MOST_CUTS`` times at most.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from batchkit.errors import PromptTooLongError
from batchkit.types import Cut

MARK = " […] "
_NO_TEXT = ("image", "image_pil", "image_url", "role", "tool_calls", "type")
_MARK_TOKENS = len(MARK.encode())  # at most
_LEAST_SHARE = 8
_MOST_CUTS = 10


class Place(NamedTuple):
    """Where a text stands in a row: the keys and positions that lead to it, and its characters."""

    path: Sequence[Any]
    length: int


def longest_text(fields: Mapping[str, Any], names: Container[str]) -> Place | None:
    """The longest text in the fields called ``names``, however deep it stands."""
    used = {name: value for name, value in fields.items() if name in names}
    return max(_texts(used, ()), key=lambda place: place.length, default=None)


def next_cut(
    length: int, last: Cut | None, error: PromptTooLongError, max_tokens: int
) -> Cut | None:
    """How much of a text of ``length`` characters to keep after ``error``; None: no cut helps.

    Room is left for the answer of ``max_tokens``, if that is not more than half of the context.
    """
    tokens, max_model_len = error.prompt_tokens, error.max_model_len
    times = 1 if last is None else last.times + 1
    if tokens is None or max_model_len is None or times > _MOST_CUTS:
        return None
    # A little under what would do: else each try comes closer to it, and none gets there.
    room = max(1, min(max_tokens, max_model_len // 2))
    target = max_model_len - room - 1 - max_model_len // 64
    if last is None:
        kept, whole_tokens = length * (target - _MARK_TOKENS) // tokens, tokens
    else:
        kept, whole_tokens = last.kept, last.prompt_tokens
        per_token = (length - kept) / max(1, whole_tokens - tokens + _MARK_TOKENS)
        kept = max(kept - math.ceil((tokens - target) * per_token), kept // _LEAST_SHARE)
    before = length - len(MARK) if last is None else min(last.kept, length - len(MARK))
    kept = min(kept, before - 1 if tokens > target else before // 2)
    return Cut(kept, whole_tokens, room, times) if kept >= len(MARK) else None


def cut_at(value: Any, path: Sequence[Any], kept: int) -> Any:
    """``value`` with the text at ``path`` cut to ``kept`` characters and a mark between them."""
    if not path:
        tail = kept // 2
        return value[: kept - tail] + MARK + value[len(value) - tail :]
    changed: Any = dict(value) if isinstance(value, Mapping) else list(value)
    changed[path[0]] = cut_at(value[path[0]], path[1:], kept)
    return changed


def _texts(value: Any, path: tuple[Any, ...]) -> Iterator[Place]:
    if isinstance(value, str):
        yield Place(path, len(value))
    elif isinstance(value, Mapping):
        for key, part in value.items():
            if key not in _NO_TEXT or not path:
                yield from _texts(part, (*path, key))
    elif isinstance(value, list | tuple):
        for n, part in enumerate(value):
            yield from _texts(part, (*path, n))
