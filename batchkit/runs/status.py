"""The state of a run. It is found without an engine, and without reading the whole log."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from batchkit.config.numbers import duration
from batchkit.engines.memory_ladder import Ladder
from batchkit.errors import BatchkitError
from batchkit.runs.reach import Reach
from batchkit.sources import count_rows
from batchkit.storage.checkpoint import Checkpoint, Totals, read_checkpoint
from batchkit.storage.lines import Spent
from batchkit.storage.log import log_of, read_lines
from batchkit.storage.manifest import read_manifest
from batchkit.storage.metrics import newest_metrics
from batchkit.storage.runfolder import held_by, named
from batchkit.storage.starts import Checked, History, read_history
from batchkit.storage.steps import spent_in
from batchkit.types import Usage

_BAR, _EIGHTHS = 40, " ▏▎▍▌▋▊▉"  # width in characters; the last one is filled in eighths
_RATE_BYTES = 256 * 1024  # bytes at the end of the log: a few hundred records


@dataclass(frozen=True, slots=True)
class Status:
    """The state of a run.

    - ``total``: number of rows; None if they can't be counted (rows given from Python).
    - ``generations``: number of generations, for rows that have several. This number and the tokens include rows in
      progress.
    - ``engine_settings``: options that out-of-memory errors have reduced below the job's values.
    - ``engine_events``: the newest twenty log lines about the engine in the last start.
    - ``accepted_tokens_per_step``: with speculative decoding, the mean number of drafted tokens that a forward pass of the
      last start accepted for one request; otherwise None.
    - ``held_by``: the process that works on the run, or None.
    - ``checked``: the rows that ``[self_check]`` has computed again, over all starts.
    - ``workers``: the state of each worker when the last start wrote its last checkpoint, also of workers that have left;
      empty without several workers.
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
    generations: int
    rows_per_s: float | None
    eta_s: float | None
    engine_restarts: int
    engine_settings: Mapping[str, Any]
    engine_events: Sequence[str]
    workers: Sequence[Mapping[str, Any]]
    starts: int
    accepted_tokens_per_step: float | None
    held_by: Mapping[str, Any] | None
    checked: Checked

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "checked": self.checked.counts()}

    def to_text(self) -> str:
        return "\n".join(self._lines())

    def bar(self) -> str:
        """The progress bar as a line, or "" if the number of rows is unknown."""
        if not self.total:
            return ""
        share = min(1.0, (self.ok + self.failed) / self.total)
        full, part = divmod(int(share * 8 * _BAR), 8)
        filled = "█" * full + _EIGHTHS[part].strip()
        left = "" if self.eta_s is None else f", {duration(self.eta_s)} left"
        return f"▕{filled:<{_BAR}}▏ {int(100 * share)} %{left}"

    def _lines(self) -> Iterator[str]:
        total = "?" if self.total is None else f"{self.total:,}"
        pending = "?" if self.pending is None else f"{self.pending:,}"
        yield f"{self.name}: {self.ok:,} ok, {self.failed:,} failed, {pending} of {total} left"
        for kind, count in self.failed_by_kind.items():
            yield f"  failed by {kind}: {count:,}"
        if self.generations:
            yield f"generations: {self.generations:,}"
        tokens = f"tokens: {self.prompt_tokens:,} prompt"
        yield (
            f"{tokens}, {self.completion_tokens:,} completion" if self.completion_tokens else tokens
        )
        if self.accepted_tokens_per_step is not None:
            yield f"speculation: {self.accepted_tokens_per_step} drafted tokens accepted per step"
        if checked := self.checked.in_words():
            yield checked
        yield f"starts: {self.starts}, engine restarts: {self.engine_restarts}"
        yield from (f"  {event}" for event in self.engine_events[-5:])
        yield from map(self._worker_line, self.workers)
        yield "the log was not checked for damage; `batchkit verify` does that"
        for name, value in self.engine_settings.items():
            yield f"memory ran out, so now {name} = {value}"
        if self.held_by is None:
            yield "no process works on it"
        else:
            eta = "" if self.eta_s is None else f", {duration(self.eta_s)} left"
            rate = "" if self.rows_per_s is None else f": {self.rows_per_s:.1f} rows/s{eta}"
            yield f"{named(self.held_by)} works on it{rate}"

    def _worker_line(self, worker: Mapping[str, Any]) -> str:
        gpus = f", GPU {', '.join(map(str, worker['gpus']))}" if worker["gpus"] else ""
        shown = (
            self.held_by or worker["left_at"]
        )  # an ended run shows only workers that left before
        state = f" {worker['state']}," if shown else ""
        for word in ("joined", "left"):
            if at := worker[f"{word}_at"]:
                state += f" {word} {at[:19].replace('T', ' ')},"
        return (
            f"worker {worker['worker']} on {worker['node'] or 'no node'}{gpus}:{state}"
            f" {worker['rows']:,} rows, {worker['rows_per_s']:.1f} rows/s, {worker['in_flight']} in flight,"
            f" {worker['restarts']} restarts, {worker['engine_restarts']} of its engine"
        )


def status(folder: Path) -> Status:
    """Return the run's state from its checkpoint, the log after it, the notes of its starts and the lock. This is safe while the
    run is in progress.

    The checkpoint is not checked against the log; ``verify`` does this.

    Raises:
        StoreError: The folder is not a run folder, or its log is missing.
    """
    manifest, history, log = read_manifest(folder), read_history(folder), log_of(folder)
    found = counts_of(folder)
    totals, steps, tokens = found.totals, found.steps, found.tokens
    total = total_rows(folder, history)
    pending = pending_rows(total, totals, history)
    holder = held_by(folder)
    last_start = history.last_start
    rate = _rate(log) if holder else None
    metrics = newest_metrics(folder)
    return Status(
        name=manifest.name,
        folder=str(folder),
        total=total,
        ok=totals.ok,
        failed=totals.failed,
        pending=pending,
        failed_by_kind=totals.count_by_kind(),
        prompt_tokens=tokens.prompt_tokens,
        completion_tokens=tokens.completion_tokens,
        generations=steps.generations,
        rows_per_s=rate,
        eta_s=pending / rate if rate and pending is not None else None,
        engine_settings=_settings(history),
        engine_events=last_start.engine_events if last_start else [],
        workers=[worker.model_dump() for worker in last_start.workers] if last_start else [],
        engine_restarts=sum(start.engine_restarts for start in history.starts),
        starts=len(history.starts),
        accepted_tokens_per_step=None if metrics is None else metrics.accepted_tokens_per_step,
        held_by=holder,
        checked=history.self_checks,
    )


class Counts(NamedTuple):
    """Counts of a run. ``totals``: counts of its records. ``steps``: counts of its generations, if rows have
    several."""

    totals: Totals
    steps: Spent

    @property
    def tokens(self) -> Usage:
        """The tokens of all answers so far."""
        of = self.steps if self.steps.generations else self.totals
        return Usage(of.prompt_tokens, of.completion_tokens)


def counts_of(folder: Path) -> Counts:
    """Count the run's records. The checkpoint is trusted, and only the log after it is read.

    Raises:
        StoreError: The log is missing.
    """
    log, checkpoint = log_of(folder), read_checkpoint(folder)
    if checkpoint is None or checkpoint.checksum.end > log.stat().st_size:
        checkpoint = Checkpoint.none()
    for line in read_lines(log, checkpoint.checksum.end):
        if line.record is not None:  # the last line may be incomplete
            checkpoint.totals.add(line.record)
    return Counts(checkpoint.totals, spent_in(folder, checkpoint.steps))


def pending_rows(total: int | None, totals: Totals, history: History) -> int | None:
    """Return the number of rows without a record. Rows that ``--skip-from`` left to another run don't count."""
    if total is None:
        return None
    return max(0, total - totals.ok - totals.failed - history.skipped_elsewhere)


def total_rows(folder: Path, history: History) -> int | None:
    """Return the number of rows from the run's history. If no start has counted them, count them now. Return None if they
    can't be counted."""
    if history.total is not None:
        return history.total
    try:
        reach = Reach.of(folder)
        return count_rows(reach.job.input, reach.files(reach.job.input))
    except BatchkitError:
        return None


def _settings(history: History) -> dict[str, Any]:
    """Return the reduced options of the engines, by name. Options of ``[engines.NAME]`` have the prefix
    ``engines.NAME.``."""
    return {
        f"engines.{name}.{option}" if name else option: value
        for name, reductions in sorted(history.reductions.items())
        for option, value in Ladder(reductions.options).overrides.items()
    }


def _rate(log: Path) -> float | None:
    """Return rows per second over the last records of the log, or None if unknown."""
    start = max(0, log.stat().st_size - _RATE_BYTES)
    lines = islice(read_lines(log, start), 1 if start else 0, None)  # the first line may be cut off
    finished = [line.record.finished_at for line in lines if line.record is not None]
    if len(finished) < 2:
        return None
    first, last = datetime.fromisoformat(finished[0]), datetime.fromisoformat(finished[-1])
    seconds = (last - first).total_seconds()
    return round((len(finished) - 1) / seconds, 3) if seconds > 0 else None
