"""``--on-change requeue``: move the records whose row is unchanged to a new log.

Log, checkpoint and manifest are replaced in one step. Vectors stay where they are; one whose row has
another index now is copied. The new ones are made in a folder beside the
old ones; renaming that folder to ``.requeue`` commits the change. From then on the old files are
not read, and the next process that opens the run moves the new ones into place, retrying if needed.
"""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import closing
from pathlib import Path

import orjson

from batchkit.errors import StoreError
from batchkit.sources.rowhash import known_hashes
from batchkit.storage.checkpoint import CHECKPOINT
from batchkit.storage.files import free_name, sync_folder
from batchkit.storage.ledger import REQUEUE, RESULTS
from batchkit.storage.manifest import Manifest
from batchkit.storage.newest import read_newest
from batchkit.storage.runfolder import MANIFEST
from batchkit.storage.store import RecordLine, Store
from batchkit.storage.vectors import VECTORS, Vectors, segments_of
from batchkit.types import Row

_UNFINISHED = f"{REQUEUE}.tmp"
_Present = dict[tuple[str, int], tuple[int, tuple[str, ...]]]


def requeue(folder: Path, rows: Iterable[Row], manifest: Manifest, *, by_id: bool) -> str:
    """Keep the records whose row is still among ``rows``, under its present index; drop the others.

    ``manifest`` becomes the run's manifest. The old log is kept beside the new one. A row is the
    same if its fields are; it is looked up by id if the job names one (the n-th row of an id for
    the n-th record of it), else by index. Holds an index and a hash or two per row.

    Raises:
        StoreError: the disk refuses; the run is unchanged.
    """
    unfinished = folder / _UNFINISHED
    try:
        unfinished.mkdir()
        kept, dropped = _copy(folder, unfinished, _present(rows, by_id=by_id), by_id)
        manifest.write(unfinished)
        unfinished.rename(folder / REQUEUE)
        sync_folder(folder)
    except (OSError, StoreError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise StoreError(f"{folder}: can't requeue, and the run is as it was: {reason}") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    aside = finish_requeue(folder)
    return f"requeue: {kept:,} records kept, {dropped:,} rows to run again; old log: {aside}"


def finish_requeue(folder: Path) -> str | None:
    """Finish an interrupted ``requeue``: move its files into place. Returns the old log's name.

    Called by a run and by a repair before they read the log.

    Raises:
        StoreError: the disk refuses.
    """
    shutil.rmtree(folder / _UNFINISHED, ignore_errors=True)  # not committed
    made, aside = folder / REQUEUE, None
    if not os.path.lexists(made):
        return None
    if made.is_symlink() or not made.is_dir():
        raise StoreError(f"{made}: is not the folder that a requeue makes; remove it")
    try:
        if segments := segments_of(made):
            (folder / VECTORS).mkdir(exist_ok=True)
            for segment in segments.values():
                segment.replace(folder / VECTORS / segment.name)
            sync_folder(folder / VECTORS)
        if (made / RESULTS).exists():
            if (folder / RESULTS).exists():  # missing after a kill before the new log
                aside = free_name(folder / RESULTS, ".before-")
                (folder / RESULTS).rename(aside)
            (folder / CHECKPOINT).unlink(missing_ok=True)  # it belongs to the old log
        for name in (RESULTS, CHECKPOINT, MANIFEST):
            if (made / name).exists():
                (made / name).replace(folder / name)
        sync_folder(folder)
        shutil.rmtree(made)
    except OSError as error:
        raise StoreError(f"{made}: can't be moved into place: {error.strerror or error}") from error
    return None if aside is None else aside.name


def _present(rows: Iterable[Row], *, by_id: bool) -> _Present:
    """Index and hashes of each row, by the key that its record is looked up with."""
    n_rows: Counter[str] = Counter()
    present = {}
    for row in rows:
        key = row.id if by_id else str(row.index)
        present[key, n_rows[key]] = row.index, known_hashes(row.fields, nan_is_null=False)
        n_rows[key] += 1
    return present


def _copy(run: Path, folder: Path, present: _Present, by_id: bool) -> tuple[int, int]:
    """Write the records to keep, with their checkpoint. Returns the numbers kept and dropped."""
    n_records: Counter[str] = Counter()
    vectors = Vectors(run)

    def to_keep() -> Iterator[RecordLine]:
        for record in read_newest(run / RESULTS):
            key = record["id"] if by_id else str(record["index"])
            row_now = present.get((key, n_records[key]))
            n_records[key] += 1
            if row_now is not None and record.get("input_hash") in row_now[1]:
                vector = None
                if record.get("embedding") is not None and record["index"] != row_now[0]:
                    vector = vectors.of(record)
                    del record["embedding"]
                record["index"], record["id"] = row_now[0], key  # if rows have no ids: the index
                line = orjson.dumps(record, option=orjson.OPT_APPEND_NEWLINE)
                yield RecordLine(line, record, vector)

    with closing(Store(folder, first_segment=max(segments_of(run), default=-1) + 1)) as store:
        store.copy_all(to_keep())
    kept = store.totals.records
    return kept, n_records.total() - kept
