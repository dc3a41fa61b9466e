"""``verify``: the audit of a run's log against its checkpoint and its input."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import orjson

from batchkit.errors import BatchkitError
from batchkit.runs.status import pending_rows, total_rows
from batchkit.runs.steps_audit import audit_steps, rows_again
from batchkit.sources.input import Input, from_job, input_changes
from batchkit.sources.rowhash import input_hash
from batchkit.storage.checkpoint import CHECKPOINT, Checkpoint, Totals, damage_in, read_checkpoint
from batchkit.storage.index_set import IndexSet
from batchkit.storage.job_toml import job_of_run
from batchkit.storage.lines import failure_kind, record_of
from batchkit.storage.log import RESULTS, log_of, read_lines
from batchkit.storage.manifest import Manifest, read_manifest
from batchkit.storage.vectors import Vectors

NAMED = 5  # rows named of each kind of finding


@dataclass(frozen=True, slots=True)
class Verification:
    """The audit of a run. For each kind of row, ``…_rows`` lists the first few by index.

    ``lost``: rows that the checkpoint counts but the log does not hold. ``duplicates``: rows with
    more than one answer; a blank ok record does not count. ``unknown``: records at an index that
    the input does not have. ``mixed``: records of another row than the one at their index, by
    id or by ``input_hash``. ``pending``: rows without a record; none is named if ``--skip-from`` left
    some of them to another run. ``checkpoint_matches``: the checkpoint counts what the log holds; a
    missing one matches, since it is a cache. ``damage``: where the log differs from what it was at
    the last checkpoint, or None. ``bad_vectors``: rows with a record whose vector is missing, damaged,
    another row's, or not finite, and ``vector_fault`` describes the first. ``torn_bytes``: bytes of the logs that
    are not records or generations. ``generations``: lines of ``steps.jsonl``; ``generations_lost``: of those
    that records count and that are not there, ``generations_duplicate``: the same call of a row again.
    ``not_compared``: why the records were not compared with the input, or None if they were.
    """

    rows: int | None
    records: int
    ok: int
    failed: int
    pending: int | None
    pending_rows: Sequence[int]
    lost: int
    lost_rows: Sequence[int]
    duplicates: int
    duplicate_rows: Sequence[int]
    unknown: int
    unknown_rows: Sequence[int]
    mixed: int
    mixed_rows: Sequence[int]
    checkpoint_matches: bool
    damage: str | None
    bad_vectors: int
    bad_vector_rows: Sequence[int]
    vector_fault: str | None
    generations: int
    generations_lost: int
    generations_lost_rows: Sequence[int]
    generations_duplicate: int
    generations_duplicate_rows: Sequence[int]
    torn_bytes: int
    not_compared: str | None

    @property
    def is_sound(self) -> bool:
        of_rows = self.lost, self.duplicates, self.unknown, self.mixed, self.bad_vectors
        of_steps = self.generations_lost, self.generations_duplicate
        return self.checkpoint_matches and not any(of_rows + of_steps) and self.damage is None

    @property
    def exit_code(self) -> int:
        return 0 if self.is_sound else 1

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def to_text(self) -> str:
        """A line for each key, with its value and the rows named for it."""
        found, lines = self.to_json(), []
        for name, value in found.items():
            if name.endswith("_rows"):
                continue
            named = found.get(f"{name}_rows") or found.get(f"{name.rstrip('s')}_rows") or ()
            more = ", …" if named and value is not None and value > len(named) else ""
            rows = f" (rows {', '.join(map(str, named))}{more})" if named else ""
            lines.append(f"{name}: {value}{rows}")
        return "\n".join([*lines, "sound" if self.is_sound else "NOT SOUND"])


@dataclass
class _Log:
    """The result of a pass over the log; ``indexes``, ``offsets`` and ``generations`` (how many the record
    counts) have an entry for each record.

    ``last_answers``: offsets of the newest answer, for rows that have several.
    """

    totals: Totals = field(default_factory=Totals)
    at_checkpoint: Totals = field(default_factory=Totals)
    once: IndexSet = field(default_factory=IndexSet)
    last_answers: dict[int, int] = field(default_factory=dict)
    bad_vectors: IndexSet = field(default_factory=IndexSet)
    vector_fault: str | None = None
    torn_bytes: int = 0
    indexes: array[int] = field(default_factory=lambda: array("q"))
    offsets: array[int] = field(default_factory=lambda: array("q"))
    generations: array[int] = field(default_factory=lambda: array("q"))

    def is_superseded(self, record: Mapping[str, Any], offset: int) -> bool:
        """True if ``record``, at ``offset``, is an answer and its row has a newer one."""
        if failure_kind(record) is not None:
            return False
        return self.last_answers.get(record["index"], offset) != offset


@dataclass
class _Rows:
    """The result of comparing the records with the input.

    ``n_pending``: rows without a record; None if the input could not be read. ``mixed``: for each
    such row, the id and the ``input_hash`` that its record must have.
    """

    n_pending: int | None = None
    pending: list[int] = field(default_factory=list)
    unknown: IndexSet = field(default_factory=IndexSet)
    mixed: dict[int, tuple[str, str]] = field(default_factory=dict)
    not_compared: str | None = None

    def fits(self, record: Mapping[str, Any]) -> bool:
        """True if ``record`` may be kept."""
        index = record["index"]
        wanted = self.mixed.get(index)
        return index not in self.unknown and (wanted is None or _is_of(record, *wanted))


def verify(folder: Path) -> Verification:
    """Read the whole log, and compare it with the checkpoint and the input.

    Raises:
        StoreError: not a run folder, or its log is missing, or a file of vectors can't be read.
    """
    manifest = read_manifest(folder)
    checkpoint = read_checkpoint(folder)  # before the log, which grows
    known = checkpoint or Checkpoint.none()
    log = read_log(log_of(folder), known.checksum.end, vectors=Vectors(folder))
    rows = compare(folder, folder / RESULTS, manifest, log)
    lost = IndexSet()
    if checkpoint is not None:
        claimed = checkpoint.totals.completed | checkpoint.totals.failed_rows
        lost = claimed - (log.totals.completed | log.totals.failed_rows)
    total = total_rows(folder, manifest)
    steps = audit_steps(folder, known.steps.checksum.end)
    too_few = steps.too_few(log.indexes, log.generations)
    return Verification(
        rows=total,
        records=log.totals.records,
        ok=log.totals.ok,
        failed=log.totals.failed,
        pending=_pending(rows, total, log.totals, manifest),
        pending_rows=[] if manifest.skipped_elsewhere else rows.pending,
        lost=len(lost),
        lost_rows=list(islice(lost, NAMED)),
        duplicates=len(log.last_answers),
        duplicate_rows=list(islice(log.last_answers, NAMED)),
        unknown=len(rows.unknown),
        unknown_rows=list(islice(rows.unknown, NAMED)),
        mixed=len(rows.mixed),
        mixed_rows=list(islice(rows.mixed, NAMED)),
        checkpoint_matches=not (folder / CHECKPOINT).exists()
        or (
            checkpoint is not None
            and _says(checkpoint.totals) == _says(log.at_checkpoint)
            and known.steps.generations == steps.at_checkpoint
        ),
        damage=damage_in(folder, known),
        bad_vectors=len(log.bad_vectors),
        bad_vector_rows=list(islice(log.bad_vectors, NAMED)),
        vector_fault=log.vector_fault,
        generations=steps.generations,
        generations_lost=sum(count - there for count, there in too_few.values()),
        generations_lost_rows=list(too_few)[:NAMED],
        generations_duplicate=int(steps.is_again.sum()),
        generations_duplicate_rows=list(islice(rows_again(steps), NAMED)),
        torn_bytes=log.torn_bytes + steps.torn_bytes,
        not_compared=rows.not_compared,
    )


def read_log(
    path: Path,
    offset: int,
    keep: Callable[[dict[str, Any]], bool] = lambda record: True,
    vectors: Vectors | None = None,
) -> _Log:
    """One pass over the records for which ``keep`` is true; ``at_checkpoint`` counts those before
    ``offset``. Their ``vectors`` are checked, if they are given."""
    found = _Log()
    for line in read_lines(path):
        if line.record is None:
            found.torn_bytes += line.end - line.offset
            continue
        record = orjson.loads(line.raw)
        if not keep(record):
            continue
        found.totals.add(line.record)
        if line.end <= offset:
            found.at_checkpoint.add(line.record)
        index = line.record.index
        if vectors is not None and (fault := vectors.fault_in(record)) is not None:
            found.bad_vectors.add(index)
            found.vector_fault = found.vector_fault or fault
        found.indexes.append(index)
        found.offsets.append(line.offset)
        found.generations.append(line.record.generations or 0)
        if failure_kind(record) is None:
            if index in found.once:
                found.last_answers[index] = line.offset
            found.once.add(index)
    return found


def compare(folder: Path, path: Path, manifest: Manifest, log: _Log) -> _Rows:
    """Compare the newest record of each row in the log at ``path`` with the row of the input."""
    found = _Rows()
    try:
        job = job_of_run(folder)
        if job.input.path is None:
            _compare_indexes(manifest, log, found)
            return found
        source = from_job(job)
        if changes := input_changes(manifest.input, source.files or []):
            found.not_compared = f"the input has changed since: {'; '.join(changes)}"
            return found
        _compare_rows(source, _newest(path, log), found)
        _find_pending(source, log, found)
    except BatchkitError as error:
        found = _Rows(not_compared=f"the input can't be read: {error}")
    return found


def _compare_rows(source: Input, records: Iterator[dict[str, Any]], found: _Rows) -> None:
    """Compares all rows that the filter and the shard leave, ignoring the limit."""
    record = next(records, None)
    for row in source.everything(lambda index: False):
        while record is not None and record["index"] < row.index:
            found.unknown.add(record["index"])
            record = next(records, None)
        if record is not None and record["index"] == row.index:
            known = input_hash(row.fields)
            if not _is_of(record, row.id, known):
                found.mixed[row.index] = row.id, known
            record = next(records, None)
    while record is not None:
        found.unknown.add(record["index"])
        record = next(records, None)


def _find_pending(source: Input, log: _Log, found: _Rows) -> None:
    """Finds the rows that the run is to answer and that have no record."""
    found.n_pending = 0
    for row in source.read(log.totals.is_settled):
        found.n_pending += 1
        found.pending += [row.index][: NAMED - len(found.pending)]


def _compare_indexes(manifest: Manifest, log: _Log, found: _Rows) -> None:
    """Only the number of rows is known if they were given from Python."""
    if not manifest.input:
        found.not_compared = "its rows came from an iterator"
        return
    found.not_compared = "its rows were given from Python; only their number is known"
    size, settled = manifest.input[0].size, log.totals.completed | log.totals.failed_rows
    found.unknown = IndexSet(index for index in settled if index >= size)
    found.pending = list(islice((i for i in range(size) if i not in settled), NAMED))


def _pending(rows: _Rows, total: int | None, totals: Totals, manifest: Manifest) -> int | None:
    """Rows without a record, those that ``--skip-from`` left to another run not counted."""
    if rows.n_pending is None:
        return pending_rows(total, totals, manifest)
    return max(0, rows.n_pending - manifest.skipped_elsewhere)


def _is_of(record: Mapping[str, Any], row_id: str, known: str) -> bool:
    """True if the record belongs to the row with this id and this ``input_hash``."""
    return (record["id"], record.get("input_hash")) == (row_id, known)


def _newest(path: Path, log: _Log) -> Iterator[dict[str, Any]]:
    """The newest record of each row, indexes ascending."""
    import numpy as np

    indexes = np.frombuffer(log.indexes, np.int64)
    order = np.argsort(indexes, kind="stable")  # stable: the newest record of a row stays last
    is_newest = np.append(np.diff(indexes[order]) != 0, True)[: len(order)]
    with path.open("rb") as file:
        for offset in np.frombuffer(log.offsets, np.int64)[order[is_newest]].tolist():
            file.seek(offset)
            if (record := record_of(file.readline())) is not None:
                yield record


def _says(totals: Totals) -> tuple[object, ...]:
    """The part of ``totals`` that a checkpoint stores."""
    by_kind = {kind: rows for kind, rows in totals.failed_by_kind.items() if len(rows)}
    tokens = totals.prompt_tokens, totals.completion_tokens
    return totals.completed, by_kind, totals.cut_off_in_reasoning, totals.records, *tokens
