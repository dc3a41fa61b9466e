"""``--on-change requeue``: moves the records of unchanged rows to a new log.

Log, generations, checkpoint, manifest and history are replaced in one step. A repair replaces the logs in the same way.
Vectors stay in their files; if a row gets another index, its vector is copied.

The new files are first written to a folder next to the old ones. Renaming this folder to ``.requeue`` commits the
change: from then on, the old files are not read. If this process is killed before it has moved the new files into
place, the next process that opens the run moves them.
"""

from __future__ import annotations

import os
import shutil
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from msgspec.structs import replace

from batchkit.errors import StoreError
from batchkit.sources.rowhash import input_hash
from batchkit.storage.checkpoint import CHECKPOINT
from batchkit.storage.files import free_name, sync_folder
from batchkit.storage.index_set import IndexSet
from batchkit.storage.ledger import Ledger, RecordLine, rewritten
from batchkit.storage.log import REQUEUE, RESULTS, STEPS, read_generations
from batchkit.storage.manifest import Manifest
from batchkit.storage.newest_lines import read_newest
from batchkit.storage.runfolder import MANIFEST
from batchkit.storage.starts import STARTS, History
from batchkit.storage.steps import GenerationLine, fresh_line, line_with
from batchkit.storage.vectors import VECTORS, Vectors, segments_of
from batchkit.types import Row

_UNFINISHED = f"{REQUEUE}.tmp"


def requeue(
    folder: Path,
    rows: Iterable[Row],
    manifest: Manifest,
    history: History,
    *,
    by_id: bool,
    keep_records: bool,
) -> str:
    """Keep the records of rows that are still among ``rows``, under the rows' new indexes, and drop the other records.

    Two rows are the same if their fields are equal and their ids (with ``by_id``) or indexes (without it) are equal,
    too. Generations of changed rows are kept, because such a row may make an equal request again. The old logs are kept
    next to the new ones. Memory: an index and one or two hashes per row.

    - ``manifest``, ``history``: the run's new manifest and history.
    - ``keep_records``: False treats all rows as changed.

    Raises:
        StoreError: the disk fails; the run is unchanged.
    """
    with replacing_logs(folder, "requeue") as made:
        kept, dropped, reused = _copy(folder, made, _Rows(rows, by_id=by_id), keep_records)
        manifest.write(made)
        history.write(made)
    aside = finish_requeue(folder)
    of_these = f" ({reused:,} of their generations can be used again)" if reused else ""
    return (
        f"requeue: {kept:,} records kept, {dropped:,} rows to run again{of_these}; old log: {aside}"
    )


@contextmanager
def replacing_logs(folder: Path, verb: str) -> Iterator[Path]:
    """Yield a folder for new logs. The new logs replace the old logs when the block ends without an error.

    The end of the block commits the change; ``finish_requeue`` then moves the files into place. ``verb``: completes
    "can't …" in the error message.

    Raises:
        StoreError: the disk fails; the run is unchanged.
    """
    unfinished = folder / _UNFINISHED
    try:
        unfinished.mkdir()
        if os.path.lexists(folder / STEPS):
            (unfinished / STEPS).touch()
        yield unfinished
        unfinished.rename(folder / REQUEUE)
        sync_folder(folder)
    except (OSError, StoreError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise StoreError(f"{folder}: can't {verb} ({reason}); the run is unchanged") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def finish_requeue(folder: Path) -> str | None:
    """Move the files that ``replacing_logs`` has committed into place. Return the old log's new name; None if no log
    was moved.

    A run and a repair call this before they read the log, because the process that wrote the files may have been
    killed.

    Raises:
        StoreError: the disk fails.
    """
    shutil.rmtree(folder / _UNFINISHED, ignore_errors=True)  # not committed
    made, aside = folder / REQUEUE, None
    if not os.path.lexists(made):
        return None
    if made.is_symlink() or not made.is_dir():
        raise StoreError(
            f"{made}: must be a folder made by a requeue, but is something else; remove it"
        )
    try:
        if segments := segments_of(made):
            (folder / VECTORS).mkdir(exist_ok=True)
            for segment in segments.values():
                segment.replace(folder / VECTORS / segment.name)
            sync_folder(folder / VECTORS)
        for name in (STEPS, RESULTS):
            # A file is missing if a process that was killed has already moved it.
            if (made / name).exists() and (folder / name).exists():
                aside = free_name(folder / name, ".before-")
                (folder / name).rename(aside)
        if (made / RESULTS).exists():
            (folder / CHECKPOINT).unlink(missing_ok=True)  # it belongs to the old log
        for name in (STEPS, RESULTS, CHECKPOINT, STARTS, MANIFEST):
            if (made / name).exists():
                (made / name).replace(folder / name)
        sync_folder(folder)
        shutil.rmtree(made)
    except OSError as error:
        raise StoreError(
            f"the result of --on-change requeue ({made}) can't be moved into the run folder:"
            f" {error.strerror or error}; correct this, then run the same command again"
        ) from error
    return None if aside is None else aside.name


class _Move(NamedTuple):
    """The new index of a row (None if the new input lacks the row), and whether its record is kept."""

    to: int | None
    has_record: bool


class _Rows:
    """The rows of the new input, looked up by key (id or index) and hash. Each row is returned at most once."""

    def __init__(self, rows: Iterable[Row], *, by_id: bool) -> None:
        self.by_id = by_id
        self._same: defaultdict[tuple[str, str], list[int]] = defaultdict(list)
        self._taken = IndexSet()
        self._left: dict[str, list[int]] | None = None
        for row in rows:
            self._same[self.key(row.index, row.id), input_hash(row.fields)].append(row.index)
        for indexes in self._same.values():
            indexes.reverse()  # ``pop`` takes the last, which must be the lowest index

    def key(self, index: int, row_id: str) -> str:
        return row_id if self.by_id else str(index)

    def same(self, key: str, input_hash: str) -> int | None:
        """Return the index of a row with this key and hash that was not returned before; None if there is none."""
        return self._first(self._same.get((key, input_hash), []))

    def other(self, key: str) -> int | None:
        """Return the index of a row that has this key, whatever its hash, and was not returned before; None if there is
        none.

        Call it only after ``same`` was called for all records, because it could return the row of a record whose input
        is unchanged.
        """
        if self._left is None:
            found = defaultdict[str, set[int]](set)
            for (of, _), indexes in self._same.items():
                found[of].update(indexes)
            self._left = {of: sorted(indexes, reverse=True) for of, indexes in found.items()}
        return self._first(self._left.get(key, []))

    def _first(self, indexes: list[int]) -> int | None:
        while indexes:
            if (index := indexes.pop()) not in self._taken:
                self._taken.add(index)
                return index
        return None


def _moves(records: Iterable[dict[str, Any]], rows: _Rows, keep_records: bool) -> dict[int, _Move]:
    """Return the new index of each record's row, by the row's old index."""
    moves, changed = dict[int, _Move](), list[tuple[int, str]]()
    for record in records:
        was, key = record["index"], rows.key(record["index"], record["id"])
        if (to := rows.same(key, record.get("input_hash") or "")) is None:
            changed.append((was, key))
        else:
            moves[was] = _Move(to, keep_records)
    moves |= {was: _Move(rows.other(key), False) for was, key in changed}
    return moves


def _original(index: int | None, moves: Mapping[int, _Move]) -> int | None:
    """Return the new index of the row with the original of a copied answer; None if its record is not kept."""
    move = None if index is None else moves.get(index)
    return move.to if move is not None and move.has_record else None


def _copy(run: Path, folder: Path, rows: _Rows, keep_records: bool) -> tuple[int, int, int]:
    """Write the records and generations that are kept to ``folder``, with a checkpoint.

    Return three counts: records kept, records dropped, and generations of rows without a record.
    """
    vectors = Vectors(run)
    moves = _moves(read_newest(run / RESULTS), rows, keep_records)
    n_records, reused = len(moves), 0

    def to_keep() -> Iterator[RecordLine]:
        for record in read_newest(run / RESULTS):
            to, is_kept = moves[record["index"]]
            if to is not None and is_kept:
                vector = None
                if record.get("embedding") is not None and record["index"] != to:
                    vector = vectors.of(record)
                    del record["embedding"]
                record |= {"index": to, "id": rows.key(to, record["id"])}
                if (original := _original(record.pop("duplicate_of", None), moves)) is not None:
                    record["duplicate_of"] = original
                yield rewritten(record, vector)

    def generations() -> Iterator[GenerationLine]:
        nonlocal reused
        for line in read_generations(run):
            if line.record is None:
                continue
            was = line.record.index
            key = rows.key(was, line.record.id)
            if was not in moves:  # it has no record
                moves[was] = _Move(rows.other(key), False)
            to, has_record = moves[was]
            if to is None or not (has_record or line.record.status == "ok"):
                continue
            original = _original(line.record.duplicate_of, moves)
            moved = replace(line.record, index=to, id=key, duplicate_of=original)
            if has_record:
                yield line_with(moved)
            else:
                reused += 1
                yield fresh_line(replace(moved, selected=None, votes=None))

    with closing(Ledger(folder, first_segment=max(segments_of(run), default=-1) + 1)) as ledger:
        ledger.write(to_keep())
        ledger.write(generations())
    kept = ledger.totals.records
    return kept, n_records - kept, reused
