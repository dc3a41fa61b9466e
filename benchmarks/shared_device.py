"""A simulated device that several engines share: the rule by which steps end, and its state in a file.

A step takes ``work_s`` if it runs alone, and then uses ``share`` of the device's throughput
(0 < share <= 1). Steps wait in queues, and the first step of each queue runs. Under NVIDIA's MPS each
engine has a queue; under time slicing all engines have one together. While the shares of the running
steps add up to at most 1, each step runs at full speed. Above that, all steps slow down by this sum
(processor sharing), so the device never does more than its throughput.

The rule is an assumption, not a measurement. It leaves out the cost of switching between processes,
which real time slicing has, and the contention for caches and memory, which real MPS has.

A later step can only delay an earlier one. So a waiting engine sleeps until the end as known, and then
looks again. The ends are exact: only the moment of a submission depends on the machine.
"""

from __future__ import annotations

import fcntl
import json
import math
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

TINY_S = 1e-9  # two ends that differ by less are one


class Submission(NamedTuple):
    """A step that is submitted to ``queue`` at the time ``at``, in seconds."""

    at: float
    queue: str
    work_s: float
    share: float


def ends(submissions: Iterable[Submission]) -> list[float]:
    """Return when each step ends. ``submissions``: in the order of their times."""
    device = Device()
    numbers = []
    for at, queue, work_s, share in submissions:
        device.advance(at)
        numbers.append(device.submit(queue, work_s, share))
    device.advance(math.inf)
    return [device.ended[number] for number in numbers]


class Device:
    """The state of the device at the time ``now``.

    - ``queues``: by name, the steps that have not ended: number, seconds of work left, share.
    - ``ended``: by number, the ends of steps that nobody has asked for yet.
    """

    def __init__(self, state: Any = None) -> None:
        found = state or {"now": 0.0, "count": 0, "queues": {}, "ended": []}
        self.now: float = found["now"]
        self.count: int = found["count"]
        self.queues: dict[str, list[list[Any]]] = found["queues"]
        self.ended: dict[int, float] = dict(found["ended"])

    def submit(self, queue: str, work_s: float, share: float) -> int:
        """Append a step to a queue now, and return its number."""
        self.count += 1
        self.queues.setdefault(queue, []).append([self.count, work_s, share])
        return self.count

    def advance(self, until: float) -> None:
        """Let the running steps run until the time ``until``."""
        while self.queues:
            running = [steps[0] for steps in self.queues.values()]
            slowdown = max(1.0, sum(share for _, _, share in running))
            first_s = min(left_s for _, left_s, _ in running)
            is_over = self.now + first_s * slowdown > until
            worked_s = (until - self.now) / slowdown if is_over else first_s
            for step in running:
                step[1] -= worked_s
            if is_over:
                break
            self.now += worked_s * slowdown
            for queue, steps in [*self.queues.items()]:
                if steps[0][1] < TINY_S:
                    self.ended[steps.pop(0)[0]] = self.now
                if not steps:
                    del self.queues[queue]
        self.now = max(self.now, until)

    def end_as_known(self, number: int) -> float:
        """Return when the step ends if no other step is submitted."""
        alone = deepcopy(self)
        alone.advance(math.inf)
        return alone.ended[number]

    def to_json(self) -> str:
        return json.dumps({**vars(self), "ended": [*self.ended.items()]})


class DeviceFile:
    """A device whose state is in a file, for engines in several processes of this machine. An empty
    file is an idle device."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def submit(self, queue: str, work_s: float, share: float) -> int:
        with self._locked() as device:
            return device.submit(queue, work_s, share)

    def wait(self, number: int) -> float:
        """Wait until the step has ended, and return its end by the monotonic clock. Call once for each
        step."""
        while True:
            with self._locked() as device:
                if number in device.ended:
                    return device.ended.pop(number)
                end = device.end_as_known(number)
            time.sleep(max(0.0, end - time.monotonic()))

    @contextmanager
    def _locked(self) -> Iterator[Device]:
        """Yield the device as it is now, and save it."""
        with self._path.open("r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            device = Device(json.loads(file.read() or "null"))
            device.advance(time.monotonic())
            yield device
            file.seek(0)
            file.truncate()
            file.write(device.to_json())
            file.flush()
