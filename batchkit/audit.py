"""``status`` and ``verify``: what a run folder holds, told without an engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import Any

from batchkit.errors import BatchkitError
from batchkit.indexset import IndexSet
from batchkit.ladder import Ladder
from batchkit.ledger import RESULTS, failure_kind, log_of, read_lines
from batchkit.manifest import job_of_run, read_manifest
from batchkit.runfolder import held_by
from batchkit.sources import count_rows
from batchkit.store import CHECKPOINT, Totals, read_checkpoint, trusted_checkpoint

_RATE_BYTES = 256 * 1024  # of the log's end: some hundred records


@dataclass(frozen=True, slots=True)
class Status:
    """Where a run stands. ``total`` None: its rows can't be counted (rows given from Python).

    ``engine_settings``: options that memory running out has made smaller than the job's.
    ``engine_events``: what befell the engine in the last start, the newest twenty lines. ``workers``:
    how each of several did in it, as of the last checkpoint.
    """

    name: str
    folder: str
    total: int | None
    ok: int
    failed: int
    pending: int | None
    failed_by_kind: Mapping[str, int]
    prompt_tokens: int
    completion_tokens: int
    rows_per_s: float | None
    eta_s: float | None
    engine_restarts: int
    engine_settings: Mapping[str, Any]
    engine_events: Sequence[str]
    workers: Sequence[Mapping[str, Any]]
    starts: int
    held_by: Mapping[str, Any] | None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Verification:
    """The ledger's audit.

    ``lost``: rows that the checkpoint counts but the log does not hold. ``duplicates``: rows with
    more than one answer; an ok record that is blank is none. A missing checkpoint matches: it is a
    cache; a damaged one does not. ``torn_bytes``: bytes of the log that are no record.
    """

    rows: int | None
    records: int
    ok: int
    failed: int
    pending: int | None
    lost: int
    duplicates: int
    checkpoint_matches: bool
    torn_bytes: int

    @property
    def is_sound(self) -> bool:
        return not self.lost and not self.duplicates and self.checkpoint_matches

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def status(folder: Path) -> Status:
    """Reads the log past the checkpoint, the manifest, and the lock. Safe while the run works.

    Raises:
        StoreError: not a run folder, or its log is gone.
    """
    manifest, log = read_manifest(folder), log_of(folder)
    totals, offset = trusted_checkpoint(folder)
    for line in read_lines(log, offset):
        if line.record is not None:
            totals.add(line.record)
    total = _total(folder, manifest)
    pending = _pending(total, totals, manifest)
    holder = held_by(folder)
    last_start: Mapping[str, Any] = manifest["starts"][-1] if manifest["starts"] else {}
    rate = _rate(log) if holder else None
    return Status(
        name=manifest["name"],
        folder=str(folder),
        total=total,
        ok=totals.ok,
        failed=totals.failed,
        pending=pending,
        failed_by_kind=totals.count_by_kind(),
        prompt_tokens=totals.prompt_tokens,
        completion_tokens=totals.completion_tokens,
        rows_per_s=rate,
        eta_s=pending / rate if rate and pending is not None else None,
        engine_settings=Ladder(manifest.get("engine_steps")).overrides,
        engine_events=last_start.get("engine_events", []),
        workers=last_start.get("workers", []),
        engine_restarts=sum(start.get("engine_restarts", 0) for start in manifest["starts"]),
        starts=len(manifest["starts"]),
        held_by=holder,
    )


def verify(folder: Path) -> Verification:
    """Reads the whole log and holds the checkpoint against it.

    Raises:
        StoreError: not a run folder, or its log is gone.
    """
    manifest = read_manifest(folder)
    read = read_checkpoint(folder)  # before the log, which grows
    checkpoint, offset = read or (Totals(), 0)
    size = log_of(folder).stat().st_size
    totals, at_checkpoint = Totals(), Totals()
    once, twice = IndexSet(), IndexSet()
    torn = 0
    for line in read_lines(folder / RESULTS):
        if line.record is None:
            torn += line.end - line.offset
            continue
        totals.add(line.record)
        if line.end <= offset:
            at_checkpoint.add(line.record)
        if failure_kind(line.record) is None:
            index = line.record["index"]
            (twice if index in once else once).add(index)
    total = _total(folder, manifest)
    claimed = checkpoint.completed | checkpoint.failed_rows
    return Verification(
        rows=total,
        records=totals.records,
        ok=totals.ok,
        failed=totals.failed,
        pending=_pending(total, totals, manifest),
        lost=sum(not totals.is_settled(index) for index in claimed),
        duplicates=len(twice),
        checkpoint_matches=not (folder / CHECKPOINT).exists()
        or (read is not None and offset <= size and _told(checkpoint) == _told(at_checkpoint)),
        torn_bytes=torn,
    )


def _pending(total: int | None, totals: Totals, manifest: Mapping[str, Any]) -> int | None:
    """Rows without a record, those that ``--skip-from`` left to another run not counted."""
    if total is None:
        return None
    elsewhere = manifest.get("skipped_elsewhere", 0)
    return int(max(0, total - totals.ok - totals.failed - elsewhere))


def _told(totals: Totals) -> tuple[object, ...]:
    """What a checkpoint tells of ``totals``."""
    by_kind = {kind: rows for kind, rows in totals.failed_by_kind.items() if len(rows)}
    tokens = totals.prompt_tokens, totals.completion_tokens
    return totals.completed, by_kind, totals.records, *tokens


def _total(folder: Path, manifest: Mapping[str, Any]) -> int | None:
    """From the manifest where a start got to count them, else counted now."""
    if manifest["total"] is not None:
        return int(manifest["total"])
    try:
        return count_rows(job_of_run(folder).input)
    except BatchkitError:
        return None


def _rate(log: Path) -> float | None:
    """Rows per second over the last records of the log."""
    start = max(0, log.stat().st_size - _RATE_BYTES)
    lines = islice(read_lines(log, start), 1 if start else 0, None)  # the first one may be cut
    finished = [line.record["finished_at"] for line in lines if line.record is not None]
    if len(finished) < 2:
        return None
    first, last = datetime.fromisoformat(finished[0]), datetime.fromisoformat(finished[-1])
    seconds = (last - first).total_seconds()
    return round((len(finished) - 1) / seconds, 3) if seconds > 0 else None
