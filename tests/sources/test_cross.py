"""``input.cross``: each row once for each value."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from batchkit.config.tables import InputTable, JobConfig
from batchkit.errors import JobError
from batchkit.sources import count_rows, read_rows
from batchkit.sources.input import from_python
from tests.support.sources import ROWS, rows_of, table, write, write_rows

VALUES: dict[str, Any] = {"adapter": ["x", "y", ""]}
PRODUCT: dict[str, Any] = {"adapter": ["x", ""], "t": [0, 0.5]}


@pytest.mark.parametrize("name", ["in.jsonl", "in.csv", "in.parquet", "in.xlsx"])
def test_each_row_comes_once_for_each_value(name: str, tmp_path: Path) -> None:
    path = write_rows(tmp_path, name)
    found = rows_of(path, id="id", cross=VALUES)
    assert [row.index for row in found] == [*range(12)]
    assert [row.id for row in found[:4]] == ["a/x", "a/y", "a/", "b/x"]
    assert [row.fields["adapter"] for row in found[:4]] == ["x", "y", "", "x"]
    assert [row.fields["kind"] for row in found[2:4]] == ["Fact", "Count"]
    assert count_rows(table(path, cross=VALUES)) == 12


def test_ids_have_the_first_words_of_a_long_value(tmp_path: Path) -> None:
    texts = ["Answer in one word. No more.", "Answer in one word. Please.", "Think\nfirst", "brief"]
    found = rows_of(write_rows(tmp_path, "in.jsonl"), id="id", cross={"system": texts})
    short = ["answer-in-one-word", "answer-in-one-word-2", "think-first", "brief"]
    assert [row.id for row in found[:4]] == [f"a/{label}" for label in short]
    assert [row.fields["system"] for row in found[:4]] == texts


def test_several_keys_make_all_combinations(tmp_path: Path) -> None:
    found = rows_of(write_rows(tmp_path, "in.jsonl"), id="id", cross=PRODUCT)
    assert [row.id for row in found[:5]] == ["a/x/0", "a/x/0.5", "a//0", "a//0.5", "b/x/0"]
    assert found[3].fields["adapter"] == ""
    assert found[3].fields["t"] == 0.5


@pytest.mark.parametrize(
    ("keys", "indexes"),
    [
        ({"limit": 2}, [0, 1, 2, 3, 4, 5]),
        ({"where": {"kind": "Fact"}}, [0, 1, 2, 6, 7, 8]),
        ({"where": {"kind": "Fact"}, "limit": 1}, [0, 1, 2]),
        ({"id": None}, [*range(12)]),
    ],
)
def test_rows_are_chosen_before_they_are_crossed(
    keys: dict[str, Any], indexes: list[int], tmp_path: Path
) -> None:
    keys = {"id": "id", "cross": VALUES, **keys}
    path = write_rows(tmp_path, "in.jsonl")
    assert [row.index for row in rows_of(path, **keys)] == indexes
    assert count_rows(table(path, **keys)) == len(indexes)
    skipped = read_rows(table(path, **keys), skip=lambda index: index % 3 != 1)
    assert [row.index for row in skipped] == [index for index in indexes if index % 3 == 1]


def test_a_shard_has_all_values_of_its_rows(tmp_path: Path) -> None:
    path = write_rows(tmp_path, "in.jsonl")
    shares = [rows_of(path, id="id", cross=VALUES, shard=f"{n}/2") for n in range(2)]
    assert sorted(row.index for share in shares for row in share) == [*range(12)]
    for share in shares:
        whole = {row.index // 3 for row in share}
        assert {row.index for row in share} == {3 * n + k for n in whole for k in range(3)}


def test_a_row_that_can_not_be_read_fails_once_for_each_value(tmp_path: Path) -> None:
    path = write(tmp_path, "in.jsonl", '{"id": "a"}\n{broken\n{"id": "c", "adapter": "mine"}\n')
    found = rows_of(path, id="id", cross=VALUES)
    assert [row.id for row in found[3:6]] == ["no-id:1/x", "no-id:1/y", "no-id:1/"]
    assert all("line 2" in str(row.error) for row in found[3:6])
    assert [str(row.error) for row in found[6:]] == [
        "input.cross.adapter: the row already has a column of that name; rename the key"
    ] * 3


def test_rows_from_python_are_crossed(tmp_path: Path) -> None:
    source = from_python(ROWS, InputTable(id="id", cross=VALUES))
    assert source.size() == 12
    found = [*source.read(lambda index: index < 7)]
    assert [(row.index, row.id) for row in found[:2]] == [(7, "c/y"), (8, "c/")]
    assert source.changes(True) == {}
    once = from_python(iter(ROWS), InputTable(id="id", cross=VALUES))
    assert [row.id for row in once.read(lambda index: False)][-1] == "d/"


@pytest.mark.parametrize(
    ("cross", "words"),
    [
        ({"a": []}, "a: the list of values is empty"),
        ({"a": [1, "1"]}, "a: '1' is listed twice"),
        ({"a": "x"}, "a: found 'x', expected a list of values"),
    ],
)
def test_values_that_can_not_name_rows_are_refused(cross: Any, words: str) -> None:
    with pytest.raises(JobError, match=words):
        JobConfig(input={"cross": cross}, engine={"kind": "dry-run"})
