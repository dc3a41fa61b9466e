"""The benchmarks' scripts: that they start, and that those run here which nobody runs every day."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.forks import Fork

pytestmark = pytest.mark.release

ROOT = Path(__file__).parents[1]
CALLED = ("sides", "ray_script", "pretrained_sides")  # by other scripts, not by hand
SCRIPTS = sorted(
    path.stem
    for path in (ROOT / "benchmarks").glob("*.py")
    if path.stem not in CALLED and '__name__ == "__main__"' in path.read_text()
)


def run(script: str, *args: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / f"{script}.py"), *args],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=280,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False,
    )


def gpu(*args: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """The script and its commands as forks of a process that has imported vLLM."""
    command = [sys.executable, "-P", "-m", "tests.support.forked_benchmark", "gpu", *args]
    paths = os.pathsep.join([str(ROOT / "benchmarks"), str(ROOT)])
    with Fork(
        command,
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": paths},
    ) as process:
        stdout, stderr = process.communicate(timeout=280)
    return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_script_says_what_it_takes(script: str, tmp_path: Path) -> None:
    ended = run(script, "--help", cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith("usage:")


@pytest.mark.parametrize("words", [["tune"], ["plan", "--only", "simulated"]], ids=["tune", "plan"])
def test_what_is_simulated_holds(words: list[str], tmp_path: Path) -> None:
    ended = run(*words, cwd=tmp_path)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    figures = json.loads(ended.stdout.splitlines()[-1])["figures"]
    assert {figure["verdict"] for figure in figures} <= {"holds", ""}, figures


def test_all_sides_of_the_gpu_benchmark_answer_every_row(tmp_path: Path) -> None:
    ended = gpu("--tiny", "--only", "text", cwd=tmp_path)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    assert found["benchmark"] == "gpu"
    assert set(found["machine"]) == {"vllm", "torch", "card", "card_bytes", "driver"}
    section = found["sections"]["text"]
    assert section["error"] is None
    lines = section["results"]
    assert [line["side"] for line in lines] == ["batchkit", "generate(all)", "batches of 64"]
    assert {line["rows"] for line in lines} == {24}
    assert len({line["tokens"] for line in lines}) == 1
    assert all(0 <= line["equal_texts"] <= 1 for line in lines)
    assert lines[1]["wanted"] == 0.98


def test_a_section_that_fails_is_reported_and_leaves_the_others_alone(tmp_path: Path) -> None:
    ended = gpu("--tiny", "--only", "text,ledger", "--limit-s", "1", cwd=tmp_path)
    assert ended.returncode == 1, ended.stderr
    sections = json.loads(ended.stdout.splitlines()[-1])["sections"]
    assert list(sections) == ["text", "ledger"]
    assert all(found["error"].startswith("SectionError") for found in sections.values())


def test_all_benchmarks_end_in_one_table(tmp_path: Path) -> None:
    ended = run("all", "--only", "checkpoint", cwd=tmp_path)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    *table, last = ended.stdout.splitlines()
    assert any(line.split()[:1] == ["checkpoint"] and line.endswith(" s") for line in table)
    (ran,) = json.loads(last)["results"]
    assert ran["script"] == "checkpoint"
    assert ran["problem"] == ""
    assert ran["figures"][0]["found"] > 0


def test_each_part_of_the_ledger_is_timed_and_can_be_switched_off(tmp_path: Path) -> None:
    """The script replaces functions of the package, which may get other names."""
    ended = run("ledger", "--rows", "500", "--rounds", "1", cwd=tmp_path)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found = json.loads(ended.stdout.splitlines()[-1])
    assert all(part["cpu_us"] > 0 for part in found["parts"].values())
    assert {"no fsync", "no checkpoint", "no writing", "no ledger"} < found["ratios"].keys()
