"""The format of a file, and the function that reads it."""

from __future__ import annotations

from functools import lru_cache
from pathlib import PurePosixPath

from batchkit.config.masking import masked
from batchkit.config.seams import READERS
from batchkit.config.tables import InputTable
from batchkit.errors import InputError
from batchkit.sources.files import COMPRESSIONS, name_of
from batchkit.sources.reader import Format

FORMATS = {
    "jsonl": "batchkit.sources.lines:JSONL",
    "json": "batchkit.sources.json_list:FORMAT",
    "csv": "batchkit.sources.csv_table:FORMAT",
    "openai-batch": "batchkit.sources.lines:OPENAI_BATCH",
    "prompts": "batchkit.sources.lines:PROMPTS",
    "files": "batchkit.sources.whole_files:FILES",
    "clips": "batchkit.sources.whole_files:CLIPS",
    "pdf": "batchkit.sources.whole_files:PDF",
    "run": "batchkit.runs.as_input:FORMAT",
    "xlsx": "batchkit.sources.workbook:FORMAT",
    "parquet": "batchkit.sources.parquet:FORMAT",  # last: it imports pyarrow
}
ROWS_ARE_FILES = ("files", "clips", "pdf")  # each file, or each page of a file, is a row


def format_of(path: str, table: InputTable) -> str:
    """Return the name of the format of ``path``. A JSON Lines file is opened to see whether its lines are OpenAI
    requests.

    Raises:
        InputError: ``input.format`` is "auto" and the suffix is unknown.
    """
    if table.format != "auto":
        return table.format
    if table.is_run:
        return "run"
    suffix = suffix_of(path)
    name = format_with(suffix)
    if suffix in (".zip", ".tar"):
        raise InputError(
            f"{path}: is an archive; unpack it, or name its files: {suffix[1:]}://*.csv::{path}"
        )
    if suffix == ".xls":
        raise InputError(f"{path}: is a workbook of Excel before 2007; save it as .xlsx")
    if not name:
        suffixes = (suffix for name in READERS.names() for suffix in load_format(name).suffixes)
        raise InputError(
            f"{path}: the suffix {suffix!r} is unknown; set input.format to one of"
            f" {', '.join(READERS.names())}, or use one of the suffixes {', '.join(suffixes)}"
        )
    if name == "jsonl":
        from batchkit.sources.lines import is_batch

        return "openai-batch" if is_batch(path) else "jsonl"
    return name


def read_as(path: str, table: InputTable) -> str:
    """Return a text that identifies how a file is read: its format, and its name if the rows contain the name. If this
    text changes, the same bytes may give other rows."""
    if table.is_run:
        return "run"
    suffix = suffix_of(path)
    name = format_with(suffix) if table.format == "auto" else table.format
    if name in ROWS_ARE_FILES:  # their rows contain the file's name
        file = table.name_of_file(path)
        return f"{name}: {masked(file) if '://' in file else file}"
    return "tsv" if name == "csv" and suffix == ".tsv" else name


def suffix_of(path: str) -> str:
    """Return the suffix without compression: ``.jsonl`` for ``A.JSONL.gz`` and ``https://host/a.jsonl?token=x``."""
    name = PurePosixPath(name_of(path))
    if name.suffix.lower() in COMPRESSIONS:
        name = name.with_suffix("")
    return name.suffix.lower()


@lru_cache
def format_with(suffix: str) -> str:
    """Return the name of the format of files with ``suffix``, or ""."""
    found = (name for name in READERS.names() if suffix in load_format(name).suffixes)
    return next(found, "")


def load_format(name: str) -> Format:
    found: Format = READERS.load(name)
    return found
