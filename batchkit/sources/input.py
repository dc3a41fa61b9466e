"""The source of a run's rows: the job's own input, or rows given from Python."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from io import BufferedReader
from pathlib import Path
from typing import Any, NamedTuple

from batchkit.config.regular_file import open_regular
from batchkit.config.tables import InputTable, JobConfig
from batchkit.config.tables.input import variants
from batchkit.errors import (
    BatchkitError,
    ChangedInputError,
    InputError,
    JobError,
    StoreError,
)
from batchkit.sources import count_rows, crossed, has_ids, read_rows
from batchkit.sources.finding import listing
from batchkit.sources.fingerprint import changed_files, fingerprint
from batchkit.sources.python_rows import PLACE, python_rows
from batchkit.sources.reader import Skip, shown
from batchkit.sources.rowhash import input_hash
from batchkit.storage.identity import CHANGING
from batchkit.storage.manifest import FileFingerprint
from batchkit.storage.starts import current_manifest
from batchkit.types import Row

_CHUNK_BYTES = 1 << 20
LOOK_S = 5.0
_HASH_BYTES = 8  # size of an input_hash
_REST = 8  # the pause after a check is at least this many times the time that the check took


class Input(NamedTuple):
    """The source of a run's rows.

    - ``files``: fingerprints, which show whether the input is the one of an earlier start. None for rows that can be
      read only once; such a run can't be resumed.
    - ``read(skip)``: yields the rows, but not those for whose index ``skip(index)`` is true.
    - ``everything(skip)``: the same, but ignores ``input.limit``.
    - ``size``: returns the total number of rows, or None if unknown.
    - ``has_ids``: True if row ids do not depend on positions.
    - ``id``: for rows passed from Python, the field that identifies a row; otherwise None.
    - ``changes(thorough)``: returns how the input now differs from ``files``, by path. A thorough check may take as
      long as making ``files``.
    - ``labels``: the pandas index of the rows; None if they have none.
    - ``left_out``: a text about unused files in the input's folder. ``if_empty``: the message for an input without
      rows.
    - ``sample_of``: the number of rows in the whole input if only a sample is read; otherwise None.
    """

    files: list[FileFingerprint] | None
    read: Callable[[Skip], Iterator[Row]]
    everything: Callable[[Skip], Iterator[Row]]
    size: Callable[[], int | None]
    has_ids: bool
    changes: Callable[[bool], Mapping[str, str]] = lambda thorough: {}
    labels: Any = None
    id: str | None = None
    left_out: str = ""
    if_empty: str = "there are no rows"
    sample_of: int | None = None


def from_job(job: JobConfig) -> Input:
    """Return the job's own input: the files that match now. Files that appear later are not read."""
    unlimited = job.input.model_copy(update={"limit": None})
    files = fingerprint(job.input, _known_files(job.folder))
    paths = {file.path: file.sha256 for file in files}
    return Input(
        files=files,
        read=lambda skip: read_rows(job.input, skip=skip, files=paths),
        everything=lambda skip: read_rows(unlimited, skip=skip, files=paths),
        size=lambda: count_rows(job.input, paths),
        has_ids=has_ids(job.input, paths),
        changes=lambda thorough: changed_files(job.input, files, thorough=thorough),
        left_out=listing(job.input).left_out,
        if_empty=why_empty(job.input),
    )


def from_python(rows: Any, table: InputTable) -> Input:
    """Return an input of rows from Python: prompts, chat messages, or dicts of template fields.

    Raises:
        JobError: ``table`` has a key that only works for files, or ``rows`` are not rows.
    """
    if table.where or table.limit or table.shard or table.filled:
        raise JobError(
            'input.where, input.limit, input.shard and input.empty = "skip" work only for files, and the rows are'
            " from Python: leave these keys out and give only the rows to run"
        )
    found = python_rows(rows, table.id)
    has_ids = found.id is not None
    if found.size is None:
        once = partial(crossed, table.cross, lambda skip: found.read())
        return Input(None, once, once, lambda: None, has_ids, id=found.id)
    n_rows = found.size
    size = n_rows()
    hashes, columns = bytearray(), tuple[str, ...]()
    for row in found.read():
        hashes += bytes.fromhex(input_hash(row.fields))
        columns = columns or tuple(map(str, row.fields))
    is_other = False

    def changes(thorough: bool) -> dict[str, str]:
        if (now := n_rows()) != size:
            return {PLACE: f"{size:,} rows → {now:,} rows"}
        return {PLACE: "other values"} if is_other else {}

    def read(skip: Skip) -> Iterator[Row]:
        """Yield the rows. Set ``is_other`` if a row differs from the first time it was read, even if it is changed back
        later."""
        nonlocal is_other
        end = 0
        for row in found.read():
            start, end = end, end + _HASH_BYTES
            is_other |= hashes[start:end].hex() != input_hash(row.fields)
            if not skip(row.index):
                yield row
        is_other |= end < len(hashes)

    digest = hashlib.sha256(hashes).hexdigest()
    file = FileFingerprint(PLACE, size, 0, digest, columns=columns)
    each, n_values = partial(crossed, table.cross, read), len(variants(table.cross))
    labels = None if found.labels is None else found.labels.repeat(n_values)
    empty = f"process() was given no rows: an empty {type(rows).__name__}"
    return Input(
        [file],
        each,
        each,
        lambda: size * n_values,
        has_ids,
        changes,
        labels,
        found.id,
        if_empty=empty,
    )


def watched(
    rows: Iterator[Row], source: Input, now: Callable[[], float] = time.monotonic
) -> Iterator[Row]:
    """Yield ``rows``, and check every few seconds whether their ``source`` has changed since the run began.

    At the end, or if the rows can't be read any further, the check is thorough.

    Raises:
        ChangedInputError: The source has changed. Rows from before and after the change may have been read.
    """
    next_look = now() + LOOK_S
    try:
        for row in rows:
            yield row
            if (began := now()) >= next_look:
                check_unchanged(source.changes(False))
                took_s = now() - began  # about a second for 200,000 files
                next_look = now() + max(LOOK_S, _REST * took_s)
    except ChangedInputError:
        raise
    except InputError as error:
        check_unchanged(source.changes(True), error)
        raise
    check_unchanged(source.changes(True))


def check_unchanged(changes: Mapping[str, str], because: InputError | None = None) -> None:
    """Raise ChangedInputError if there are ``changes`` (by path). ``because``: a reading error that the changes may
    explain."""
    if not changes:
        return
    path, how = next(iter(changes.items()))
    others = f" and {len(changes) - 1} other files" if len(changes) > 1 else ""
    then = f"; then it could not be read: {because}" if because is not None else ""
    raise ChangedInputError(
        f"{path}{others}: changed while the run read it ({how}){then}. Some rows may have been"
        " answered from the old input and others from the new, so the run stops. All finished rows are"
        " saved. Keep the input as it is now, or restore the old one, and run again with --on-change requeue (keeps the"
        " answers of unchanged rows, answers the others again) or --fresh",
        changes.keys(),
    ) from because


def distrusted(files: list[FileFingerprint], changed: Collection[str]) -> list[FileFingerprint]:
    """Return ``files``, in which files that ``changed`` during the run have fingerprints that match no file.

    The next start then compares the rows of these files, even if the files were changed back.
    """
    paths = {*changed} & {file.path for file in files} or {file.path for file in files}
    return [
        replace(file, mtime_ns=0, ctime_ns=0, sha256=CHANGING) if file.path in paths else file
        for file in files
    ]


def why_empty(table: InputTable) -> str:
    if table.shard is not None:
        return f"shard {table.shard} of {table.path} has no rows"
    wanted = ", ".join(f"{name} = {shown(value)}" for name, value in table.where.items())
    if table.filled and not wanted:
        blank = ", ".join(sorted(table.filled))
        return f'{table.path}: input.empty = "skip" leaves out all rows, because each has an empty field: {blank}'
    reason = (
        f"no row matches input.where: {wanted} (upper and lower case differ)"
        if wanted
        else "has no rows"
    )
    return f"{table.path}: {reason}"


def _known_files(folder: Path) -> list[FileFingerprint]:
    """Return the fingerprints of an earlier start, so that unchanged files need not be read again."""
    try:
        return current_manifest(folder).input
    except StoreError:
        return []


class Total:
    """The total number of rows, counted in a separate thread while the model loads."""

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
        except BatchkitError:  # the thread that reads the rows reports the same error
            self._count = None


def input_changes(then: Sequence[FileFingerprint], now: Sequence[FileFingerprint]) -> list[str]:
    """Return one line for each file whose content differs between two lists of fingerprints.

    Moving or touching a file is no change, unless its new name selects another format.
    """
    if len(then) == len(now) and all(map(_same, then, now)):
        return []
    old = {file.path: file for file in then}
    new = {file.path: file for file in now}
    return [
        f"input {path}: {_difference_of(old.get(path), new.get(path))}"
        for path in sorted({*old, *new})
        if path not in old or path not in new or not _same(old[path], new[path])
    ] or ["input: the order of the files"]


def _same(then: FileFingerprint, now: FileFingerprint) -> bool:
    if then.sha256 == CHANGING:
        return False
    return (then.sha256, then.read_as) == (now.sha256, now.read_as)


def _difference_of(then: FileFingerprint | None, now: FileFingerprint | None) -> str:
    if then is not None and now is not None and (added := _lines_added(then, now)):
        return f"{added:,} lines were appended"
    columns = "" if then is None or now is None else _columns_changed(then.columns, now.columns)
    return f"{_described(then)} → {_described(now)}{columns}"


def _columns_changed(then: Sequence[str], now: Sequence[str]) -> str:
    if not then or not now:
        return ""
    more = [f"column {name!r} added" for name in now if name not in then]
    return "".join(
        f", {how}"
        for how in (*more, *(f"column {name!r} removed" for name in then if name not in now))
    )


def _lines_added(then: FileFingerprint, now: FileFingerprint) -> int:
    """Return the number of lines appended to a local text file; 0 if the file differs in another way."""
    path = Path(now.path)
    if path.suffix not in (".jsonl", ".csv", ".tsv", ".txt") or now.size <= then.size:
        return 0
    digest = hashlib.sha256()
    try:
        with BufferedReader(open_regular(path)) as file:
            left = then.size
            while chunk := file.read(min(left, _CHUNK_BYTES)):
                digest.update(chunk)
                left -= len(chunk)
            return sum(1 for _ in file) if digest.hexdigest() == then.sha256 else 0
    except OSError:
        return 0


def _described(file: FileFingerprint | None) -> str:
    if file is None:
        return "none"
    name = f", read as {file.read_as}" if file.read_as else ""
    unit = "rows" if file.path == PLACE else "bytes"
    return f"{file.size:,} {unit}, {file.sha256[:12]}{name}"
