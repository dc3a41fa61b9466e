"""``metrics.jsonl``: how a run went over time, one line for each look at it.

A line of any age is there to draw a chart with, so older ones may be further apart: once the file
has ``MOST_LINES``, a line stays if it is at least a five-hundredth of its age before the next one.
After a week these are some 4,000 lines, and those of its first day 20 minutes apart.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from batchkit.config.regular_file import read_bytes
from batchkit.storage.files import disk_errors, open_private, write_all, write_atomically

METRICS = "metrics.jsonl"
MOST_LINES = 8192
_PER_AGE = 500


class GpuLoad(msgspec.Struct, frozen=True):
    """One GPU of the machine: memory in use by any process, and the share of the time it was busy."""

    memory_bytes: int
    utilization: float | None = None


class Metrics(msgspec.Struct, frozen=True, omit_defaults=True):
    """One line. Rows, tokens and ``seconds`` are of the run, over all starts; the others are of the
    start whose number ``start`` is, from 1.

    ``seconds``: for how long its starts have run, loading included. ``completion_tokens`` are those of
    records, ``unfinished_tokens`` those of answers that have not ended, and ``generations`` are those
    of rows with several. ``window``: how many requests
    may be in flight; of these the engine runs ``running``, and ``waiting`` wait in its queue.
    ``kv_cache_usage``: from 0 to 1, the fullest engine's. ``host_bytes``: resident memory of the run's
    processes on this machine. ``gpus``: those of this machine, if nvidia-ml-py is installed.
    """

    at: str
    start: int
    seconds: float
    rows_ok: int
    rows_failed: int
    rows_total: int | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    unfinished_tokens: int = 0
    generations: int = 0
    retried: int = 0
    in_flight: int = 0
    window: int = 0
    running: int = 0
    waiting: int = 0
    kv_cache_usage: float = 0.0
    preemptions: int = 0
    engine_restarts: int = 0
    host_bytes: int | None = None
    gpus: list[GpuLoad] = []


_decoder = msgspec.json.Decoder(Metrics)


def read_metrics(folder: Path) -> list[Metrics]:
    """The lines of a run, oldest first; empty if it has none. Lines that are broken are left out.

    Raises:
        StoreError: the file can't be read.
    """
    with disk_errors(folder / METRICS, "can't be read"):
        try:
            return [*_decoded(read_bytes(folder / METRICS).splitlines())]
        except FileNotFoundError:
            return []


class MetricsLog:
    """Appends lines to the ``metrics.jsonl`` of one run; used by one thread of the run's process.

    It is no reason to stop a run: after an error of the disk, ``say`` gets it, and nothing is written
    any more. Nor is it if the folder's lock ``is_lost``.
    """

    def __init__(
        self, folder: Path, *, is_lost: Callable[[], bool], say: Callable[[str], None]
    ) -> None:
        self._path = folder / METRICS
        self._is_lost, self._say = is_lost, say
        self._file: int | None = None
        self.seconds_before = 0.0
        """For how long earlier starts have run."""
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
        """Replace the file by one with the lines to keep."""
        kept = thinned([*_decoded(read_bytes(self._path).splitlines())])
        write_atomically(self._path, (msgspec.json.encode(line) + b"\n" for line in kept))
        self.close()
        self._file = open_private(self._path, os.O_RDWR | os.O_APPEND)
        self._n_lines = len(kept)

    def _give_up(self, error: OSError) -> None:
        self.close()
        self._say(
            f"{self._path}: can't write: {error.strerror or error}; the run goes on without it"
        )


def thinned(lines: Sequence[Metrics]) -> list[Metrics]:
    """The lines to keep, of ``lines`` from the oldest to the newest; these two are kept."""
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
