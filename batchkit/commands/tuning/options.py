"""Options that trials set, and how the best ones are set in the job file.

A name without a dot is an option of the engine (``engine.options``), any other one is a key of the job file.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import tomlkit
from tomlkit.exceptions import TOMLKitError

from batchkit.config.tables import JobConfig
from batchkit.errors import JobError
from batchkit.storage.files import write_atomically

_TABLE, SIZE = "engine.options", "max_num_seqs"
KEY = f"{_TABLE}.{SIZE}"


def with_options(job: JobConfig, options: Mapping[str, Any]) -> JobConfig:
    """The job with these options besides its own, and without workers unless they are among them.

    The engine is kept from continuing at a smaller size when memory runs out: the trial is of
    this size.
    """
    of_run = {"workers": None} | {
        name.partition(".")[2]: value for name, value in options.items() if "." in name
    }
    options = job.engine.options | {n: value for n, value in options.items() if "." not in n}
    if job.engine.kind == "transformers":
        options["shrink_on_oom"] = False
    return job.model_copy(
        update={
            "engine": job.engine.model_copy(update={"options": options}),
            "run": job.run.model_copy(update=of_run),
        }
    )


def most_of(job: JobConfig, rows: int) -> tuple[int, str]:
    """The largest size that a trial with ``rows`` rows can fill, and why."""
    window = job.run.max_in_flight
    if window != "auto" and window < rows:
        return window, f"run.max_in_flight = {window} hands the engine no more (leave it out)"
    return rows, f"there are {rows:,} rows"


def patch(options: Mapping[str, Any]) -> str:
    """The lines of TOML that set them."""
    tables = dict[str, dict[str, Any]]()
    for name, value in options.items():
        table, _, key = _key(name).rpartition(".")
        tables.setdefault(table, {})[key] = value
    return "\n".join(f"[{table}]\n{tomlkit.dumps(keys)}" for table, keys in tables.items()).rstrip()


def _key(name: str) -> str:
    return name if "." in name else f"{_TABLE}.{name}"


def check_patch(path: Path) -> None:
    """Like ``write_patch``, but only checks that it would work, because trials take long."""
    _edited(path, {SIZE: 1})
    if not os.access(path.resolve().parent, os.W_OK):
        raise JobError(f"{path}: can't be changed: no leave to write in its folder")


def write_patch(path: Path, options: Mapping[str, Any]) -> None:
    """Set the options in the job file at ``path``, in one step; the rest is left unchanged.

    Raises:
        JobError: it can't be read, written, or changed in these keys alone.
    """
    changed = _edited(path, options)
    path = path.resolve()  # keep a symbolic link
    try:
        mode = path.stat().st_mode
        write_atomically(path, changed)
        path.chmod(mode)
    except OSError as error:
        raise _not_changed(path, error, options) from error


def _edited(path: Path, options: Mapping[str, Any]) -> bytes:
    try:
        text = path.read_bytes().decode("utf-8-sig")
        document: Any = tomlkit.parse(text)
        wanted = tomllib.loads(text)
        for name, value in options.items():
            _set(document, name, value, tomlkit.table)
            _set(wanted, name, value, dict)
        changed = tomlkit.dumps(document)
        if tomllib.loads(changed) != wanted:  # tomlkit can't edit every form of a table
            keys = ", ".join(map(_key, options))
            raise TOMLKitError(f"{keys} can't be set without touching other keys")
    except (OSError, ValueError, TOMLKitError) as error:
        raise _not_changed(path, error, options) from error
    return changed.encode()


def _set(table: Any, name: str, value: Any, new: Callable[[], Any]) -> None:
    *parts, key = _key(name).split(".")
    for part in parts:
        if part not in table:
            table[part] = new()
        table = table[part]
    table[key] = value


def _not_changed(path: Path, error: Exception, options: Mapping[str, Any]) -> JobError:
    return JobError(f"{path}: can't be changed: {error}; write\n{patch(options)}")
