"""Parquet parts of a run's answers, which a folder in ``output.export`` gets during the run.

``part-00000.parquet``, ``part-00001.parquet``, … hold the rows that got an answer in consecutive byte ranges of
``results.jsonl``. A part is not written again: its metadata says where the next part begins, so any process that has the
log continues. Rows without an answer are in ``failed.parquet``, which is written when the run has ended, and removed
before the next part, because a retry may answer them. So each row is in the folder once.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from msgspec.structs import asdict

from batchkit.config.export_target import HUB
from batchkit.config.urls import bare
from batchkit.errors import JobError
from batchkit.runs.card import write_card
from batchkit.runs.layout import Layout
from batchkit.runs.status import counts_of
from batchkit.storage.job_toml import job_of_run
from batchkit.storage.lines import failure_kind
from batchkit.storage.log import RESULTS, Checksum, opened_log
from batchkit.storage.manifest import read_manifest
from batchkit.storage.newest_lines import Span
from batchkit.storage.remote import OutputFolder, upload_errors
from batchkit.types import Record

if TYPE_CHECKING:
    import pyarrow as pa

FAILED = "failed.parquet"
_PART = re.compile(r"part-\d{5,}\.parquet", re.ASCII)
_PART_KEY = "batchkit.part"


class Written(NamedTuple):
    """The content of a folder of parts: the number of parts and of their rows, and of the rows in ``failed.parquet``."""

    parts: int
    rows: int
    failed: int = 0


class _Position(NamedTuple):
    """The place where the next part begins. ``log``: the log up to there. ``rows``: rows of the parts so far."""

    number: int = 0
    log: Checksum = Checksum()
    rows: int = 0


class PartsFolder:
    """The parts of the run ``run`` in the folder or address ``place``. One thread at a time may use it.

    ``most_bytes``: how much of the log a part holds, apart from the rest of a line.

    Raises (every method):
        JobError: the folder has parts of something else than this log.
        StoreError: a record or a vector is damaged.
        UploadError: the folder can't be read or written.
    """

    def __init__(self, run: Path, place: str, *, most_bytes: int = 128 << 20) -> None:
        self.name, self._place, self._most_bytes = bare(place), place, most_bytes
        self._run, self._log = run, run / RESULTS
        self._created_at = read_manifest(run).created_at
        self._known = Checksum()  # of the log, up to the end of the newest part
        # The range of a part that was not confirmed. It is tried again unchanged, because the first upload may still
        # arrive, and then replaces the part.
        self._tried: tuple[int, int] | None = None

    @cached_property
    def _layout(self) -> Layout:
        return Layout.of_parts(job_of_run(self._run))

    def check(self) -> None:
        """Check that the folder is empty or has parts of this run."""
        with self._opened() as folder:
            self._position(folder, folder.names())

    def write(self, end: int) -> Written:
        """Write the rows answered before byte ``end`` of the log, an end of a line, that have no part yet."""
        with self._opened() as folder:
            return self._write(folder, end)

    def finish(self, end: int) -> Written:
        """Write all other rows, including rows without an answer. ``end``: the log's end."""
        with self._opened() as folder:
            written, totals = self._write(folder, end), counts_of(self._run).totals
            if totals.ok + totals.failed == written.rows:
                return written
            log, known = self._known.extended(self._log, end), _metadata(folder, FAILED)
            if (known.get("range"), known.get("crc32")) == ([0, end], log.crc32):
                return written._replace(failed=known["rows"])
            with folder.writing(FAILED) as path:
                tables = self._tables((0, end), answered=False)
                rows = self._write_tables(path, tables, (0, end), log)
            self._write_card(folder)
            return written._replace(failed=rows)

    @contextmanager
    def _opened(self) -> Iterator[OutputFolder]:
        advice = (
            f"the answered rows are safe in {self._run}; correct this, and the same command again"
            " writes the rest"
        )
        with upload_errors(self._place, advice):
            yield OutputFolder(self._place)

    def _write(self, folder: OutputFolder, end: int) -> Written:
        names = folder.names()
        begun = at = self._position(folder, names)
        while at.log.end < end:
            span = at.log.end, self._end_after(at.log.end, end)
            tables = self._tables(span, answered=True)
            first = next(tables, None)
            if first is None and span[1] == end:
                break  # no row got an answer, so the next part begins here
            if FAILED in names:
                folder.remove(FAILED)
                names.remove(FAILED)
            self._tried = span
            tables = chain([] if first is None else [first], tables)
            log = at.log.extended(self._log, span[1])
            with folder.writing(_name(at.number)) as path:
                rows = self._write_tables(path, tables, span, log, at.rows)
            self._tried, self._known = None, log
            at = _Position(at.number + 1, log, at.rows + rows)
        if at != begun:
            self._write_card(folder)
        return Written(at.number, at.rows)

    def _position(self, folder: OutputFolder, names: Collection[str]) -> _Position:
        """Return the place where the next part begins. If the newest part is not whole, its range comes next.

        Raises:
            JobError: the parts belong to something else, or one is missing.
        """
        number = sum(_PART.fullmatch(name) is not None for name in names)
        are_all_there = {_name(n) for n in range(number)} <= {*names}
        found = _metadata(folder, _name(number - 1)) if number else {}
        if number and are_all_there and not found:
            number -= 1
            found = _metadata(folder, _name(number - 1)) if number else {}
        if not number:
            return _Position()
        try:
            crc32, (_, end), rows = found["crc32"], found["range"], found["rows_before"]
            log = self._known if self._known.end <= end else Checksum()
            log = log.extended(self._log, end)
            is_same = (found["created_at"], crc32, end) == (self._created_at, *log)
            if is_same and are_all_there:
                self._known = log
                return _Position(number, log, rows + found["rows"])
        except (KeyError, TypeError, ValueError):
            pass
        raise JobError(
            f"output.export: {self.name}: has parts of another run, or of other records than {self._log} has now (after"
            " --fresh, --on-change requeue, a repair or a restored copy); name another folder, or remove the files"
            " part-*.parquet there, and all parts are written again"
        )

    def _end_after(self, start: int, end: int) -> int:
        """Return the end of the part that begins at byte ``start``, at most ``end``."""
        if self._tried is not None and self._tried[0] == start:
            return self._tried[1]
        if end - start <= self._most_bytes:
            return end
        with opened_log(self._log) as file:
            file.seek(start + self._most_bytes)
            file.readline()
            return min(file.tell(), end)

    def _tables(self, span: Span, *, answered: bool) -> Iterator[pa.Table]:
        from batchkit.runs.table import read_batches

        def is_chosen(record: Record) -> bool:
            return _is_answer(record) == answered

        return read_batches(self._run, self._layout, span=span, chosen=is_chosen)

    def _write_tables(
        self,
        path: Path,
        tables: Iterator[pa.Table],
        span: Span,
        log: Checksum,
        rows_before: int = 0,
    ) -> int:
        """Write a Parquet file with the rows in ``span`` of the log. Its metadata says where the next part begins."""
        from batchkit.runs.parquet import write_tables

        part = {
            "created_at": self._created_at,
            "range": span,
            "crc32": log.crc32,
            "rows_before": rows_before,
        }
        about = {"batchkit.run": self._run.name, _PART_KEY: json.dumps(part)}
        return write_tables(path, self._layout, tables, about)

    def _write_card(self, folder: OutputFolder) -> None:
        """Write the card of a dataset on the hub. Other folders have only Parquet files, because readers of a whole folder
        expect that."""
        if not self._place.startswith(HUB):
            return
        names = folder.names()
        files = {"train": "part-*.parquet"} if _name(0) in names else {}
        files |= {"failed": FAILED} if FAILED in names else {}
        write_card(folder, self._run, files)


def _name(number: int) -> str:
    return f"part-{number:05}.parquet"


def _metadata(folder: OutputFolder, name: str) -> dict[str, Any]:
    """Return what batchkit has noted in a Parquet file, and its number of ``rows``; nothing if the file is missing or
    not whole."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with folder.open(name) as file:
            found = pq.read_metadata(file)
    except (FileNotFoundError, pa.ArrowInvalid):
        return {}
    part = (found.metadata or {}).get(_PART_KEY.encode(), b"{}")
    return {**json.loads(part), "rows": found.num_rows}


def _is_answer(record: Record) -> bool:
    if record.status == "failed" or (record.text and not record.text.isspace()):
        return record.status == "ok"
    return failure_kind(asdict(record)) is None
