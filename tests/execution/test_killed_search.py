"""A run that is killed again and again while it searches for a poison row gets to the end of it.

The engine is a fake (``fake_mortal_engine.py``); the run, its folder and the kills are real.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from batchkit.storage.log import RESULTS
from batchkit.storage.newest import read_newest
from tests.support.fake_mortal_engine import OPENED
from tests.support.forks import LightFork
from tests.support.rows import read_jsonl, write_jsonl

pytestmark = pytest.mark.slow

N_ROWS = 200
POISON = ["row 17", "row 33"]
JOB = """
name = "job"
input.path = "rows.jsonl"
prompt.user = "{{ q }}"
engine.kind = "dry-run"
run.max_in_flight = 64
output.keep = ["q"]
"""
STEPS = (
    JOB.replace('prompt.user = "{{ q }}"\n', "")
    + """
[[steps]]
name = "draft"
prompt.user = "draft of {{ q }}"
[[steps]]
name = "revise"
prompt.user = "{{ steps.draft.text | replace('draft of ', '') }}"
"""
)


def start(folder: Path, kill_at: int | None = None) -> int:
    """The exit code of ``batchkit run``, killed as it opens the engine of that number."""
    faults = {"poison": POISON, "kill_at": kill_at}
    with LightFork(
        [sys.executable, "-m", "tests.support.fake_mortal_engine", "run", "job.toml"],
        cwd=folder,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "BATCHKIT_TEST_FAULTS": json.dumps(faults)},
    ) as process:
        _, stderr = process.communicate(timeout=120)
    assert "Traceback" not in stderr, stderr
    code: int = process.returncode
    return code


def written(folder: Path, job: str = JOB) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "job.toml").write_text(job)
    write_jsonl(folder / "rows.jsonl", [{"q": f"row {n}"} for n in range(N_ROWS)])
    return folder


def engines(folder: Path) -> int:
    return len((folder / OPENED).read_text().splitlines())


def manifest(folder: Path) -> dict[str, Any]:
    read: dict[str, Any] = json.loads((folder / "output/job/manifest.json").read_text())
    return read


def suspects(folder: Path) -> list[Any]:
    groups = manifest(folder)["suspects"]["groups"]
    return [key for group in groups for key, _ in group["rows"]]


def failed(folder: Path) -> list[str]:
    records = list(read_newest(folder / "output/job" / RESULTS))
    assert [record["index"] for record in records] == list(range(N_ROWS))
    return [record["fields"]["q"] for record in records if record["status"] == "failed"]


@pytest.mark.parametrize("job", [JOB, STEPS], ids=["a generation", "two steps"])
def test_a_search_that_is_killed_again_and_again_ends_with_the_poison_rows(
    job: str, tmp_path: Path
) -> None:
    calm, killed = written(tmp_path / "calm", job), written(tmp_path / "killed", job)
    assert start(calm) == 3
    assert failed(calm) == POISON
    starts = 1
    while (code := start(killed, kill_at=4)) != 3:
        assert code == -signal.SIGKILL
        starts += 1
        assert starts <= 12, "each start searches from the beginning"
    assert failed(killed) == POISON
    deaths = engines(killed) - 1  # all but the last engine died, or were in a run that was killed
    assert deaths <= engines(calm) - 1 + len(POISON) + starts
    assert manifest(killed)["suspects"]["groups"] == [], "cleared when the search has ended"


def test_the_generation_that_kills_is_named_and_its_row_keeps_the_others(tmp_path: Path) -> None:
    folder = written(tmp_path, STEPS)
    assert start(folder, kill_at=3) == -signal.SIGKILL
    assert any(key in suspects(folder) for key in ([17, "revise", 0], [33, "revise", 0]))
    assert start(folder) == 3
    poisoned = [r for r in read_newest(folder / "output/job" / RESULTS) if r["status"] == "failed"]
    assert [record["fields"]["q"] for record in poisoned] == POISON
    for record in poisoned:
        assert record["error"]["kind"] == "engine_crash"
        assert record["error"]["message"].startswith("step revise: the engine dies on this row")
        assert record["steps"]["draft"]["text"] == f"draft of {record['fields']['q']}"
    log = (folder / "output/job/run.log").read_text()
    assert "row 17 (id 17), step revise, alone kills the engine: failed" in log
    generations = read_jsonl(folder / "output/job/steps.jsonl")
    found = Counter((line["index"], line["step"]) for line in generations)
    assert found == {(row, step): 1 for row in range(N_ROWS) for step in ("draft", "revise")}
