"""Verdicts about answers that were computed again, and how many rows a self-check takes in the time it has."""

from __future__ import annotations

import math
from collections.abc import Sequence
from random import Random
from typing import Any

import numpy as np
import pytest

from batchkit.runs.answers import SideAnswer, Token, tokens_of
from batchkit.runs.verdicts import of_drawn, of_numbers, of_texts, tie_of
from batchkit.types import Pooled

WORDS = [" red", " green", " blue"]


def answer(
    text: str, tops: Sequence[dict[str, float]] | None = None, end: str = "stop"
) -> SideAnswer:
    """The first token of each of ``tops`` was taken."""
    logprobs = tops and [
        {
            "token": next(iter(top)),
            "logprob": next(iter(top.values())),
            "top_logprobs": [{"token": token, "logprob": its} for token, its in top.items()],
        }
        for top in tops
    ]
    return SideAnswer(text, end, logprobs and tokens_of(logprobs))


ALONE = answer(
    "one red dog",
    [
        {"one": -0.1},
        {" red": -0.7, " blue": -0.705, " green": -2.0},
        {" dog": -0.2, "<|end|>": -1.7},
        {"<|end|>": -0.3, " house": -0.31},
    ],
)


@pytest.mark.parametrize(
    ("batched", "kind", "token", "gap"),
    [
        ("one red dog", "equal", None, None),
        ("one blue dog", "near_tie", 1, 0.005),
        ("one green dog", "different", 1, 1.3),
        ("one yellow dog", "different", 1, 1.3),  # at least: it is not among the likeliest
        ("one red", "different", 2, 1.5),  # it ended
        ("one red dog house", "near_tie", 3, 0.01),
    ],
)
def test_texts_are_compared_at_the_first_token_that_differs(
    batched: str, kind: str, token: int | None, gap: float | None
) -> None:
    found = of_texts(answer(batched), ALONE, 0.02, is_beginning=False)
    assert (found.kind, found.token) == (kind, token)
    assert found.gap == (None if gap is None else pytest.approx(gap))


def test_a_longer_token_may_have_led_to_the_difference() -> None:
    alone = answer("a cat", [{"a": -0.7, "an": -0.71, "the": -2.0}, {" cat": -0.1, " dog": -3.0}])
    found = of_texts(answer("an owl"), alone, 0.02, is_beginning=False)
    assert (found.kind, found.gap) == ("near_tie", pytest.approx(0.01))


def test_an_answer_that_broke_off_is_no_tie_with_one_that_ended() -> None:
    found = of_texts(answer("one red dog", end="length"), ALONE, 0.02, is_beginning=False)
    assert found.kind == "equal"
    cut = of_texts(answer("one red", end="length"), ALONE, 2.0, is_beginning=False)
    assert cut.gap == pytest.approx(1.5)  # the least that the engine names, not the end


def test_the_beginning_of_an_answer_may_end_within_a_character() -> None:
    whole = answer("tea 茶 and cake")
    assert of_texts(whole, answer("tea \ufffd"), 0.0, is_beginning=True).kind == "equal"
    assert of_texts(whole, answer("tee"), 0.0, is_beginning=True).kind == "different"


def test_ties_are_wider_for_coarser_numbers() -> None:
    ties = [tie_of(dtype) for dtype in ("float32", "float16", "bfloat16")]
    assert ties == sorted(ties)
    assert tie_of(None) == tie_of("bfloat16")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_vectors_may_differ_by_rounding_only(dtype: str) -> None:
    vector = np.random.default_rng(0).normal(size=384).astype("<f4")
    rounded = vector * (1 + 2.0 ** (-20 if dtype == "float32" else -9))
    other = vector + 0.3 * vector[::-1]

    def against(found: np.ndarray[Any, Any]) -> str:
        pair = (Pooled(vector=its.astype("<f4").tobytes()) for its in (vector, found))
        return of_numbers(*pair, dtype).kind

    assert against(rounded) == "equal"
    assert against(other) == "different"
    assert against(vector[:100]) == "different"


def test_probabilities_may_differ_by_rounding_only() -> None:
    before = Pooled(probabilities=[0.7, 0.3])
    assert of_numbers(before, Pooled(probabilities=[0.70001, 0.29999]), "float32").kind == "equal"
    assert of_numbers(before, Pooled(probabilities=[0.68, 0.32]), "float32").kind == "different"


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.3])
@pytest.mark.parametrize("top_p", [1.0, 0.8])
def test_a_drawn_answer_is_judged_by_what_the_model_would_draw(
    temperature: float, top_p: float
) -> None:
    """The model's own draws pass, hundreds of them; tokens that it finds unlikely don't."""
    random = Random(0)
    logprobs = {"a": math.log(0.6), "b": math.log(0.3), "c": math.log(0.0999), "d": math.log(1e-4)}
    weights = {name: math.exp(its / temperature) for name, its in logprobs.items()}
    kept = {"a", "b"} if top_p < 1 else set(logprobs)
    sampling = {"temperature": temperature, "top_p": top_p}

    def judged(names: Sequence[str]) -> str:
        return of_drawn([Token(name, logprobs[name], logprobs) for name in names], sampling).kind

    likely = [weights[name] * (name in kept) for name in logprobs]
    draws = [random.choices([*logprobs], likely, k=40) for _ in range(200)]
    assert {judged(draw) for draw in draws} == {"equal"}
    assert judged(["d"] * 40) == "different"
