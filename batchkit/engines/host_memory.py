"""Whether the host's memory, or the container's, ran out.

The kernel frees memory by killing a process, but a person may kill one with the same signal. The
kernel's own count of such kills, and how much memory was free shortly before, show which it was.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

LOOK_S = 1.0
RECENT_S = 10.0
LITTLE_FREE = 0.05
_CGROUPS = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")


def free_memory_share() -> float:
    """Share of the memory that is available, from 0 to 1: the host's, or the container's if less."""
    import psutil

    memory = psutil.virtual_memory()
    share = float(memory.available / memory.total)
    for group in memory_groups():
        try:
            limit = int(_first(group, "memory.max", "memory.limit_in_bytes"))
            used = int(_first(group, "memory.current", "memory.usage_in_bytes"))
            share = min(share, 1 - (used - _reclaimable(group)) / limit)
        except (OSError, ValueError, ZeroDivisionError):  # absent, or "max"
            continue
    return share


def family_bytes(pid: int) -> int:
    """Resident memory of a process and all its descendants.

    Not cheap: finding them means reading all processes of the host.
    """
    import psutil

    total = 0
    with suppress(psutil.NoSuchProcess):
        first = psutil.Process(pid)
        for process in (first, *first.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                total += process.memory_info().rss
    return total


def oom_kills() -> int | None:
    """How many processes of this one's cgroup the kernel has killed for memory so far; of the whole
    host if no cgroup counts them; None if nothing does."""
    for group in memory_groups():
        for name in ("memory.events", "memory.oom_control"):
            if (count := _field(group / name, "oom_kill")) is not None:
                return count
    return _field(Path("/proc/vmstat"), "oom_kill")


def memory_groups(membership: Path = _MEMBERSHIP, mounted: Path = _CGROUPS) -> Iterator[Path]:
    """The cgroups (version 2 or 1) that limit this process's memory, its own first.

    In a container, the path that the kernel reports may not be visible; then the mount is its own.
    """
    try:
        lines = membership.read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "" or "memory" in controllers.split(","):
            root = mounted / "memory" if controllers else mounted
            own = root / path.lstrip("/")
            yield from (group for group in (own, *own.parents) if group.is_relative_to(root))


class MemoryWatch:
    """Watches the host's memory while one engine runs, from the creation of this object on.

    The thread that waits for the engine calls ``look`` often; it reads at most once a second.
    """

    def __init__(
        self,
        *,
        free_share: Callable[[], float] = free_memory_share,
        kills: Callable[[], int | None] = oom_kills,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._free_share, self._kills, self._clock = free_share, kills, clock
        self._kills_before = kills()
        self._next_look = clock()
        self._seen: deque[tuple[float, float]] = deque()

    def look(self) -> None:
        now = self._clock()
        if now >= self._next_look:
            self._next_look = now + LOOK_S
            self._seen.append((now, self._free_share()))
            while now - self._seen[0][0] > RECENT_S:
                self._seen.popleft()

    def evidence(self) -> str:
        """The evidence that memory ran out just now; empty if there is none."""
        before, after = self._kills_before, self._kills()
        if before is not None and after is not None and after > before:
            return f"the kernel has killed for memory (oom_kill {before} → {after})"
        since = self._clock() - RECENT_S
        free = min((share for at, share in self._seen if at >= since), default=1.0)
        return f"{free:.0%} of the memory was free shortly before" if free < LITTLE_FREE else ""


def _reclaimable(group: Path) -> int:
    """The page cache: it counts as used, but the kernel drops it before it kills a process."""
    return sum(
        _field(group / "memory.stat", name) or 0 for name in ("inactive_file", "active_file")
    )


def _first(group: Path, *names: str) -> str:
    """The content of the first of these files that exists."""
    for name in names:
        if (group / name).exists():
            return (group / name).read_text(encoding="utf-8").strip()
    raise FileNotFoundError(group)


def _field(path: Path, name: str) -> int | None:
    """The number after ``name`` in a file of names and numbers; None if there is none."""
    try:
        table = dict(
            line.split(maxsplit=1) for line in path.read_text(encoding="utf-8").splitlines()
        )
        return int(table[name])
    except (OSError, KeyError, ValueError):
        return None
