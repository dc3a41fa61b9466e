"""What another package adds with entry points works like batchkit's own; examples/plugin is the example."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from batchkit.engines.base import Engine
from tests.support import environments
from tests.support.paths import ROOT
from tests.support.rows import read_jsonl

pytestmark = pytest.mark.release

EXAMPLE = ROOT / "examples" / "plugin"
MODULE = (EXAMPLE / "batchkit_example.py").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment into which the wheel and the example were installed."""
    wheel = environments.wheel(tmp_path_factory.mktemp("dist"))
    place = tmp_path_factory.mktemp("plugin") / "env"
    return environments.installed(place, wheel, EXAMPLE) / "bin" / "python"


@pytest.fixture(autouse=True)
def _job(tmp_path: Path) -> None:
    for name in ("job.toml", "tales.paragraphs"):
        shutil.copy(EXAMPLE / name, tmp_path)


def run(python: Path, folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    command = [python, "-m", "batchkit", *args]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


def test_one_job_uses_a_reader_an_engine_a_layer_an_extractor_two_kinds_of_scorer_and_an_export(
    python: Path, tmp_path: Path
) -> None:
    ran = run(python, tmp_path, "run", "job.toml")
    assert ran.returncode == 0, ran.stderr
    records = read_jsonl(tmp_path / "output" / "loud" / "results.jsonl")
    records.sort(key=lambda record: record["index"])  # the layer answers first
    found = [(r["text"], r["prediction"], r["scores"]["as-long"]) for r in records]
    of_layer = "They lived happily."
    assert found == [
        ("ONCE", "ONCE", 1.0),
        ("UPON A TIME", "UPON", 4 / 11),
        (of_layer, "They", 4 / 7),
    ]
    exported = run(python, tmp_path, "export", "job.toml", "--texts", "--json")
    assert exported.returncode == 0, exported.stderr
    assert json.loads(exported.stdout)["rows"] == 3
    assert (tmp_path / "output/loud/results.texts").read_text() == f"ONCE\nUPON A TIME\n{of_layer}"
    helped = run(python, tmp_path, "export", "--help").stdout
    assert re.search(r"--texts \[PATH\] +Write the text of each answer\.", helped)
    assert "the longest of 3 answers has 19 characters" in ran.stderr
    overall = json.loads(run(python, tmp_path, "score", "job.toml", "--json").stdout)["overall"]
    assert overall["of-longest"] == pytest.approx(100 / 3 * (4 + 11 + 19) / 19)


@pytest.mark.parametrize(
    ("line", "reason"),
    [("raise KeyError(len(answers))", "KeyError: 3"), ("longest = 1", "returned 4.0, expected")],
)
def test_a_deferred_scorer_that_fails_leaves_its_own_scores_out_alone(
    python: Path, tmp_path: Path, line: str, reason: str
) -> None:
    broken = MODULE.replace("longest = max(len(answer.text) for answer in answers)", line)
    (tmp_path / "batchkit_example.py").write_text(broken)
    ran = run(python, tmp_path, "run", "job.toml")
    assert ran.returncode == 0, ran.stderr
    assert re.search(f"the scorer of-longest fails: .*{reason}.*3 answers are unscored", ran.stderr)
    found = json.loads(run(python, tmp_path, "score", "job.toml", "--json").stdout)["overall"]
    assert (found["n"], found["unscored_by"]) == (3, {"of-longest": 3})


def test_names_that_nothing_has_are_refused_with_the_nearest(python: Path, tmp_path: Path) -> None:
    mistakes = {
        "engine.kind=lout": "did you mean 'loud'?",
        "input.format=paragraph": "did you mean 'paragraphs'?",
        'scoring.scorers=["aslong"]': "did you mean 'as-long'?",
        'select.scorer="oflongest"': "did you mean 'of-longest'?",
        "scoring.extract=first-words": "did you mean 'first-word'?",
    }
    flags = [part for mistake in mistakes for part in ("--set", mistake)]
    refused = run(python, tmp_path, "validate", "job.toml", *flags)
    assert refused.returncode == 2
    for mistake, message in mistakes.items():
        assert re.search(f"{mistake.partition('=')[0]}.*{re.escape(message)}", refused.stderr)


def test_the_engine_of_the_example_has_all_that_an_engine_has() -> None:
    example: dict[str, Any] = {}
    exec(MODULE, example)
    assert {name for name in vars(Engine) if not name.startswith("_")} <= {*dir(example["Loud"])}


def test_a_plug_in_that_can_not_be_imported_is_named(python: Path, tmp_path: Path) -> None:
    (tmp_path / "batchkit_example.py").write_text("import no_such_module")
    refused = run(python, tmp_path, "validate", "job.toml")
    assert refused.returncode == 2
    assert "batchkit-example" in refused.stderr
    assert "No module named 'no_such_module'" in refused.stderr


@pytest.mark.parametrize("page", ["plugins.md", "how-to/plug-in.md"])
def test_the_pages_show_the_example(page: str) -> None:
    files = [path.read_text(encoding="utf-8") for path in EXAMPLE.glob("*.*")]
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    blocks = re.findall(r"```(?:toml|python)[^\n]*\n(.*?)```", text, re.DOTALL)
    assert blocks
    for block in blocks:
        assert any(block in file for file in files), block
