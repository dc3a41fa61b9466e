"""Cuts in the middle of a row's longest text, for a prompt that is too long.

Only the engine knows how many tokens a text has. Therefore the size of a cut is estimated from the token count of the
refused prompt, and the shorter prompt is sent to the engine. If it is still too long, the cut is made larger. Usually
two or three tries are enough.

- Each further cut keeps at least an eighth of the text that the previous cut kept, because the estimate removes too
  much if the middle of a text has far fewer tokens than its ends.
- An engine may refuse a prompt whose token count should fit, for example a server that also counts the longest possible
  answer. Then at most half of the text is kept.
- Every cut is larger than the one before, and a row is cut at most ``_MOST_CUTS`` times.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from heapq import nlargest
from typing import Any, NamedTuple

from batchkit.errors import PromptTooLongError
from batchkit.rendering.messages import MEDIA_PARTS
from batchkit.types import Cut

MARK = " […] "
_NO_TEXT = (*MEDIA_PARTS, "role", "tool_calls", "type")
_MARK_TOKENS = len(MARK.encode())  # an upper bound
_LEAST_SHARE = 8  # a further cut keeps at least this fraction (1/8) of the text
_MOST_CUTS = 10
_MOST_TEXTS = 10


class TextPlace(NamedTuple):
    """The position of a text in a row. ``path``: keys and indexes that lead to the text. ``length``: its number of
    characters."""

    path: Sequence[Any]
    length: int


def longest_text(
    fields: Mapping[str, Any],
    names: Container[str],
    is_shown: Callable[[TextPlace], bool] = lambda place: True,
) -> TextPlace | None:
    """Return the place of the longest text in the fields called ``names``, at any depth; None if there is no text.

    A long text may not be part of the prompt. Therefore the result is the longest of the ten longest texts for which
    ``is_shown`` returns True; if there is none, the longest text.
    """
    used = {name: value for name, value in fields.items() if name in names}
    longest = nlargest(_MOST_TEXTS, _texts(used, ()), key=lambda place: place.length)
    return next(filter(is_shown, longest), longest[0] if longest else None)


def next_cut(
    length: int, last: Cut | None, error: PromptTooLongError, max_tokens: int
) -> Cut | None:
    """Return the next cut to try for a text of ``length`` characters after ``error``; None if no cut helps.

    The cut reserves ``max_tokens`` tokens for the answer, but at most half of ``error.max_model_len``.
    """
    tokens, max_model_len = error.prompt_tokens, error.max_model_len
    times = 1 if last is None else last.times + 1
    if tokens is None or max_model_len is None or times > _MOST_CUTS:
        return None
    # Aim a little below the limit, because otherwise each try would come closer to the limit without getting below it.
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
    """Return a copy of ``value`` in which only the first and last characters of the text at ``path``, ``kept`` in
    total, remain, with ``MARK`` between them."""
    if not path:
        tail = kept // 2
        return value[: kept - tail] + MARK + value[len(value) - tail :]
    changed: Any = dict(value) if isinstance(value, Mapping) else list(value)
    changed[path[0]] = cut_at(value[path[0]], path[1:], kept)
    return changed


def _texts(value: Any, path: tuple[Any, ...]) -> Iterator[TextPlace]:
    if isinstance(value, str):
        yield TextPlace(path, len(value))
    elif isinstance(value, Mapping):
        for key, part in value.items():
            if key not in _NO_TEXT or not path:
                yield from _texts(part, (*path, key))
    elif isinstance(value, list | tuple):
        for n, part in enumerate(value):
            yield from _texts(part, (*path, n))
