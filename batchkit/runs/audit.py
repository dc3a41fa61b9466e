"""A single pass over each log of a run, for the report of ``verify`` and for ``verify --repair``."""

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
from batchkit.storage.newest_lines import last_of_each
from batchkit.storage.vectors import Vectors
from batchkit.types import Record

Numbers = np.ndarray[Any, Any]


def key_of(row_id: str, input_hash: str) -> int:
    """Return a 32-bit key that is equal for records of the same row, within one process."""
    return hash((row_id, input_hash)) & 0xFFFF_FFFF


@dataclass
class Records:
    """The content of ``results.jsonl``.

    - ``totals``: counts of all records. ``at_checkpoint``: counts of those that the checkpoint covers.
    - ``torn_bytes``: bytes of lines that are not records.
    - ``vector_fault``: a message about the first bad vector.
    - The arrays have one entry per record, in log order: row, ``key_of``, number of generations (without those that the
      record itself calls lost), whether it is an answer, and whether its vector is intact.
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
        """Read the records in ``lines`` and check their vectors.

        ``checkpoint_end``: byte offset up to which the checkpoint covers the log. Raises StoreError if a vector file
        can't be read.
        """
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
        """The positions, in the arrays, of each row's newest record, in row order."""
        return last_of_each(np.frombuffer(self.rows, np.uint32))

    @cached_property
    def newest_rows(self) -> Numbers:
        """The rows that have records, in ascending order."""
        found: Numbers = np.frombuffer(self.rows, np.uint32)[self.newest]
        return found

    def others(self, rows: array[int], keys: array[int]) -> dict[int, int]:
        """Return the rows whose newest record belongs to another row of the input, each with the key that its record
        should have.

        ``rows``: rows of the input that have a record. ``keys``: the ``key_of`` of each of them.
        """
        wanted = np.frombuffer(keys, np.uint32)
        theirs = np.frombuffer(rows, np.uint32)
        newest = self.newest[self.newest_rows.searchsorted(theirs)]
        is_other = np.frombuffer(self.keys, np.uint32)[newest] != wanted
        return dict(zip(theirs[is_other].tolist(), wanted[is_other].tolist(), strict=True))

    def answered_again(self) -> list[int]:
        """Return the rows with more than one answer."""
        answers = np.frombuffer(self.rows, np.uint32)[np.frombuffer(self.is_answer, np.bool_)]
        again: list[int] = np.unique(np.delete(answers, last_of_each(answers))).tolist()
        return again

    def without_vector(self) -> list[int]:
        """Return the rows with a record whose vector is missing or damaged."""
        pairs = zip(self.rows, self.has_vector, strict=True)
        return [*dict.fromkeys(row for row, has_vector in pairs if not has_vector)]

    def kept(self, unknown: IndexSet, mixed: Mapping[int, int]) -> list[bool]:
        """Return for each record whether a repair keeps it. A record is kept if its row is known, its vector is intact,
        and no newer answer exists.

        - ``unknown``: rows that the input does not have.
        - ``mixed``: rows whose record belongs to another row, with the key that is expected.
        """
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
    """The content of ``steps.jsonl``.

    ``at_checkpoint``: number of lines that the checkpoint covers. The arrays have one entry per generation: its row,
    and a key, which is equal for the same call of a row. A repeated key is therefore a duplicate.
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
        """Return for each line whether an earlier line has its key."""
        _, firsts = np.unique(np.frombuffer(self.keys, np.int64), return_index=True)
        again = np.ones(len(self.keys), np.bool_)
        again[firsts] = False
        return again

    def again(self) -> list[int]:
        """Return the row of each duplicate line."""
        rows: list[int] = np.frombuffer(self.rows, np.uint32)[self.is_again()].tolist()
        return rows

    def too_few(self, records: Records) -> dict[int, tuple[int, int]]:
        """Return the rows whose newest record counts more generations than the log has, as row -> (counted,
        present)."""
        counted = np.frombuffer(records.generations, np.uint32)[records.newest]
        places = np.flatnonzero(counted)
        rows, n_there = np.unique(
            np.frombuffer(self.rows, np.uint32)[~self.is_again()], return_counts=True
        )
        there = dict(zip(rows.tolist(), n_there.tolist(), strict=True))
        pairs = zip(records.newest_rows[places].tolist(), counted[places].tolist(), strict=True)
        return {row: (n, there.get(row, 0)) for row, n in pairs if n > there.get(row, 0)}
