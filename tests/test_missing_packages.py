"""An engine whose packages are missing or broken says so itself, in one line with the remedy.

A module that raises on import stands on ``PYTHONPATH``: so the package is missing, or broken, for the
run's process and for every process that it starts.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.support.dry_runs import reductions
from tests.support.own_process import batchkit
from tests.support.rows import write_jsonl

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]

WITHOUT = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {names}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Missing())
"""
# Installed, as far as anybody can see who does not import it; found out by the launcher alone.
BROKEN = """
import os, signal, sys

class Broken:
    def find_spec(self, name, path=None, target=None):
        if name == "vllm" and "batchkit.engines.process.child" in sys.argv:
            {happens}

sys.meta_path.insert(0, Broken())
"""
JOB = """
name = "job"
input.path = "rows.jsonl"
prompt.user = "{{ q }}"
engine.model = "no-such-org/no-such-model"
"""


def command(
    folder: Path, site: str, *args: str, timeout_s: float = 60
) -> subprocess.CompletedProcess[str]:
    """``batchkit`` in ``folder``, after every process has run ``site`` at its start."""
    (folder / "site").mkdir()
    (folder / "site/sitecustomize.py").write_text(site)
    (folder / "job.toml").write_text(JOB)
    write_jsonl(folder / "rows.jsonl", [{"q": "tea?"}])
    path = f"{folder / 'site'}{os.pathsep}{ROOT}"
    return batchkit(*args, cwd=folder, timeout_s=timeout_s, start=subprocess.Popen, PYTHONPATH=path)


def assert_one_line(ended: subprocess.CompletedProcess[str], *words: str) -> None:
    errors = [line for line in ended.stderr.splitlines() if line.startswith("batchkit: error: ")]
    assert ended.returncode == 2, ended.stderr
    assert len(errors) == 1, ended.stderr
    assert all(word in errors[0] for word in words), errors
    assert "Traceback" not in ended.stderr
    assert "out of memory" not in ended.stderr


SETUP = f"make -C {ROOT} setup"
TRANSFORMERS = "--set engine.kind=transformers"


@pytest.mark.parametrize(
    ("name", "command_line", "remedy"),
    [
        ("vllm", "run job.toml", SETUP),
        ("vllm", "run job.toml --dry-run", SETUP),
        ("vllm", "run job.toml --set engine.in_process=true", SETUP),
        ("torch", f"run job.toml {TRANSFORMERS}", SETUP),
        ("transformers", f"validate job.toml {TRANSFORMERS}", SETUP),
        ("safetensors", "demo model model", SETUP),
        ("uvicorn", "view .", f"pip install -e '{ROOT}[view]'"),
    ],
)
def test_without_a_package_a_command_ends_with_one_line_that_says_what_to_install(
    tmp_path: Path, name: str, command_line: str, remedy: str
) -> None:
    ended = command(tmp_path, WITHOUT.format(names=[name]), *command_line.split())
    assert_one_line(ended, f"{name} ", " not installed", remedy)
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize(("name", "task"), [("numpy", "generate"), ("pyarrow", "embed")])
def test_without_what_writes_a_run_is_refused_before_its_first_row(
    tmp_path: Path, name: str, task: str
) -> None:
    options = ["--set", "engine.kind=dry-run", "--set", f"task={task}"]
    ended = command(tmp_path, WITHOUT.format(names=[name]), "run", "job.toml", *options)
    assert_one_line(ended, f"No module named '{name}'", "install")
    assert not (tmp_path / "output/job/results.jsonl").exists()


def test_a_package_that_can_not_be_imported_is_one_line_too(tmp_path: Path) -> None:
    words = "libcudart.so.12: cannot open shared object file"
    broken = WITHOUT.format(names=["vllm.env_override"]).replace(
        'raise ModuleNotFoundError(f"No module named {name!r}", name=name)', "pass"
    )
    broken += f"""
class Broken:
    def find_spec(self, name, path=None, target=None):
        if name == "vllm.env_override":
            raise ImportError({words!r})

sys.meta_path.insert(0, Broken())
"""
    ended = command(tmp_path, broken, "validate", "job.toml")
    assert_one_line(ended, words, "batchkit doctor")


@pytest.mark.parametrize(
    ("happens", "words"),
    [
        ('raise ImportError("libcudart.so.12: no such file")', "libcudart.so.12: no such file"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", "SIGSEGV: Fatal Python error: Segmentation fault"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "SIGKILL"),
        ("os._exit(7)", "exit code 7"),
    ],
)
def test_a_launcher_that_does_not_start_says_its_own_error(
    tmp_path: Path, happens: str, words: str
) -> None:
    ended = command(tmp_path, BROKEN.format(happens=happens), "run", "job.toml")
    assert ended.returncode == 1, ended.stderr
    assert words in ended.stderr
    assert "engine.log" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert "out of memory" not in ended.stderr
    assert reductions(tmp_path / "output/job") == [], "no setting would help"
