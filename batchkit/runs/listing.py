"""The runs below a folder: their list, their states, and the run that a command-line argument refers to."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from glob import escape
from itertools import starmap
from pathlib import Path
from typing import Any, NamedTuple

from batchkit.config.loading import load_job
from batchkit.config.masking import masked_text
from batchkit.config.suggest import did_you_mean
from batchkit.config.tables import BudgetTable
from batchkit.errors import BatchkitError, JobError, StoreError
from batchkit.runs.index import stamp_of
from batchkit.runs.remote import copied
from batchkit.runs.status import Status, status
from batchkit.scoring.metrics import markdown
from batchkit.storage.checkpoint import CHECKPOINT
from batchkit.storage.job_toml import job_of_run
from batchkit.storage.log import RESULTS
from batchkit.storage.manifest import Manifest, read_manifest, without_manifest
from batchkit.storage.runfolder import LOCK, MANIFEST, held_by, is_run
from batchkit.storage.starts import STARTS, History, StartNote, latest_run, read_history
from batchkit.storage.store.objects import is_store
from batchkit.types import Usage, utc_now

_MOST_LOOKS = 1_000  # runs whose status is kept in memory
_COUNTS = ("name", "total", "ok", "failed", "pending", "eta_s")
_HEADS = ("run", "state", "ok", "failed", "left", "started", "model")
_FINISHED = (0, 3)  # exit codes of runs in which every row has a record


class Look(NamedTuple):
    """The status, manifest and history of a run at one moment. ``limits``: the job's ``[budget]``."""

    status: Status
    manifest: Manifest
    history: History
    limits: BudgetTable

    @property
    def state(self) -> str:
        """The state: "running", "finished", "failed to start" or "stopped"."""
        now, last = self.status, self.history.last_start
        if now.held_by is not None:
            return "running"
        settled = now.ok + now.failed
        if now.pending == 0 or (now.pending is None and last and last.exit in _FINISHED):
            return "finished"
        if not settled and last is not None and last.exit in (1, 2):
            return "failed to start"
        return "stopped"

    def summary(self) -> dict[str, Any]:
        """Return the run's entry in the list of runs."""
        manifest, last = self.manifest, self.history.last_start
        return {
            **{name: getattr(self.status, name) for name in _COUNTS},
            "state": self.state,
            "budgets": [*self._budgets()],
            "started_at": last.started_at if last else None,
            "model": manifest.model.name,
            "kind": manifest.identity.get("engine.kind"),
        }

    def _budgets(self) -> Iterator[dict[str, Any]]:
        """Yield the used part of each limit of ``[budget]``. The seconds are those of the last start only."""
        budget, starts, now = self.limits, self.history.starts, self.status
        tokens = Usage(now.prompt_tokens, now.completion_tokens)
        spent = {
            "max_seconds": _seconds_of(starts[-1], now.held_by is not None) if starts else None,
            "max_completion_tokens": now.completion_tokens,
            "max_price": budget.price_of(tokens, sum(start.gpu_seconds for start in starts)),
        }
        for name, value in spent.items():
            if (limit := getattr(budget, name)) is not None:
                yield {"name": name, "spent": value, "limit": limit}

    def to_json(self) -> dict[str, Any]:
        """Return the dict of ``batchkit status --json`` with the state and all starts."""
        starts = [*starmap(_start, enumerate(self.history.starts, 1))]
        return {**self.status.to_json(), "state": self.state, "starts": starts}


@dataclass
class Runs:
    """The runs below the folder ``target``. If ``is_single``, ``target`` itself is the only run.

    A run is looked up by key (its folder name) among existing folders, so no part of an HTTP request is used as a path.
    ``media``: folders whose files may be shown; if empty, those that the run's job file uses. ``named``: the keys to
    show; None shows all.
    """

    target: Path
    is_single: bool
    media: tuple[Path, ...] = ()
    named: Callable[[], Collection[str]] | None = None

    def folders(self) -> dict[str, Path]:
        """Return run folders by key, the newest first. Empty if the folder was removed."""
        if self.is_single:
            return {self.target.name: self.target} if is_run(self.target) else {}
        paths = (
            *self.target.glob(f"[!.]*/{MANIFEST}"),
            *self.target.glob(f"[!.]*/[!.]*/{MANIFEST}"),  # variants of a job
            *self.target.glob(f"[!.]*/[!.]*/[!.]*/{MANIFEST}"),  # trials of find-bs and tune
        )
        stamps = {path: stamp_of(path) for path in paths}
        newest = sorted(stamps, key=lambda path: (stamps[path] or (0, 0, 0))[2], reverse=True)
        shown = None if self.named is None else self.named()
        return {
            key: path.parent
            for path in newest
            for key in [_key_of(path.parent, self.target)]
            if shown is None or key in shown
        }

    def to_json(self) -> dict[str, Any]:
        return {"runs": [*self.listed()]}

    def to_text(self) -> str:
        """Return a table of the runs, with errors of unreadable runs below it."""
        runs = [*self.listed()]
        if not runs:
            return f"{self.target}: no runs"
        errors = [f"{run['run']}: {run['error']}" for run in runs if "error" in run]
        return "\n".join([markdown(_HEADS, [*map(_cells, runs)]), *errors])

    def listed(self) -> Iterator[dict[str, Any]]:
        """Yield an entry for each run. An unreadable run has ``error`` instead of counts."""
        for key, folder in self.folders().items():
            head = {"run": key, "folder": str(folder)}
            try:
                yield head | look_at(folder).summary()
            except (BatchkitError, OSError) as error:
                text = masked_text(str(error))
                yield head | {"name": folder.name, "state": "stopped", "error": text}


def _key_of(run: Path, target: Path) -> str:
    return ":".join(run.relative_to(target).parts)


def runs_below(folder: Path) -> Runs:
    """Return the runs below a folder. Raise JobError if the folder does not exist."""
    if not folder.is_dir():
        raise JobError(f"{folder}: no such folder; name one that holds run folders")
    return Runs(folder, is_single=is_run(folder))


def is_folder_of_runs(folder: Path) -> bool:
    """Return whether ``folder`` is a folder but not a run: ``output/``, or the folder of a job's variants."""
    parts_of_run = (MANIFEST, RESULTS, CHECKPOINT)
    return folder.is_dir() and not any((folder / name).exists() for name in parts_of_run)


def look_at(folder: Path) -> Look:
    """Return the run's current status. Its files are read again only if they changed.

    Raises:
        StoreError: The run can't be read.
    """
    stamps = tuple(
        stamp_of(folder / name) for name in (MANIFEST, STARTS, RESULTS, CHECKPOINT, LOCK)
    )
    try:
        return _look(folder, stamps, held_by(folder) is not None)
    except OSError as error:
        raise StoreError(f"{folder}: can't be read: {error.strerror}") from error


@lru_cache(_MOST_LOOKS)
def _look(folder: Path, stamps: tuple[Any, ...], is_held: bool) -> Look:
    manifest, history = read_manifest(folder), read_history(folder)
    return Look(status(folder), manifest, history, job_of_run(folder).budget)


def _cells(run: Mapping[str, Any]) -> list[str]:
    counts = (run.get(name) for name in ("ok", "failed", "pending"))
    began = (run.get("started_at") or "")[:16].replace("T", " ")
    cells = ["" if count is None else f"{count:,}" for count in counts]
    return [run["run"], run["state"], *cells, began, run.get("model") or ""]


def _seconds_of(start: StartNote, is_running: bool) -> float | None:
    """Return the seconds that a start took, or has taken so far; None if its process was killed."""
    end = start.ended_at or (utc_now() if is_running else None)
    since = datetime.fromisoformat(start.started_at)
    return None if end is None else (datetime.fromisoformat(end) - since).total_seconds()


def _start(number: int, start: StartNote) -> Mapping[str, Any]:
    events = zip(start.engine_event_times, start.engine_events, strict=False)
    return {
        "number": number,
        **start.model_dump(),
        "events": [{"at": at, "text": text} for at, text in events],
    }


def folder_of(target: str, overrides: Sequence[str] = ()) -> Path:
    """Return the run folder for ``target``: a folder, a job file, or the address of a run in a store, which is copied.
    It may have no run yet."""
    if is_store(target):
        return copied(target)
    path = Path(target)
    return load_job(path, overrides).folder if path.is_file() else path


def near_run(folder: Path) -> str:
    """Return the end of a message about ``folder``: a suggestion of a run inside it, or of a sibling with a similar
    name.
    """
    if inside := sorted(str(run) for run in folder.glob("*") if is_run(run)):
        return f"; did you mean {inside[0]!r}?"
    return did_you_mean(str(folder), (str(run) for run in folder.parent.glob("*") if is_run(run)))


def find_run(target: str | None, overrides: Sequence[str] = ()) -> Path:
    """Return the run folder for ``target``: a run folder, a job file, or the address of a run in a store (then it is a
    copy to read); None means the latest run.

    ``overrides`` apply to the job file, for example to its ``name``.

    Raises:
        JobError: There is no such run.
        StoreError: The manifest is missing.
    """
    if target is None:
        return latest_run(Path("output"))
    path = Path(target)
    if path.is_file() and path.suffix != ".toml" and is_run(path.parent):
        raise JobError(f"{target}: is a file of a run; name the run's folder: {path.parent}")
    folder = folder_of(target, overrides)
    if not is_run(folder):
        if any(os.path.lexists(folder / name) for name in (RESULTS, CHECKPOINT)):
            raise StoreError(without_manifest(folder))
        shards = folder.parent.glob(f"{escape(folder.name)}.shard-*-of-*/{MANIFEST}")
        counts = {path.parent.name.rpartition("-of-")[2] for path in shards}
        # The names of earlier shards end with .1, .2, … after --fresh.
        if counts := {count for count in counts if count.isdecimal()}:
            parts = " ".join(f"{folder}.shard-*-of-{count}" for count in sorted(counts, key=int))
            raise JobError(
                f"{folder}: there is no run in this folder, but there are shards of the job. Give the folder of one"
                f" shard, or merge the shards first: `batchkit merge {parts} --into {target}`"
            )
        if path.is_file():
            dry = folder.with_name(f"{folder.name}.dry-run")
            hint = f"; its dry run is {dry}" if is_run(dry) else ""
            raise JobError(
                f"{folder}: there is no run in this folder; start one with `batchkit run {target}`{hint}"
            )
        raise JobError(f"{target}: neither a run folder nor a job file{near_run(folder)}")
    return folder


def find_variants(target: str) -> list[Path]:
    """Return the runs of a job's variants, the oldest first; empty if ``target`` (a folder or a job file) has none."""
    folder = folder_of(target)
    if not is_folder_of_runs(folder):
        return []
    runs = (path.parent for path in folder.glob(f"[!.]*/{MANIFEST}"))
    return sorted(runs, key=lambda run: (read_manifest(run).created_at, run.name))
