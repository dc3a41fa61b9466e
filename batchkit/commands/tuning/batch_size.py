"""The key of the job file that decides how many requests run at once, and how it is set there."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tomlkit
from tomlkit.exceptions import TOMLKitError

from batchkit.config.tables import JobConfig
from batchkit.errors import JobError
from batchkit.storage.files import write_atomically

KEY = "engine.options.max_num_seqs"


def with_size(job: JobConfig, size: int) -> JobConfig:
    """The job with another batch size.

    The engine is kept from continuing at a smaller size when memory runs out: the trial is of
    this size.
    """
    options = {**job.engine.options, "max_num_seqs": size}
    if job.engine.kind == "transformers":
        options["shrink_on_oom"] = False
    return job.model_copy(update={"engine": job.engine.model_copy(update={"options": options})})


def most_of(job: JobConfig, rows: int) -> tuple[int, str]:
    """The largest size that a trial with ``rows`` rows can fill, and why."""
    window = job.run.max_in_flight
    if window != "auto" and window < rows:
        return window, f"run.max_in_flight = {window} hands the engine no more (leave it out)"
    return rows, f"there are {rows:,} rows"


def patch(size: int) -> str:
    """The lines of TOML that set it."""
    table, _, name = KEY.rpartition(".")
    return f"[{table}]\n{name} = {size}"


def check_patch(path: Path) -> None:
    """Like ``write_patch``, but only checks that it would work, because trials take long."""
    _edited(path, 1)
    if not os.access(path.resolve().parent, os.W_OK):
        raise JobError(f"{path}: can't be changed: no leave to write in its folder")


def write_patch(path: Path, size: int) -> None:
    """Set the size in the job file at ``path``, in one step; the rest is left unchanged.

    Raises:
        JobError: it can't be read, written, or changed in this one key alone.
    """
    changed = _edited(path, size)
    path = path.resolve()  # keep a symbolic link
    try:
        mode = path.stat().st_mode
        write_atomically(path, changed)
        path.chmod(mode)
    except OSError as error:
        raise _not_changed(path, error, size) from error


def _edited(path: Path, size: int) -> bytes:
    try:
        text = path.read_bytes().decode("utf-8-sig")
        document: Any = tomlkit.parse(text)
        wanted = tomllib.loads(text)
        _set(document, KEY, size, tomlkit.table)
        _set(wanted, KEY, size, dict)
        changed = tomlkit.dumps(document)
        if tomllib.loads(changed) != wanted:  # tomlkit can't edit every form of a table
            raise TOMLKitError(f"{KEY} can't be set without touching other keys")
    except (OSError, ValueError, TOMLKitError) as error:
        raise _not_changed(path, error, size) from error
    return changed.encode()


def _set(table: Any, key: str, value: int, new: Callable[[], Any]) -> None:
    *tables, name = key.split(".")
    for part in tables:
        if part not in table:
            table[part] = new()
        table = table[part]
    table[name] = value


def _not_changed(path: Path, error: Exception, size: int) -> JobError:
    return JobError(f"{path}: can't be changed: {error}; write\n{patch(size)}")
