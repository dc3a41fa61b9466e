"""The commands of the documentation that name a real model, as they are written, and what it says they print.

The models are found by their names on the hub, in the cache that ``make real-models`` lays out like the hub's.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.chat_server import serving
from tests.support.espeak import record
from tests.support.paths import ROOT
from tests.support.prose import sentences
from tests.support.real_models import real_model
from tests.support.rows import read_jsonl, write_jsonl

pytestmark = pytest.mark.real

BLOCK = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```', re.MULTILINE | re.DOTALL)


@pytest.fixture(autouse=True)
def _in_a_folder_with_the_jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = real_model("smollm2-135m-instruct").parent / "hub"
    monkeypatch.setenv("HF_HUB_CACHE", str(hub))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.chdir(tmp_path)
    shutil.copytree(ROOT / "jobs", "jobs")


def shell(command: str) -> str:
    """Return what the command prints. It must succeed."""
    done = subprocess.run(["bash", "-ec", command], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout + done.stderr


def test_the_tutorial() -> None:
    page = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")
    printed = ""
    with serving(lambda text, body: "Yes.\n[Score]: 100/100") as server:
        server.names.append("Qwen/Qwen3-8B")
        for kind, name, text in BLOCK.findall(page):
            if name:
                Path(name).write_text(text.replace("http://localhost:8000/v1", server.url))
            if kind == "python":
                shell(f"python {name}")
            elif kind == "bash":
                printed = shell(text)
            elif kind == "csv":
                assert Path("short_reviews.csv").read_text().startswith(text)
            elif kind == "text":
                assert [line for line in text.splitlines() if line not in printed] == [], printed
    assert server.answered.total() == 60


def test_the_first_example_of_the_readme() -> None:
    """Without compiling the model, which takes minutes."""
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    command = next(text for kind, _, text in BLOCK.findall(page) if text.startswith("batchkit run"))
    shutil.copy("jobs/data/reviews.csv", ".")
    eager = "--set engine.options.enforce_eager=true --set engine.options.dtype=float32"
    assert "40 ok, 0 failed of 40 rows" in shell(f"{command.strip()} {eager}")
    assert Path("answers.parquet").exists()


def command_in(job: str) -> str:
    """Return the command that the job file's comment gives for a real model."""
    text = (ROOT / "jobs" / job).read_text(encoding="utf-8")
    comments = "\n".join(re.findall(r"^# ?(.*)", text, re.MULTILINE)).replace("\\\n", "")
    return next(line for line in comments.splitlines() if "engine.model=" in line)


@pytest.mark.parametrize("job", ["sentiment.toml", "embed_reviews.toml"])
def test_a_job_on_the_model_that_its_comment_names(job: str) -> None:
    assert "40 ok, 0 failed of 40 rows" in shell(command_in(job))


def test_transcription_with_the_model_that_the_comment_names() -> None:
    text = record(Path("talk.wav"), sentences(8)).text
    write_jsonl(Path("recordings.jsonl"), [{"id": "talk", "recording": "talk.wav", "text": text}])
    shell(command_in("transcribe.toml"))
    (row,) = read_jsonl(Path("output/talks/results.jsonl"))
    assert row["scores"]["wer"] < 10
    assert len(row["segments"]) >= 4


def test_a_model_is_a_folder_or_a_name_on_the_hub() -> None:
    page = (ROOT / "docs" / "without-a-hub.md").read_text(encoding="utf-8")
    by_folder, by_name = (text for _, _, text in BLOCK.findall(page) if "batchkit run" in text)
    shell(by_folder)
    shell(by_name)
    folders = "sentiment_folder", "sentiment_smollm2"
    found = [read_jsonl(Path("output", name, "results.jsonl")) for name in folders]
    first, second = ([answer["text"] for answer in records] for records in found)
    assert first == second
