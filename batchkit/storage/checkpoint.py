"""``checkpoint.json``: counts over a run's logs up to a byte offset, and a checksum of each log up to that offset.

The checksum shows damage before the offset when a log is opened. The checkpoint is only a cache: if it is missing or
damaged, it is ignored and the whole log is read.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import orjson

from batchkit.config.regular_file import read_bytes
from batchkit.errors import StoreError
from batchkit.storage.files import write_atomically
from batchkit.storage.index_set import IndexSet, of_ranges, ranges_of
from batchkit.storage.lines import Spent, tokens_in
from batchkit.storage.log import RESULTS, STEPS, Checksum, damage_of, log_of
from batchkit.types import Counted

CHECKPOINT = "checkpoint.json"
VERSION = 1
COUNTS = ("records", "prompt_tokens", "completion_tokens")
_SEAL = b',"seal":'
_MOST_BYTES = 1 << 30  # enough for 100,000,000 rows if every second one is settled


@dataclass
class Totals:
    """Counts over the records in ``results.jsonl``, updated with each record that is written.

    - ``completed``: indexes of rows whose newest record is ok.
    - ``failed_by_kind``: indexes of rows whose newest record is failed, by the error's kind.
    - ``records``, ``prompt_tokens``, ``completion_tokens``: sums over all records, also of earlier attempts.
    """

    completed: IndexSet = field(default_factory=IndexSet)
    failed_by_kind: dict[str, IndexSet] = field(default_factory=dict)
    records: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0

    @property
    def ok(self) -> int:
        return len(self.completed)

    @property
    def failed(self) -> int:
        return sum(map(len, self.failed_by_kind.values()))

    @property
    def failed_rows(self) -> IndexSet:
        return IndexSet.union(IndexSet(), *self.failed_by_kind.values())

    def count_by_kind(self) -> dict[str, int]:
        return {kind: len(rows) for kind, rows in self.failed_by_kind.items() if len(rows)}

    def is_settled(self, index: int) -> bool:
        """Return True if the row has a record, ok or failed."""
        return index in self.completed or any(
            index in rows for rows in self.failed_by_kind.values()
        )

    def add(self, record: Counted) -> None:
        """Count a record. If the row already has one, the new record decides whether the row is ok or failed."""
        index, error = record.index, record.error
        self.records += 1
        prompt_tokens, completion_tokens = tokens_in(record)
        self.prompt_tokens += prompt_tokens
        self.completion_tokens += completion_tokens
        for rows in self.failed_by_kind.values():
            rows.discard(index)
        if record.status == "ok":
            self.completed.add(index)
        else:
            self.completed.discard(index)
            kind = "unknown" if error is None else error.kind
            self.failed_by_kind.setdefault(kind, IndexSet()).add(index)


class StepsPoint(NamedTuple):
    """The part of a checkpoint about ``steps.jsonl``: counts over its generations up to ``checksum.end``.

    - ``first``: offset of the first generation whose row has no record yet, or the log's end. A resume reads the log
      from there.
    - ``spent``: totals of all generations up to ``checksum.end``.
    """

    checksum: Checksum
    first: int = 0
    spent: Spent = Spent()


class Checkpoint(NamedTuple):
    """The content of ``checkpoint.json``.

    - ``totals``: counts over ``results.jsonl`` up to ``checksum.end``.
    - ``steps``: counts over ``steps.jsonl``.
    - ``vectors``: size in bytes of each segment of vectors, by file name.
    """

    totals: Totals
    checksum: Checksum
    steps: StepsPoint
    vectors: Mapping[str, int]

    @classmethod
    def none(cls) -> Checkpoint:
        return cls(Totals(), Checksum(), StepsPoint(Checksum()), {})

    def write(self, folder: Path) -> None:
        """Replace the checkpoint of ``folder``.

        Call it only after an fsync of the logs and vectors, up to the offsets and sizes that this checkpoint holds.

        Raises:
            OSError: the disk fails.
        """
        totals, steps = self.totals, self.steps
        table = {
            "version": VERSION,
            "offset": self.checksum.end,
            "completed": ranges_of(totals.completed),
            "failed": ranges_of(totals.failed_rows),
            "failed_by_kind": {
                kind: ranges_of(rows) for kind, rows in totals.failed_by_kind.items() if len(rows)
            },
            "counts": {
                "records": totals.records,
                "ok": totals.ok,
                "failed": totals.failed,
                "prompt_tokens": totals.prompt_tokens,
                "completion_tokens": totals.completion_tokens,
            },
            "crc32": self.checksum.crc32,
            "steps": {
                **steps.spent._asdict(),
                "first": steps.first,
                "end": steps.checksum.end,
                "crc32": steps.checksum.crc32,
            },
            "vectors": self.vectors,
        }
        content = orjson.dumps(table, option=orjson.OPT_SERIALIZE_NUMPY)
        write_atomically(folder / CHECKPOINT, _sealed(content))


def read_checkpoint(folder: Path) -> Checkpoint | None:
    """Return the checkpoint of ``folder``; None if it is missing or its own checksum is wrong. The logs are not
    read."""
    try:
        content = read_bytes(folder / CHECKPOINT, _MOST_BYTES)
        found = orjson.loads(content)
        if found["version"] != VERSION or content != _sealed(content.rpartition(_SEAL)[0] + b"}"):
            return None
        totals = Totals(
            completed=of_ranges(found["completed"]),
            failed_by_kind={
                kind: of_ranges(ranges) for kind, ranges in found["failed_by_kind"].items()
            },
            **{name: found["counts"][name] for name in COUNTS},
        )
        steps = found["steps"]
        spent = Spent(*(steps[name] for name in Spent._fields))
        point = StepsPoint(Checksum(steps["crc32"], steps["end"]), steps["first"], spent)
        return Checkpoint(
            totals, Checksum(found["crc32"], found["offset"]), point, found["vectors"]
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError):
        return None


def check_log(folder: Path) -> None:
    """Check the log of a run before its records are read: first the checksum of the checkpoint, then every line after
    it.

    Raises:
        StoreError: the log is missing or damaged.
    """
    known = read_checkpoint(folder) or Checkpoint.none()
    if (damage := damage_of(log_of(folder), known.checksum)) is not None:
        raise StoreError(damage)


def damage_in(folder: Path, known: Checkpoint) -> str | None:
    """Return a message about damage to the logs of ``folder`` and how to repair it; None if they are undamaged.

    ``known``: the checkpoint of ``folder``.

    Raises:
        OSError: a log can't be read.
    """
    results = damage_of(folder / RESULTS, known.checksum)
    return results or damage_of(folder / STEPS, known.steps.checksum)


def _sealed(content: bytes) -> bytes:
    """Return the JSON object ``content`` with its checksum added as the last member."""
    return content[:-1] + _SEAL + str(zlib.crc32(content)).encode() + b"}"
