"""Used and free memory of the host, the container, processes and GPUs."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

from batchkit.config.tables import JobConfig
from batchkit.storage.metrics import GpuLoad

_LOOK_S = 1.0
_CGROUPS = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")


class Gpu(NamedTuple):
    """An NVIDIA GPU. The sizes are None if the GPU shares the host's memory.

    ``utilization``: share of time that the GPU was busy, from 0 to 1; None if unknown.
    """

    name: str
    total_gib: float | None = None
    free_gib: float | None = None
    utilization: float | None = None


def free_memory_share() -> float:
    """Return the share of free memory, from 0 to 1: the host's, or the container's if that is less.

    This function and the others in this module never raise an error, because a failed measurement must not end a run.
    """
    import psutil

    with suppress(Exception):
        memory = psutil.virtual_memory()
        of_groups = (1 - used / most for used, most in _limits())
        return min([memory.available / memory.total, *of_groups])
    return 1.0


def free_bytes() -> float:
    """Return the free memory in bytes: the host's, or the container's if that is less; 0 if it is unknown."""
    import psutil

    with suppress(Exception):
        of_groups = (most - used for used, most in _limits())
        return float(min([psutil.virtual_memory().available, *of_groups]))
    return 0.0


def memory_limit() -> float:
    """Return the memory limit of the container in bytes, or infinity without a limit."""
    return min((most for _, most in _limits()), default=float("inf"))


def family_bytes(pid: int) -> int:
    """Return the resident memory of a process and all its descendants in bytes; 0 if the process has ended.

    Expensive: reads all processes of the host.
    """
    import psutil

    total = 0
    with suppress(Exception):
        first = psutil.Process(pid)
        for process in (first, *first.children(recursive=True)):
            with suppress(psutil.Error):
                total += process.memory_info().rss
    return total


def gpu_bytes() -> int | None:
    """Return the bytes in use on all GPUs by all processes; None if a GPU does not report them, or there is no GPU.

    The memory of a single process is not available, because in a container the driver uses other process ids.
    """
    with suppress(Exception):
        found = [_used_bytes(gpu) for gpu in gpus()]
        return sum(filter(None, found)) if found and None not in found else None
    return None


def gpu_loads() -> list[GpuLoad]:
    """Return memory use and utilization of this machine's GPUs; an empty list without nvidia-ml-py or a driver."""
    with suppress(Exception):
        return [
            GpuLoad(used, gpu.utilization)
            for gpu in _nvml_gpus() or ()
            if (used := _used_bytes(gpu)) is not None
        ]
    return []


def gpus() -> list[Gpu]:
    """Return the NVIDIA GPUs of this machine, or an empty list if the driver does not answer."""
    found = _nvml_gpus()
    return _smi_gpus() if found is None else found


def visible_gpus() -> int:
    """Return the number of GPUs that a child process would see."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return len(gpus())
    return len(list(takewhile(lambda it: it not in ("", "-1"), chosen.split(","))))


def _used_bytes(gpu: Gpu) -> int | None:
    if gpu.total_gib is None or gpu.free_gib is None:
        return None
    return int((gpu.total_gib - gpu.free_gib) * 2**30)


def _nvml_gpus() -> list[Gpu] | None:
    """Return the GPUs as nvidia-ml-py lists them; None if this package is not installed. vLLM installs the package.

    nvidia-ml-py is faster than starting nvidia-smi.
    """
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        try:
            numbers = range(pynvml.nvmlDeviceGetCount())
            return [_nvml_gpu(pynvml, pynvml.nvmlDeviceGetHandleByIndex(n)) for n in numbers]
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        return []


def _nvml_gpu(pynvml: Any, device: Any) -> Gpu:
    gpu = Gpu(pynvml.nvmlDeviceGetName(device))
    with suppress(pynvml.NVMLError):
        memory = pynvml.nvmlDeviceGetMemoryInfo(device)
        gpu = gpu._replace(total_gib=memory.total / 2**30, free_gib=memory.free / 2**30)
        used = pynvml.nvmlDeviceGetUtilizationRates(device).gpu
        gpu = gpu._replace(utilization=used / 100)
    return gpu


def _smi_gpus() -> list[Gpu]:
    query = ["--query-gpu=name,memory.total,memory.free", "--format=csv,noheader,nounits"]
    try:
        asked = subprocess.run(
            ["nvidia-smi", *query], capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return []
    gpus: list[Gpu] = []
    for line in asked.stdout.strip().splitlines():
        name, *sizes = (part.strip() for part in line.rsplit(",", 2))
        known = all(size.isdecimal() for size in sizes)  # else "[N/A]"
        gpus.append(Gpu(name, *(int(size) / 1024 for size in sizes)) if known else Gpu(name))
    return gpus


def oom_kills() -> int | None:
    """Return how many processes of this cgroup the kernel has killed because memory ran out.

    If the cgroup has no such count, return the host's count; None if the host has no count, either.
    """
    for group in memory_groups():
        for name in ("memory.events", "memory.oom_control"):
            if (count := _field(group / name, "oom_kill")) is not None:
                return count
    return _field(Path("/proc/vmstat"), "oom_kill")


def memory_groups(membership: Path = _MEMBERSHIP, mounted: Path = _CGROUPS) -> Iterator[Path]:
    """Yield the cgroups (version 2 or 1) that limit this process's memory: its own group first, then its parents.

    In a container, the path that the kernel reports may not exist. The mounted folder itself is then the process's
    group.
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
    """A watch that tells whether memory ran out since it was created.

    When memory runs out, the kernel kills a process with the same signal that a person may send. The kernel's count of
    such kills shows the difference.
    """

    def __init__(self, kills: Callable[[], int | None] = oom_kills) -> None:
        self._kills, self._before = kills, kills()

    def evidence(self) -> str:
        """Return the evidence that memory ran out, or ""."""
        before, after = self._before, self._kills()
        if before is None or after is None or after <= before:
            return ""
        return f"the kernel has killed processes to free memory (oom_kill {before} → {after})"


class HostMemory:
    """The resident memory of a process and its descendants, read once a second; 0 if ``run.max_host_gb`` is not set."""

    def __init__(self, job: JobConfig) -> None:
        self._is_limited = job.run.max_host_gb is not None
        self._next_look = self._bytes = 0.0

    def bytes_of(self, pid: int) -> int:
        now = time.monotonic()
        if self._is_limited and now >= self._next_look:
            self._next_look, self._bytes = now + _LOOK_S, family_bytes(pid)
        return int(self._bytes)


def _limits() -> Iterator[tuple[int, int]]:
    """Yield the used and the maximum bytes of each cgroup that limits this process's memory."""
    for group in memory_groups():
        with suppress(OSError, ValueError):  # absent, or "max"
            most = int(_first(group, "memory.max", "memory.limit_in_bytes"))
            used = int(_first(group, "memory.current", "memory.usage_in_bytes"))
            if most > 0:
                yield used - _reclaimable(group), most


def _reclaimable(group: Path) -> int:
    """Return the size of the page cache of the cgroup ``group``, in bytes.

    The page cache counts as used memory, but the kernel drops it before it kills a process.
    """
    return sum(
        _field(group / "memory.stat", name) or 0 for name in ("inactive_file", "active_file")
    )


def _first(group: Path, *names: str) -> str:
    """Return the content of the first file in ``names`` that exists in the folder ``group``."""
    for name in names:
        if (group / name).exists():
            return (group / name).read_text(encoding="utf-8").strip()
    raise FileNotFoundError(group)


def _field(path: Path, name: str) -> int | None:
    """Return the number after ``name`` in a file of names and numbers; None if the file has no such number."""
    try:
        table = dict(
            line.split(maxsplit=1) for line in path.read_text(encoding="utf-8").splitlines()
        )
        return int(table[name])
    except (OSError, KeyError, ValueError):
        return None
