"""Exports: the newest record of each row, in input order, in other file formats.

Every format is written as a stream to a temporary file, which is renamed when it is complete.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import orjson

from batchkit.commands import Say
from batchkit.commands.export.outputs import (
    Export,
    check_table,
    export_of,
    exporting,
    refuse_own_file,
)
from batchkit.config.export_target import SUFFIXES, Target, is_dataset
from batchkit.config.tables import FOR_VECTORS, OF_TOKENS
from batchkit.errors import JobError
from batchkit.runs.card import write_card
from batchkit.runs.inputs import InputColumns
from batchkit.runs.layout import EMBEDDING, Layout, vector_type
from batchkit.runs.status import status
from batchkit.sources.files import COMPRESSIONS
from batchkit.sources.formats import format_with
from batchkit.storage.checkpoint import check_log
from batchkit.storage.files import disk_errors
from batchkit.storage.job_toml import job_of_run
from batchkit.storage.log import RESULTS
from batchkit.storage.remote import (
    OutputFolder,
    check_address,
    file_address,
    sending,
    upload_errors,
)
from batchkit.storage.score_store import read_scored
from batchkit.storage.vectors import Vectors, VectorType

_OPTIONS = orjson.OPT_APPEND_NEWLINE | orjson.OPT_SERIALIZE_NUMPY
_FORMULA = re.compile(r"[=+\-@\t\r\n\uff1d\uff0b\uff0d\uff20]")  # the last four are full width
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.ASCII | re.IGNORECASE)

EXPORTS = {
    "parquet": "batchkit.commands.export:PARQUET",
    "jsonl": "batchkit.commands.export:JSONL",
    "csv": "batchkit.commands.export:CSV",
    "safe-csv": "batchkit.commands.export:SAFE_CSV",
    "npy": "batchkit.commands.export:NPY",
    "lance": "batchkit.commands.export.tables:LANCE",
    "delta": "batchkit.commands.export.tables:DELTA",
    "openai": "batchkit.commands.export.openai:OPENAI",
    "realhit": "batchkit.contrib.realhit.harness:RESULTS",
    "srt": "batchkit.commands.export.subtitles:SRT",
    "vtt": "batchkit.commands.export.subtitles:VTT",
}


class Exported(NamedTuple):
    """A file that an export has written. ``path``: a path or an address. ``source_bytes`` is the size of
    ``results.jsonl``, for comparison."""

    path: str
    format: str
    rows: int
    bytes: int
    source_bytes: int

    @property
    def ratio(self) -> float | None:
        """Size relative to ``results.jsonl``; None for a table, which also contains its older versions."""
        if export_of(self.format).package:
            return None
        return self.bytes / self.source_bytes if self.source_bytes else 0.0

    def to_json(self) -> dict[str, Any]:
        return {**self._asdict(), "ratio": self.ratio and round(self.ratio, 4)}

    def to_text(self) -> str:
        size = f"{self.path}: {self.rows:,} rows, {self.bytes:,} bytes"
        if self.ratio is None:
            return f"{size} in all versions"
        return f"{size}, {self.ratio:.2f} × the {self.source_bytes:,} of results.jsonl"


def export(
    folder: Path,
    target: Target,
    say: Say = lambda text: None,
    *,
    only_finished: bool = False,
    force: bool = False,
    lacks: Say | None = None,
) -> list[Exported]:
    """Write a run's records in one of the formats of ``EXPORTS``.

    Without ``target.place``, the file is ``results.<suffix>`` in the run folder (``results.newest.jsonl`` for jsonl,
    since ``results.jsonl`` is the log).

    - ``safe-csv``: a CSV that is safe in a spreadsheet; text that looks like a formula is prefixed with ``'``.
    - ``npy``: the vectors as one matrix, and the ids of its rows in a second file. For ``token_embed`` and
      ``token_classify``, which have several vectors per row, ``offsets.npy`` has the start of each row.
    - ``lance``, ``delta``: a table in a folder; an older export stays as an older version of the table.
    - ``openai``: two files, answers and errors.
    - ``srt``, ``vtt``: a file for each transcript, in a folder.

    Parameters:

    - ``force``: also replace an existing file that batchkit did not write.
    - ``say``: called with messages about rows without an answer, and about cells of ``csv`` that a spreadsheet would
      execute.
    - ``lacks``: called with a message if columns are missing because the input was removed or changed (default:
      ``say``). If ``say`` or ``lacks`` raises an exception, no file is written.

    Raises:
        JobError: The target is a file that batchkit did not write; the format is ``npy``, and the run has no vectors or
            they differ in length; or ``only_finished`` is set, and some rows have no record.
        StoreError: The folder is not a run folder, its log is damaged, or the file can't be written.
        UploadError: The file can't be sent to its address.
    """
    log, found = folder / RESULTS, status(folder)
    check_log(folder)
    form = export_of(target.format)
    check_table(target)
    own = folder / (form.name or f"results.{target.format}")
    if found.pending:
        done = f"{found.ok + found.failed:,} of {found.total:,} rows; {found.pending:,} have no answer yet"
        if only_finished:
            raise JobError(f"{folder}: {done}; resume the run, or omit --only-finished")
        say(f"{target}: {done}")

    def write(path: Path, say: Say, lacks: Say) -> dict[Path, int]:
        refuse_own_file(path, folder)
        _check_suffix(path, target.format, own.suffix, is_table=bool(form.package))
        if not force and form.is_foreign(path):
            raise JobError(
                f"{path}: exists, and was not written by batchkit; give another path, or replace it with --force"
            )
        with disk_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            return form.write(folder, path, *[say, lacks] * form.says)

    def exported(file: Path, rows: int, shown: str) -> Exported:
        parts = [file, *file.rglob("*")]
        n_bytes = sum(part.stat().st_size for part in parts if part.is_file())
        source_bytes = log.stat().st_size
        return Exported(shown, target.format, rows, n_bytes, source_bytes)

    if target.place is None or not target.is_remote:
        written = write(own if target.place is None else Path(target.place), say, lacks or say)
        return [exported(file, rows, str(file)) for file, rows in written.items()]
    check_address(target.place, "FILE")
    address = file_address(target.place, f"{found.name}{own.suffix}")
    parent = address.rpartition("/")[0]
    with sending(address) as (path, shown):
        files = write(path, shown(say), shown(lacks or say)).items()
        sent = [exported(file, n, f"{parent}/{file.relative_to(path.parent)}") for file, n in files]
    if is_dataset(target.place) and target.format == "parquet":
        dataset = target.place.rstrip("/")
        with upload_errors(dataset, "correct this and run `batchkit export` again"):
            split = {"train": address.removeprefix(f"{dataset}/")}
            write_card(OutputFolder(dataset), folder, split)
    return sent


def _check_suffix(path: Path, format_name: str, usual: str, *, is_table: bool) -> None:
    """Raise JobError if ``path`` has the suffix of another format, or is a file instead of a folder or the other way
    round. ``usual``: this format's suffix; "" for a folder. ``is_table``: the format is a table in a folder."""
    suffix = path.suffix.lower()
    if is_table and path.is_file():
        raise JobError(f"{path}: is a file, but --{format_name} writes a folder; give another path")
    if usual and not is_table and path.is_dir():
        raise JobError(f"{path}: is a folder; give a file in it")
    is_known = format_name in EXPORTS and (
        format_with(suffix) or suffix in COMPRESSIONS or suffix in SUFFIXES
    )
    if not usual or suffix in (usual, "") or not is_known:
        return
    other = f", or give --{suffix[1:]}" * (suffix[1:] in EXPORTS)
    raise JobError(
        f"{path}: --{format_name} writes {usual} files; give a file name with this suffix{other}"
    )


def write_parquet(
    folder: Path, path: Path, say: Say = print, lacks: Say = print
) -> dict[Path, int]:
    """Write Parquet. The job decides the columns, so a column exists even if it is null in every row."""
    from batchkit.runs.parquet import write_tables
    from batchkit.runs.table import read_batches

    inputs = InputColumns(folder)
    layout = Layout.of(folder, inputs.names)
    batches = read_batches(folder, layout, inputs)
    with exporting(path, folder) as temporary:
        rows = write_tables(temporary, layout, batches, about_run(folder))
        say_what_lacks(inputs, path, say, lacks)
    return {path: rows}


def about_run(folder: Path) -> dict[str, str]:
    """Return metadata for the Parquet file: the run's name, its number of rows, how many have no answer, and the counts
    of the self-check as JSON."""
    found = status(folder)
    about = {"run": found.name, "rows": found.total, "rows_without_answer": found.pending}
    if found.checked.rows:
        about["checked"] = json.dumps(found.checked.counts())
    if job_of_run(folder).is_dry:
        about["dry_run"] = True
    return {f"batchkit.{name}": str(value) for name, value in about.items()}


def say_what_lacks(inputs: InputColumns, path: Path, say: Say, lacks: Say) -> None:
    if inputs.problem is not None:
        note = lacks if inputs.is_local else say
        note(f"{path}: columns of the input are missing or empty: {inputs.problem}")


def write_jsonl(folder: Path, path: Path, say: Say = print, lacks: Say = print) -> dict[Path, int]:
    """Write JSONL. Vectors are written as numbers, because a record's reference to a vector file is valid only in the
    run folder."""
    vectors, inputs, rows = Vectors(folder), InputColumns(folder), 0
    with exporting(path, folder) as temporary, temporary.open("wb") as file:
        for record in read_scored(folder):
            record["fields"] = inputs.of(record)
            if record.get(EMBEDDING) is not None:
                record[EMBEDDING] = vectors.of(record)
            file.write(orjson.dumps(record, option=_OPTIONS))
            rows += 1
        say_what_lacks(inputs, path, say, lacks)
    return {path: rows}


def write_csv(
    folder: Path, path: Path, say: Say = print, lacks: Say = print, *, is_safe: bool = False
) -> dict[Path, int]:
    """Write CSV.

    ``is_safe``: put ``'`` before a text that a spreadsheet would run as a formula, but not before numbers. See
    https://owasp.org/www-community/attacks/CSV_Injection
    """
    from batchkit.runs.table import read_batches

    formulas = 0

    def cell(value: Any) -> Any:
        """Return the text of a cell; a list becomes JSON. Counts texts that look like formulas."""
        nonlocal formulas
        if _is_formula(value):
            formulas += 1
            return f"'{value}" if is_safe else value
        return orjson.dumps(value).decode() if isinstance(value, list) else value

    inputs, rows = InputColumns(folder), 0
    layout = Layout.of(folder, inputs.names, vectors=False)
    with (
        exporting(path, folder) as temporary,
        temporary.open("w", newline="", encoding="utf-8") as file,
    ):
        writer = csv.writer(file)
        writer.writerow(map(cell, layout.columns))
        for batch in read_batches(folder, layout, inputs):
            columns = (map(cell, column.to_pylist()) for column in batch.columns)
            writer.writerows(zip(*columns, strict=True))
            rows += batch.num_rows
        say_what_lacks(inputs, path, say, lacks)
    if formulas and not is_safe:
        say(
            f"{path}: a spreadsheet would run {formulas:,} of its texts as formulas; use --safe-csv to prevent that"
        )
    return {path: rows}


def _is_formula(value: Any) -> bool:
    begins_so = isinstance(value, str) and _FORMULA.match(value) is not None
    return begins_so and _NUMBER.fullmatch(value) is None


def write_npy(folder: Path, path: Path) -> dict[Path, int]:
    """Write the vectors as one matrix that numpy can map into memory, and the ids of its rows as a JSON list.

    Failed rows are left out of both. For tasks with a vector for each token, row ``n`` of the run has the matrix
    rows from ``offsets[n]`` up to ``offsets[n + 1]``.

    Raises:
        JobError: There are no vectors, or they differ in length.
    """
    from batchkit.runs.table import read_batches

    job = job_of_run(folder)
    kind = vector_type(folder, job)
    if kind is None:
        raise JobError(
            f'{folder}: --npy is for {FOR_VECTORS}, but the task of this run is "{job.task}"; use --parquet'
        )
    if kind.dimensions is None:
        raise JobError(
            f"{folder}: a matrix needs vectors of one length, but the run has no vectors yet, or vectors of several"
            " lengths; use --parquet, which writes vectors as lists"
        )
    ids_path, ends = path.with_name(f"{path.stem}.ids.json"), [0]
    rows, is_ragged = 0, job.task in OF_TOKENS
    with (
        exporting(path, folder) as temporary,
        exporting(ids_path, folder) as temporary_ids,
        temporary.open("wb") as file,
        temporary_ids.open("wb") as ids_file,
    ):
        _write_head(file, 0, kind)
        for table in read_batches(folder, Layout.of(folder)):
            answered = table.filter(table[EMBEDDING].is_valid())
            for chunk in answered[EMBEDDING].chunks:
                lengths = chunk.value_lengths().to_pylist() if is_ragged else [1] * len(chunk)
                values = chunk.flatten().flatten() if is_ragged else chunk.flatten()
                file.write(values.to_numpy().data)
                ends += accumulate(lengths, initial=ends.pop())
            for row_id in answered["id"].to_pylist():
                ids_file.write((b",\n" if rows else b"[") + orjson.dumps(row_id))
                rows += 1
        ids_file.write(b"]\n" if rows else b"[]\n")
        file.seek(0)
        _write_head(file, ends[-1], kind)
    written = {path: rows, ids_path: rows}
    if is_ragged:
        written[_write_offsets(folder, path, ends)] = rows
    return written


def _write_offsets(folder: Path, path: Path, ends: Sequence[int]) -> Path:
    offsets = path.with_name(f"{path.stem}.offsets.npy")
    with exporting(offsets, folder) as temporary, temporary.open("wb") as file:
        np.save(file, np.array(ends, np.int64))
    return offsets


def _write_head(file: BinaryIO, rows: int, kind: VectorType) -> None:
    """Write the header of the ``.npy`` file. The header is written again when the number of ``rows`` is known.

    The length of the header stays the same, because numpy reserves space for the digits.
    """
    head = {
        "descr": np.dtype(kind.dtype).str,
        "fortran_order": False,
        "shape": (rows, kind.dimensions),
    }
    np.lib.format.write_array_header_1_0(file, head)  # type: ignore[no-untyped-call]


PARQUET = Export(write_parquet, says=True)
JSONL = Export(write_jsonl, "results.newest.jsonl", says=True)
CSV = Export(write_csv, says=True)
SAFE_CSV = Export(partial(write_csv, is_safe=True), "results.csv", says=True)
NPY = Export(write_npy)
