"""``manifest.json``: the job and the input with which a run began.

``identity`` holds everything that decides the answers (``identity.py``). The input's files are listed in ``input``. A
resume checks that both are unchanged. The first start writes the manifest; later starts append their notes to
``starts.jsonl`` (``starts.py``). Only a requeue, or a start of a run without records, replaces it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import orjson
from pydantic import BaseModel, ConfigDict, ValidationError

import batchkit
from batchkit.config.masking import masked
from batchkit.config.regular_file import read_bytes
from batchkit.config.tables import JobConfig
from batchkit.errors import StoreError
from batchkit.storage.checkpoint import CHECKPOINT
from batchkit.storage.files import disk_errors, write_atomically
from batchkit.storage.identity import Identity, identity
from batchkit.storage.log import RESULTS
from batchkit.storage.runfolder import MANIFEST
from batchkit.types import utc_now

_START_AGAIN = "; start again with --fresh (the old folder is kept)"


@dataclass(frozen=True, slots=True)
class FileFingerprint:
    """The fingerprint of one input file. A later start compares it to notice that the file has changed."""

    path: str
    size: int
    mtime_ns: int  # 0 if ``sha256`` hashes the bytes of a remote file
    # Hash of the file's bytes. For a remote file: of its store's report (``fsspec``'s ``ukey``: size, ETag or
    # time), or of its bytes if a web server reports neither ETag nor time. For rows from Python: of each
    # row's ``input_hash``.
    sha256: str
    ctime_ns: int = 0  # changes with every write, and can't be set back like ``mtime_ns``
    read_as: str = ""  # format, from the file's name or the job
    columns: tuple[str, ...] = ()  # of a table, and of rows from Python


class _Part(BaseModel):
    """A part of the manifest. Keys that this version does not know are kept."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True)


class Model(_Part):
    name: str | None
    revision: Any = None


class Manifest(_Part):
    """The content of ``manifest.json``."""

    version: Literal[1]
    name: str
    batchkit: str = ""
    created_at: str = ""
    input: list[FileFingerprint]
    identity: Identity
    model: Model
    seed: int | None
    merged_from: list[str] | None = None

    @classmethod
    def new(
        cls,
        job: JobConfig,
        files: Sequence[FileFingerprint],
        prompt_files: Mapping[str, str] | None = None,
    ) -> Manifest:
        """Return the manifest of a run that has not been started.

        - ``files``: fingerprints of the input files.
        - ``prompt_files``: hashes of the files that the prompts of all rows include.
        """
        return cls(
            version=1,
            name=job.name,
            batchkit=batchkit.__version__,
            created_at=utc_now(),
            input=[replace(file, path=masked(file.path)) for file in files],
            identity=identity(job, prompt_files),
            model=Model(name=masked(job.engine.model), revision=job.engine.options.get("revision")),
            seed=job.run.seed,
        )

    def renewed(self, new: Manifest, identity: Identity) -> Manifest:
        """Return this run's manifest with the input and the model of ``new``, and with ``identity``."""
        update = {key: getattr(new, key) for key in ("input", "model", "seed")}
        return self.model_copy(update={**update, "identity": identity})

    def write(self, folder: Path) -> None:
        """Replace the manifest in ``folder`` in one step. No other code writes it.

        Raises:
            StoreError: the disk fails.
        """
        path, table = folder / MANIFEST, self.model_dump(exclude_unset=True)
        with disk_errors(path):
            write_atomically(path, orjson.dumps(table, option=orjson.OPT_INDENT_2, default=str))


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest of a run.

    Raises:
        StoreError: the manifest is missing, or can't be read.
    """
    path = folder / MANIFEST
    with disk_errors(path, "can't be read", _START_AGAIN):
        try:
            return Manifest.model_validate_json(read_bytes(path))
        except FileNotFoundError:
            raise StoreError(without_manifest(folder)) from None
        except ValidationError as error:
            raise StoreError(f"{path}: {_problem(error)}") from error


def without_manifest(folder: Path) -> str:
    """Return an error message for a ``folder`` that has no manifest, with the remedy."""
    if not any(os.path.lexists(folder / name) for name in (RESULTS, CHECKPOINT)):
        return f"{folder}: not a run folder (no {MANIFEST})"
    return (
        f"{folder}: has records ({RESULTS}, {CHECKPOINT}) but no {MANIFEST}, so it is unknown which job and"
        f" input they were made from. Restore a copy of {MANIFEST} if there is one; otherwise run the job from"
        " the beginning: `batchkit run JOB --fresh`, which keeps the old folder"
    )


def _problem(error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    if not first["loc"]:
        return f"can't be read: {first['msg']}{_START_AGAIN}"
    if first["loc"] == ("version",):
        return f"is from another version of batchkit (its format is not 1){_START_AGAIN}"
    return (
        f"damaged at {'.'.join(map(str, first['loc']))}: {first['msg']}; restore a copy of it, or"
        " start a new run with --fresh (the old folder is kept)"
    )
