"""Exports: the newest record of each row, in the order of the input, in other formats.

Each writer streams; the file appears under its name only when it is whole.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from batchkit.errors import StoreError
from batchkit.ledger import RESULTS
from batchkit.manifest import job_of_run, read_manifest
from batchkit.outputs import refuse_own_file
from batchkit.realhit import write_realhit
from batchkit.runfolder import replacing
from batchkit.scorebook import read_scored
from batchkit.scoring import kept_fields, score_names

BATCH = 10_000

Records = Iterable[dict[str, Any]]


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


class Layout(NamedTuple):
    """What a table of records has besides the record's own columns.

    ``scores``: a column ``scores.<name>`` each, and one for the prediction; None: nothing is scored.
    ``keep``: the kept fields, as text; one that bears the name of another column gets ``fields.``
    before it.
    """

    scores: Sequence[str] | None
    keep: Sequence[str]

    @classmethod
    def of(cls, folder: Path) -> Layout:
        """Fixed by the job, so that every export of a run has the same columns."""
        job = job_of_run(folder)
        scores = score_names(job.scoring) if job.scoring.is_on else None
        return cls(scores, kept_fields(job))

    def columns(self) -> dict[str, str]:
        """The columns' names and Arrow types, in their order."""
        found = dict(_COLUMNS)
        if self.scores is not None:
            found |= {"prediction": "string"}
            found |= {f"scores.{name}": "double" for name in self.scores}
        return found | {
            name if name not in found else f"fields.{name}": "string" for name in self.keep
        }

    def values(self, record: Mapping[str, Any]) -> list[Any]:
        """The record's values in the order of ``columns``."""
        usage, error = record.get("usage") or {}, record.get("error") or {}
        fields, choices = record.get("fields") or {}, record.get("choices")
        values = [
            record["index"],
            record["id"],
            record["status"],
            record.get("attempt"),
            record.get("text"),
            record.get("finish_reason"),
            usage.get("prompt_tokens"),
            usage.get("completion_tokens"),
            record.get("latency_s"),
            record.get("finished_at"),
            error.get("kind"),
            error.get("type"),
            error.get("message"),
            None if choices is None else orjson.dumps(choices).decode(),
            record.get("prompt"),
            record.get("truncated_tokens"),
        ]
        if self.scores is not None:
            scores = record.get("scores") or {}
            values += [record.get("prediction"), *(scores.get(name) for name in self.scores)]
        return values + [_as_text(fields.get(name)) for name in self.keep]


_COLUMNS = {
    "index": "int64",
    "id": "string",
    "status": "string",
    "attempt": "int32",
    "text": "string",
    "finish_reason": "string",
    "prompt_tokens": "int64",
    "completion_tokens": "int64",
    "latency_s": "double",
    "finished_at": "string",
    "error_kind": "string",
    "error_type": "string",
    "error_message": "string",
    "choices": "string",
    "prompt": "string",
    "truncated_tokens": "int64",
}


def _write_parquet(folder: Path, path: Path) -> dict[Path, int]:
    """The schema is fixed by the job, so a column may be null for any number of rows."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    layout = Layout.of(folder)
    schema = pa.schema(
        [pa.field(name, pa.type_for_alias(kind)) for name, kind in layout.columns().items()]
    )
    rows, records = 0, read_scored(folder)
    with (
        replacing(path) as temporary,
        pq.ParquetWriter(temporary, schema, compression="zstd") as writer,
    ):
        while batch := [layout.values(record) for record in islice(records, BATCH)]:
            arrays = [
                pa.array(values, field.type)
                for values, field in zip(zip(*batch, strict=True), schema, strict=True)
            ]
            writer.write_batch(pa.RecordBatch.from_arrays(arrays, schema=schema))
            rows += len(batch)
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


def _as_text(value: Any) -> str | None:
    if value is None or isinstance(value, str):
        return value
    return orjson.dumps(value).decode()


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
