"""What an earlier start left in the run folder, and what it means for this one.

A run goes on only with the job and the input that it began with: anything else would mix two
configurations in one table. Where they differ, ``on_change`` decides: stop and say what differs,
begin a new run beside the old, or keep the records whose rows are still the same and run the rest.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple

import orjson

from batchkit.config import JobConfig
from batchkit.errors import BatchkitError, ChangedError
from batchkit.inputs import Input
from batchkit.ledger import RESULTS, read_newest
from batchkit.manifest import (
    MASK,
    differences,
    new_manifest,
    new_start,
    read_manifest,
    write_job,
    write_manifest,
)
from batchkit.rowhash import input_hash
from batchkit.runfolder import claim, is_run, move_aside
from batchkit.stopping import Interrupted
from batchkit.store import CHECKPOINT, Store, free_name
from batchkit.types import Row, utc_now

OnChange = Literal["fail", "new", "requeue"]


class OpenRun(NamedTuple):
    """A claimed run folder; ``news`` says what was done to open it."""

    folder: Path
    store: Store
    manifest: dict[str, Any]
    news: list[str]


@contextmanager
def open_run(
    job: JobConfig,
    source: Input,
    *,
    command: str,
    overrides: Sequence[str],
    fresh: bool,
    on_change: OnChange,
) -> Iterator[OpenRun]:
    """Claim the run folder, settle what changed, open the store; close all of it afterwards.

    ``job`` is what the run is to be made from, ``overrides`` what this start alone does otherwise.

    Raises:
        ChangedError: job or input changed, and ``on_change`` is "fail".
        StoreError: another process holds the folder, or the disk refuses.
    """
    folder, news = job.folder, list[str]()
    new = new_manifest(job, source.files or [])
    with ExitStack() as held:
        held.enter_context(claim(folder))
        if is_run(folder) and (
            fresh or source.files is None or _settle_changes(job, source, new, on_change, news)
        ):
            news.append(f"the earlier run is kept in {move_aside(folder)}")  # lock and all
            held.close()
            held.enter_context(claim(folder))
        manifest = _merged(new, read_manifest(folder)) if is_run(folder) else new
        start = new_start(command, overrides)
        manifest["starts"].append(start)
        write_job(folder, job)
        store = Store(folder)
        if store.salvaged_bytes:
            news.append(
                f"{RESULTS} ended in {store.salvaged_bytes} broken bytes; they are set aside"
            )
        write_manifest(folder, manifest)
        try:
            yield OpenRun(folder, store, manifest, news)
        except BatchkitError as error:
            start["exit"] = error.exit_code
            raise
        except Interrupted as stop:
            start["exit"] = 128 + stop.signum
            raise
        finally:
            start["ended_at"] = utc_now()
            try:
                store.close()
            finally:
                write_manifest(folder, manifest)


def _merged(new: dict[str, Any], old: dict[str, Any]) -> dict[str, Any]:
    """The run's own manifest, with what decides this start's answers in it."""
    renewed = ("input", "identity", "fingerprints", "model", "seed", "total")
    merged = new | old | {key: new[key] for key in renewed}
    if merged["scoring"] != new["scoring"]:
        merged["scoring"] = None  # of several kinds, until all is scored anew in one of them
    # A job that was read back from its job.toml has its secrets masked; their fingerprints stay.
    known = {key: old["identity"].get(key, MASK) for key in new["identity"]}
    merged["identity"] = {
        key: known[key] if value == MASK else value for key, value in new["identity"].items()
    }
    return merged


def _settle_changes(
    job: JobConfig,
    source: Input,
    new: Mapping[str, Any],
    on_change: OnChange,
    news: list[str],
) -> bool:
    """Do what ``on_change`` says about changes. True where the old run must be moved aside."""
    folder = job.folder
    manifest = read_manifest(folder)
    job_changes = differences(manifest["identity"], new["identity"])
    changes = job_changes + input_changes(manifest["input"], new["input"])
    if not changes or not (folder / RESULTS).exists() or not (folder / RESULTS).stat().st_size:
        return False  # nothing was answered yet, so nothing can be mixed
    if on_change == "fail":
        listed = "\n".join(f"  {change}" for change in changes)
        raise ChangedError(
            f"{folder}: job or input changed since this run began\n{listed}\n"
            "Undo the change, or choose: --fresh or --on-change new (begin anew, the old run is"
            " kept), --on-change requeue (run again what the change touches)"
        )
    news.append(f"changed since this run began: {'; '.join(changes)}")
    if on_change == "new":
        return True
    # Another filter or share changes no answer: the records of the rows that it keeps still hold.
    holds = all(change.startswith(("input.where:", "input.shard:")) for change in job_changes)
    rows = source.everything(lambda index: False) if holds else iter(())
    news.append(_requeue(folder, rows, by_id=source.has_ids))
    return False


def input_changes(then: list[dict[str, Any]], now: list[dict[str, Any]]) -> list[str]:
    """One line for each file that differs, by content: moving or touching one changes nothing."""
    if [file["sha256"] for file in then] == [file["sha256"] for file in now]:
        return []
    old = {file["path"]: file for file in then}
    new = {file["path"]: file for file in now}
    return [
        f"input {path}: {_described(old.get(path))} → {_described(new.get(path))}"
        for path in sorted({*old, *new})
        if (old.get(path) or {}).get("sha256") != (new.get(path) or {}).get("sha256")
    ] or ["input: the order of the files"]


def _described(file: Mapping[str, Any] | None) -> str:
    return "none" if file is None else f"{file['size']:,} bytes, {str(file['sha256'])[:12]}"


def _requeue(folder: Path, rows: Iterable[Row], *, by_id: bool) -> str:
    """Keep the records whose row is still in the input, under its present index; drop the others.

    The old log stays beside the new one. A row is the same where its fields are, and it is looked
    for by id where the job names one (the n-th row of an id for the n-th record of it), else by
    index. Holds an index and a hash per row.
    """
    n_rows: Counter[str] = Counter()
    n_records: Counter[str] = Counter()
    present: dict[tuple[str, int], tuple[int, str]] = {}
    for row in rows:
        key = row.id if by_id else str(row.index)
        present[key, n_rows[key]] = row.index, input_hash(row.fields)
        n_rows[key] += 1
    kept = dropped = 0
    old, new = folder / RESULTS, folder / f"{RESULTS}.new"
    with new.open("wb") as file:
        for record in read_newest(old):
            key = record["id"] if by_id else str(record["index"])
            row_now = present.get((key, n_records[key]))
            n_records[key] += 1
            if row_now is None or record.get("input_hash") != row_now[1]:
                dropped += 1
                continue
            kept += 1
            record["index"] = row_now[0]
            file.write(orjson.dumps(record, option=orjson.OPT_APPEND_NEWLINE))
        file.flush()
        os.fsync(file.fileno())
    aside = free_name(old, "before")
    os.link(old, aside)
    (folder / CHECKPOINT).unlink(missing_ok=True)
    new.replace(old)
    return f"requeue: {kept:,} records kept, {dropped:,} rows to run again; old log: {aside.name}"
