"""The wheel: what is in it, and what works where it is installed without vLLM."""

from __future__ import annotations

import email
import os
import re
import subprocess
import tomllib
from collections.abc import Callable
from email.message import Message
from pathlib import Path
from zipfile import ZipFile

import pytest

from batchkit.config.installation import DISTRIBUTION
from tests.support import environments
from tests.support.environments import ADDRESS
from tests.support.paths import ROOT

pytestmark = pytest.mark.release

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
JOB = """
name = "colours"
[input]
path = "rows.jsonl"
[prompt]
user = "What is {{ colour }}?"
[engine]
model = "Qwen/Qwen3-8B"
[engine.options]
max_model_len = 512
"""

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return environments.wheel(tmp_path_factory.mktemp("dist"))


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return environments.installed(tmp_path_factory.mktemp("installed") / "venv", wheel)


@pytest.fixture
def run(environment: Path, tmp_path: Path) -> Run:
    def run_one(*args: str, exit_code: int = 0) -> subprocess.CompletedProcess[str]:
        clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        command = [str(environment / "bin" / "batchkit"), *args]
        done = subprocess.run(
            command, cwd=tmp_path, env=clean, capture_output=True, text=True, check=False
        )
        assert done.returncode == exit_code, f"{args}\n{done.stdout}\n{done.stderr}"
        return done

    return run_one


def metadata(wheel: Path) -> Message:
    with ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("/METADATA"))
        return email.message_from_bytes(archive.read(name))


def test_the_wheel_has_all_files_of_the_package_the_jobs_and_the_cookbook(wheel: Path) -> None:
    with ZipFile(wheel) as archive:
        names = set(archive.namelist())
    listed = subprocess.check_output(
        ["git", "ls-files", "batchkit", "jobs", "docs/cookbook.md"], cwd=ROOT, text=True
    )
    shared = next(name for name in names if ".data/" in name).partition("/")[0]
    for path in listed.splitlines():
        name = path if path.startswith("batchkit/") else path.removeprefix("docs/")
        place = (
            ""
            if name == path and path.startswith("batchkit/")
            else f"{shared}/data/share/batchkit/"
        )
        assert f"{place}{name}" in names


def test_the_page_on_a_registry_leads_to_the_repository(wheel: Path, tmp_path: Path) -> None:
    found = metadata(wheel)
    assert found["Name"] == DISTRIBUTION == PROJECT["name"]
    assert found["Author"]
    assert f"Repository, {ADDRESS}" in (found.get_all("Project-URL") or [])
    page = str(found.get_payload())
    links = re.findall(r"\]\(([^)]+)\)", page)
    assert links
    for link in links:
        place = "raw" if link.endswith(".png") else "blob"
        assert link.startswith(f"{ADDRESS}/{place}/main/")
        assert (ROOT / link.removeprefix(f"{ADDRESS}/{place}/main/")).exists()
    without = metadata(environments.wheel(tmp_path, ""))
    assert without.get_all("Project-URL") is None
    assert "](" not in str(without.get_payload()), "a link to a file would lead nowhere"


def test_without_vllm_the_installed_command_checks_and_runs_a_job(run: Run, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"colour": "red"}\n{"colour": "blue"}\n')
    (tmp_path / "job.toml").write_text(JOB)
    dry = ["--set", "engine.kind=dry-run"]
    assert "2" in run("validate", "job.toml", *dry).stdout
    ended = run("run", "job.toml", exit_code=2)
    assert (
        "vllm is not installed in this Python: pip install torch transformers 'vllm<0.33,>=0.27'"
        in ended.stderr
    )
    for said in ("engine.kind=dry-run", '"openai-server"', "vLLM's CPU build"):
        assert said in run("run", "job.toml", "--dry-run", exit_code=2).stderr
        assert said.strip('"') in run("doctor", exit_code=1).stdout + ended.stderr
    run("run", "job.toml", *dry)
    assert '"ok": 2' in run("status", "--json").stdout.replace('":2', '": 2')
    run("export", "--parquet")
    run("report")
    assert {"results.parquet", "report.html"} <= {
        path.name for path in (tmp_path / "output" / "colours.dry-run").iterdir()
    }


def test_init_writes_a_job_that_the_installed_command_checks(run: Run, tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("id,text\n1,tea\n")
    run("init", "text", "mine.toml")
    path = ["--set", "input.path=rows.csv", "--set", "engine.kind=dry-run"]
    run("validate", "mine.toml", *path)


def test_the_jobs_that_ship_run_from_the_environment(run: Run, environment: Path) -> None:
    job = environment / "share" / "batchkit" / "jobs" / "sentiment.toml"
    dry = ["--set", "engine.kind=dry-run"]
    run("validate", str(job), *dry)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_completion_script_of_each_shell_is_printed(
    environment: Path, shell: str, tmp_path: Path
) -> None:
    done = subprocess.run(
        [environment / "bin" / "batchkit"],
        cwd=tmp_path,
        env={"PATH": os.environ["PATH"], "_BATCHKIT_COMPLETE": f"{shell}_source"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "_BATCHKIT_COMPLETE" in done.stdout, done.stderr
