"""Where a start's rows come from: the job's own input, or rows given from Python."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

from batchkit.config import JobConfig
from batchkit.errors import BatchkitError, RequestError
from batchkit.manifest import read_manifest
from batchkit.prompts import input_hash
from batchkit.runfolder import is_run
from batchkit.sources import FileFingerprint, count_rows, fingerprint, read_rows
from batchkit.types import Row


class Input(NamedTuple):
    """Where this start's rows come from.

    ``files`` are the fingerprints that tell whether it is the input of an earlier start; None for
    rows that can be read only once, which can never be resumed. ``read`` gives the rows for whose
    index its argument is false; ``everything`` too, but also those that ``where`` and ``limit``
    leave out. ``size`` says how many rows there are to run in all, if it can.
    """

    files: list[dict[str, Any]] | None
    read: Callable[[Callable[[int], bool]], Iterator[Row]]
    everything: Callable[[Callable[[int], bool]], Iterator[Row]]
    size: Callable[[], int | None]


def from_job(job: JobConfig) -> Input:
    """The job's own input."""
    previous: tuple[FileFingerprint, ...] = ()
    if is_run(job.folder):
        previous = tuple(FileFingerprint(**file) for file in read_manifest(job.folder)["input"])
    unfiltered = job.input.model_copy(update={"where": {}, "limit": None})
    return Input(
        files=[asdict(file) for file in fingerprint(job.input, previous)],
        read=lambda skip: read_rows(job.input, skip=skip),
        everything=lambda skip: read_rows(unfiltered, skip=skip),
        size=lambda: count_rows(job.input),
    )


def from_python(rows: Iterable[Any]) -> Input:
    """Rows given from Python: prompts, chat messages, or dicts of template fields."""
    if not isinstance(rows, Sequence):

        def once(skip: Callable[[int], bool]) -> Iterator[Row]:
            return (_row(index, value) for index, value in enumerate(rows))

        return Input(None, once, once, lambda: None)
    made = [_row(index, value) for index, value in enumerate(rows)]
    digest = hashlib.sha256("".join(input_hash(row.fields) for row in made).encode()).hexdigest()

    def read(skip: Callable[[int], bool]) -> Iterator[Row]:
        return (row for row in made if not skip(row.index))

    file = {"path": "(rows from Python)", "size": len(made), "mtime_ns": 0, "sha256": digest}
    return Input([file], read, read, lambda: len(made))


def _row(index: int, value: Any) -> Row:
    """A prompt, a list of chat messages, or a dict of template fields."""
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
    return Row(index, str(index), fields)


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
