"""The data that ships with the jobs: complete, and what the scripts make."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

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


def test_every_question_has_its_table_and_answer() -> None:
    text = (TABLES / "data" / "QA_final.json").read_text(encoding="utf-8")
    queries = json.loads(text)["queries"]
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
