"""What another package adds with entry points works like batchkit's own; docs/plugins.md is the example."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sysconfig
import venv
from pathlib import Path
from typing import Any

import pytest

from batchkit.engines.base import Engine
from tests.support.paths import ROOT
from tests.support.rows import read_jsonl

pytestmark = pytest.mark.release

PAGE = (ROOT / "docs" / "plugins.md").read_text(encoding="utf-8")
PROJECT, MODULE, JOB = re.findall(r"```(?:toml|python)\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the packages of this one, and the example installed."""
    folder = tmp_path_factory.mktemp("plugin")
    venv.create(folder / "env", symlinks=True)
    (site,) = (folder / "env").glob("lib/*/site-packages")
    ours = sysconfig.get_path("purelib")
    (site / "ours.pth").write_text(f"import site; site.addsitedir({ours!r})\n{ROOT}\n")
    project = folder / "project"
    project.mkdir()
    (project / "pyproject.toml").write_text(PROJECT)
    (project / "batchkit_example.py").write_text(MODULE)
    it = folder / "env" / "bin" / "python"
    flags = ["--no-index", "--no-deps", "--no-build-isolation", "--quiet"]
    subprocess.run([it, "-m", "pip", "install", *flags, project], check=True, cwd=folder)
    return it


def run(python: Path, folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    command = [python, "-m", "batchkit", *args]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


def test_one_job_uses_a_reader_an_engine_an_extractor_two_kinds_of_scorer_and_an_export(
    python: Path, tmp_path: Path
) -> None:
    (tmp_path / "job.toml").write_text(JOB)
    (tmp_path / "tales.paragraphs").write_text("once\n\nupon a time\n")
    ran = run(python, tmp_path, "run", "job.toml")
    assert ran.returncode == 0, ran.stderr
    records = read_jsonl(tmp_path / "output" / "loud" / "results.jsonl")
    found = [(r["text"], r["prediction"], r["scores"]["as-long"]) for r in records]
    assert found == [("ONCE", "ONCE", 1.0), ("UPON A TIME", "UPON", 4 / 11)]
    exported = run(python, tmp_path, "export", "job.toml", "--texts", "--json")
    assert exported.returncode == 0, exported.stderr
    assert json.loads(exported.stdout)["rows"] == 2
    assert (tmp_path / "output/loud/results.texts").read_text() == "ONCE\nUPON A TIME"
    helped = run(python, tmp_path, "export", "--help").stdout
    assert re.search(r"--texts \[PATH\] +Write the text of each answer\.", helped)
    assert "the longest of 2 answers has 11 characters" in ran.stderr
    overall = json.loads(run(python, tmp_path, "score", "job.toml", "--json").stdout)["overall"]
    assert overall["of-longest"] == pytest.approx(50 * (4 / 11 + 1))


@pytest.mark.parametrize(
    ("line", "reason"),
    [("raise KeyError(len(answers))", "KeyError: 2"), ("longest = 1", "returned 4.0, expected")],
)
def test_a_deferred_scorer_that_fails_leaves_its_own_scores_out_alone(
    python: Path, tmp_path: Path, line: str, reason: str
) -> None:
    (tmp_path / "job.toml").write_text(JOB)
    (tmp_path / "tales.paragraphs").write_text("once\n\nupon a time\n")
    broken = MODULE.replace("longest = max(len(answer.text) for answer in answers)", line)
    (tmp_path / "batchkit_example.py").write_text(broken)
    ran = run(python, tmp_path, "run", "job.toml")
    assert ran.returncode == 0, ran.stderr
    assert re.search(f"the scorer of-longest fails: .*{reason}.*2 answers are unscored", ran.stderr)
    found = json.loads(run(python, tmp_path, "score", "job.toml", "--json").stdout)["overall"]
    assert (found["n"], found["unscored_by"]) == (2, {"of-longest": 2})


def test_names_that_nothing_has_are_refused_with_the_nearest(python: Path, tmp_path: Path) -> None:
    mistakes = {
        "engine.kind=lout": "did you mean 'loud'?",
        "input.format=paragraph": "did you mean 'paragraphs'?",
        'scoring.scorers=["aslong"]': "did you mean 'as-long'?",
        'select.scorer="oflongest"': "did you mean 'of-longest'?",
        "scoring.extract=first-words": "did you mean 'first-word'?",
    }
    (tmp_path / "job.toml").write_text(JOB)
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
    (tmp_path / "job.toml").write_text(JOB)
    (tmp_path / "batchkit_example.py").write_text("import no_such_module")
    refused = run(python, tmp_path, "validate", "job.toml")
    assert refused.returncode == 2
    assert "batchkit-example" in refused.stderr
    assert "No module named 'no_such_module'" in refused.stderr
