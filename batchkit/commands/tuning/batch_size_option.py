"""The key of the job file that decides how many requests run at once, and how it is set there."""

from __future__ import annotations

import os
import tomllib
from codecs import BOM_UTF8
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, NamedTuple

import tomlkit
from tomlkit.exceptions import TOMLKitError

from batchkit.config.tables import JobConfig
from batchkit.engines.registry import max_num_seqs_of, open_engine
from batchkit.errors import JobError
from batchkit.execution.window import START
from batchkit.storage.files import write_atomically


class BatchSizeOption(NamedTuple):
    """A key, dotted, and why this one was chosen. ``most``: larger values would change little."""

    key: str
    reason: str
    most: int | None = None


def batch_size_option(job: JobConfig) -> BatchSizeOption:
    """``engine.options.max_num_seqs``, or ``run.max_in_flight`` if that is a smaller number."""
    window = job.run.max_in_flight
    if window == "auto":
        return BatchSizeOption(
            "engine.options.max_num_seqs",
            "how many requests the engine runs at once; the window (run.max_in_flight, how many are"
            " handed to it) adapts to it",
        )
    seqs = _max_num_seqs(job)
    if window < seqs:
        return BatchSizeOption(
            "run.max_in_flight",
            f"the window is the bottleneck: run.max_in_flight = {window} keeps the engine from running the"
            f' {seqs} at once that it could ("auto" would not)',
            int(START * seqs),
        )
    return BatchSizeOption(
        "engine.options.max_num_seqs",
        f"how many requests the engine runs at once; run.max_in_flight = {window} hands it no more",
        window,
    )


def with_size(job: JobConfig, option: BatchSizeOption, size: int) -> JobConfig:
    """The job with ``size`` at the option, its engine in a process of its own.

    The engine is kept from continuing at a smaller size when memory runs out: the trial is of
    this size.
    """
    options, run = dict(job.engine.options), job.run
    if option.key == "run.max_in_flight":
        run = run.model_copy(update={"max_in_flight": size})
    else:
        options["max_num_seqs"] = size
    if job.engine.kind == "transformers":
        options["shrink_on_oom"] = False
    engine = job.engine.model_copy(update={"in_process": False, "options": options})
    return job.model_copy(update={"engine": engine, "run": run})


def patch(option: BatchSizeOption, size: int) -> str:
    """The lines of TOML that set the option."""
    table, _, name = option.key.rpartition(".")
    return f"[{table}]\n{name} = {size}"


def check_patch(path: Path, option: BatchSizeOption) -> None:
    """Like ``write_patch``, but only checks that it would work, because trials take long."""
    path = path.resolve()
    _edited(path, option, 1)
    if not os.access(path.parent, os.W_OK):
        raise JobError(f"{path}: can't be changed: no leave to write in its folder")


def write_patch(path: Path, option: BatchSizeOption, size: int) -> None:
    """Set the option in the job file at ``path``, in one step; the rest is left unchanged.

    Raises:
        JobError: it can't be read, written, or changed in this one key alone.
    """
    path = path.resolve()  # keep a symbolic link
    changed = _edited(path, option, size)
    try:
        mode = path.stat().st_mode
        write_atomically(path, changed)
        path.chmod(mode)
    except OSError as error:
        raise JobError(
            f"{path}: can't be changed: {error}; write\n{patch(option, size)}"
        ) from error


def _edited(path: Path, option: BatchSizeOption, size: int) -> bytes:
    try:
        before = path.read_bytes()
        changed = _with_value(before.decode("utf-8-sig"), option, size).encode()
    except (OSError, UnicodeDecodeError, TOMLKitError) as error:
        raise JobError(
            f"{path}: can't be changed: {error}; write\n{patch(option, size)}"
        ) from error
    return BOM_UTF8 + changed if before.startswith(BOM_UTF8) else changed


def _with_value(text: str, option: BatchSizeOption, size: int) -> str:
    *tables, name = option.key.split(".")
    document = tomlkit.parse(text)
    table: Any = document
    for part in tables:
        if part not in table:
            table.add(part, tomlkit.table())
        table = table[part]
    table[name] = size
    changed = tomlkit.dumps(document)
    if text.count("\r\n") == text.count("\n") > 0:
        changed = changed.replace("\r\n", "\n").replace("\n", "\r\n")
    wanted = tomllib.loads(text)
    inner: dict[str, Any] = wanted
    for part in tables:
        inner = inner.setdefault(part, {})
    inner[name] = size
    with suppress(tomllib.TOMLDecodeError):
        if tomllib.loads(changed) == wanted:
            return changed
    # tomlkit can't edit every form of a table
    raise TOMLKitError(f"{option.key} can't be set without touching other keys")


def _max_num_seqs(job: JobConfig) -> int:
    seqs = job.engine.options.get("max_num_seqs")
    if isinstance(seqs, int):
        return seqs
    if (most := max_num_seqs_of(job.engine.kind)) is not None:
        return most
    with closing(open_engine(job)) as engine:  # it loads no model
        return engine.max_num_seqs
