"""What the loss of a machine costs a run in a store (``output.store``).

    python benchmarks/vanish.py [--rounds 3] [--rows 50000] [--interval 10] [--quick]

The dry-run engine answers 200 rows a second. The store is a folder (``file://``). A "machine" is a process with a folder
and a namespace of process ids of its own (``unshare --pid``), so that batchkit can't see whether the previous process has
died, and waits as on another machine. It fails at a random instant of an interval; the next machine starts at once.

- again: rows that the lost machine had answered and not uploaded, so that another one computes them again. Rows in
  flight (32) are not counted.
- pause: from the failure to the next new row of any machine. The time to get another machine comes on top, and so
  does the time to load a model.
- start: the part of the pause that a new process takes on this machine now: from its start to its first row, as
  measured with the machine that failed.

The cases: ``kill -9``, and the disk is lost; SIGTERM, the notice of a spot machine; SIGSTOP, a machine that hangs; and
``kill -9`` for one of four machines with ``--join``, a quarter of the rate each.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from frame import HERE, JOB, Figure, arguments, report, spread, write_rows

sys.path.insert(0, str(HERE.parent))

from batchkit.storage.store.objects import Objects
from batchkit.storage.store.seals import Chain

RATE, LATENCY_S = 200, 0.16  # RATE * LATENCY_S rows are in flight
JOINED = 4
LIMIT_S = 300


class Lost(NamedTuple):
    """What a failure cost. ``again``: rows."""

    again: int
    pause_s: float
    start_s: float


class Machine:
    """A running ``batchkit run`` in ``folder``."""

    def __init__(self, folder: Path, *words: object) -> None:
        self.folder, self._began = folder, time.perf_counter()
        self._namespace = -1
        (folder / "rows.jsonl").symlink_to(folder.parent / "rows.jsonl")
        (folder / "job.toml").symlink_to(folder.parent / "job.toml")
        own = ["unshare", "--pid", "--fork", "--kill-child"]
        own += [] if os.geteuid() == 0 else ["--user", "--map-current-user"]
        command = [*own, sys.executable, "-m", "batchkit", "run", "job.toml", *map(str, words)]
        with (folder / "output.log").open("w") as log:
            self._parent = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log)

    def send(self, signum: signal.Signals) -> None:
        pid = self._parent.pid
        (child,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        # While this file is open, no other machine gets the same number for its namespace.
        self._namespace = os.open(f"/proc/{child}/ns/pid", os.O_RDONLY)
        os.kill(int(child), signum)

    @property
    def log(self) -> Path:
        """The log of its run, which it may not have yet."""
        found = list(self.folder.glob("output/*/results.jsonl"))
        found += self.folder.glob("output/*.joined/*/results.jsonl")
        return found[0] if found else self.folder / "none"

    @property
    def size(self) -> int:
        return self.log.stat().st_size if self.log.exists() else 0

    def rows_after(self, end: int) -> int:
        return self.log.read_bytes()[end:].count(b"\n")

    def await_row(self) -> float:
        """Wait for the first row. Return the seconds since the start."""
        until(lambda: self.size > 0)
        return time.perf_counter() - self._began

    def wait(self) -> None:
        self._parent.wait(LIMIT_S)

    def remove(self) -> None:
        self._parent.kill()  # and with it the child
        self._parent.wait()
        if self._namespace != -1:
            os.close(self._namespace)
        shutil.rmtree(self.folder)


class Place:
    """The folder of all machines and of their store."""

    def __init__(self, folder: Path, args: Namespace, chance: random.Random) -> None:
        self.folder, self.args, self.chance = folder, args, chance
        write_rows(folder / "rows.jsonl", args.rows)
        self._n_machines = 0

    def begin(self, rate: float, *words: object) -> Machine:
        self._n_machines += 1
        (here := self.folder / f"machine{self._n_machines}").mkdir()
        job = f"[engine.options]\nlatency_s = {LATENCY_S}\n"
        job += f"[run]\nstore_interval_s = {self.args.interval}\nmax_in_flight = {int(rate * LATENCY_S)}\n"
        job += f'[output]\nstore = "file://{self.folder}/store"\n'
        (self.folder / "job.toml").write_text(JOB + job)
        return Machine(here, *words)

    def sealed(self, run: str) -> int:
        """Return the size of the log that the store has of a run."""
        objects = Objects(f"file://{self.folder}/store/{run}")
        return Chain(objects).catch_up().checksum("results.jsonl").end

    def sleep_until_failure(self, run: str) -> None:
        """Wait for the second upload of rows, and then for a part of the next interval."""
        segments = self.folder / "store" / run / "segments"
        until(lambda: len([s for s in segments.glob("*") if "-none-" not in s.name]) >= 2)
        time.sleep(self.chance.uniform(0, self.args.interval))


def main() -> None:
    args = arguments(
        __doc__,
        "one round, and an interval of a second",
        rounds=(3, 1),
        rows=(50_000, 10_000),
        interval=(10.0, 1.0),
    )
    figures, chance = list[Figure](), random.Random(2026)
    print(f"{'case':>20} {'again':>6} {'spread':>12} {'pause s':>8} {'spread':>12} {'start s':>8}")
    for name, case in CASES.items():
        found = []
        for _ in range(args.rounds):
            with tempfile.TemporaryDirectory() as folder:
                found.append(case(Place(Path(folder), args, chance)))
        again, pauses, starts = zip(*found, strict=True)
        middle = Lost(*map(statistics.median, (again, pauses, starts)))
        print(
            f"{name:>20} {middle.again:>6.0f} {spread(again, 0):>12} {middle.pause_s:>8.1f}"
            f" {spread(pauses, 1):>12} {middle.start_s:>8.1f}",
            flush=True,
        )
        most = 0 if name == "SIGTERM" else 1.25 * args.interval * RATE
        figures.append(
            Figure(f"rows computed again, {name}", middle.again, "rows", most, at_most=True)
        )
        figures.append(Figure(f"next new row, {name}", middle.pause_s, "s"))
    report("vanish", figures, rounds=args.rounds, interval_s=args.interval, rows_per_s=RATE)


def killed(place: Place) -> Lost:
    return _continued(place, lambda machine: machine.send(signal.SIGKILL))


def notified(place: Place) -> Lost:
    return _continued(place, lambda machine: machine.send(signal.SIGTERM))


def frozen(place: Place) -> Lost:
    return _continued(place, lambda machine: machine.send(signal.SIGSTOP), ends=False)


def _continued(place: Place, fail: Callable[[Machine], None], *, ends: bool = True) -> Lost:
    """Let a machine fail, and another one continue its run."""
    with removing() as machines:
        machines.append(first := place.begin(RATE))
        start_s = first.await_row()
        place.sleep_until_failure("counting")
        began = time.perf_counter()
        fail(first)
        if ends:
            first.wait()
        machines.append(second := place.begin(RATE))
        end = place.sealed("counting")
        until(lambda: second.size > end)
        return Lost(first.rows_after(end), time.perf_counter() - began, start_s)


def one_of_several(place: Place) -> Lost:
    with removing() as machines:
        machines += [place.begin(RATE / JOINED, "--join") for _ in range(JOINED)]
        first, *others = machines
        start_s = first.await_row()
        run = first.log.parent.name
        place.sleep_until_failure(f"counting.joined/{run}")
        began, sizes = time.perf_counter(), [other.size for other in others]
        first.send(signal.SIGKILL)
        until(lambda: [other.size for other in others] != sizes)
        pause_s = time.perf_counter() - began
        first.wait()
        end = place.sealed(f"counting.joined/{run}")
        return Lost(first.rows_after(end), pause_s, start_s)


CASES = {
    "kill -9": killed,
    "SIGTERM": notified,
    "SIGSTOP": frozen,
    f"kill -9, one of {JOINED}": one_of_several,
}


@contextmanager
def removing() -> Iterator[list[Machine]]:
    machines: list[Machine] = []
    try:
        yield machines
    finally:
        for machine in machines:
            machine.remove()


def until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not is_so():
        if time.monotonic() > deadline:
            raise SystemExit("it did not happen in time")
        time.sleep(0.01)


if __name__ == "__main__":
    main()
