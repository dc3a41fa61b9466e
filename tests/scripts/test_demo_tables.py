"""The tables on which the demo model is trained: what they hold, and that the test's are apart."""

from __future__ import annotations

from itertools import islice
from random import Random
from types import ModuleType

import numpy as np
import pytest

from tests.support.scripts import load_script


@pytest.fixture(scope="module")
def demo() -> ModuleType:
    return load_script("demo_tables")


def test_tables_of_training_and_test_share_no_pair_of_words_and_no_number(demo: ModuleType) -> None:
    random = Random(0)
    pairs: dict[bool, set[tuple[str, str]]] = {False: set(), True: set()}
    numbers: dict[bool, set[int]] = {False: set(), True: set()}
    for size in demo.SIZES:
        for test in (False, True):
            table = demo.make_table(random, size, test=test)
            numbers[test] |= {value for values in table.values for value in values}
            pairs[test] |= {
                tuple(question.text.rstrip("?").split()[5:8:2])
                for question in islice(demo.questions(random, table, test=test), 60)
                if question.kind == "value"
            }
    assert len(pairs[False]) > 300
    assert len(pairs[True]) > 30
    assert not pairs[False] & pairs[True]
    assert not numbers[False] & numbers[True]


def test_questions_are_answered_from_the_cells(demo: ModuleType) -> None:
    table = demo.Table(
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


def test_a_cell_fills_two_visual_tokens_and_no_word_is_cut(demo: ModuleType) -> None:
    table = demo.make_table(Random(0), (3, 2))
    image = demo.draw(table)
    assert image.size == (3 * demo.CELL_WIDTH, 4 * demo.CELL_HEIGHT)
    assert (demo.CELL_WIDTH, demo.CELL_HEIGHT) == (64, 32)
    for word in [*demo.THEMES, *demo.ROW_WORDS, *demo.COLUMN_WORDS, "9999"]:
        alone = demo.Table(word, (), (), (), font_size=max(demo.FONT_SIZES), shade=255)
        pixels = np.asarray(demo.draw(alone))
        assert (pixels[1:-1, -3:-1] == 255).all(), f"{word} touches the right edge"
        assert (pixels[1:-1, 1:4] == 255).all(), f"{word} touches the left edge"


def test_the_same_seed_gives_the_same_table(demo: ModuleType) -> None:
    assert demo.make_table(Random(5), (4, 4)) == demo.make_table(Random(5), (4, 4))
    assert demo.make_table(Random(5), (4, 4)) != demo.make_table(Random(6), (4, 4))
