"""``verify --repair``: makes a damaged log readable and resumable.

A start does the same by itself, if only what its records rely on is gone: vectors, or generations.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import orjson

from batchkit.errors import StoreError
from batchkit.execution.requeue import finish_requeue
from batchkit.runs.audit import Calls, Records
from batchkit.runs.verify import Compared, compare
from batchkit.storage.checkpoint import CHECKPOINT, Checkpoint, damage_in, read_checkpoint
from batchkit.storage.files import free_name, write_atomically
from batchkit.storage.index_set import IndexSet
from batchkit.storage.ledger import Ledger, RecordLine, rewritten
from batchkit.storage.lines import Generation, generation_in, record_in
from batchkit.storage.log import (
    RESULTS,
    STEPS,
    LogLine,
    log_of,
    read_generations,
    read_lines,
    with_pieces,
)
from batchkit.storage.manifest import read_manifest
from batchkit.storage.runfolder import Claim, claim
from batchkit.storage.steps import GenerationLine, fresh_line
from batchkit.storage.vectors import Vectors
from batchkit.types import COUNT_LIMIT, Record


class Repair(NamedTuple):
    """What ``repair`` did: ``kept`` records, and how many lines were ``removed`` to each file.

    ``accepted``: the damage of a log whose lines were all kept because they show no trace of it.
    ``rows_with_less``: rows that have lost generations, which their records say now.
    """

    kept: int
    removed: Mapping[Path, int]
    accepted: str | None
    rows_with_less: int = 0

    def to_text(self) -> str:
        aside = "".join(f", {n:,} lines set aside in {path}" for path, n in self.removed.items())
        accepted = "" if self.accepted is None else f"\naccepted as it is: {self.accepted}"
        less = f"\n{self.rows_with_less:,} rows have lost generations, and keep their answers"
        return f"repaired: {self.kept:,} records kept{aside}{less * bool(self.rows_with_less)}{accepted}"


def repair(folder: Path, media: Sequence[Path] = ()) -> Repair:
    """Make the log and its checkpoint sound again: every whole record of a known row is kept.

    Lines that are not records, records at an index that the input does not have, records of another
    row than the one at their index, records whose vector is not there, and all but the newest answer
    of a row are moved to ``results.jsonl.broken-<n>``. Rows without a record left are pending: the next start runs them.
    Lines of ``steps.jsonl`` that are not generations, or are there twice, are moved in the same way; a row
    whose generations are gone keeps its answer, and its record says how many are (``generations_lost``).

    Raises:
        StoreError: another process holds the folder, the log is missing, a file of vectors can't be read, or
            the disk refuses.
    """
    with claim(folder) as lock:
        finish_requeue(folder)
        manifest = read_manifest(folder)
        return repair_held(folder, lock, lambda records: compare(folder, manifest, records, media))


def repair_held(folder: Path, lock: Claim, compared_with: Callable[[Records], Compared]) -> Repair:
    """``repair`` by the process that holds the ``lock``; ``compared_with`` has the result of comparing the records
    with the input.

    Raises:
        StoreError: as ``repair``.
    """
    path = log_of(folder)
    damage = damage_in(folder, read_checkpoint(folder) or Checkpoint.none())
    records = Records.of(_lines(folder), Vectors(folder), 0)
    calls = Calls.of(_calls(folder), 0)
    compared = compared_with(records)
    keep = records.kept(compared.unknown, compared.mixed)
    settled = IndexSet(row for row, kept in zip(records.rows, keep, strict=True) if kept)
    too_few = {row: there for row, (_, there) in calls.too_few(records).items()}
    removed, removed_calls = list[bytes](), list[bytes]()
    scratch = folder / ".repair.tmp"
    shutil.rmtree(scratch, ignore_errors=True)  # left by a killed process
    try:
        scratch.mkdir()
        with closing(Ledger(scratch)) as ledger:
            ledger.write(_kept(_lines(folder), keep, too_few, removed))
            ledger.write(_kept_calls(_calls(folder), calls, settled, removed_calls))
        lock.check()
        aside = {}
        for log_path, lines in ((path, removed), (folder / STEPS, removed_calls)):
            if lines:
                aside[free := free_name(log_path, ".broken-")] = len(lines)
                write_atomically(free, b"".join(lines))
        (folder / CHECKPOINT).unlink(missing_ok=True)
        (scratch / RESULTS).replace(path)
        if os.path.lexists(folder / STEPS):
            (scratch / STEPS).touch()
            (scratch / STEPS).replace(folder / STEPS)
        Ledger(folder, lock).close()  # makes the checkpoint
    except OSError as error:
        raise StoreError(f"{folder}: can't be repaired: {error.strerror}") from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return Repair(ledger.totals.records, aside, None if aside else damage, len(too_few))


def _lines(folder: Path) -> Iterator[LogLine[Record]]:
    return with_pieces(read_lines(folder / RESULTS), record_in)


def _calls(folder: Path) -> Iterator[LogLine[Generation]]:
    return with_pieces(read_generations(folder), generation_in)


def _kept(
    lines: Iterator[LogLine[Record]],
    keep: list[bool],
    too_few: Mapping[int, int],
    removed: list[bytes],
) -> Iterator[RecordLine]:
    """The records to ``keep``, which has an entry for each; ``removed`` gets the other lines. Records of the
    rows in ``too_few`` have no more generations than these; what they count beyond is lost."""
    is_kept = iter(keep)
    for line in lines:
        raw, record = line.raw, line.record
        if record is None or not next(is_kept):
            removed.append(raw)
        elif (record.generations or 0) > (left := too_few.get(record.index, COUNT_LIMIT)):
            removed.append(raw)
            lost = (record.generations or 0) - left
            yield rewritten(orjson.loads(raw) | {"generations_lost": lost})
        else:
            yield RecordLine(raw, record)


def _kept_calls(
    lines: Iterator[LogLine[Generation]], calls: Calls, settled: IndexSet, removed: list[bytes]
) -> Iterator[GenerationLine]:
    """Each generation once; ``removed`` gets the other lines. If some were damaged, what is left of rows that are
    not ``settled`` may not be all, so these may ask for something else (``replay``)."""
    is_again = iter(calls.is_again().tolist())
    for line in lines:
        if line.record is None or next(is_again):
            removed.append(line.raw)
        elif calls.torn_bytes and line.record.index not in settled:
            yield fresh_line(line.record)
        else:
            yield GenerationLine(line.raw, line.record)
