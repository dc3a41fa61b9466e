"""Over the whole input, rows that begin alike run next to each other, and no row is lost."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from datetime import date, datetime
from decimal import Decimal
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchkit.errors import InputError, RequestError
from batchkit.rendering.global_order import (
    BLOCK_BYTES,
    Block,
    first_block,
    ordered_in_memory,
    ordered_on_disk,
    shared_less,
    worth_ordering,
)
from batchkit.types import Row, RowHint

DEPTHS = (4096, 1024, 256)  # characters
Order = Callable[[Sequence[RowHint]], list[int]]


def rows_of(hints: Sequence[RowHint], fields: Any = None) -> list[Row]:
    return [Row(n, f"id {n}", {"n": n, **(fields or {})}) for n in range(len(hints))]


def longest_allowed(hint: RowHint) -> float:
    return hint.max_tokens


def in_memory(hints: Sequence[RowHint]) -> list[int]:
    return [row.index for row, _ in ordered_in_memory(rows_of(hints), hints, longest_allowed)]


def on_disk(hints: Sequence[RowHint]) -> list[int]:
    return [row.index for row, _ in stored(rows_of(hints), hints)]


BOTH = pytest.mark.parametrize("ordered", [in_memory, on_disk])


def stored(
    rows: Sequence[Row], hints: Sequence[RowHint], again: Sequence[Row] | None = None
) -> Iterator[tuple[Row, int]]:
    """The order on disk. ``again``: the rows of the second reading, if they are others."""

    def read_again(of: Container[int]) -> Iterable[Row]:
        return (row for row in (rows if again is None else again) if row.index in of)

    return ordered_on_disk(rows, read_again, lambda row: hints[row.index], longest_allowed)


def alike(n_rows: int, n_groups: int, characters: int, seed: int = 0) -> list[RowHint]:
    """Rows that share so many characters with the others of their group, and not one more; shuffled."""
    draw = random.Random(seed)
    numbers = [n % n_groups for n in range(n_rows)]
    draw.shuffle(numbers)
    return [
        RowHint(f"{number:08}" + "x" * (characters - 8) + f"{n:08}", 0)
        for n, number in enumerate(numbers)
    ]


def n_pieces(order: Sequence[int], hints: Sequence[RowHint], characters: int) -> int:
    """Return how often a group of rows that share ``characters`` begins in ``order``."""
    return sum(1 for _ in groupby(order, lambda index: hints[index].beginning[:characters]))


# Every row once

BEGINNINGS = st.sampled_from(
    ["", "a", "b" * 64, "b" * 64 + "c", "b" * 300, "b" * 300 + "c", "d" * 5000, "d" * 5000 + "e"]
)
HINTS = st.builds(RowHint, BEGINNINGS, st.integers(0, 4), st.sampled_from(["", "one", "two"]))


@given(st.lists(HINTS, max_size=600))
def test_every_row_comes_exactly_once(hints: list[RowHint]) -> None:
    order = in_memory(hints)
    assert sorted(order) == list(range(len(hints)))
    assert on_disk(hints) == order


def test_every_row_comes_exactly_once_from_several_parts() -> None:
    hints = alike(40, 9, 256)
    rows = rows_of(hints, {"filled": "x" * (BLOCK_BYTES // 7)})  # a part has 6 rows
    order = [row.index for row, _ in stored(rows, hints)]
    assert sorted(order) == list(range(40))
    assert n_pieces(order, hints, 256) <= 9 + 40 // 6


def test_rows_come_back_from_the_disk_as_they_were() -> None:
    values: list[Any] = [None, True, -1.5, 2**70, "grüße", b"\0\xff", [1, ["two"]], {"a": {1: []}}]
    values += ["\ud800", (1, 2), {"a"}, Decimal("1.10"), date(2026, 1, 2), datetime(2026, 1, 2, 3)]
    rows = [Row(3 * n, f"id {n}", {"value": value, "n": n}) for n, value in enumerate(values)]
    found = [row for row, _ in stored(rows, [RowHint("", 0)] * 99)]
    assert found == rows
    assert [type(row.fields["value"]) for row in found] == [type(value) for value in values]


def test_a_row_that_cannot_be_read_stays_one() -> None:
    rows = rows_of([RowHint("", 0)] * 3)
    rows[1] = Row(1, "id 1", {}, RequestError("line 2 is no JSON"))
    found = [row for row, _ in stored(rows, [RowHint(str(n), 0) for n in range(3)])]
    assert sorted(found, key=lambda row: row.index) == rows


def test_rows_that_only_the_second_reading_has_are_left_out() -> None:
    hints = [RowHint("", 0)] * 9
    rows = rows_of(hints)
    assert [row.index for row, _ in stored(rows[:5], hints, again=rows)] == list(range(5))


def test_no_rows_are_no_error() -> None:
    assert in_memory([]) == on_disk([]) == []


def test_a_value_that_cannot_be_stored_is_an_error_that_names_the_row() -> None:
    rows = [
        Row(0, "zero", {}),
        Row(1, "one", {"value": iter([1])}),
        Row(2, "two", {"value": lambda: 0}),
    ]
    with pytest.raises(InputError, match=r'row 2 \(id two\): run.order = "global"'):
        [*stored(rows, [RowHint("", 0)] * 3)]


def test_a_folder_of_parts_is_removed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    hints = [RowHint("", 0)] * 9
    for n_taken in (9, 1):
        found = stored(rows_of(hints), hints)
        for _ in range(n_taken):
            next(found)
        assert [*tmp_path.iterdir()]
        found.close()  # type: ignore[attr-defined]
        assert not [*tmp_path.iterdir()]


# Order


@BOTH
@pytest.mark.parametrize("characters", DEPTHS)
def test_rows_that_share_a_beginning_are_neighbors(ordered: Order, characters: int) -> None:
    hints = alike(250, 40, characters)
    assert n_pieces(ordered(hints), hints, characters) == 40


@BOTH
def test_rows_that_share_more_are_neighbors_among_those_that_share_less(ordered: Order) -> None:
    draw = random.Random(1)
    numbers = [(n % 3, n % 12, n % 48) for n in range(240)]
    draw.shuffle(numbers)
    hints = [RowHint(f"{a:0256}{b:0768}{c:03072}{n}", 0) for n, (a, b, c) in enumerate(numbers)]
    order = ordered(hints)
    assert [n_pieces(order, hints, depth) for depth in DEPTHS] == [48, 12, 3]


@BOTH
@pytest.mark.parametrize("characters", [256, 1024])
def test_no_group_is_divided_when_the_rows_are_sorted_again(
    ordered: Order, characters: int
) -> None:
    hints = [
        RowHint("y" * 64 + hint.beginning, n % 5)
        for n, hint in enumerate(alike(6000, 1000, characters))
    ]
    assert n_pieces(ordered(hints), hints, 64 + characters) == 1000


def test_groups_are_told_apart_by_their_number() -> None:
    hints = alike(250, 40, 256)
    groups = defaultdict(set)
    for row, group in ordered_in_memory(rows_of(hints), hints, longest_allowed):
        groups[group].add(hints[row.index].beginning[:256])
    assert len(groups) == 40
    assert all(len(its) == 1 for its in groups.values())
    assert 0 not in groups


@BOTH
def test_rows_of_one_adapter_are_neighbors(ordered: Order) -> None:
    hints = [RowHint(f"{n % 7}", n % 5, lora=("", "a", "b")[n % 3]) for n in range(200)]
    order = ordered(hints)
    assert len([*groupby(order, lambda index: hints[index].lora)]) == 3


@BOTH
@settings(max_examples=30)
@given(st.lists(st.text(max_size=5), unique=True, max_size=50))
def test_rows_with_nothing_in_common_keep_their_order(
    ordered: Order, beginnings: list[str]
) -> None:
    hints = [RowHint(beginning, 0) for beginning in beginnings]
    assert ordered(hints) == list(range(len(hints)))


def test_many_rows_with_nothing_in_common_keep_their_order() -> None:
    assert in_memory([RowHint(str(n), 0) for n in range(3000)]) == list(range(3000))


@BOTH
def test_longer_answers_begin_first(ordered: Order) -> None:
    lengths = random.Random(5).sample(range(200), 200)
    one_group = [RowHint("same", length) for length in lengths]
    assert [lengths[index] for index in ordered(one_group)] == list(range(199, -1, -1))
    nothing_shared = [RowHint(str(n), length) for n, length in enumerate(lengths)]
    assert [lengths[index] for index in ordered(nothing_shared)] == list(range(199, -1, -1))


@BOTH
def test_the_group_with_the_longest_answer_begins_first(ordered: Order) -> None:
    lengths = {"a": [1, 2, 3], "b": [9, 1, 1], "c": [4, 5, 4]}
    hints = [RowHint(key, length) for key, its in lengths.items() for length in its]
    order = ordered(hints)
    assert [(hints[n].beginning, hints[n].max_tokens) for n in order] == [
        *(("b", 9), ("b", 1), ("b", 1)),
        *(("c", 5), ("c", 4), ("c", 4)),
        *(("a", 3), ("a", 2), ("a", 1)),
    ]


def test_lengths_that_are_learned_count_for_the_rows_that_are_left() -> None:
    hints = [RowHint(str(n), 0) for n in range(2000)]
    learned = False

    def expect(hint: RowHint) -> float:
        return int(hint.beginning) if learned else 0

    rows = ordered_in_memory(rows_of(hints), hints, expect)
    began = [next(rows)[0].index for _ in range(400)]
    learned = True
    then = [row.index for row, _ in rows]
    assert began == list(range(400))
    assert then[100:] == sorted(then[100:], reverse=True)
    assert set(began) | set(then) == set(range(2000))


@BOTH
def test_the_order_is_the_same_at_each_start(ordered: Order) -> None:
    hints = [hint._replace(max_tokens=n % 7) for n, hint in enumerate(alike(900, 100, 256))]
    assert ordered(hints) == ordered(hints)


# Whether it is worth it


def block_of(keys: Sequence[str]) -> Block:
    hints = [RowHint(key, 0) for key in keys]
    return Block(rows_of(hints), hints, is_all=False)


def shuffled(n_rows: int, n_groups: int) -> list[str]:
    keys = [f"group {n % n_groups}" for n in range(n_rows)]
    random.Random(4).shuffle(keys)
    return keys


def computed(keys: Sequence[str], look_ahead: int) -> int:
    windows = [keys[at : at + look_ahead] for at in range(0, len(keys), look_ahead)]
    return sum(len(set(window)) for window in windows)


@pytest.mark.parametrize(
    ("n_rows", "n_groups", "look_ahead"),
    [
        (60_000, 6_000, 1024),
        (60_000, 600, 1024),
        (6_000, 600, 256),
        (40_000, 20_000, 1024),
        (400_000, 40_000, 1024),
    ],
)
def test_the_gain_is_estimated_from_the_first_rows(
    n_rows: int, n_groups: int, look_ahead: int
) -> None:
    keys = shuffled(n_rows, n_groups)
    true = (computed(keys, look_ahead) - n_groups) / n_rows
    found = shared_less(block_of(keys[:6000]), n_rows, look_ahead)
    assert found == pytest.approx(true, abs=0.08)


@pytest.mark.parametrize(
    "keys",
    [
        [f"group {n // 6}" for n in range(5000)],  # sorted
        [f"group {n}" for n in range(5000)],  # no groups
        ["one group"] * 5000,
        shuffled(5000, 20),  # each group is in each window
        shuffled(200, 20),  # a window has all rows
        ["" if n % 20 else f"group {n}" for n in range(5000)],
        [f"group {n}" if n % 20 else "" for n in range(5000)],
        [],
    ],
    ids=["sorted", "none", "one", "few", "small", "mostly one", "one and none", "empty"],
)
def test_there_is_no_gain_if_a_window_finds_all(keys: Sequence[str]) -> None:
    block = block_of(keys)
    assert shared_less(block, 200 * len(keys), 256) < 0.1
    assert not worth_ordering(block, 200 * len(keys), 256)


def test_shuffled_groups_are_worth_it_unless_the_number_of_rows_is_unknown() -> None:
    block = block_of(shuffled(5000, 1000))
    assert worth_ordering(block, 50_000, 256)
    assert not worth_ordering(block, None, 256)


def test_the_first_block_is_limited_by_bytes() -> None:
    def rows() -> Iterator[Row]:
        for n in range(100):
            yield Row(n, str(n), {"filled": "x" * (BLOCK_BYTES // 10)})

    source = rows()
    block = first_block(source, lambda row: RowHint(str(row.index), 0))
    assert not block.is_all
    assert len(block.rows) == len(block.hints) == 10
    assert next(source).index == 10
    assert first_block(iter(block.rows[:3]), lambda row: RowHint("", 0)).is_all
