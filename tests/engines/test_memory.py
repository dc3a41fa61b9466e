"""What shows that memory ran out, and how much of it a host, a process and a GPU use."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from batchkit.engines.memory import (
    Gpu,
    MemoryWatch,
    family_bytes,
    free_bytes,
    free_memory_share,
    gpu_bytes,
    gpu_loads,
    gpus,
    memory_groups,
    memory_limit,
    oom_kills,
)
from batchkit.storage.metrics import GpuLoad


def test_a_kill_by_the_kernel_since_the_engines_start_is_evidence() -> None:
    kills = [7]
    watch = MemoryWatch(lambda: kills[-1])
    assert watch.evidence() == ""
    kills.append(8)
    assert "oom_kill 7 → 8" in watch.evidence()
    assert MemoryWatch(lambda: 8).evidence() == "", "an earlier one says nothing of the next engine"
    assert MemoryWatch(lambda: None).evidence() == ""


@pytest.mark.parametrize(
    ("membership", "groups"),
    [
        ("0::/user.slice/run.scope", ["user.slice/run.scope", "user.slice", "."]),
        ("0::/", ["."]),
        ("9:cpu:/a\n4:memory:/docker/b\n", ["memory/docker/b", "memory/docker", "memory"]),
    ],
)
def test_a_process_has_the_limits_of_all_cgroups_above_it(
    tmp_path: Path, membership: str, groups: list[str]
) -> None:
    (tmp_path / "membership").write_text(membership)
    found = memory_groups(tmp_path / "membership", tmp_path)
    assert list(found) == [tmp_path / group for group in groups]
    assert list(memory_groups(tmp_path / "absent", tmp_path)) == []


@pytest.mark.parametrize(
    ("printed", "found", "used_gib"),
    [
        ("H200, 4096, 1024\nA, B, 2048, 2048\n", [Gpu("H200", 4.0, 1.0), Gpu("A, B", 2.0, 2.0)], 3),
        ("GB10, [N/A], [N/A]\n", [Gpu("GB10")], None),
        ("", [], None),
    ],
)
def test_gpus_are_read_from_the_drivers_program(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    printed: str,
    found: list[Gpu],
    used_gib: int | None,
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\nprintf '{printed}'")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setitem(sys.modules, "pynvml", None)  # else it is used instead
    assert gpus() == found
    assert gpu_bytes() == (None if used_gib is None else used_gib * 2**30)


def test_gpus_are_read_from_the_drivers_library_if_it_can_be_imported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    memory = {0: SimpleNamespace(total=4 << 30, free=1 << 30), 1: None}

    def memory_of(device: int) -> SimpleNamespace:
        if (found := memory[device]) is None:
            raise OSError("Not Supported")
        return found

    library = SimpleNamespace(
        NVMLError=OSError,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetCount=lambda: len(memory),
        nvmlDeviceGetHandleByIndex=lambda n: n,
        nvmlDeviceGetName=lambda device: f"H{device}",
        nvmlDeviceGetMemoryInfo=memory_of,
        nvmlDeviceGetUtilizationRates=lambda device: SimpleNamespace(gpu=50),
    )
    monkeypatch.setitem(sys.modules, "pynvml", library)
    assert gpus() == [Gpu("H0", 4.0, 1.0, 0.5), Gpu("H1")]
    assert gpu_loads() == [GpuLoad(3 << 30, 0.5)]
    assert gpu_bytes() is None, "not all of it is known"
    del memory[1]
    assert gpu_bytes() == 3 << 30


def test_this_host_can_be_read() -> None:
    assert 0 < free_memory_share() <= 1
    assert memory_limit() > free_bytes() > 0
    assert memory_limit() > family_bytes(os.getpid()) > 0
    kills = oom_kills()
    assert kills is None or kills >= 0


def test_a_sample_that_fails_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where no file can be opened any more."""

    def fail(*_: object) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr("psutil.virtual_memory", fail)
    monkeypatch.setattr("psutil.Process", fail)
    monkeypatch.setitem(sys.modules, "pynvml", SimpleNamespace(NVMLError=KeyError, nvmlInit=fail))
    assert free_bytes() == 0
    assert (free_memory_share(), family_bytes(1), gpu_loads(), gpu_bytes()) == (1.0, 0, [], None)
