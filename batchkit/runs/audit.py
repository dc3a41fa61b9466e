"""One pass over each log of a run: what ``verify`` reports of it, and what ``verify --repair`` keeps."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import orjson

from batchkit.storage.checkpoint import Totals
from batchkit.storage.index_set import IndexSet
from batchkit.storage.lines import Generation, failure_kind
from batchkit.storage.log import LogLine
from batchkit.storage.newest import last_of_each
from batchkit.storage.vectors import Vectors
from batchkit.types import Record

Numbers = np.ndarray[Any, Any]


def key_of(row_id: str, input_hash: str) -> int:
    """Return a 32-bit key that is equal for records of the same row, within one process."""
    return hash((row_id, input_hash)) & 0xFFFF_FFFF


@dataclass
class Records:
    """What ``results.jsonl`` has: ``totals`` of it, and ``at_checkpoint`` of the part that a checkpoint covers.

    The arrays have an entry for each record, in the order of the log: its row, its ``key_of``, how many
    ``generations`` it counts and doesn't call lost, whether it is an answer, and whether its vector is as it should be.
    ``torn_bytes``: of lines that are no records. ``vector_fault`` describes the first vector that is not.
    """

    totals: Totals = field(default_factory=Totals)
    at_checkpoint: Totals = field(default_factory=Totals)
    torn_bytes: int = 0
    vector_fault: str | None = None
    rows: array[int] = field(default_factory=lambda: array("I"))
    keys: array[int] = field(default_factory=lambda: array("I"))
    generations: array[int] = field(default_factory=lambda: array("I"))
    is_answer: array[int] = field(default_factory=lambda: array("b"))
    has_vector: array[int] = field(default_factory=lambda: array("b"))

    @classmethod
    def of(cls, lines: Iterable[LogLine[Record]], vectors: Vectors, checkpoint_end: int) -> Records:
        """Raises StoreError if a file of vectors can't be read."""
        found, is_behind = cls(), False
        for line in lines:
            if line.end > checkpoint_end and not is_behind:
                found.at_checkpoint, is_behind = deepcopy(found.totals), True
            if line.record is None:
                found.torn_bytes += line.end - line.offset
            else:
                found._add(line.record, line.raw, vectors)
        if not is_behind:
            found.at_checkpoint = found.totals
        return found

    @cached_property
    def newest(self) -> Numbers:
        """The places of the newest record of each row, in the order of the rows."""
        return last_of_each(np.frombuffer(self.rows, np.uint32))

    @cached_property
    def newest_rows(self) -> Numbers:
        """The rows that have records, ascending."""
        found: Numbers = np.frombuffer(self.rows, np.uint32)[self.newest]
        return found

    def others(self, rows: array[int], keys: array[int]) -> dict[int, int]:
        """Return the rows whose newest record has another key than that in ``keys``, with that key; ``keys`` are of
        ``rows``, which all have records."""
        wanted = np.frombuffer(keys, np.uint32)
        theirs = np.frombuffer(rows, np.uint32)
        newest = self.newest[self.newest_rows.searchsorted(theirs)]
        is_other = np.frombuffer(self.keys, np.uint32)[newest] != wanted
        return dict(zip(theirs[is_other].tolist(), wanted[is_other].tolist(), strict=True))

    def answered_again(self) -> list[int]:
        """The rows with several answers."""
        answers = np.frombuffer(self.rows, np.uint32)[np.frombuffer(self.is_answer, np.bool_)]
        again: list[int] = np.unique(np.delete(answers, last_of_each(answers))).tolist()
        return again

    def without_vector(self) -> list[int]:
        """The rows with a record whose vector is not as it should be."""
        pairs = zip(self.rows, self.has_vector, strict=True)
        return [*dict.fromkeys(row for row, has_vector in pairs if not has_vector)]

    def kept(self, unknown: IndexSet, mixed: Mapping[int, int]) -> list[bool]:
        """Which records a repair keeps: those of known rows with their vectors, and of several answers of
        a row the newest. ``mixed``: the right key of rows whose record has another one."""
        keep, answer_of = list[bool](), dict[int, int]()
        columns = zip(self.rows, self.keys, self.is_answer, self.has_vector, strict=True)
        for number, (row, key, is_answer, has_vector) in enumerate(columns):
            keep.append(bool(has_vector) and row not in unknown and mixed.get(row, key) == key)
            if keep[-1] and is_answer:
                if (before := answer_of.get(row)) is not None:
                    keep[before] = False
                answer_of[row] = number
        return keep

    def _add(self, record: Record, raw: bytes, vectors: Vectors) -> None:
        place, text = record.embedding, record.text
        fault = None if place is None else vectors.fault_at(record.index, place)
        self.vector_fault = self.vector_fault or fault
        self.totals.add(record)
        self.rows.append(record.index)
        self.keys.append(key_of(record.id, record.input_hash))
        lost = record.generations_lost or 0
        self.generations.append(max(0, (record.generations or 0) - lost))
        self.is_answer.append(
            bool(text and text.strip()) or failure_kind(orjson.loads(raw)) is None
        )
        self.has_vector.append(fault is None)


@dataclass
class Calls:
    """What ``steps.jsonl`` has: ``at_checkpoint`` lines in the part that a checkpoint covers.

    The arrays have an entry for each generation: its row, and a key that only one line may have, since it is
    the same for the same call of a row.
    """

    at_checkpoint: int = 0
    torn_bytes: int = 0
    rows: array[int] = field(default_factory=lambda: array("I"))
    keys: array[int] = field(default_factory=lambda: array("q"))

    @classmethod
    def of(cls, lines: Iterable[LogLine[Generation]], checkpoint_end: int) -> Calls:
        calls = cls()
        for line in lines:
            if (found := line.record) is None:
                calls.torn_bytes += line.end - line.offset
                continue
            calls.rows.append(found.index)
            calls.keys.append(hash((found.index, found.step, found.call)))
            calls.at_checkpoint += line.end <= checkpoint_end
        return calls

    def is_again(self) -> Numbers:
        """Which lines have the key of a line before."""
        _, firsts = np.unique(np.frombuffer(self.keys, np.int64), return_index=True)
        again = np.ones(len(self.keys), np.bool_)
        again[firsts] = False
        return again

    def again(self) -> list[int]:
        """The row of each such line."""
        rows: list[int] = np.frombuffer(self.rows, np.uint32)[self.is_again()].tolist()
        return rows

    def too_few(self, records: Records) -> dict[int, tuple[int, int]]:
        """Return the rows whose newest record counts more generations than there are, with both numbers."""
        counted = np.frombuffer(records.generations, np.uint32)[records.newest]
        places = np.flatnonzero(counted)
        rows, n_there = np.unique(
            np.frombuffer(self.rows, np.uint32)[~self.is_again()], return_counts=True
        )
        there = dict(zip(rows.tolist(), n_there.tolist(), strict=True))
        pairs = zip(records.newest_rows[places].tolist(), counted[places].tolist(), strict=True)
        return {row: (n, there.get(row, 0)) for row, n in pairs if n > there.get(row, 0)}
