"""Where a section of gpu.py runs: its folder, time limit, machine and commands."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import bounded
import psutil
import shapes
import tomlkit

from batchkit.engines.memory import gpu_bytes

HERE = Path(__file__).parent
HUNGRY_BYTES = "HUNGRY_BYTES"  # as in hungry.py, which imports vLLM
MULTIPROCESSING = "VLLM_ENABLE_V1_MULTIPROCESSING"
GIB = 2**30

Found = dict[str, Any]  # what a section found, as it goes into the JSON line


class SectionError(Exception):
    """An error after which the section can't continue. Its results so far are kept."""


@dataclass(frozen=True)
class Place:
    """The place where a section runs. ``options``: vLLM's options for all models. ``until``: the
    end of the section, by time.monotonic()."""

    folder: Path
    tiny: bool
    rows: int
    models: Sequence[str]
    machine: Mapping[str, Any]
    options: Mapping[str, Any]
    until: float

    @property
    def left_s(self) -> float:
        left = self.until - time.monotonic()
        if left < 1:
            raise SectionError("no time left (--limit-s)")
        return left

    @property
    def memory_bytes(self) -> int:
        """The memory of the GPU, or of the machine if the engine runs on its CPU."""
        return int(self.machine["card_bytes"] or psutil.virtual_memory().total)

    @property
    def half_b(self) -> shapes.Shape:
        return shapes.TINY if self.tiny else shapes.QWEN2_HALF_B

    def job(self, model: Path, max_tokens: int, **options: Any) -> dict[str, Any]:
        """Return the tables that all jobs have. ``options`` override the options of this place."""
        return {
            "engine": {"model": str(model), "options": {**self.options, **options}},
            "sampling": {"temperature": 0, "max_tokens": max_tokens},
            "output": {"dir": str(self.folder / "output")},
        }


def answer(
    place: Place,
    script: str,
    *args: str,
    stdin: str = "",
    in_process: bool = False,
    hungry_bytes: int = 0,
    variables: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, Any]:
    """Run the script; its last line of stdout, parsed as JSON. ``variables``: added to its environment.

    Raises:
        SectionError: it failed, or the section's time limit was reached.
    """
    done = bounded.run(
        python(script, *args),
        cwd=place.folder,
        limit_s=place.left_s,
        environment=environment(hungry_bytes, in_process=in_process) | variables,
        stdin=stdin,
    )
    if done.code or not done.stdout:
        raise SectionError(f"{' '.join([script, *args[:2]])}: {done.message}")
    found: dict[str, Any] = json.loads(done.stdout[-1])
    return found


def python(module: str, *args: str) -> list[str]:
    return [sys.executable, "-P", "-m", module, *args]


def find_bs(
    place: Place,
    job: Mapping[str, Any],
    low: int,
    high: int,
    *,
    seconds: float,
    hungry_bytes: int = 0,
) -> dict[str, Any]:
    """Run `batchkit find-bs`, print its table, return its JSON; at the time limit, what it has by then.

    Raises:
        SectionError: it printed nothing.
    """
    limits = ["--low", str(low), "--high", str(high), "--seconds", str(seconds)]
    tried = _trials(place, "find-bs", job, limits, hungry_bytes)
    print(f"{'batch size':>10} {'status':>6} {'s':>6} {'rows/s':>8} {'memory':>15}  reason")
    for line in tried["batch_sizes"]:
        per_s = "" if line["rows_per_s"] is None else f"{line['rows_per_s']:.1f}"
        memory = ""
        if line["memory_gb"] is not None:
            memory = f"{line['memory_gb']:.1f} GiB {line['memory_of']}"
        reason = (line["reason"] or line["status"].partition(":")[2])[:100]
        print(
            f"{line['batch_size']:>10} {line['status'][:5]:>6} {line['seconds']:>6.1f} {per_s:>8}"
            f" {memory:>15}  {reason}".rstrip()
        )
    print(f"best {tried['best']}, largest that fits {tried['largest']}", flush=True)
    return tried


def tune(place: Place, job: Mapping[str, Any], minutes: float) -> dict[str, Any]:
    """Run `batchkit tune`, print its trials, return its JSON. Raises as ``find_bs``."""
    limits = ["--minutes", str(minutes), "--seconds", "1" if place.tiny else "8"]
    tuned = _trials(place, "tune", job, limits)
    for trial in tuned["trials"]:
        print(f"{trial['status'][:60]:>6} {trial['rows_per_s']} {trial['options']}")
    print(f"the default: {tuned['limit']}", flush=True)
    return tuned


def _trials(
    place: Place, command: str, job: Mapping[str, Any], limits: Sequence[str], hungry_bytes: int = 0
) -> dict[str, Any]:
    wait_for_card()
    path = place.folder / f"{command}.toml"
    path.write_text(tomlkit.dumps({**job, "name": "tried"}))
    done = bounded.run(
        [*python("batchkit", command, str(path), "--json"), *limits],
        cwd=place.folder,
        limit_s=place.left_s - bounded.INTERRUPTED_S,
        environment=environment(hungry_bytes),
        interrupt=True,
    )
    if not done.stdout:
        raise SectionError(f"{command}: {done.message}")
    found: dict[str, Any] = json.loads(done.stdout[-1])
    return found


def wait_for_card() -> None:
    """Wait until the GPU memory in use is constant: an ended process may still hold some."""
    used, until = gpu_bytes(), time.monotonic() + 30
    while used and time.monotonic() < until:
        time.sleep(1)
        before, used = used, gpu_bytes()
        if used is None or abs(used - before) < GIB // 8:
            return


def environment(hungry_bytes: int = 0, *, in_process: bool = False) -> dict[str, str]:
    """Return the environment of a command. In it, batchkit and these scripts can be imported, and
    vLLM logs only errors.

    vLLM's engine core runs where it does by default, even if the variable is set, or in the command's
    process.
    """
    paths = [str(HERE), str(HERE.parent), os.environ.get("PYTHONPATH", "")]
    found = os.environ | {
        HUNGRY_BYTES: str(hungry_bytes),
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_LOGGING_STREAM": "ext://sys.stderr",
        "VLLM_NO_USAGE_STATS": "1",
    }
    found.pop(MULTIPROCESSING, None)
    return found | {MULTIPROCESSING: "0"} if in_process else found
