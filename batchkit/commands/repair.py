"""``verify --repair``: makes a damaged log readable and resumable."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from batchkit.commands.verify import compare, read_log
from batchkit.errors import StoreError
from batchkit.execution.requeue import finish_requeue
from batchkit.storage.checkpoint import CHECKPOINT, log_damage, sealed_checkpoint
from batchkit.storage.files import free_name, write_atomically
from batchkit.storage.ledger import RECORD_HEAD, RESULTS, log_of, read_lines, record_of
from batchkit.storage.manifest import read_manifest
from batchkit.storage.runfolder import claim
from batchkit.storage.store import RecordLine, Store
from batchkit.storage.vectors import Vectors


class Repair(NamedTuple):
    """What ``repair`` did: ``kept`` records, and ``removed`` lines, which are now in ``aside``.

    ``accepted``: the damage of a log whose lines were all kept because they show no trace of it.
    """

    kept: int
    removed: int
    aside: Path | None
    accepted: str | None

    def to_text(self) -> str:
        aside = "" if self.aside is None else f", {self.removed:,} lines set aside in {self.aside}"
        accepted = "" if self.accepted is None else f"\naccepted as it is: {self.accepted}"
        return f"repaired: {self.kept:,} records kept{aside}{accepted}"


def repair(folder: Path) -> Repair:
    """Make the log and its checkpoint sound again: every whole record of a known row is kept.

    Lines that are not records, records at an index that the input does not have, records of another
    row than the one at their index, records whose vector is not there, and all but the newest answer
    of a row are moved to ``results.jsonl.broken-<n>``. Rows without a record left are pending: the next start runs them.

    Raises:
        StoreError: another process holds the folder, the log is missing, a file of vectors can't be read, or
            the disk refuses.
    """
    with claim(folder) as lock:
        finish_requeue(folder)
        path, manifest = log_of(folder), read_manifest(folder)
        checkpoint = sealed_checkpoint(folder)
        damage = None if checkpoint is None else log_damage(folder, checkpoint.checksum)
        scratch = folder / ".repair.tmp"
        shutil.rmtree(scratch, ignore_errors=True)  # left by a killed process
        whole, known, aside = scratch / "whole", scratch / "known", None
        try:
            removed = _copy(path, whole, lambda record, offset: True)
            log = read_log(whole / RESULTS, 0)
            rows, vectors = compare(folder, whole / RESULTS, manifest, log), Vectors(folder)

            def is_kept(record: dict[str, Any]) -> bool:
                return rows.fits(record) and vectors.fault_in(record) is None

            # Another row's answer must not supersede this row's own.
            fitting = read_log(whole / RESULTS, 0, is_kept)
            removed += _copy(
                whole / RESULTS,
                known,
                lambda record, offset: (
                    is_kept(record) and not fitting.is_superseded(record, offset)
                ),
            )
            kept = sum(1 for _ in read_lines(known / RESULTS))
            lock.check()
            if removed:
                aside = free_name(path, ".broken-")
                write_atomically(aside, b"".join(removed))
            (folder / CHECKPOINT).unlink(missing_ok=True)
            (known / RESULTS).replace(path)
            (known / CHECKPOINT).replace(folder / CHECKPOINT)
        except OSError as error:
            raise StoreError(f"{folder}: can't be repaired: {error.strerror}") from error
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
        return Repair(kept, len(removed), aside, None if removed else damage)


def _copy(log: Path, into: Path, keep: Callable[[dict[str, Any], int], bool]) -> list[bytes]:
    """Write the whole records in ``log`` for which ``keep`` is true; returns the other lines."""
    into.mkdir(parents=True)
    removed = []

    def to_keep(file: BinaryIO) -> Iterator[RecordLine]:
        for line in read_lines(log):
            raw = file.read(line.end - line.offset)
            if line.record is not None and keep(line.record, line.offset):
                yield RecordLine(raw, line.record)
            else:
                removed.append(raw)
            if line.record is None:
                yield from _records_within(raw)

    with log.open("rb") as file, closing(Store(into)) as store:
        store.copy_all(to_keep(file))
    return removed


def _records_within(raw: bytes) -> Iterator[RecordLine]:
    """The whole records in a broken line, for example if a newline between two was lost.

    A record's first bytes never occur inside a JSON string, because quotes are escaped there.
    """
    for piece in raw.split(RECORD_HEAD)[1:]:
        line = RECORD_HEAD + piece.strip() + b"\n"
        if (record := record_of(line)) is not None:
            yield RecordLine(line, record)
