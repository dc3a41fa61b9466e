"""``export --npy``: the vectors of a run as one matrix that numpy can map, and the ids of its rows."""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO

import orjson

from batchkit.commands.export.outputs import exporting
from batchkit.errors import JobError
from batchkit.runs.layout import Layout
from batchkit.runs.table import read_batches
from batchkit.runs.vector_column import EMBEDDING, vector_type
from batchkit.storage.job_toml import job_of_run
from batchkit.storage.vectors import VectorType


def write_npy(folder: Path, path: Path) -> dict[Path, int]:
    """``path``, and the ids of its rows as a JSON list. A row that failed is in neither of them.

    Raises:
        JobError: there are no vectors, or they have several lengths.
    """
    job = job_of_run(folder)
    kind = vector_type(folder, job)
    if kind is None:
        raise JobError(
            f'{folder}: --npy is for task = "embed", and its task is "{job.task}"; --parquet has what it'
            " answered"
        )
    if kind.dimensions is None:
        raise JobError(
            f"{folder}: has no vectors yet, or vectors of several lengths, and a matrix needs one length;"
            " --parquet has them as lists"
        )
    ids_path, rows = path.with_name(f"{path.stem}.ids.json"), 0
    with (
        exporting(path, folder) as temporary,
        exporting(ids_path, folder) as temporary_ids,
        temporary.open("wb") as file,
        temporary_ids.open("wb") as ids_file,
    ):
        _write_head(file, rows, kind)
        for table in read_batches(folder, Layout(None, (), embedding=kind)):
            answered = table.filter(table[EMBEDDING].is_valid())
            for chunk in answered[EMBEDDING].chunks:
                file.write(chunk.flatten().to_numpy().data)
            for row_id in answered["id"].to_pylist():
                ids_file.write((b",\n" if rows else b"[") + orjson.dumps(row_id))
                rows += 1
        ids_file.write(b"]\n" if rows else b"[]\n")
        file.seek(0)
        _write_head(file, rows, kind)
    return {path: rows, ids_path: rows}


def _write_head(file: BinaryIO, rows: int, kind: VectorType) -> None:
    """Of the same length for any number of rows: numpy leaves room for its digits."""
    import numpy as np

    head = {
        "descr": np.dtype(kind.dtype).str,
        "fortran_order": False,
        "shape": (rows, kind.dimensions),
    }
    np.lib.format.write_array_header_1_0(file, head)  # type: ignore[no-untyped-call]
