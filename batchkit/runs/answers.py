"""Differences between two runs' answers: the first token that differs, and how certain each engine was of its token.

Greedy decoding takes the likeliest token. If two tokens are about equally likely, the order of additions decides,
and that differs between kernels, batches and machines. Such a tie says nothing about the model. If an engine was far
from taking the other's token, the two engines compute different results.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import takewhile
from operator import eq
from typing import Any, Literal, NamedTuple, TypeVar

from batchkit.storage.lines import answers_in_words

T = TypeVar("T")
MOST_EXAMINED = 1_000  # maximum number of differing rows that are compared token by token
_SHOWN = 10
_BEFORE, _SHOWN_CHARACTERS = 20, 72  # characters shown before a difference, and in total
_COUNTS = ("equal", "differ", "failed_before", "failed_after", "failed_in_both")
_WORDS = re.compile(r"\s*\S+")
PIECE = "\N{REPLACEMENT CHARACTER}"  # part of a character that takes several tokens


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
        tokens = record["choices"][0].get("logprobs") if record.get("choices") else None
        return cls(
            "\n".join(filter(None, [record.get("reasoning"), answers_in_words(record)[0]])),
            record["finish_reason"],
            None if tokens is None else tokens_of(tokens),
            (record.get("usage") or {}).get("prompt_tokens"),
        )


def tokens_of(logprobs: Sequence[Mapping[str, Any]]) -> list[Token]:
    """Return the tokens of an answer from its logprobs in OpenAI's format."""
    return [_token(found) for found in logprobs]


def _token(found: Mapping[str, Any]) -> Token:
    """Return a token of the record's logprobs. Of two likely tokens with the same text, the likelier one is kept;
    tokens that a grammar forbids are left out."""
    top = {t["token"]: t["logprob"] for t in reversed(found["top_logprobs"])}
    known = {text: logprob for text, logprob in top.items() if logprob is not None}
    return Token(found["token"], found["logprob"], known)


@dataclass(frozen=True, slots=True)
class Part:
    """One engine's side of a difference. ``token``: this engine's token at the first difference; None if its answer
    ended before. ``logprob`` and ``other_logprob``: the log-probabilities that this engine reported for ``token`` and
    for the other engine's token; None if it did not report one. ``begins``: the position in ``text``, in characters, at
    which the answers differ."""

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
    ``gap_is_least``: the gap is a lower bound, because an engine did not report the other's token among its
    likeliest."""

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


@dataclass(frozen=True, slots=True)
class AnswerComparison:
    """A comparison of a run's answers with those of the baseline, over the rows that both have.

    ``equal`` and ``differ`` count rows that both answered. ``failed_before`` and ``failed_after`` count rows that
    failed only in the baseline and only in the run. ``differences``: the differences of the first 1,000 rows that
    differ, the largest gap first. A difference with a gap below ``tie`` is a tie.
    """

    equal: int
    differ: int
    failed_before: int
    failed_after: int
    failed_in_both: int
    differences: Sequence[Difference]
    tie: float

    @property
    def ties(self) -> int:
        return sum(found.is_tie(self.tie) for found in self.differences)

    def to_json(self) -> dict[str, Any]:
        answered = self.equal + self.differ
        return {
            **{name: getattr(self, name) for name in _COUNTS},
            "share_equal": self.equal / answered if answered else None,
            "ties": self.ties,
            "tie_below": self.tie,
            "differences": [
                {**asdict(found), "tie": found.is_tie(self.tie)} for found in self.differences
            ],
        }

    def lines(self, before: str, after: str) -> Iterator[str]:
        """Yield the comparison as text; the arguments are the names of the runs."""
        if answered := self.equal + self.differ:
            share = self.equal / answered
            yield f"Equal answers: {self.equal:,} of {answered:,} rows that both answered ({share:.1%})."
        failed = (
            (before, self.failed_before),
            (after, self.failed_after),
            ("both", self.failed_in_both),
        )
        for name, count in failed:
            if count:
                yield f"Failed {'only ' * (name != 'both')}in {name}: {count:,}."
        if self.differences:
            yield self._summary()
        if changed := sum(found.has_other_prompt for found in self.differences):
            yield (
                f"{changed:,} of these have prompts of different lengths: compare the chat template, the images' size"
                " and max_model_len first."
            )
        for found in self.differences[:_SHOWN]:
            yield from self._shown(found, before, after)
        if len(self.differences) > _SHOWN:
            yield f"… and {self.differ - _SHOWN:,} more (--json)"

    def _summary(self) -> str:
        median = statistics.median(found.position for found in self.differences)
        unit = self.differences[0].unit
        text = (
            f"Answers that differ: {self.differ:,}; median position of the first difference: {unit} {median:g},"
            " counted from 0"
        )
        if self.differ > len(self.differences):
            text += f", in the first {len(self.differences):,} of these answers"
        unknown = sum(found.gap is None for found in self.differences)
        if unknown == len(self.differences):
            return f"{text}. Without sampling.logprobs in both runs, it is unknown which of them are ties."
        return f"{text}; {self.ties:,} of them are ties (gap below {self.tie:g})" + (
            f", and the gap of {unknown:,} is unknown." if unknown else "."
        )

    def _shown(self, found: Difference, before: str, after: str) -> Iterator[str]:
        gap = "" if found.gap is None else f", gap {found.gap:.4f}{' or more' * found.gap_is_least}"
        tie = " (a tie)" if found.is_tie(self.tie) else ""
        yield f"- row {found.index} (id {found.id}), {found.unit} {found.position}{gap}{tie}"
        for name, part in ((before, found.a), (after, found.b)):
            yield f"  - {name}: {_chosen(part)}{_continuation(part)}"


def difference(index: int, row_id: str, a: SideAnswer, b: SideAnswer) -> Difference | None:
    """Return the first difference between two answers, or None if their texts and finish reasons are equal."""
    if (a.text, a.finish_reason) == (b.text, b.finish_reason):
        return None
    has_tokens = a.tokens is not None and b.tokens is not None
    one, two = ((side.tokens or ()) if has_tokens else _words(side.text) for side in (a, b))
    position = common_prefix(one, two, _look_alike)
    ours, theirs = ([*tokens, None][position] for tokens in (one, two))
    gaps = [gap for gap in (_gap(ours, theirs), _gap(theirs, ours)) if gap is not None]
    begins = common_prefix(a.text, b.text, eq)
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


def common_prefix(a: Sequence[T], b: Sequence[T], are_alike: Callable[[T, T], bool]) -> int:
    """Return the length of the common prefix of two sequences; ``are_alike`` compares their members."""
    pairs = zip(a, b, strict=False)
    return sum(1 for _ in takewhile(lambda pair: are_alike(*pair), pairs))


def _look_alike(a: Token, b: Token) -> bool:
    """Return True if two tokens have the same text. A token that is part of a character counts as equal to any token,
    because engines show such parts in different ways."""
    return a.text == b.text or not a.text or not b.text or PIECE in a.text or PIECE in b.text


def _words(text: str) -> list[Token]:
    """Return the words of a text as tokens, each with the white space before it, for engines without logprobs."""
    return [Token(word) for word in _WORDS.findall(text)]


def _chosen(part: Part) -> str:
    """Return an engine's token at the difference with its logprob, and the logprob it gave to the other engine's
    token."""
    if part.logprob is None:
        return ""
    other = "not among its likeliest" if part.other_logprob is None else f"{part.other_logprob:.4f}"
    return f"{json.dumps(part.token, ensure_ascii=False)} {part.logprob:.4f}, the other {other}: "


def _continuation(part: Part) -> str:
    """Return the answer's text around the difference, as one line."""
    start = max(0, part.begins - _BEFORE)
    line = " ".join(part.text[start : start + _SHOWN_CHARACTERS].split())
    before = "…" if start else ""
    after = "…" if start + _SHOWN_CHARACTERS < len(part.text) else f" [{part.finish_reason}]"
    return f"{before}{line}{after}"
