"""The end of a batch: writes its output file and its error file from the records of its run."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from batchkit.commands.export.openai import error_line, write_openai
from batchkit.config.tables import InputTable
from batchkit.runs.status import counts_of
from batchkit.serve.batch import Status, outputs_of
from batchkit.serve.files import file_doc
from batchkit.serve.settings import Settings
from batchkit.serve.store import Object
from batchkit.sources import read_rows
from batchkit.storage.files import sync_folder
from batchkit.storage.log import log_of, read_lines
from batchkit.storage.runfolder import is_run
from batchkit.types import Usage

_WHY = {
    "cancelled": ("batch_cancelled", "The batch was cancelled before this request was run."),
    "expired": (
        "batch_expired",
        "This request could not be executed before the completion window expired.",
    ),
    "failed": ("batch_failed", "The batch failed before this request was run."),
}


class Finished(NamedTuple):
    """The result of a batch: its final ``status``, further changed fields (``more``), and the file objects of its
    output and error file."""

    status: Status
    more: Object
    files: tuple[Object, ...]


def finish(batch: Object, settings: Settings) -> Finished:
    """Write the output file and the error file of a batch whose run has stopped. Rows without a record become errors.

    After a crash, the call is repeated and writes the same files.

    Raises:
        BatchkitError, OSError: The files can't be written. The run is unchanged.
    """
    folder, ids = settings.runs / batch["id"], outputs_of(batch)
    source, total = settings.files / batch["input_file_id"], batch["request_counts"]["total"]
    ok, failed, usage = _exported(folder, settings.files / ids.answers, settings.files / ids.errors)
    n_left = total - len(ok) - len(failed)
    status = _status_of(batch, n_left)
    if n_left:
        _append_unfinished(settings.files / ids.errors, source, ok | failed, status)
    n_errors = total - len(ok)
    files = tuple(_synced_files(settings, batch, {ids.answers: len(ok), ids.errors: n_errors}))
    sync_folder(settings.files)
    model = settings.models.get(batch["model"])
    named = [file["id"] for file in files]
    tokens = Usage(usage["input_tokens"], usage["output_tokens"]) if usage else Usage(0, 0)
    return Finished(
        status,
        {
            "output_file_id": ids.answers if ids.answers in named else None,
            "error_file_id": ids.errors if ids.errors in named else None,
            "request_counts": {"total": total, "completed": len(ok), "failed": n_errors},
            "usage": usage,
            "price": model and model.job.budget.price_of(tokens, batch["gpu_seconds"]),
        },
        files,
    )


def _status_of(batch: Object, n_left: int) -> Status:
    if batch["status"] == "cancelling":
        return "cancelled"
    if batch["errors"] is not None:
        return "failed"
    return "expired" if n_left else "completed"


class _Exported(NamedTuple):
    """The rows of an exported batch: indexes of those that succeeded and of those that failed, and their total token
    usage."""

    ok: Any = frozenset()
    failed: Any = frozenset()
    usage: Object | None = None


def _exported(folder: Path, answers: Path, errors: Path) -> _Exported:
    """Export the run in ``folder`` to the two files. If the run has not begun, write two empty files."""
    if not is_run(folder):
        answers.write_bytes(b"")
        errors.write_bytes(b"")
        return _Exported()
    totals = counts_of(folder).totals
    _, made = write_openai(folder, answers)
    made.replace(errors)
    return _Exported(totals.completed, totals.failed_rows, _usage_of(folder))


def _append_unfinished(path: Path, source: Path, settled: Collection[int], status: Status) -> None:
    code, message = _WHY[status]
    lines = InputTable(path=str(source), format="openai-batch")
    with path.open("ab") as file:
        for row in read_rows(lines, skip=settled.__contains__):
            line = error_line(row.index, row.id, code, message)
            file.write(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE))


def _synced_files(
    settings: Settings, batch: Object, n_lines: Mapping[str, int]
) -> Iterator[Object]:
    """Sync each file that has lines to disk, and yield its file object. Remove files without lines."""
    for name, kind in zip(n_lines, ("output", "error"), strict=True):
        path = settings.files / name
        if not n_lines[name]:
            path.unlink()
            continue
        with path.open("rb") as file:
            os.fsync(file.fileno())
        filename, after = f"{batch['id']}_{kind}.jsonl", batch["output_expires_after"]
        made = file_doc(path, filename=filename, purpose="batch_output", expires_at=None)
        own = None if after is None else made["created_at"] + after["seconds"]
        yield made | {"expires_at": own or settings.expiry(made["created_at"])}


def _usage_of(folder: Path) -> Object:
    """Return the total token usage of a run, in OpenAI's format. This reads the whole log, which takes a sixth of the
    export's time."""
    prompt = completion = reasoning = cached = 0
    for line in read_lines(log_of(folder)):
        if line.record is not None and (usage := line.record.usage) is not None:
            prompt += usage.prompt_tokens
            completion += usage.completion_tokens
            reasoning += usage.reasoning_tokens or 0
            cached += usage.cached_tokens or 0
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": cached},
        "output_tokens": completion,
        "output_tokens_details": {"reasoning_tokens": reasoning},
        "total_tokens": prompt + completion,
    }
