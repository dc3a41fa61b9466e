"""The quickstart's tables and questions."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

from PIL import Image

from tests.support.digests import digests
from tests.support.paths import ROOT
from tests.support.rows import read_jsonl
from tests.support.scripts import load_script

DATA = ROOT / "jobs" / "data" / "quickstart"


def test_the_script_writes_the_data_that_is_checked_in(tmp_path: Path) -> None:
    script = ROOT / "scripts" / "make_quickstart_data.py"
    subprocess.run([sys.executable, script, tmp_path], check=True)
    made, kept = digests(tmp_path), digests(DATA)
    assert made.keys() == kept.keys()
    for name in ("questions.jsonl", "largest.jsonl"):
        assert made[name] == kept[name]
    for path in DATA.rglob("*.png"):  # another Pillow packs them otherwise
        with Image.open(path) as image, Image.open(tmp_path / path.relative_to(DATA)) as again:
            assert image.size == again.size


def test_training_never_saw_what_is_asked() -> None:
    demo = load_script("demo_tables")
    questions = read_jsonl(DATA / "questions.jsonl")
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
            assert demo.is_test_pair(row, column)
            assert demo.is_test_number(int(asked["answer"]))


def test_the_pictures_are_small_and_each_is_asked_about_once() -> None:
    pictures = {f"image/{path.name}": path.stat().st_size for path in DATA.glob("image/*.png")}
    asked = [row["image"] for row in read_jsonl(DATA / "questions.jsonl")]
    assert sorted(asked) == sorted(pictures)
    assert sum(pictures.values()) < 2**18
