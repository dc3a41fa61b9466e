"""What shows that memory ran out, and how much of it a host, a process and a GPU use."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from batchkit.engines.memory import (
    RECENT_S,
    Gpu,
    MemoryWatch,
    family_bytes,
    free_memory_share,
    gpu_bytes,
    gpus,
    memory_groups,
    memory_limit,
    oom_kills,
)


class Host:
    """A clock and what is read of a host; all of it is put where a test wants it."""

    def __init__(self) -> None:
        self.now, self.free, self.kills = 0.0, 0.5, 7
        self.looks = 0

    def watch(self) -> MemoryWatch:
        return MemoryWatch(free_share=self._look, kills=lambda: self.kills, clock=lambda: self.now)

    def _look(self) -> float:
        self.looks += 1
        return self.free


def test_nothing_is_no_evidence() -> None:
    host = Host()
    watch = host.watch()
    assert watch.evidence() == ""
    watch.look()
    assert watch.evidence() == ""


def test_a_kill_by_the_kernel_since_the_engines_start_is_evidence() -> None:
    host = Host()
    watch = host.watch()
    host.kills = 8
    assert "oom_kill 7 → 8" in watch.evidence()
    assert host.watch().evidence() == "", "an earlier one says nothing of the next engine"


def test_little_free_memory_shortly_before_is_evidence_and_a_while_ago_is_not() -> None:
    host = Host()
    watch = host.watch()
    host.free = 0.02
    watch.look()
    host.now, host.free = 2.0, 0.9  # the killed process's memory is free again
    watch.look()
    assert "2% of the memory was free" in watch.evidence()
    host.now += RECENT_S
    watch.look()
    assert watch.evidence() == ""


def test_it_looks_at_most_once_a_second_however_often_it_is_asked() -> None:
    host = Host()
    watch = host.watch()
    for _ in range(100):
        watch.look()
    assert host.looks == 1


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
    )
    monkeypatch.setitem(sys.modules, "pynvml", library)
    assert gpus() == [Gpu("H0", 4.0, 1.0), Gpu("H1")]
    assert gpu_bytes() is None, "not all of it is known"
    del memory[1]
    assert gpu_bytes() == 3 << 30


def test_this_host_can_be_read() -> None:
    assert 0 < free_memory_share() <= 1
    assert memory_limit() > family_bytes(os.getpid()) > 0
    kills = oom_kills()
    assert kills is None or kills >= 0
