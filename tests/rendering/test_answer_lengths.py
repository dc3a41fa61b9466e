"""Lengths of answers are learned from finished rows, by kind of row."""

from __future__ import annotations

import random

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchkit.rendering.answer_lengths import AnswerLengths, kinds_of
from batchkit.types import RowHint

SHORT, LONG = (RowHint(f"{kind}\nquestion 1", 0) for kind in ("yes or no", "essay"))


def learned(*seen: tuple[RowHint, int]) -> AnswerLengths:
    lengths = AnswerLengths()
    for hint, length in seen:
        lengths.learn(kinds_of(hint), length)
    return lengths


@pytest.mark.parametrize("most", [0, 7, 4096])
def test_without_finished_rows_the_longest_allowed_length_is_expected(most: int) -> None:
    assert AnswerLengths().expected(RowHint("x", most)) == most


def test_the_mean_of_all_rows_is_expected_of_a_row_like_no_other() -> None:
    other = RowHint("x" * 5000, 300)
    assert learned((SHORT, 10), (LONG, 30)).expected(other) == pytest.approx(20)


def test_a_row_is_expected_to_be_as_long_as_rows_of_its_kind() -> None:
    lengths = learned(*[(SHORT, 2), (LONG, 400)] * 50)
    assert lengths.expected(SHORT._replace(beginning="yes or no\nquestion 2")) < 20
    assert lengths.expected(LONG._replace(beginning="essay\nquestion 2")) > 380


def test_few_rows_of_a_kind_count_less_than_many() -> None:
    found = [learned(*[(SHORT, 10)] * 100, *[(LONG, 500)] * n).expected(LONG) for n in (1, 4, 50)]
    assert 10 < found[0] < found[1] < found[2] < 500


@pytest.mark.parametrize(
    "one",
    [RowHint("q", 10), RowHint("q" * 40, 20), RowHint("a", 20), RowHint("b\nrest", 20)],
    ids=["max_tokens", "size", "a", "b"],
)
def test_each_kind_counts(one: RowHint) -> None:
    others = [RowHint("q", 20), RowHint("c\nrest", 20)]
    lengths = learned(*[(hint, 2) for hint in others] * 20, *[(one, 9)] * 20)
    assert lengths.expected(one) > max(map(lengths.expected, others))


def test_only_the_first_line_of_the_first_field_makes_a_kind() -> None:
    assert kinds_of(SHORT)[-1] == kinds_of(SHORT._replace(beginning="yes or no\nquestion 2"))[-1]
    assert kinds_of(SHORT)[-1] != kinds_of(LONG)[-1]


def test_no_answer_is_expected_to_be_longer_than_allowed() -> None:
    hint = RowHint("x", 64)
    assert learned((RowHint("x", 0), 1000)).expected(hint) == 64


@given(st.lists(st.tuples(st.sampled_from([SHORT, LONG]), st.integers(0, 10**6)), min_size=1))
def test_an_expected_length_is_between_the_shortest_and_the_longest(
    seen: list[tuple[RowHint, int]],
) -> None:
    lengths, found = learned(*seen), [length for _, length in seen]
    for hint in (SHORT, LONG, RowHint("x", 0)):
        assert min(found) - 1e-6 <= lengths.expected(hint) <= max(found) + 1e-6
    assert lengths.n_rows == len(seen)


def test_the_order_of_finished_rows_does_not_matter() -> None:
    seen = [(hint, length) for hint in (SHORT, LONG) for length in range(20)]
    again = random.Random(1).sample(seen, len(seen))
    assert learned(*seen).expected(LONG) == learned(*again).expected(LONG)


def test_what_is_known_continues_after_json() -> None:
    before = learned((SHORT, 3), (SHORT, 4), (LONG, 70), (LONG, 90))
    after = AnswerLengths(orjson.loads(orjson.dumps(before.known)))
    for lengths in (before, after):
        lengths.learn(kinds_of(SHORT), 5)
    assert {kind: tuple(its) for kind, its in after.known.items()} == before.known
    assert after.n_rows == 5
    assert [after.expected(hint) for hint in (SHORT, LONG)] == [
        before.expected(hint) for hint in (SHORT, LONG)
    ]


def test_the_number_of_kinds_is_limited() -> None:
    lengths = learned(*[(RowHint(f"kind {n}", 0), n) for n in range(9000)])
    assert len(lengths.known) <= 4096
    assert lengths.n_rows == 9000
    assert lengths.expected(RowHint("kind 8999", 0)) == pytest.approx(4500, rel=0.05)


def test_a_text_that_is_not_unicode_has_kinds() -> None:
    assert len(set(kinds_of(RowHint("\ud800", 0)))) == 4
