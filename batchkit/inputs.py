"""Where a start's rows come from: the job's own input, or rows given from Python."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from batchkit.config import InputTable, JobConfig
from batchkit.errors import BatchkitError, JobError, RequestError, StoreError
from batchkit.manifest import read_manifest
from batchkit.rowhash import input_hash
from batchkit.sources import FileFingerprint, count_rows, fingerprint, has_ids, read_rows
from batchkit.types import Row


class Input(NamedTuple):
    """Where this start's rows come from.

    ``files`` are the fingerprints that tell whether it is the input of an earlier start; None for
    rows that can be read only once, which can never be resumed. ``read`` gives the rows for whose
    index its argument is false; ``everything`` does too, past ``limit``. ``size`` says how many
    rows there are to run in all, if it can. ``has_ids``: the rows have ids that outlive a change
    of their place.
    """

    files: list[dict[str, Any]] | None
    read: Callable[[Callable[[int], bool]], Iterator[Row]]
    everything: Callable[[Callable[[int], bool]], Iterator[Row]]
    size: Callable[[], int | None]
    has_ids: bool


def from_job(job: JobConfig) -> Input:
    """The job's own input."""
    unlimited = job.input.model_copy(update={"limit": None})
    return Input(
        files=[asdict(file) for file in fingerprint(job.input, _known_files(job.folder))],
        read=lambda skip: read_rows(job.input, skip=skip),
        everything=lambda skip: read_rows(unlimited, skip=skip),
        size=lambda: count_rows(job.input),
        has_ids=has_ids(job.input),
    )


def from_python(rows: Iterable[Any], table: InputTable) -> Input:
    """Rows given from Python: prompts, chat messages, or dicts of template fields.

    Raises:
        JobError: ``table`` asks for what only files can do.
    """
    if table.where or table.limit or table.shard:
        raise JobError(
            "input.where, input.limit and input.shard are for files: give the rows that you want"
        )
    if isinstance(rows, str | Mapping):
        rows = [rows]

    def made() -> Iterator[Row]:
        return (_row(index, value, table.id) for index, value in enumerate(rows))

    has_ids = table.id is not None
    if not isinstance(rows, Sequence):
        return Input(None, lambda skip: made(), lambda skip: made(), lambda: None, has_ids)
    hashes = "".join(input_hash(row.fields) for row in made())
    digest = hashlib.sha256(hashes.encode()).hexdigest()
    size = len(rows)

    def read(skip: Callable[[int], bool]) -> Iterator[Row]:
        return (row for row in made() if not skip(row.index))

    file = {"path": "(rows from Python)", "size": size, "mtime_ns": 0, "sha256": digest}
    return Input([file], read, read, lambda: size, has_ids)


def _known_files(folder: Path) -> list[FileFingerprint]:
    """What an earlier start found, so that an untouched file need not be read again."""
    try:
        return [FileFingerprint(**file) for file in read_manifest(folder)["input"]]
    except (StoreError, KeyError, TypeError):
        return []


def _row(index: int, value: Any, key: str | None) -> Row:
    """A prompt, a list of chat messages, or a dict of template fields, with its id under ``key``."""
    if isinstance(value, str):
        fields: Mapping[str, Any] = {"prompt": value}
    elif isinstance(value, Mapping):
        fields = value
    elif isinstance(value, Sequence):
        fields = {"messages": list(value)}
    else:
        error = RequestError(
            f"row {index} is {type(value).__name__}; give a prompt, chat messages, or a dict"
        )
        return Row(index, str(index), {}, error)
    return Row(index, str(fields.get(key, index) if key else index), fields)


class Total:
    """How many rows the job has, counted on a thread of its own while the model loads."""

    def __init__(self, source: Input) -> None:
        self._source = source
        self._count: int | None = None
        self._thread = threading.Thread(target=self._work, name="count", daemon=True)
        self._thread.start()

    def now(self) -> int | None:
        return self._count

    def wait(self, timeout_s: float | None = None) -> int | None:
        self._thread.join(timeout_s)
        return self._count

    def _work(self) -> None:
        try:
            self._count = self._source.size()
        except BatchkitError:  # whoever reads the rows meets the same error and reports it
            self._count = None
