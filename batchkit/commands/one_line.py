"""``run --model … --input …``: a job given on the command line, without a job file."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Any

from batchkit.config.loading import make_job
from batchkit.config.tables import JobConfig
from batchkit.sources import read_rows
from batchkit.sources.files import COMPRESSIONS, name_of
from batchkit.sources.rowhash import has_bytes

_MAGIC = re.compile(r"[*?\[]")  # characters of a glob
_READ_FIRST = 16
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9._-]+")


def one_line_job(given: Mapping[str, Any], overrides: Sequence[str] = ()) -> JobConfig:
    """Return the job with the ``given`` keys and the ``KEY=VALUE`` overrides.

    Its name is derived from the input and the model, so that the same command resumes the same run:
    ``reviews-Qwen3-4B`` for ``data/reviews.csv`` and ``Qwen/Qwen3-4B``. Images are looked up in the working
    directory, or in the input's folder if the input is outside it. If the rows have a field ``id``, it becomes
    ``input.id``. An export does not read an input at an address again, so the columns of its first rows become
    ``output.keep``.

    Raises:
        JobError: A key is wrong, or a file is missing (see ``make_job``).
        InputError: The input can't be read.
    """
    path, model = given["input.path"], given.get("engine.model") or ""
    media = {} if "://" in path else {"root": _media_root(path)}
    table = {"name": run_name(path, model), "engine": {}, "media": media}
    job = make_job(table, "the command line", overrides, given)
    rows, keeps_all = job.input, "://" in path and job.output.keep == "*"
    if rows.is_run or rows.rows_are_files(path) or not (rows.id is None or keeps_all):
        return job
    first = islice(read_rows(rows.model_copy(update={"shard": None})), _READ_FIRST)
    fields = dict[str, Any]()
    for row in first:
        fields |= {name: value for name, value in row.fields.items() if fields.get(name) is None}
    if rows.id is None and "id" in fields:
        job = job.with_keys(input={"id": "id"})
    if keeps_all and fields and not fields.keys() >= {"custom_id", "body"}:  # an OpenAI batch file
        names = [name for name, value in fields.items() if not has_bytes(value)]
        job = job.with_keys(output={"keep": names})
    return job


def run_name(path: str, model: str) -> str:
    """Return the name of a run made from the command line: the input's file or folder name, then the last part of the
    model's name."""
    names = [_stem(path), PurePosixPath(model.rstrip("/")).name.removesuffix(".gguf")]
    return "-".join(filter(None, map(_plain, names))) or "batch"


def _media_root(path: str) -> str:
    """Return the folder in which images are looked up: the working directory, or the input's folder if the input is
    outside it."""
    # "x": "data/" before a glob must give the folder data, not its parent.
    here, beside = Path.cwd(), Path(_MAGIC.split(path)[0] + "x").resolve().parent
    return str(here if beside.is_relative_to(here) else beside)


def _stem(path: str) -> str:
    """Return the input's name without folder and suffixes: ``reviews`` for ``data/reviews.jsonl.gz``, ``part`` for
    ``part-*.csv``, ``photos`` for ``photos/*.jpg``."""
    named = PurePosixPath(name_of(path).rstrip("/"))
    if named.suffix.lower() in COMPRESSIONS:
        named = named.with_suffix("")
    if named.name in ("", ".", ".."):
        return Path.cwd().name
    return _plain(_MAGIC.split(named.stem)[0]) or _stem(str(named.parent))


def _plain(name: str) -> str:
    """Return ``name`` with each character that a run's name can't have replaced by ``-``."""
    return _NOT_IN_NAMES.sub("-", name).lstrip(".-_").rstrip("-_")
