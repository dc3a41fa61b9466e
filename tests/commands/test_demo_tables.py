"""The tables that the demo model reads: what they hold, that a test's are apart, what users get."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from random import Random

import numpy as np
import pytest

from batchkit.commands import demo_tables as demo
from batchkit.errors import JobError
from tests.support.rows import read_jsonl


def test_tables_of_training_and_test_share_no_pair_of_words_and_no_number() -> None:
    random = Random(0)
    pairs: dict[bool, set[tuple[str, str]]] = {False: set(), True: set()}
    numbers: dict[bool, set[int]] = {False: set(), True: set()}
    for size in demo.SIZES:
        for test in (False, True):
            table = demo.make_table(random, size, test=test)
            numbers[test] |= {value for values in table.values for value in values}
            pairs[test] |= {
                (question.text.split()[5], question.text.rstrip("?").split()[7])
                for question in islice(demo.questions(random, table, test=test), 60)
                if question.kind == "value"
            }
    assert len(pairs[False]) > 300
    assert len(pairs[True]) > 30
    assert not pairs[False] & pairs[True]
    assert not numbers[False] & numbers[True]


def test_questions_are_answered_from_the_cells() -> None:
    table = demo.DrawnTable(
        "Food", ("Rice", "Milk", "Tea"), ("Price", "Cost"), ((7, 80), (95, 3), (12, 9))
    )
    asked = {question.text: question for question in islice(demo.questions(Random(0), table), 2000)}
    expected = {
        "What is the value of Price for Rice?": ("value", "7"),
        "What is the value of Cost for Tea?": ("value", "9"),
        "Which row has the largest Price?": ("largest", "Milk"),
        "Which row has the largest Cost?": ("largest", "Rice"),
        "Which row has the smallest Price?": ("smallest", "Rice"),
        "Which row has the smallest Cost?": ("smallest", "Milk"),
        "Is Price larger for Milk than for Tea?": ("compare", "Yes"),
        "Is Cost larger for Milk than for Tea?": ("compare", "No"),
        "How many rows are there?": ("count", "3"),
        "How many columns are there?": ("count", "2"),
    }
    assert {text: (asked[text].kind, asked[text].answer) for text in expected} == expected


def test_a_cell_fills_two_visual_tokens_and_no_word_is_cut() -> None:
    table = demo.make_table(Random(0), (3, 2))
    image = demo.draw(table)
    assert image.size == (3 * demo.CELL_WIDTH, 4 * demo.CELL_HEIGHT)
    assert (demo.CELL_WIDTH, demo.CELL_HEIGHT) == (64, 32)
    for word in [*demo.THEMES, *demo.ROW_WORDS, *demo.COLUMN_WORDS, "9999"]:
        alone = demo.DrawnTable(word, (), (), (), font_size=max(demo.FONT_SIZES), shade=255)
        pixels = np.asarray(demo.draw(alone))
        assert (pixels[1:-1, -3:-1] == 255).all(), f"{word} touches the right edge"
        assert (pixels[1:-1, 1:4] == 255).all(), f"{word} touches the left edge"


@pytest.mark.slow
def test_more_pictures_than_there_are_sizes_and_a_seed_of_ones_own(tmp_path: Path) -> None:
    rows = {}
    for name, count, seed in (("many", 130, 1), ("one", 20, 1), ("again", 20, 1), ("two", 20, 2)):
        demo.build_demo_tables(tmp_path / name, count=count, seed=seed)
        rows[name] = read_jsonl(tmp_path / name / "questions.jsonl")
    assert rows["one"] == rows["again"] != rows["two"]
    assert {tuple(row) for row in rows["many"]} == {("id", "image", "question", "answer", "kind")}
    assert {row["image"] for row in rows["many"]} == {
        f"image/{path.name}" for path in (tmp_path / "many" / "image").iterdir()
    }


def test_a_folder_that_holds_something_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").touch()
    with pytest.raises(JobError, match="give a new or empty folder"):
        demo.build_demo_tables(tmp_path)
    with pytest.raises(JobError, match="can't be written"):
        demo.build_demo_tables(tmp_path / "mine" / "tables")
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
