"""``checkpoint.json``: what the log says up to an offset, and a checksum of the log up to there.

So opening the log detects damage before that position. A checkpoint that is missing or damaged
itself is ignored: it is a cache.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from batchkit.config.regular_file import open_regular
from batchkit.errors import CutOffReasoningError, StoreError
from batchkit.storage.checksum import Checksum, Span
from batchkit.storage.files import write_atomically
from batchkit.storage.index_set import IndexSet
from batchkit.storage.ledger import IS_MISSING, RESULTS, log_of, read_lines, tokens_in

CHECKPOINT = "checkpoint.json"
VERSION = 1
COUNTS = ("records", "prompt_tokens", "completion_tokens")
_SEAL = b',"seal":'


@dataclass
class Totals:
    """Counts over the log, updated with every line.

    ``cut_off_in_reasoning``: those of the failed rows whose answer ended before its reasoning did.
    """

    completed: IndexSet = field(default_factory=IndexSet)
    failed_by_kind: dict[str, IndexSet] = field(default_factory=dict)
    cut_off_in_reasoning: IndexSet = field(default_factory=IndexSet)
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
        rows = IndexSet()
        for kind_rows in self.failed_by_kind.values():
            rows = rows | kind_rows
        return rows

    def count_by_kind(self) -> dict[str, int]:
        return {kind: len(rows) for kind, rows in self.failed_by_kind.items() if len(rows)}

    def is_settled(self, index: int) -> bool:
        """True if the row has a record, ok or failed."""
        return index in self.completed or any(
            index in rows for rows in self.failed_by_kind.values()
        )

    def add(self, record: Mapping[str, Any]) -> None:
        """Count one line; the newest record of a row decides whether it is ok or failed."""
        index = record["index"]
        self.records += 1
        prompt_tokens, completion_tokens = tokens_in(record)
        self.prompt_tokens += prompt_tokens
        self.completion_tokens += completion_tokens
        for rows in self.failed_by_kind.values():
            rows.discard(index)
        self.cut_off_in_reasoning.discard(index)
        if record["status"] == "ok":
            self.completed.add(index)
        else:
            self.completed.discard(index)
            error = record.get("error") or {}
            self.failed_by_kind.setdefault(error.get("kind", "unknown"), IndexSet()).add(index)
            if error.get("type") == CutOffReasoningError.__name__:
                self.cut_off_in_reasoning.add(index)


class StepsPoint(NamedTuple):
    """What ``steps.jsonl`` has up to byte ``end``: ``generations``, and their tokens. ``first``: where
    the first line of a row without a record begins, or ``end``."""

    first: int = 0
    end: int = 0
    generations: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0


class Checkpoint(NamedTuple):
    """What the log says up to ``checksum.end``, and ``steps.jsonl`` up to ``steps.end``.

    ``is_sealed``: it was read from a file that is byte for byte what a store wrote.
    """

    totals: Totals
    checksum: Checksum
    steps: StepsPoint = StepsPoint()
    is_sealed: bool = True

    @property
    def is_older(self) -> bool:
        """True if an older version wrote it, without a checksum: correct, but not relied on."""
        return self.checksum.end > 0 and not self.checksum.segments

    def write(self, folder: Path) -> None:
        """Replace the checkpoint of ``folder``, whose logs must be on disk up to its ends.

        Raises:
            OSError: the disk refuses.
        """
        totals, checksum = self.totals, self.checksum
        table = {
            "version": VERSION,
            "offset": checksum.end,
            "completed": totals.completed.ranges(),
            "failed": totals.failed_rows.ranges(),
            "failed_by_kind": {
                kind: rows.ranges() for kind, rows in totals.failed_by_kind.items() if len(rows)
            },
            "cut_off_in_reasoning": totals.cut_off_in_reasoning.ranges(),
            "counts": {
                "records": totals.records,
                "ok": totals.ok,
                "failed": totals.failed,
                "prompt_tokens": totals.prompt_tokens,
                "completion_tokens": totals.completion_tokens,
            },
            "crc32": checksum.segments,
        }
        if self.steps.end:
            table["steps"] = self.steps._asdict()
        content = orjson.dumps(table, option=orjson.OPT_SERIALIZE_NUMPY)
        write_atomically(folder / CHECKPOINT, _sealed(content))


def read_checkpoint(folder: Path) -> Checkpoint | None:
    """What ``checkpoint.json`` says, correct or not; None if it is missing or unusable."""
    try:
        with open_regular(folder / CHECKPOINT) as file:
            content = file.readall()
        found = orjson.loads(content)
        if found["version"] != VERSION:
            return None
        totals = Totals(
            completed=IndexSet.from_ranges(found["completed"]),
            failed_by_kind={
                kind: IndexSet.from_ranges(ranges)
                for kind, ranges in found["failed_by_kind"].items()
            },
            cut_off_in_reasoning=IndexSet.from_ranges(found.get("cut_off_in_reasoning", [])),
            **{name: _count(found["counts"][name]) for name in COUNTS},
        )
        segments = map(_count, found.get("crc32", ()))
        is_sealed = content == _sealed(content.rpartition(_SEAL)[0] + b"}")
        known = {name: _count(value) for name, value in found.get("steps", {}).items()}
        checksum = Checksum(segments, _count(found["offset"]))
        return Checkpoint(totals, checksum, StepsPoint(**known), is_sealed)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def sealed_checkpoint(folder: Path) -> Checkpoint | None:
    """The checkpoint, not yet checked against the log; None if it is missing or damaged itself."""
    found = read_checkpoint(folder)
    return found if found is not None and found.is_sealed else None


def trusted_checkpoint(folder: Path) -> Checkpoint | None:
    """The checkpoint, after a check of the log against it; None if it is missing or damaged itself.

    Raises:
        StoreError: the log is not what it was at the checkpoint.
    """
    found = sealed_checkpoint(folder)
    if found is not None and (damage := log_damage(folder, found.checksum)) is not None:
        raise StoreError(damage)
    return found


def check_log(folder: Path) -> None:
    """Check the part of the log that the checkpoint covers. Call it before reading a run's records.

    Raises:
        StoreError: the log is missing or damaged.
    """
    log_of(folder)
    trusted_checkpoint(folder)


def passed_over(folder: Path) -> str | None:
    """A warning if readers skip a line although whole records follow it; it names the first one.

    Reads only the part of the log without a checksum: all of it if there is no sound checkpoint.
    The part before is what ``check_log`` checks.
    """
    path, broken = folder / RESULTS, None
    checkpoint = sealed_checkpoint(folder)
    start = checkpoint.checksum.end if checkpoint else 0
    for line in read_lines(path, max(start - 1, 0)):
        if line.offset < start < line.end:  # the log was changed before: check_log raises
            return None
        if line.record is None and line.end > start:
            broken = line.offset if broken is None else broken
        elif broken is not None:
            return (
                f"{path}: the line at byte {broken} is not a record and is skipped; its row may be"
                f" missing below. `batchkit verify --repair {folder}` sets it aside, and the next run"
                " answers the row again"
            )
    return None


def log_damage(folder: Path, checksum: Checksum) -> str | None:
    """Where and how the log differs from ``checksum``, and the remedy; None if it does not."""
    path = folder / RESULTS
    if not path.exists():
        return f"{path}: {IS_MISSING}"
    repair = f"`batchkit verify --repair {folder}`"
    remedy = f"{repair} sets the damage aside and keeps every whole record"
    size = path.stat().st_size
    span = Span(0, size) if size < checksum.end else checksum.difference(path)
    if span is None:
        return None
    if (broken := _broken_line(path, span)) is not None:
        return f"{path}: the record at byte {broken} is damaged; {remedy}"
    if size < checksum.end:
        return f"{path}: has {size} bytes, and had {checksum.end} at the last checkpoint; {remedy}"
    return (
        f"{path}: was changed since the last checkpoint, between byte {span.start} and {span.end},"
        " and each line there is a whole record, so the change can't be located. Restore a copy"
        f", or accept the file as it is now with {repair}"
    )


def _broken_line(path: Path, span: Span) -> int | None:
    """Byte position of the first line in ``span`` that is not a record."""
    for line in read_lines(path):
        if line.offset >= span.end:
            return None
        if line.record is None and line.end > span.start:
            return line.offset
    return None


def _sealed(content: bytes) -> bytes:
    """The JSON object ``content`` with its own checksum as its last member."""
    return content[:-1] + _SEAL + str(zlib.crc32(content)).encode() + b"}"


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is not a count")
    return value
