"""Where two answers differ, and how certain each engine was."""

from __future__ import annotations

import pytest

from batchkit.runs.answers import SideAnswer, Token, difference


def answer(*tokens: Token, text: str | None = None, finish_reason: str = "stop") -> SideAnswer:
    written = "".join(token.text for token in tokens) if text is None else text
    return SideAnswer(written, finish_reason, tokens)


def token(text: str, logprob: float = -0.1, **others: float) -> Token:
    return Token(text, logprob, {text: logprob, **others})


PARTS = {
    "a gap near zero is a tie": (
        answer(token("a"), token("b", -0.690, c=-0.694)),
        answer(token("a"), token("c", -0.691, b=-0.692)),
        *(1, 0.004, False, True),
    ),
    "the more certain side decides": (
        answer(token("b", -0.7, c=-0.701)),
        answer(token("c", -0.1, b=-3.1)),
        *(0, 3.0, False, False),
    ),
    "a token that is not among the likeliest is no tie": (
        answer(token("b", -0.7, x=-0.702)),
        answer(token("c", -0.7, b=-0.7)),
        *(0, 0.002, True, False),
    ),
    "pieces of a character": (  # vLLM gives nothing for the first pieces and the whole for the last
        answer(token("a"), token(""), token("é"), token("b"), text="aéb"),
        answer(token("a"), token("\ufffd"), token("\ufffd"), token("c"), text="aéc"),
        *(3, 0.0, True, False),
    ),
    "an answer that ends sooner": (
        answer(token("a")),
        answer(token("a"), token("b")),
        *(1, None, False, False),
    ),
    "the same text with another end": (
        answer(token("a")),
        answer(token("a"), finish_reason="length"),
        *(1, None, False, False),
    ),
    "an empty answer": (answer(text=""), answer(token("a")), *(0, None, False, False)),
}


@pytest.mark.parametrize(
    ("a", "b", "position", "gap", "is_least", "is_tie"), PARTS.values(), ids=PARTS
)
def test_where_answers_part(
    a: SideAnswer,
    b: SideAnswer,
    position: int,
    gap: float | None,
    is_least: bool,
    is_tie: bool,
) -> None:
    found = difference(0, "q", a, b)
    assert found is not None
    assert difference(0, "q", a, a) is difference(0, "q", b, b) is None
    assert (found.position, found.unit) == (position, "token")
    assert found.gap == (None if gap is None else pytest.approx(gap))
    assert (found.gap_is_least, found.is_tie(0.01)) == (is_least, is_tie)
    assert not found.is_tie(0.003)
