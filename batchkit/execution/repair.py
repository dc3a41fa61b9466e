"""``verify --repair``: makes a damaged log readable and resumable.

If only vectors or generations of records are missing, a start repairs the run by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path

import orjson

from batchkit.execution.requeue import finish_requeue, replacing_logs
from batchkit.runs.audit import Calls, Records
from batchkit.runs.verify import Compared, compare
from batchkit.storage.checkpoint import CHECKPOINT, Checkpoint, damage_in, read_checkpoint
from batchkit.storage.index_set import IndexSet
from batchkit.storage.ledger import Ledger, RecordLine, rewritten
from batchkit.storage.lines import Generation, generation_in, record_in
from batchkit.storage.log import RESULTS, LogLine, log_of, read_generations, read_lines, with_pieces
from batchkit.storage.runfolder import Claim, claim
from batchkit.storage.starts import current_manifest
from batchkit.storage.steps import GenerationLine, fresh_line
from batchkit.storage.vectors import Vectors
from batchkit.types import COUNT_LIMIT, Record


def repair(folder: Path, media: Sequence[Path] = ()) -> str:
    """Repair the logs and the checkpoint, and return a description of the repair.

    The new ``results.jsonl`` leaves out

    - lines that are not records;
    - records whose index the input does not have, or at whose index the input now has another row;
    - records whose vector is missing;
    - all but the newest answer of a row.

    Rows without a record are pending, and the next start runs them. The new ``steps.jsonl`` leaves out lines that are
    not generations, or are repeated. A row whose generations are missing keeps its answer, and its record gets the
    number of missing generations (``generations_lost``). The old logs are kept with the suffix ``.before-<n>``.

    Raises:
        StoreError: another process holds the folder, the log is missing, a file of vectors can't be read, or the disk
            fails.
    """
    with claim(folder) as lock:
        finish_requeue(folder)
        manifest = current_manifest(folder)
        return repair_held(folder, lock, lambda records: compare(folder, manifest, records, media))


def repair_held(folder: Path, lock: Claim, compared_with: Callable[[Records], Compared]) -> str:
    """Repair a run folder whose ``lock`` this process holds.

    ``compared_with``: compares the records with the input.

    Raises:
        StoreError: as for ``repair``.
    """
    log_of(folder)  # raises if the log is missing
    damage = damage_in(folder, read_checkpoint(folder) or Checkpoint.none())
    records = Records.of(_lines(folder), Vectors(folder), 0)
    calls = Calls.of(_calls(folder), 0)
    compared = compared_with(records)
    keep = records.kept(compared.unknown, compared.mixed)
    too_few = {row: there for row, (_, there) in calls.too_few(records).items()}
    left_out = {
        "records": keep.count(False),
        "generations": len(calls.again()),
        "broken bytes": records.torn_bytes + calls.torn_bytes,
    }
    old_log = None
    if too_few or any(left_out.values()):
        settled = IndexSet(row for row, kept in zip(records.rows, keep, strict=True) if kept)
        with replacing_logs(folder, "be repaired") as made:
            with closing(Ledger(made)) as ledger:
                ledger.write(_kept(_lines(folder), keep, too_few))
                ledger.write(_kept_calls(_calls(folder), calls, settled))
            lock.check()
        old_log = finish_requeue(folder)
    (folder / CHECKPOINT).unlink(missing_ok=True)
    Ledger(folder, lock).close()  # writes the checkpoint
    said = f"repaired: {keep.count(True):,} records kept"
    if old_log is not None:
        parts = ", ".join(f"{n:,} {what}" for what, n in left_out.items() if n)
        said += f"; left out: {parts or 'nothing'}; old log: {old_log}"
    elif damage is not None:  # all lines are whole, but fewer than at the checkpoint
        said += f"\naccepted as it is: {damage}"
    if too_few:
        said += f"\n{len(too_few):,} rows have lost generations; the rows' answers are kept"
    return said


def _lines(folder: Path) -> Iterator[LogLine[Record]]:
    return with_pieces(read_lines(folder / RESULTS), record_in)


def _calls(folder: Path) -> Iterator[LogLine[Generation]]:
    return with_pieces(read_generations(folder), generation_in)


def _kept(
    lines: Iterator[LogLine[Record]], keep: list[bool], too_few: Mapping[int, int]
) -> Iterator[RecordLine]:
    """Yield the records to keep.

    - ``keep``: one flag for each record in ``lines``, in order.
    - ``too_few``: number of generations found, by row index, for rows whose log lost some. Their records get
      ``generations_lost``.
    """
    is_kept = iter(keep)
    for line in lines:
        if (record := line.record) is None or not next(is_kept):
            continue
        lost = (record.generations or 0) - too_few.get(record.index, COUNT_LIMIT)
        if lost > 0:
            yield rewritten(orjson.loads(line.raw) | {"generations_lost": lost})
        else:
            yield RecordLine(line.raw, record)


def _kept_calls(
    lines: Iterator[LogLine[Generation]], calls: Calls, settled: IndexSet
) -> Iterator[GenerationLine]:
    """Yield each valid generation once.

    If the log has damaged lines, a row without a record may have lost generations. Its other generations are marked
    ``replay: fresh``, so that the row does not fail if it makes other requests when it is run again.
    """
    is_again = iter(calls.is_again().tolist())
    for line in lines:
        if line.record is None or next(is_again):
            continue
        if calls.torn_bytes and line.record.index not in settled:
            yield fresh_line(line.record)
        else:
            yield GenerationLine(line.raw, line.record)
