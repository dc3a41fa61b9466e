"""Which run folder a name on the command line means."""

from __future__ import annotations

import os
from collections.abc import Sequence
from glob import escape
from pathlib import Path

from batchkit.config.loading import load_job
from batchkit.config.suggest import did_you_mean
from batchkit.errors import JobError, StoreError
from batchkit.storage.checkpoint import CHECKPOINT
from batchkit.storage.log import RESULTS
from batchkit.storage.manifest import latest_run, without_manifest
from batchkit.storage.runfolder import MANIFEST, is_run


def folder_of(target: str, overrides: Sequence[str] = ()) -> Path:
    """The run folder that ``target`` (a folder or a job file) means, even if it has no run."""
    path = Path(target)
    return load_job(path, overrides).folder if path.is_file() else path


def near_run(folder: Path) -> str:
    """What a message about ``folder``, which is no run folder, ends with: a run beside it with nearly its name."""
    return did_you_mean(str(folder), (str(run) for run in folder.parent.glob("*") if is_run(run)))


def find_run(
    target: str | None, overrides: Sequence[str] = (), output: Path = Path("output")
) -> Path:
    """The run folder that ``target`` means: a run folder, a job file, or the last run if None.

    ``overrides`` apply to the job file, for example to its ``name``.

    Raises:
        JobError: there is no such run.
        StoreError: its manifest is missing.
    """
    if target is None:
        return latest_run(output)
    path, folder = Path(target), folder_of(target, overrides)
    if not is_run(folder):
        if any(os.path.lexists(folder / name) for name in (RESULTS, CHECKPOINT)):
            raise StoreError(without_manifest(folder))
        shards = folder.parent.glob(f"{escape(folder.name)}.shard-*-of-*/{MANIFEST}")
        counts = {path.parent.name.rpartition("-of-")[2] for path in shards}
        if counts := {count for count in counts if count.isdecimal()}:  # others were moved aside
            parts = " ".join(f"{folder}.shard-*-of-{count}" for count in sorted(counts, key=int))
            raise JobError(
                f"{folder}: no run there, but shards of it: name one of them, or `batchkit merge {parts}"
                f" --into {target}` first"
            )
        if path.is_file():
            dry = folder.with_name(f"{folder.name}.dry-run")
            hint = f"; its dry run is {dry}" if is_run(dry) else ""
            raise JobError(f"{folder}: no run there; start one with `batchkit run {target}`{hint}")
        raise JobError(f"{target}: neither a run folder nor a job file{near_run(folder)}")
    return folder
