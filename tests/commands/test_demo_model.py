"""The models of random weights that `batchkit demo-model` builds. The engine tests run them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from batchkit.commands.demo_model import build_demo_model
from batchkit.errors import JobError
from tests.support.paths import ROOT

pytestmark = pytest.mark.slow


def contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "demo"
    build_demo_model(path)
    return path


@pytest.mark.release
@pytest.mark.parametrize("flags", [[], ["--text-only"]])
def test_it_is_the_same_to_the_byte_in_another_process(tmp_path: Path, flags: list[str]) -> None:
    there = [sys.executable, "-m", "batchkit", "demo", "model", tmp_path / "there", *flags]
    subprocess.run(there, check=True, cwd=ROOT)
    build_demo_model(tmp_path / "here", text_only=bool(flags))
    assert contents(tmp_path / "here") == contents(tmp_path / "there")


def test_it_stays_under_a_megabyte_and_says_what_it_is(model: Path) -> None:
    assert sum(f.stat().st_size for f in model.iterdir()) <= 1_000_000
    assert "answers mean nothing" in (model / "README.md").read_text(encoding="utf-8")


def test_greedy_answers_are_words_and_follow_the_prompt(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    build_demo_model(tmp_path / "demo", text_only=True)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "demo")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "demo")
    answers = []
    for question in ("How much bread?", "Who reads the letter?", "Name 3 birds.", "?"):
        chat = [{"role": "user", "content": question}]
        inputs = tokenizer.apply_chat_template(
            chat, add_generation_prompt=True, return_dict=True, return_tensors="pt"
        )
        output = model.generate(**inputs, max_new_tokens=16, do_sample=False)
        answers.append(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :]))
    assert len(set(answers)) == 4
    assert all(re.fullmatch(r"([ ][a-z]+|[,.])+", answer) for answer in answers), answers


def test_an_older_demo_model_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "demo"
    build_demo_model(path)
    (path / "left over").touch()
    build_demo_model(path, text_only=True)
    assert not (path / "left over").exists()
    assert json.loads((path / "config.json").read_text())["model_type"] == "qwen2"
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("kind", ["folder", "file"])
def test_anything_else_is_left_alone(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "mine"
    if kind == "folder":
        path.mkdir()
        (path / "config.json").write_text("{}")
    else:
        path.write_text("mine")
    before = contents(tmp_path)
    with pytest.raises(JobError, match=re.escape(str(path))):
        build_demo_model(path)
    assert contents(tmp_path) == before


def test_a_build_that_fails_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(JobError, match="can't be written"):
        build_demo_model(tmp_path / "file" / "demo")
    assert [p.name for p in tmp_path.iterdir()] == ["file"]
