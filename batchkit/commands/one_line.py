"""``run --model … --input …``: a job that is given on the command line, without a job file."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from batchkit.config.loading import make_job
from batchkit.config.tables import JobConfig
from batchkit.sources import read_rows
from batchkit.sources.files import COMPRESSIONS, name_of

_MAGIC = re.compile(r"[*?\[]")  # of a glob
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9._-]+")


def one_line_job(given: Mapping[str, Any], overrides: Sequence[str] = ()) -> JobConfig:
    """The job of the keys that are ``given``, with the ``KEY=VALUE`` overrides applied.

    Its name follows from the input and the model, so that the same line continues the same run:
    ``reviews-Qwen3-4B`` for ``data/reviews.csv`` and ``Qwen/Qwen3-4B``.

    Images are looked up in the working directory, or beside an input that lies outside of it. Rows with a field
    ``id`` are named by it.

    Raises:
        JobError: as ``make_job``.
        InputError: the input can't be read.
    """
    path, model = given["input.path"], given.get("engine.model") or ""
    media = {} if "://" in path else {"root": _media_root(path)}
    table = {"name": run_name(path, model), "engine": {}, "media": media}
    job = make_job(table, "the command line", overrides, given)
    rows = job.input
    if rows.id is None and not rows.is_run and not rows.rows_are_files(path):
        first = next(read_rows(rows.model_copy(update={"shard": None})), None)
        if first is not None and "id" in first.fields:
            return job.model_copy(update={"input": rows.model_copy(update={"id": "id"})})
    return job


def run_name(path: str, model: str) -> str:
    """Of the file's or folder's name, and the last part of the model's."""
    names = [_stem(path), PurePosixPath(model.rstrip("/")).name.removesuffix(".gguf")]
    return "-".join(filter(None, map(_plain, names))) or "batch"


def _media_root(path: str) -> str:
    """Never a folder that a glob would have to name."""
    here, beside = Path.cwd(), Path(_MAGIC.split(path)[0] + "x").resolve().parent
    return str(here if beside.is_relative_to(here) else beside)


def _stem(path: str) -> str:
    """``reviews`` for ``data/reviews.jsonl.gz``, ``part`` for ``part-*.csv``, and ``photos`` for
    ``photos/*.jpg``."""
    named = PurePosixPath(name_of(path).rstrip("/"))
    if named.suffix.lower() in COMPRESSIONS:
        named = named.with_suffix("")
    if named.name in ("", ".", ".."):
        return Path.cwd().name
    return _plain(_MAGIC.split(named.stem)[0]) or _stem(str(named.parent))


def _plain(name: str) -> str:
    """``name`` with only the characters that a run's name may have."""
    return _NOT_IN_NAMES.sub("-", name).lstrip(".-_").rstrip("-_")
