"""The ``merge`` command: combines several runs of one job into one run. They may be shards, or a run and later runs of
missing rows."""

from __future__ import annotations

import heapq
import os
import resource
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, field, replace
from functools import reduce
from itertools import groupby, repeat
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from batchkit.commands.score import is_scored, scored_from
from batchkit.config.loading import load_job
from batchkit.config.tables import JobConfig
from batchkit.errors import ChangedError, JobError
from batchkit.runs.layout import vector_type
from batchkit.sources.input import from_job, input_changes
from batchkit.storage.checkpoint import check_log
from batchkit.storage.files import building, disk_errors
from batchkit.storage.identity import Identity, continued, differences, scoring_of
from batchkit.storage.index_set import IndexSet
from batchkit.storage.job_toml import job_of_run, write_job
from batchkit.storage.ledger import Ledger, RecordLine, raw_line, rewritten
from batchkit.storage.lines import failure_kind, whole_record
from batchkit.storage.log import RESULTS, log_of, read_generations
from batchkit.storage.manifest import Manifest, read_manifest
from batchkit.storage.newest_lines import NewestLine, NewestLog
from batchkit.storage.runfolder import JOB, claim
from batchkit.storage.score_store import SCORES, join_scores, write_scores
from batchkit.storage.starts import History, StartNote, read_history
from batchkit.storage.steps import GenerationLine, fresh_line
from batchkit.storage.vectors import Vectors
from batchkit.types import utc_now

NAMED = 5  # ids shown for missing and for conflicting rows
_RELEASE_EVERY = 4096  # rows
_SHOWN = 3  # runs of another job whose differences are shown


@dataclass(slots=True)
class Merged:
    """The result of a merge. All numbers count rows of the job's input.

    - ``double``: rows for which several runs have the same answer.
    - ``conflicting``: rows for which runs have different answers; the newest is used.
    - ``folder``: the new run folder; None if nothing was written.
    """

    runs: list[str]
    total: int = 0
    ok: int = 0
    failed: int = 0
    missing: int = 0
    double: int = 0
    conflicting: int = 0
    missing_ids: list[str] = field(default_factory=list)
    conflicting_ids: list[str] = field(default_factory=list)
    folder: str | None = None

    @property
    def exit_code(self) -> int:
        return 3 if self.missing or self.failed else 0

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "exit": self.exit_code}

    def to_text(self) -> str:
        counts = f"{self.ok:,} ok, {self.failed:,} failed, {self.missing:,} missing"
        lines = [f"{len(self.runs)} runs: {counts} of {self.total:,} rows"]
        same = f"{self.double:,} with the same text"
        differing = f"{self.conflicting:,} with different texts (the newest is used)"
        lines.append(f"answered more than once: {same}, {differing}")
        for what, count, ids in (
            ("missing", self.missing, self.missing_ids),
            ("differing", self.conflicting, self.conflicting_ids),
        ):
            more = f" and {count - len(ids):,} more" if count > len(ids) else ""
            lines += [f"{what}: {', '.join(ids)}{more}"] if count else []
        return "\n".join([*lines, self.folder or "nothing written"])

    def add(self, newest: NewestRecord) -> None:
        if newest.record["status"] == "ok":
            self.ok += 1
        else:
            self.failed += 1
        if not newest.agree:
            self.conflicting += 1
            self.conflicting_ids += [newest.record["id"]][: NAMED - len(self.conflicting_ids)]
        elif newest.answers > 1:
            self.double += 1


class _MergedRun(NamedTuple):
    """One of the runs to merge, locked by this process. ``job`` is the run's own job, with all paths resolved.
    ``picked`` collects the indexes of the rows whose record is taken from this run."""

    folder: Path
    manifest: Manifest
    history: History
    job: JobConfig
    log: NewestLog
    picked: IndexSet


class NewestRecord(NamedTuple):
    """The record chosen for a row. ``raw`` is its line in the log of the run ``part``. ``answers``: how many runs have
    an answer for the row. ``agree``: whether all these answers are equal."""

    part: _MergedRun
    raw: bytes
    record: dict[str, Any]
    answers: int = 1
    agree: bool = True


def _newest_records(parts: Sequence[_MergedRun]) -> Iterator[NewestRecord]:
    """Yield the chosen record of each row, in input order.

    Each run offers its newest record of the row. The answer with the latest ``finished_at`` is chosen; a failure is
    chosen only if no run has an answer.

    Raises:
        StoreError: A record is damaged.
    """

    def read(line: NewestLine, part: _MergedRun) -> NewestRecord:
        raw = part.log.view[line.start : line.end]
        return NewestRecord(part, raw, whole_record(raw, part.folder / RESULTS, line.start))

    def row_of(found: tuple[NewestLine, _MergedRun]) -> int:
        return found[0].row

    lines = heapq.merge(*(zip(part.log, repeat(part)) for part in parts), key=row_of)
    for number, (_, same) in enumerate(groupby(lines, row_of)):
        found = [read(*one) for one in same]
        answers = [one for one in found if failure_kind(one.record) is None]
        newest = max(answers or found, key=lambda one: str(one.record.get("finished_at")))
        said = {_compared_parts(one.record) for one in answers} if len(found) > 1 else ()
        yield newest._replace(answers=len(answers), agree=len(said) < 2)
        if number % _RELEASE_EVERY == 0:
            for part in parts:
                part.log.release()


def _compared_parts(record: dict[str, Any]) -> bytes:
    """Return the parts of a record that tell whether two answers are equal, as JSON. Ids of tool calls are left out,
    because they are random."""
    parts = [
        (choice.get("text"), [call["function"] for call in choice.get("tool_calls") or ()])
        for choice in record.get("choices") or [record]
    ]
    return orjson.dumps([parts, record.get("label"), record.get("score"), record.get("entities")])


def merge(runs: Sequence[Path], into: Path, *, partial: bool = False) -> Merged:
    """Merge ``runs`` into the new run folder ``into``, which appears only when it is complete. The merged runs are not
    changed.

    A row's newest answer is used; a failure is used only if no run has an answer. If a row of the input has no
    record in any run, nothing is written unless ``partial``.

    Raises:
        JobError: ``into`` exists or is one of the runs, or the rows can't be distinguished.
        ChangedError: The runs belong to different jobs, or the input has changed.
        StoreError: Another process uses one of the runs, a log is damaged, or writing fails.
    """
    _check_places(runs, into)
    # For each run: its lock, log, scores, and some segments of vectors.
    _allow_open_files(8 * len(runs) + 100)
    with ExitStack() as held:
        parts = []
        for folder in runs:
            held.enter_context(claim(folder))
            check_log(folder)
            log = held.enter_context(closing(NewestLog(log_of(folder))))
            job = job_of_run(folder)
            history = read_history(folder)
            manifest = history.added_to(read_manifest(folder))
            parts.append(_MergedRun(folder, manifest, history, job, log, IndexSet()))
        _check_same_job(parts)
        _check_same_vectors(parts)
        there = IndexSet(row for part in parts for row in part.log.rows.tolist())
        merged = Merged([*map(str, runs)])
        for row_id in _missing(parts, there):
            merged.missing += 1
            merged.missing_ids += [row_id][: NAMED - len(merged.missing_ids)]
        merged.total = len(there) + merged.missing
        if merged.missing and not partial:
            for newest in _newest_records(parts):
                merged.add(newest)
        else:
            _write(into, parts, there, merged)
            merged.folder = str(into)
        return merged


def _check_places(runs: Sequence[Path], into: Path) -> None:
    places = [folder.resolve() for folder in runs]
    if into.resolve() in places:
        raise JobError(f"--into {into}: is one of the runs; name a new folder")
    for folder, place in zip(runs, places, strict=True):
        if places.count(place) > 1:
            raise JobError(f"{folder}: is named twice; name each run once")
    if os.path.lexists(into):
        raise JobError(
            f"--into {into}: exists already, and merge never changes a folder; move it away, or name a"
            " new folder (to include its rows, list it among the runs)"
        )


def _allow_open_files(count: int) -> None:
    """Raise this process's limit of open files to ``count``, or as far as allowed: a job array may have a thousand
    shards."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = count if hard == resource.RLIM_INFINITY else min(count, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def _check_same_job(parts: Sequence[_MergedRun]) -> None:
    """Raise ChangedError if the runs have different jobs or inputs. The settings that are compared when a run is
    resumed must be equal, except shards and limits."""
    first, known = parts[0], _identity_without_shard(parts[0].manifest)
    if first.job.input.path is None and not first.manifest.input:
        raise JobError(
            f"{first.folder}: can't be merged, because its rows came from a Python iterator and can't be compared"
            " with those of another run"
        )
    changed = []
    for part in parts:  # include the first run: its settings may have changed while it ran
        answers = _identity_without_shard(part.manifest)
        changes = differences(known, answers)
        known = continued(known, answers)  # a run without rows may not have determined all values
        changes += input_changes(first.manifest.input, part.manifest.input)
        if changes:
            changed.append("\n".join([f"{part.folder}:", *(f"  {change}" for change in changes)]))
    if changed:
        more = [f"… and {len(changed) - _SHOWN} more"] if len(changed) > _SHOWN else []
        raise ChangedError(
            f"these runs belong to different jobs. Differences from {first.folder}:\n"
            + "\n".join([*changed[:_SHOWN], *more])
        )


def _check_same_vectors(parts: Sequence[_MergedRun]) -> None:
    """Raise ChangedError if the vectors of two runs differ in number format or length. Then their models differ
    although their names are equal; on a server, the same name may later stand for another model. A run whose job
    requests vectors of several lengths is not checked."""
    found = [(part.folder, kind) for part in parts if (kind := vector_type(part.folder, part.job))]
    uniform = [(folder, kind) for folder, kind in found if kind.dimensions is not None]
    for folder, kind in uniform:
        first, known = uniform[0]
        if kind != known:
            raise ChangedError(
                f"{folder}: has vectors with {kind}, but {first} has vectors with {known}. They come from different"
                " models and can't be compared; leave one of these runs out, and answer its rows again"
            )


def _identity_without_shard(manifest: Manifest) -> Identity:
    settings = {key: value for key, value in manifest.identity.job.items() if key != "input.shard"}
    return replace(manifest.identity, job=settings)


def _missing(parts: Sequence[_MergedRun], there: IndexSet) -> Iterator[str]:
    """Yield the ids of the rows that the runs should have answered but that have no record. ``there``: indexes of all
    rows with a record."""
    job, files = _job_of_all_rows(parts[0].job, parts), parts[0].manifest.input
    if job.input.path is None:
        yield from (str(index) for index in range(files[0].size) if index not in there)
        return
    source = from_job(job)
    if changes := input_changes(files, source.files or []):
        listed = "\n".join(f"  {change}" for change in changes)
        raise ChangedError(
            f"the input changed since these runs began, so it is unknown which rows are missing:\n"
            f"{listed}\nUndo the change, then merge again"
        )
    yield from (row.id for row in source.read(there.__contains__))


def _job_of_all_rows(job: JobConfig, parts: Sequence[_MergedRun]) -> JobConfig:
    """Return ``job`` for all rows of all ``parts``: without a shard, and with the largest of their limits."""
    limits = [part.job.input.limit for part in parts]
    known = [limit for limit in limits if limit is not None]
    limit = max(known) if len(known) == len(limits) else None
    return job.with_keys(input={"shard": None, "limit": limit})


def _write(into: Path, parts: Sequence[_MergedRun], there: IndexSet, merged: Merged) -> None:
    newest = max(parts, key=_last_start)
    load_job(newest.folder / JOB, [f"name={into.name}"])  # refuses an invalid name
    job = _job_of_all_rows(newest.job, parts)
    job = job.with_keys(name=into.name, output={"dir": str(into.resolve().parent)})
    runs = [part.folder for part in parts]
    with disk_errors(into), building(into) as folder:
        with closing(Ledger(folder)) as ledger:
            ledger.write(_records(parts, merged))
            ledger.write(_generations(parts, there))
        if any((run / SCORES).exists() for run in runs):
            scores = join_scores(runs, [part.picked for part in parts])
            write_scores(folder, scores, before=lambda: None)
        write_job(folder, job)
        _manifest(newest, parts, job, merged).write(folder)
        _history(folder, newest, parts, job, merged).write(folder)


def _records(parts: Sequence[_MergedRun], merged: Merged) -> Iterator[RecordLine]:
    vectors = {part.folder: Vectors(part.folder) for part in parts}
    for newest in _newest_records(parts):
        merged.add(newest)
        newest.part.picked.add(newest.record["index"])
        if newest.record.get("embedding") is None:
            yield raw_line(newest.raw)
        else:
            vector = vectors[newest.part.folder].of(newest.record)
            del newest.record["embedding"]  # the vector gets another position in the merged run
            yield rewritten(newest.record, vector)


def _generations(parts: Sequence[_MergedRun], settled: IndexSet) -> Iterator[GenerationLine]:
    """Yield each row's generations from one run: the one whose record was chosen or, for rows without a record (not in
    ``settled``), the first run that has generations of the row."""
    taken = IndexSet()
    for part in parts:
        begun = IndexSet()
        for line in read_generations(part.folder):
            if line.record is None:
                continue
            row = line.record.index
            if row in part.picked:
                yield GenerationLine(line.raw, line.record)
            elif row not in settled and row not in taken:
                begun.add(row)
                yield fresh_line(line.record)  # a damaged generation may be missing
        taken |= begun


def _manifest(
    newest: _MergedRun, parts: Sequence[_MergedRun], job: JobConfig, merged: Merged
) -> Manifest:
    """Return the manifest of the merged run. It is a copy of the newest run's manifest, with the facts that all runs
    have found."""
    oldest_first = (
        _identity_without_shard(part.manifest) for part in sorted(parts, key=_last_start)
    )
    update = {
        "name": job.name,
        "created_at": utc_now(),
        "identity": reduce(continued, oldest_first),
        "merged_from": merged.runs,
    }
    return newest.manifest.model_copy(update=update)


def _history(
    folder: Path, newest: _MergedRun, parts: Sequence[_MergedRun], job: JobConfig, merged: Merged
) -> History:
    """Return the history of the merged run: the newest run's, with the starts of all runs and of the merge.

    The merge's start has the package versions of the newest start, because these packages made the answers.
    """
    starts = [
        start.model_copy(update={"run": str(part.folder)})
        for part in parts
        for start in part.history.starts
    ]
    starts.sort(key=lambda start: start.started_at)
    last: dict[str, Any] = {"ended_at": utc_now(), "exit": merged.exit_code, "seconds": 0.0}
    if starts:
        last["versions"] = starts[-1].versions
    starts.append(StartNote.now("merge").model_copy(update=last))
    ways = {part.history.scoring for part in parts}
    in_one_way = ways == {scoring_of(job)} and all(is_scored(part.folder, job) for part in parts)
    update = {
        "starts": starts,
        "total": merged.total,
        "skipped_elsewhere": 0,
        "scoring": scoring_of(job) if in_one_way or not job.scoring.is_on else None,
        "scored_from": scored_from(folder, job) if in_one_way else None,
        "judged": [*dict.fromkeys(name for part in parts for name in part.history.judged)],
        "found": {},  # the merged manifest has them
        "checked": {},
        "input": None,
    }
    return newest.history.model_copy(update=update)


def _last_start(part: _MergedRun) -> str:
    return max((start.started_at for start in part.history.starts), default="")
