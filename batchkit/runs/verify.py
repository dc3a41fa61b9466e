"""The audit of a run's log against its checkpoint and its input, for ``verify``."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from batchkit.errors import BatchkitError
from batchkit.runs.audit import Calls, Records, key_of
from batchkit.runs.reach import Reach
from batchkit.runs.status import pending_rows, total_rows
from batchkit.sources.input import from_job, input_changes
from batchkit.sources.rowhash import input_hash
from batchkit.storage.checkpoint import CHECKPOINT, Checkpoint, Totals, damage_in, read_checkpoint
from batchkit.storage.index_set import IndexSet
from batchkit.storage.log import log_of, read_generations, read_lines
from batchkit.storage.manifest import Manifest, read_manifest
from batchkit.storage.starts import read_history
from batchkit.storage.vectors import Vectors

NAMED = 5  # rows listed for each kind of problem
_AT_ONCE = 10_000  # rows


@dataclass(frozen=True, slots=True)
class Verification:
    """The audit of a run. For each kind of row, ``…_rows`` lists the first few by index.

    - ``rows``: number of rows of the run; None if unknown. ``records``: number of records, several for some rows.
    - ``lost``: rows that the checkpoint counts but the log does not contain.
    - ``duplicates``: rows with more than one answer, ignoring ok records without content.
    - ``unknown``: records with an index that the input does not have.
    - ``mixed``: records whose id or ``input_hash`` belongs to another row than the one at their index.
    - ``pending``: rows without a record. No rows are listed if ``--skip-from`` left some to another run.
    - ``checkpoint_matches``: the checkpoint agrees with the log. A missing checkpoint counts as agreeing, because it is
      only a cache.
    - ``damage``: where the log differs from its state at the last checkpoint, or None.
    - ``bad_vectors``: rows whose vector is missing, damaged, another row's, or not finite. ``vector_fault``: a message
      about the first of them.
    - ``torn_bytes``: bytes of the logs that are not records or generations.
    - ``generations``: lines of ``steps.jsonl``; ``generations_lost``: generations that records count but the file lacks;
      ``generations_duplicate``: repeated lines of the same call of a row.
    - ``not_compared``: why the records were not compared with the input, or None if they were.
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
        """Return a text with one line per key: its value, and the first rows. Faults that were not found have no
        line."""
        found, lines = self.to_json(), []
        for name, value in found.items():
            is_fault = name in ("damage", "vector_fault", "not_compared")
            if name.endswith("_rows") or (is_fault and value is None):
                continue
            named = found.get(f"{name}_rows") or found.get(f"{name.rstrip('s')}_rows") or ()
            more = ", …" if named and value is not None and value > len(named) else ""
            rows = f" (rows {', '.join(map(str, named))}{more})" if named else ""
            lines.append(f"{name}: {'not known' if value is None else value}{rows}")
        return "\n".join([*lines, "sound" if self.is_sound else "NOT SOUND"])


@dataclass
class Compared:
    """The result of comparing the newest record of each row with the input.

    - ``n_pending``: number of rows without a record; None if the input could not be read. ``pending``: the first of
      them.
    - ``mixed``: rows whose record belongs to another row, with the expected ``key_of``.
    """

    n_pending: int | None = None
    pending: list[int] = field(default_factory=list)
    unknown: IndexSet = field(default_factory=IndexSet)
    mixed: Mapping[int, int] = field(default_factory=dict)
    not_compared: str | None = None


def verify(folder: Path, media: Sequence[Path] = ()) -> Verification:
    """Read the whole log and compare it with the checkpoint and with the input, as far as ``Reach`` allows.

    Raises:
        StoreError: The folder is not a run folder, its log is missing, or a file of vectors can't be read.
    """
    manifest, history = read_manifest(folder), read_history(folder)
    checkpoint = read_checkpoint(folder)  # read before the log, which may grow
    known = checkpoint or Checkpoint.none()
    records = Records.of(read_lines(log_of(folder)), Vectors(folder), known.checksum.end)
    calls = Calls.of(read_generations(folder), known.steps.checksum.end)
    compared, totals, total = (
        compare(folder, history.added_to(manifest), records, media),
        records.totals,
        total_rows(folder, history),
    )
    claimed = known.totals.completed | known.totals.failed_rows
    pending = pending_rows(total, totals, history)
    if compared.n_pending is not None:
        pending = max(0, compared.n_pending - history.skipped_elsewhere)
    too_few = calls.too_few(records)
    matches = (_stored_part(known.totals), known.steps.spent.generations) == (
        _stored_part(records.at_checkpoint),
        calls.at_checkpoint,
    )
    return Verification(
        rows=total,
        records=totals.records,
        ok=totals.ok,
        failed=totals.failed,
        pending=pending,
        pending_rows=[] if history.skipped_elsewhere else compared.pending,
        **_named("lost", claimed - (totals.completed | totals.failed_rows)),
        **_named("duplicates", records.answered_again()),
        **_named("unknown", compared.unknown),
        **_named("mixed", compared.mixed),
        checkpoint_matches=matches if checkpoint else not (folder / CHECKPOINT).exists(),
        damage=damage_in(folder, known),
        **_named("bad_vectors", records.without_vector()),
        vector_fault=records.vector_fault,
        generations=len(calls.rows),
        generations_lost=sum(count - there for count, there in too_few.values()),
        generations_lost_rows=list(too_few)[:NAMED],
        **_named("generations_duplicate", calls.again()),
        torn_bytes=records.torn_bytes + calls.torn_bytes,
        not_compared=compared.not_compared,
    )


def compare(
    folder: Path, manifest: Manifest, records: Records, media: Sequence[Path] = ()
) -> Compared:
    """Compare the records with the rows of the input after filter and shard. ``input.limit`` is ignored.

    ``media``: folders whose files may be opened.
    """
    totals = records.totals
    try:
        reach = Reach.of(folder, media)
        job = reach.job
        if job.input.path is None:
            return _compare_indexes(manifest, totals)
        reach.files(job.input)
        source = from_job(job)
        if changes := input_changes(manifest.input, source.files or []):
            return Compared(
                not_compared=f"the input has changed since the run read it: {'; '.join(changes)}"
            )
        unknown, mixed = totals.completed | totals.failed_rows, dict[int, int]()
        settled = iter(source.everything(lambda index: not totals.is_settled(index)))
        while part := [*islice(settled, _AT_ONCE)]:
            rows = array("I", (row.index for row in part))
            keys = array("I", (key_of(row.id, input_hash(row.fields)) for row in part))
            unknown -= IndexSet(rows)
            mixed |= records.others(rows, keys)
        n_pending, pending = 0, list[int]()
        for row in source.read(totals.is_settled):
            n_pending += 1
            pending += [row.index][: NAMED - len(pending)]
    except BatchkitError as error:
        return Compared(not_compared=f"the input can't be read: {error}")
    return Compared(n_pending, pending, unknown, mixed)


def _compare_indexes(manifest: Manifest, totals: Totals) -> Compared:
    """Compare only the number of rows, because rows given from Python can't be read again."""
    if not manifest.input:
        return Compared(not_compared="the rows came from a Python iterator")
    size, settled = manifest.input[0].size, totals.completed | totals.failed_rows
    return Compared(
        pending=[*islice((index for index in range(size) if index not in settled), NAMED)],
        unknown=IndexSet(index for index in settled if index >= size),
        not_compared="the rows were given from Python; only their number is known",
    )


def _named(name: str, rows: Iterable[int]) -> dict[str, Any]:
    """Return the number of ``rows`` and the first few of them, under the keys of a Verification."""
    found = [*rows]
    return {name: len(found), f"{name.removesuffix('s')}_rows": [*dict.fromkeys(found)][:NAMED]}


def _stored_part(totals: Totals) -> tuple[object, ...]:
    """Return the part of ``totals`` that a checkpoint stores. Equal parts mean that the checkpoint matches the log."""
    by_kind = {kind: rows for kind, rows in totals.failed_by_kind.items() if len(rows)}
    tokens = totals.prompt_tokens, totals.completion_tokens
    return totals.completed, by_kind, totals.records, *tokens
