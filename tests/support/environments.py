"""Environments with packages that the tests' own one lacks."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from importlib.metadata import distributions
from pathlib import Path

import pytest
from filelock import FileLock

from batchkit.storage.files import cache_folder
from tests.support.paths import ROOT

ADDRESS = "https://git.example/team/batchkit"
"""The repository of the wheel."""
TABLES = ("deltalake", "duckdb", "ipykernel", "ipywidgets", "nbclient", "polars", "pylance")
FIND_LINKS = [word for at in os.environ.get("PIP_FIND_LINKS", "").split() for word in ("-f", at)]
_UNREACHABLE = re.compile("error sending request|Could not connect|dns error|Connection reset")
_SCRIPT = """#!{python}
from batchkit.__main__ import main
main()
"""


def wheel(folder: Path, repository: str = ADDRESS) -> Path:
    """Build batchkit's wheel in ``folder``."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    environment = os.environ | {"REPOSITORY": repository}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    (wheel,) = folder.glob("*.whl")
    return wheel


def installed(place: Path, *packages: str | Path, python: str = sys.executable) -> Path:
    """Return ``place``, a new environment with only ``packages`` and what they depend on."""
    uv("venv", "--clear", "--seed", "--python", python, place)
    uv("pip", "install", "--python", place / "bin" / "python", *FIND_LINKS, *packages)
    return place


def uv(*words: str | Path, cwd: Path | None = None) -> str:
    """Run uv and return what it prints. Skip the test if uv can't reach the package index."""
    command = [sys.executable, "-m", "uv", "--quiet", *map(str, words)]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    if done.returncode and _UNREACHABLE.search(done.stderr):
        pytest.skip(f"the package index can't be reached: {done.stderr.strip()[-300:]}")
    assert done.returncode == 0, f"{command}\n{done.stderr}"
    return done.stdout


def with_tables() -> Path:
    """Return an environment with ``TABLES`` beside all that the tests' own environment has. It is made once, in
    batchkit's cache. Programs in it need the checkout on their ``PYTHONPATH``."""
    place, ours = cache_folder("tables"), sysconfig.get_path("purelib")
    done, content = place / "packages.txt", "\n".join([sys.version, ours, *TABLES])
    place.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(place.with_suffix(".lock")):
        if done.is_file() and done.read_text() == content:
            return place
        shutil.rmtree(place, ignore_errors=True)
        same = place.with_suffix(".constraints")  # a package that both have is in one version
        same.write_text("\n".join(f"{one.name}=={one.version}" for one in distributions()))
        installed(place, *TABLES, "--constraint", same)
        (site,) = place.glob("lib/*/site-packages")
        (site / "ours.pth").write_text(f"import site; site.addsitedir({ours!r})\n")
        script = place / "bin" / "batchkit"
        script.write_text(_SCRIPT.format(python=place / "bin" / "python"))
        script.chmod(0o755)
        done.write_text(content)
    return place
