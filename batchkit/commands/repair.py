"""``verify --repair``: makes a damaged log readable and resumable."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import orjson

from batchkit.errors import StoreError
from batchkit.execution.requeue import finish_requeue
from batchkit.runs.steps_audit import audit_steps, each_once, whole_lines
from batchkit.runs.verify import compare, read_log
from batchkit.storage.checkpoint import CHECKPOINT, Checkpoint, damage_in, read_checkpoint
from batchkit.storage.files import free_name, write_atomically
from batchkit.storage.ledger import Ledger, RecordLine, rewritten
from batchkit.storage.lines import RECORD_HEAD, record_in
from batchkit.storage.log import RESULTS, STEPS, log_of, read_lines
from batchkit.storage.manifest import read_manifest
from batchkit.storage.runfolder import claim
from batchkit.storage.steps import GenerationLine
from batchkit.storage.vectors import Vectors
from batchkit.types import COUNT_LIMIT


class Repair(NamedTuple):
    """What ``repair`` did: ``kept`` records, and how many lines were ``removed`` to each file.

    ``accepted``: the damage of a log whose lines were all kept because they show no trace of it.
    ``counted_less``: records of rows that have lost generations, and now count what they have.
    """

    kept: int
    removed: Mapping[Path, int]
    accepted: str | None
    counted_less: int = 0

    def to_text(self) -> str:
        aside = "".join(f", {n:,} lines set aside in {path}" for path, n in self.removed.items())
        accepted = "" if self.accepted is None else f"\naccepted as it is: {self.accepted}"
        less = f"\n{self.counted_less:,} rows have lost generations, and keep their answers"
        return (
            f"repaired: {self.kept:,} records kept{aside}{less * bool(self.counted_less)}{accepted}"
        )


def repair(folder: Path) -> Repair:
    """Make the log and its checkpoint sound again: every whole record of a known row is kept.

    Lines that are not records, records at an index that the input does not have, records of another
    row than the one at their index, records whose vector is not there, and all but the newest answer
    of a row are moved to ``results.jsonl.broken-<n>``. Rows without a record left are pending: the next start runs them.
    Lines of ``steps.jsonl`` that are not generations, or are there twice, are moved in the same way; a row
    whose generations are gone keeps its answer, and its record counts those that are left.

    Raises:
        StoreError: another process holds the folder, the log is missing, a file of vectors can't be read, or
            the disk refuses.
    """
    with claim(folder) as lock:
        finish_requeue(folder)
        path, manifest = log_of(folder), read_manifest(folder)
        damage = damage_in(folder, read_checkpoint(folder) or Checkpoint.none())
        scratch = folder / ".repair.tmp"
        shutil.rmtree(scratch, ignore_errors=True)  # left by a killed process
        whole, known = scratch / "whole", scratch / "known"
        try:
            removed, removed_steps = list[bytes](), list[bytes]()
            _copy(
                path,
                whole,
                lambda record, offset: True,
                removed,
                whole_lines(folder, removed_steps),
            )
            log, steps = read_log(whole / RESULTS, 0), audit_steps(whole)
            too_few = steps.too_few(log.indexes, log.generations)
            rows, vectors = compare(folder, whole / RESULTS, manifest, log), Vectors(folder)

            def is_kept(record: dict[str, Any]) -> bool:
                return rows.fits(record) and vectors.fault_in(record) is None

            # Another row's answer must not supersede this row's own.
            fitting = read_log(whole / RESULTS, 0, is_kept)
            _copy(
                whole / RESULTS,
                known,
                lambda record, offset: (
                    is_kept(record) and not fitting.is_superseded(record, offset)
                ),
                removed,
                each_once(whole, steps, removed_steps, fitting.totals.is_settled),
                {row: n for row, (_, n) in too_few.items()},
            )
            kept = sum(1 for _ in read_lines(known / RESULTS))
            lock.check()
            aside = {}
            for log_path, lines in ((path, removed), (folder / STEPS, removed_steps)):
                if lines:
                    aside[free := free_name(log_path, ".broken-")] = len(lines)
                    write_atomically(free, b"".join(lines))
            (folder / CHECKPOINT).unlink(missing_ok=True)
            (known / RESULTS).replace(path)
            if os.path.lexists(folder / STEPS):
                (known / STEPS).touch()
                (known / STEPS).replace(folder / STEPS)
            (known / CHECKPOINT).replace(folder / CHECKPOINT)
        except OSError as error:
            raise StoreError(f"{folder}: can't be repaired: {error.strerror}") from error
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
        return Repair(kept, aside, None if aside else damage, len(too_few))


def _copy(
    log: Path,
    into: Path,
    keep: Callable[[dict[str, Any], int], bool],
    removed: list[bytes],
    steps: Iterator[GenerationLine],
    generations: Mapping[int, int] = MappingProxyType({}),
) -> None:
    """Write the whole records in ``log`` for which ``keep`` is true, and ``steps``; ``removed`` gets the
    other lines. Records of the rows in ``generations`` count no more than these."""
    into.mkdir(parents=True)

    def to_keep() -> Iterator[RecordLine]:
        for line in read_lines(log):
            raw, record = line.raw, line.record
            if record is None:
                removed.append(raw)
                yield from _records_within(raw)
            elif not keep(orjson.loads(raw), line.offset):
                removed.append(raw)
            elif (record.generations or 0) > (left := generations.get(record.index, COUNT_LIMIT)):
                removed.append(raw)
                yield rewritten(orjson.loads(raw) | {"generations": left})
            else:
                yield RecordLine(raw, record)

    with closing(Ledger(into)) as ledger:
        ledger.write(to_keep())
        ledger.write(steps)


def _records_within(raw: bytes) -> Iterator[RecordLine]:
    """The whole records in a broken line, for example if a newline between two was lost.

    A record's first bytes never occur inside a JSON string, because quotes are escaped there.
    """
    for piece in raw.split(RECORD_HEAD)[1:]:
        line = RECORD_HEAD + piece.strip() + b"\n"
        if (record := record_in(line)) is not None:
            yield RecordLine(line, record)
