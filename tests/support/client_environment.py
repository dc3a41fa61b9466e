"""Programs of others that are clients of ``batchkit serve`` or read runs, each in a virtual environment of its own."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

from filelock import FileLock

from batchkit.runs.status import counts_of
from batchkit.storage.files import cache_folder
from tests.support.api_server import serving
from tests.support.environments import installed
from tests.support.how_to import run_page
from tests.support.paths import ROOT

FOLDER = cache_folder("clients")
NEWEST = "2026-11-30"  # uv leaves out what was published later, also of what the packages need
MODEL = ("--model", "batchkit-demo", "--set", "engine.kind=dry-run")
ADDRESS = "http://127.0.0.1:8080"  # in the pages


def client_environment(name: str, *packages: str) -> Path:
    """The environment ``name`` with ``packages``. It is made once, and kept in the user's cache folder."""
    place = FOLDER / name
    made_of, wanted = place / "packages.txt", "\n".join([sys.version, *packages, NEWEST])
    place.mkdir(parents=True, exist_ok=True)
    with FileLock(FOLDER / f"{name}.lock"):
        if made_of.exists() and made_of.read_text() == wanted:
            return place
        installed(place, "--exclude-newer", NEWEST, *packages)
        made_of.write_text(wanted)
    return place


def reader_environment(name: str, *packages: str) -> Path:
    """The same, also with batchkit and what it depends on. With ``PYTHONPATH``, its programs import this checkout."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    return client_environment(name, str(ROOT), *project["dependencies"], *packages)


def run_client(page: str, folder: Path, environment: Path, **variables: str) -> str:
    """Run the page against a server of its own, and return what it prints. No model answers: each row is answered
    with its number."""
    with serving(*MODEL, cwd=folder) as served:
        return run_page(
            page,
            folder,
            environment=environment,
            replaced={ADDRESS: served.url.rstrip("/")},
            variables={"PYTHONPATH": "", **variables},
        )


def answered(folder: Path) -> list[int]:
    """The number of rows with an answer in each batch of the server that ran in ``folder``; no row may have failed."""
    totals = [counts_of(run).totals for run in (folder / "output/serve/batches").iterdir()]
    assert not any(counts.failed for counts in totals)
    return sorted(counts.ok for counts in totals)
