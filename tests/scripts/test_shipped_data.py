"""The data that ships with the jobs: complete, right and small."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from PIL import Image

from batchkit.commands.demo_tables import is_test_number, is_test_pair
from tests.support.paths import ROOT
from tests.support.rows import read_jsonl

DATA = ROOT / "jobs" / "data"
QUICKSTART, TABLES = DATA / "quickstart", DATA / "tables"
KINDS = {"image": "png", "html": "html", "markdown": "md", "csv": "csv", "latex": "txt"}


def test_the_script_writes_the_data_that_is_checked_in(tmp_path: Path) -> None:
    script = ROOT / "scripts" / "make_quickstart_data.py"
    subprocess.run([sys.executable, script, tmp_path], check=True)
    made, kept = (
        {path.relative_to(of): path for path in of.rglob("*") if path.is_file()}
        for of in (tmp_path, QUICKSTART)
    )
    assert made.keys() == kept.keys()
    for name, path in made.items():
        if path.suffix != ".png":
            assert path.read_bytes() == kept[name].read_bytes()
            continue
        with Image.open(kept[name]) as image, Image.open(path) as again:
            assert image.size == again.size  # another Pillow packs them otherwise


@pytest.fixture(scope="module")
def queries() -> list[dict[str, str]]:
    text = (TABLES / "data" / "QA_final.json").read_text(encoding="utf-8")
    return json.loads(text)["queries"]


def test_every_question_has_its_table_and_answer(queries: list[dict[str, str]]) -> None:
    assert [query["id"] for query in queries] == list(range(1, 41))
    for query in queries:
        assert query["Question"]
        assert query["FinalAnswer"]
        assert query["ProcessedAnswer"]
        for folder, ending in KINDS.items():
            assert (TABLES / folder / f"{query['FileName']}.{ending}").stat().st_size
    tables = {query["FileName"] for query in queries}
    for folder in KINDS:
        assert {f.stem for f in (TABLES / folder).iterdir()} == tables
    assert len(tables) == 8
    assert Counter(query["QuestionType"] for query in queries) == {
        "Fact Checking": 12,
        "Numerical Reasoning": 11,
        "Data Analysis": 8,
        "Structure Comprehending": 5,
        "Visualization": 4,
    }
    assert {q["SubQType"].split()[0] for q in queries if q["QuestionType"] == "Data Analysis"} == {
        "Summary", "Rudimentary", "Exploratory", "Predictive", "Anomaly"
    }  # fmt: skip


def test_short_answers_stand_in_their_tables(queries: list[dict[str, str]]) -> None:
    """Looked-up values are cells of the CSV."""
    for query in queries:
        if query["SubQType"] == "Value-Matching":
            path = TABLES / "csv" / f"{query['FileName']}.csv"
            with path.open(encoding="utf-8", newline="") as file:
                assert query["FinalAnswer"] in {cell for row in csv.reader(file) for cell in row}


def test_totals_add_up() -> None:
    with (TABLES / "csv" / "food-table01.csv").open(encoding="utf-8", newline="") as file:
        rows = [[int(c) for c in row[2:]] for row in list(csv.reader(file))[2:]]
    assert all(sum(row[:-1]) == row[-1] for row in rows)
    regions, total = [rows[i : i + 4] for i in (0, 4, 8)], rows[12]
    for region in regions:
        assert [sum(column) for column in zip(*region[:3], strict=True)] == region[3]
    assert [sum(column) for column in zip(*(r[3] for r in regions), strict=True)] == total


def test_the_pictures_are_readable_and_small() -> None:
    for path in (TABLES / "image").iterdir():
        with Image.open(path) as image:
            assert image.format == "PNG"
            assert image.mode == "P"
            assert min(image.size) >= 300
            assert max(image.size) <= 1500
            assert len(image.convert("RGB").getcolors() or []) >= 4  # text, rules, shades, paper
    assert sum(f.stat().st_size for f in TABLES.rglob("*") if f.is_file()) < 2**20


def test_training_never_saw_what_is_asked() -> None:
    questions = read_jsonl(QUICKSTART / "questions.jsonl")
    assert Counter(asked["kind"] for asked in questions) == {
        "value": 24,
        "compare": 4,
        "largest": 4,
        "smallest": 4,
        "count": 4,
    }
    for asked in questions:
        if asked["kind"] == "value":
            column, row = asked["question"].rstrip("?").split()[5:8:2]
            assert is_test_pair(row, column)
            assert is_test_number(int(asked["answer"]))


def test_the_pictures_are_small_and_each_is_asked_about_once() -> None:
    pictures = {
        f"image/{path.name}": path.stat().st_size for path in QUICKSTART.glob("image/*.png")
    }
    asked = [row["image"] for row in read_jsonl(QUICKSTART / "questions.jsonl")]
    assert sorted(asked) == sorted(pictures)
    assert sum(pictures.values()) < 2**18
