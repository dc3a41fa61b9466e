"""``metrics.jsonl``: the metrics of a run over time, about one line per second.

Charts are drawn from these lines, so older lines may be further apart. When the file reaches ``MOST_LINES``, it is
thinned: a line stays if the time to the next line is at least a five-hundredth of its age. After a week there are about
4,000 lines; lines of the first day are 20 minutes apart.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from batchkit.config.regular_file import open_regular, read_bytes
from batchkit.storage.files import disk_errors, open_private, write_all, write_atomically

METRICS = "metrics.jsonl"
MOST_LINES = 8192
_PER_AGE = 500
_LAST_BYTES = 16384  # at least one line, even with dozens of GPUs


class GpuLoad(msgspec.Struct, frozen=True):
    """The load of one GPU: memory used by all processes, and the share of time that the GPU was busy, from 0 to 1 (None
    if unknown)."""

    memory_bytes: int
    utilization: float | None = None


class Metrics(msgspec.Struct, frozen=True, omit_defaults=True):
    """One line of ``metrics.jsonl``.

    Rows, tokens and ``seconds`` count all starts of the run; the other values are for one start.
    """

    at: str
    start: int  # number of the start, from 1
    seconds: float  # run time of all starts, including loading
    rows_ok: int
    rows_failed: int
    rows_total: int | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0  # tokens in records
    unfinished_tokens: int = 0  # tokens of requests that still run
    generations: int = 0  # generations of rows with several
    retried: int = 0
    in_flight: int = 0
    window: int = 0  # maximum number of requests in flight
    running: int = 0  # requests that the engine runs
    waiting: int = 0  # requests in the engine's queue
    kv_cache_usage: float = 0.0  # from 0 to 1; the highest if there are several engines
    preemptions: int = 0
    drafts: int = 0  # drafts that speculative decoding checked
    accepted_tokens: int = 0  # drafted tokens that were accepted
    engine_restarts: int = 0
    host_bytes: int | None = None  # resident memory of the run's processes on this machine
    gpus: list[GpuLoad] = []  # of this machine, if nvidia-ml-py is installed

    @property
    def accepted_tokens_per_step(self) -> float | None:
        """The mean number of drafted tokens that a forward pass accepted for one request; None without speculative
        decoding."""
        return round(self.accepted_tokens / self.drafts, 2) if self.drafts else None


_decoder = msgspec.json.Decoder(Metrics)


def read_metrics(folder: Path) -> list[Metrics]:
    """Return the valid lines of a run's ``metrics.jsonl``, oldest first; an empty list if there is no file.

    Raises:
        StoreError: the file can't be read.
    """
    with disk_errors(folder / METRICS, "can't be read"):
        try:
            return [*_decoded(read_bytes(folder / METRICS).splitlines())]
        except FileNotFoundError:
            return []


def newest_metrics(folder: Path) -> Metrics | None:
    """Return the newest valid line of a run's ``metrics.jsonl``, or None. Only the end of the file is read.

    Raises:
        StoreError: the file can't be read.
    """
    path = folder / METRICS
    with (
        disk_errors(path, "can't be read"),
        suppress(FileNotFoundError),
        open_regular(path) as file,
    ):
        file.seek(max(0, file.seek(0, os.SEEK_END) - _LAST_BYTES))
        return next(iter(_decoded(reversed(file.readall().splitlines()))), None)
    return None


class MetricsLog:
    """A writer that appends to the ``metrics.jsonl`` of one run; used by one thread of the run's process.

    - ``say``: gets the message of a disk error. The run continues, and no more lines are written.
    - ``is_lost``: returns True if the folder's lock was lost. Then nothing is written.
    """

    def __init__(
        self, folder: Path, *, is_lost: Callable[[], bool], say: Callable[[str], None]
    ) -> None:
        self._path = folder / METRICS
        self._is_lost, self._say = is_lost, say
        self._file: int | None = None
        self.seconds_before = 0.0  # run time of earlier starts
        self._n_lines = 0
        try:
            self._file = open_private(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
            self._find_end(self._file)
        except OSError as error:
            self._give_up(error)

    def append(self, metrics: Metrics) -> None:
        if self._file is None or self._is_lost():
            return
        try:
            write_all(self._file, msgspec.json.encode(metrics) + b"\n")
            self._n_lines += 1
            if self._n_lines >= MOST_LINES:
                self._thin()
        except OSError as error:
            self._give_up(error)

    def close(self) -> None:
        if self._file is not None:
            with suppress(OSError):
                os.close(self._file)
            self._file = None

    def _find_end(self, file: int) -> None:
        raw = read_bytes(self._path)
        if raw and not raw.endswith(b"\n"):  # a kill cut the last line off
            write_all(file, b"\n")
        lines = raw.splitlines()
        self._n_lines = len(lines)
        self.seconds_before = max((line.seconds for line in _decoded(lines[-2:])), default=0.0)

    def _thin(self) -> None:
        """Replace the file by one without the lines that charts don't need."""
        kept = thinned([*_decoded(read_bytes(self._path).splitlines())])
        write_atomically(self._path, (msgspec.json.encode(line) + b"\n" for line in kept))
        self.close()
        self._file = open_private(self._path, os.O_RDWR | os.O_APPEND)
        self._n_lines = len(kept)

    def _give_up(self, error: OSError) -> None:
        self.close()
        self._say(
            f"{self._path}: can't write: {error.strerror or error}; the run continues without metrics"
        )


def thinned(lines: Sequence[Metrics]) -> list[Metrics]:
    """Return the lines that stay when the file is thinned, oldest first. The oldest and the newest line always stay."""
    oldest, *between, newest = lines
    kept = [newest]
    for line in reversed(between):
        age = newest.seconds - line.seconds
        if (kept[-1].seconds - line.seconds) * _PER_AGE >= max(age, 1.0):
            kept.append(line)
    return [oldest, *reversed(kept)]


def _decoded(lines: Iterable[bytes]) -> Iterable[Metrics]:
    for line in lines:
        with suppress(msgspec.DecodeError):
            yield _decoder.decode(line)
