"""Which format a file has, and the function that reads it."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import PurePosixPath
from typing import Any, cast

from batchkit.config.masking import masked
from batchkit.config.tables import InputTable
from batchkit.config.tables.input import IMAGE_SUFFIXES, PDF_SUFFIX
from batchkit.errors import InputError
from batchkit.sources.files import COMPRESSIONS, name_of
from batchkit.sources.reader import Reader

READERS = {
    "jsonl": "batchkit.sources.jsonl:read",
    "json": "batchkit.sources.json_list:read",
    "csv": "batchkit.sources.csv_table:read",
    "parquet": "batchkit.sources.parquet:read",
    "xlsx": "batchkit.sources.workbook:read",
    "openai-batch": "batchkit.sources.openai_batch:read",
    "prompts": "batchkit.sources.prompts:read",
    "files": "batchkit.sources.one_file:read",
    "pdf": "batchkit.sources.pdf:read",
    "run": "batchkit.sources.run:read",
}
TABLES = ("csv", "parquet", "xlsx")  # every row of a file has the same fields
ROWS_ARE_FILES = ("files", "pdf")  # a file is a row, or each of its pages is
COUNTERS = {  # formats whose rows can be counted without parsing them
    "jsonl": "batchkit.sources.lines:count_lines",
    "openai-batch": "batchkit.sources.lines:count_lines",
    "prompts": "batchkit.sources.lines:count_lines",
    "parquet": "batchkit.sources.parquet:count",
    "files": "batchkit.sources.one_file:count",
    "pdf": "batchkit.sources.pdf:count",
}
SUFFIXES = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "csv",
    ".parquet": "parquet",
    ".xlsx": "xlsx",
    ".xlsm": "xlsx",
    ".txt": "prompts",
    PDF_SUFFIX: "pdf",
    **dict.fromkeys(IMAGE_SUFFIXES, "files"),
}


def format_of(path: str, table: InputTable) -> str:
    """The key of ``READERS`` for ``path``; JSON lines are checked for OpenAI batch requests.

    Raises:
        InputError: ``input.format`` is "auto" and the suffix is unknown.
    """
    if table.format != "auto":
        return table.format
    if table.is_run:
        return "run"
    suffix = suffix_of(path)
    if suffix not in SUFFIXES:
        raise InputError(
            f"{path}: the suffix {suffix!r} names no format; set input.format to one of"
            f" {', '.join(READERS)}, or use one of {', '.join(SUFFIXES)}"
        )
    if SUFFIXES[suffix] == "jsonl":
        from batchkit.sources.openai_batch import is_batch

        return "openai-batch" if is_batch(path) else "jsonl"
    return SUFFIXES[suffix]


def read_as(path: str, table: InputTable) -> str:
    """How a file's name decides its format: equal bytes may give other rows under another name."""
    if table.is_run:
        return "run"
    suffix = suffix_of(path)
    name = SUFFIXES.get(suffix, "") if table.format == "auto" else table.format
    if name in ROWS_ARE_FILES:  # whose rows have the name
        file = table.name_of_file(path)
        return f"{name}: {masked(file) if '://' in file else file}"
    return "tsv" if name == "csv" and suffix == ".tsv" else name


def suffix_of(path: str) -> str:
    """``.jsonl`` for ``a.jsonl``, ``A.JSONL.gz`` and ``https://host/a.jsonl?token=x``."""
    name = PurePosixPath(name_of(path))
    if name.suffix.lower() in COMPRESSIONS:
        name = name.with_suffix("")
    return name.suffix.lower()


def load_reader(format_name: str) -> Reader:
    return cast(Reader, _load(READERS[format_name]))


def load_counter(format_name: str) -> Callable[[str], int] | None:
    """Counts the rows of a file; None if they can only be counted by reading them."""
    if format_name not in COUNTERS:
        return None
    return cast("Callable[[str], int]", _load(COUNTERS[format_name]))


def _load(target: str) -> Any:
    module, _, name = target.partition(":")
    return getattr(import_module(module), name)
