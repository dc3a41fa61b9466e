"""The first difference between two engines' answers, and how certain each engine was of its token.

Greedy decoding takes the likeliest token. If two tokens are about equally likely, the order of additions decides,
and that differs between kernels, batches and machines. Such a tie says nothing about the model. If an engine was far
from taking the other's token, the two engines compute different results.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from operator import eq
from typing import Any, Literal, NamedTuple, TypeVar

from batchkit.storage.lines import answers_in_words

T = TypeVar("T")
_WORDS = re.compile(r"\s*\S+")
_PIECE = "\N{REPLACEMENT CHARACTER}"  # part of a character that takes several tokens


class Token(NamedTuple):
    """A token of an answer. ``logprob``: None if the engine gives none. ``top``: logprobs of the likeliest tokens, by
    text."""

    text: str
    logprob: float | None = None
    top: Mapping[str, float] = {}


class SideAnswer(NamedTuple):
    """An engine's answer to a row. ``text`` includes reasoning and tool calls. ``tokens``: None if the engine gives
    none."""

    text: str
    finish_reason: str | None
    tokens: Sequence[Token] | None = None
    prompt_tokens: int | None = None

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> SideAnswer:
        tokens = record["choices"][0]["logprobs"] if "choices" in record else None
        return cls(
            "\n".join(filter(None, [record.get("reasoning"), answers_in_words(record)[0]])),
            record["finish_reason"],
            None if tokens is None else [_token(found) for found in tokens],
            None if record["usage"] is None else record["usage"]["prompt_tokens"],
        )


def _token(found: Mapping[str, Any]) -> Token:
    """Return a token of the record's logprobs. Of two likely tokens with the same text, the likelier one is kept;
    tokens that a grammar forbids are left out."""
    top = {t["token"]: t["logprob"] for t in reversed(found["top_logprobs"])}
    known = {text: logprob for text, logprob in top.items() if logprob is not None}
    return Token(found["token"], found["logprob"], known)


@dataclass(frozen=True, slots=True)
class Part:
    """One engine's side of a difference. ``token``: its token at the first difference; None if its answer ended before.
    ``logprob`` belongs to this token, ``other_logprob`` to the other engine's token, both as this engine reports them;
    None if it does not. ``begins``: the position in ``text``, in characters, at which the answers differ."""

    text: str
    begins: int
    finish_reason: str | None
    prompt_tokens: int | None
    token: str | None
    logprob: float | None
    other_logprob: float | None


@dataclass(frozen=True, slots=True)
class Difference:
    """A row whose answers differ from ``position`` on, counted from 0 in tokens or words (``unit``). ``gap``: by how
    much the more certain engine preferred its own token, as a difference of logprobs; None if unknown for both.
    ``gap_is_least``: the gap is a lower bound, because a token is not among the other engine's likeliest."""

    index: int
    id: str
    position: int
    unit: Literal["token", "word"]
    a: Part
    b: Part
    gap: float | None
    gap_is_least: bool

    def is_tie(self, below: float) -> bool:
        return self.gap is not None and self.gap < below and not self.gap_is_least

    @property
    def has_other_prompt(self) -> bool:
        """True if the two prompts differ in length, which shows that the engines received different prompts."""
        counts = self.a.prompt_tokens, self.b.prompt_tokens
        return None not in counts and counts[0] != counts[1]

    @property
    def rank(self) -> tuple[bool, float, int]:
        """A sort key that puts the largest gap first and unknown gaps last."""
        return self.gap is None, -(self.gap or 0.0), self.index


def difference(index: int, row_id: str, a: SideAnswer, b: SideAnswer) -> Difference | None:
    """Return the first difference between two answers, or None if their texts and finish reasons are equal."""
    if (a.text, a.finish_reason) == (b.text, b.finish_reason):
        return None
    has_tokens = a.tokens is not None and b.tokens is not None
    one, two = ((side.tokens or ()) if has_tokens else _words(side.text) for side in (a, b))
    position = _common_prefix(one, two, _look_alike)
    ours, theirs = ([*tokens, None][position] for tokens in (one, two))
    gaps = [gap for gap in (_gap(ours, theirs), _gap(theirs, ours)) if gap is not None]
    begins = _common_prefix(a.text, b.text, eq)
    return Difference(
        index,
        row_id,
        position,
        "token" if has_tokens else "word",
        _part(a, begins, ours, theirs),
        _part(b, begins, theirs, ours),
        max((gap.value for gap in gaps), default=None),
        any(gap.is_least for gap in gaps),
    )


class _Gap(NamedTuple):
    value: float
    is_least: bool


def _gap(own: Token | None, other: Token | None) -> _Gap | None:
    if own is None or other is None or own.logprob is None or not own.top:
        return None
    if (known := own.top.get(other.text)) is not None:
        # A penalty or a bias may have chosen a token that is not the model's likeliest.
        return _Gap(abs(own.logprob - known), is_least=False)
    return _Gap(max(0.0, own.logprob - min(own.top.values())), is_least=True)


def _part(answer: SideAnswer, begins: int, own: Token | None, other: Token | None) -> Part:
    known = None if own is None or other is None else own.top.get(other.text)
    return Part(
        text=answer.text,
        begins=begins,
        finish_reason=answer.finish_reason,
        prompt_tokens=answer.prompt_tokens,
        token=None if own is None else own.text,
        logprob=None if own is None else own.logprob,
        other_logprob=known,
    )


def _common_prefix(a: Sequence[T], b: Sequence[T], are_alike: Callable[[T, T], bool]) -> int:
    """Return the length of the common prefix of two sequences; ``are_alike`` compares their members."""
    pairs = zip(a, b, strict=False)
    return sum(1 for _ in takewhile(lambda pair: are_alike(*pair), pairs))


def _look_alike(a: Token, b: Token) -> bool:
    """Return True if two tokens have the same text. A token that is part of a character counts as equal to any token,
    because engines show such parts in different ways."""
    return a.text == b.text or not a.text or not b.text or _PIECE in a.text or _PIECE in b.text


def _words(text: str) -> list[Token]:
    """Return the words of a text as tokens, each with the white space before it, for engines without logprobs."""
    return [Token(word) for word in _WORDS.findall(text)]
