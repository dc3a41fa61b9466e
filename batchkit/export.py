"""Exports: the newest record of each row, in the order of the input, in other formats.

Each writer streams; the file appears under its name only when it is whole.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from batchkit.errors import StoreError
from batchkit.ledger import RESULTS
from batchkit.manifest import read_manifest
from batchkit.outputs import refuse_own_file
from batchkit.realhit import write_realhit
from batchkit.runfolder import replacing
from batchkit.scorebook import read_scored
from batchkit.table import Layout, read_batches, schema_of


class Exported(NamedTuple):
    """A file that was written; ``source_bytes`` is the size of ``results.jsonl``."""

    path: Path
    rows: int
    bytes: int
    source_bytes: int


def export(folder: Path, format_name: str, path: Path | None = None) -> list[Exported]:
    """Write a run's records as ``parquet``, ``jsonl``, ``csv``, ``openai`` or ``realhit``.

    ``path`` left out: ``results.<suffix>`` in the run folder (``results.newest.jsonl`` for jsonl,
    since ``results.jsonl`` is the ledger). ``openai`` writes two files, answers and errors;
    ``realhit`` the two of RealHiTBench's harness, into the folder ``path`` or as the file ``path``.

    Raises:
        StoreError: not a run folder, or the file can't be written.
    """
    read_manifest(folder)
    log = folder / RESULTS
    if not log.exists():
        raise StoreError(f"{folder}: nothing to export: no row has finished yet")
    path = path or folder / _NAMES[format_name]
    refuse_own_file(path, folder)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        written = _WRITERS[format_name](folder, path)
    except OSError as error:
        raise StoreError(f"{path}: can't write: {error.strerror or error}") from error
    source_bytes = log.stat().st_size
    return [Exported(p, rows, p.stat().st_size, source_bytes) for p, rows in written.items()]


def _write_parquet(folder: Path, path: Path) -> dict[Path, int]:
    """The schema is fixed by the job, so a column may be null for any number of rows."""
    import pyarrow.parquet as pq

    layout, rows = Layout.of(folder), 0
    batches = read_batches(folder, layout)
    with (
        replacing(path) as temporary,
        pq.ParquetWriter(temporary, schema_of(layout), compression="zstd") as writer,
        ThreadPoolExecutor(1) as pool,  # reads the next batch while this thread writes one
    ):
        coming = pool.submit(next, batches, None)
        while (batch := coming.result()) is not None:
            coming = pool.submit(next, batches, None)
            writer.write_table(batch)
            rows += batch.num_rows
    return {path: rows}


def _write_jsonl(folder: Path, path: Path) -> dict[Path, int]:
    rows = 0
    with replacing(path) as temporary, temporary.open("wb") as file:
        for record in read_scored(folder):
            file.write(_line(record))
            rows += 1
    return {path: rows}


def _write_csv(folder: Path, path: Path) -> dict[Path, int]:
    layout, rows = Layout.of(folder), 0
    with (
        replacing(path) as temporary,
        temporary.open("w", newline="", encoding="utf-8") as file,
    ):
        writer = csv.writer(file)
        writer.writerow(layout.columns())
        for record in read_scored(folder):
            writer.writerow(layout.values(record))
            rows += 1
    return {path: rows}


def _write_openai(folder: Path, path: Path) -> dict[Path, int]:
    """OpenAI's batch output: https://platform.openai.com/docs/guides/batch, answers and errors."""
    model = read_manifest(folder)["model"]["name"]
    errors = path.with_name(f"{path.stem}.errors{path.suffix}")
    n_answers = n_errors = 0
    with (
        replacing(path) as answers_path,
        replacing(errors) as errors_path,
        answers_path.open("wb") as answers_file,
        errors_path.open("wb") as errors_file,
    ):
        for record in read_scored(folder):
            if record["status"] == "ok":
                answers_file.write(_line(_openai_answer(record, model)))
                n_answers += 1
            else:
                errors_file.write(_line(_openai_error(record)))
                n_errors += 1
    return {path: n_answers, errors: n_errors}


def _openai_answer(record: Mapping[str, Any], model: str) -> dict[str, Any]:
    usage = record.get("usage") or {"prompt_tokens": 0, "completion_tokens": 0}
    choices = record.get("choices") or [record]
    return {
        "id": f"batch_req_{record['index']}",
        "custom_id": record["id"],
        "response": {
            "status_code": 200,
            "request_id": f"req_{record['index']}",
            "body": {
                "id": f"chatcmpl-{record['index']}",
                "object": "chat.completion",
                "model": model,
                "choices": [
                    {
                        "index": number,
                        "message": {"role": "assistant", "content": choice["text"]},
                        "logprobs": (found := choice.get("logprobs")) and {"content": found},
                        "finish_reason": choice["finish_reason"],
                    }
                    for number, choice in enumerate(choices)
                ],
                "usage": usage
                | {"total_tokens": usage["prompt_tokens"] + usage["completion_tokens"]},
            },
        },
        "error": None,
    }


def _openai_error(record: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "id": f"batch_req_{record['index']}",
        "custom_id": record["id"],
        "response": None,
        "error": {"code": record["error"]["kind"], "message": record["error"]["message"]},
    }


def _line(value: Mapping[str, Any]) -> bytes:
    return orjson.dumps(value, option=orjson.OPT_APPEND_NEWLINE)


_WRITERS: dict[str, Callable[[Path, Path], dict[Path, int]]] = {
    "parquet": _write_parquet,
    "jsonl": _write_jsonl,
    "csv": _write_csv,
    "openai": _write_openai,
    "realhit": write_realhit,
}
_NAMES = {
    "parquet": "results.parquet",
    "jsonl": "results.newest.jsonl",
    "csv": "results.csv",
    "openai": "results.openai.jsonl",
    "realhit": "realhit",
}
