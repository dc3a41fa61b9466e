"""Several engines on one GPU (``workers.per_gpu``): 1, 2 and 4 of them, with and without MPS.

    python benchmarks/sharing.py [--rounds 3] [--only NAME] [--quick]

Real vLLM, whose engines share one simulated accelerator (shared_device.py), through ``batchkit run``.
Names are max_num_seqs x milliseconds a step:

- **512x0.01**: the device computes next to nothing, so vLLM's Python is the bottleneck, as with a small
  model on a fast GPU. Two engines need two cores, and MPS makes no difference.
- **16x200**: a small model. A step uses a quarter of the device, and hardly any of the host.
- **16x100**: a large model. A step uses the whole device, so more engines only fill its gaps.

The quarter is an assumption: for real models the share depends on the model, the batch and the GPU.
There is no GPU here. ``CUDA_VISIBLE_DEVICES`` makes batchkit believe in one, and a program that stands in
for nvidia-cuda-mps-control starts (MPS) or fails (time slicing). With 512 requests at once vLLM's engine core
has a process of its own, as on a GPU, and otherwise not, as batchkit does on a CPU.

A rate counts tokens from the moment when all engines run 90 % of max_num_seqs to the first one that no
longer does, from the times of the steps. "Allowed" is the rate of a device that is never idle: full
steps, one after another (one engine, time slicing), or as many at once as fit into its throughput (MPS).
A ratio is a rate divided by that of one engine in the same round. "whole" is the time from the loaded
models to the last record.
"""

from __future__ import annotations

import json
import os
import statistics
import struct
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import bounded
import tomlkit
from frame import HERE, Figure, arguments, report, spread
from sides import COSTS, ONLY
from text import write

from batchkit.commands.demo_model import build_demo_model
from tests.support import mps_stand_in

FULL = 0.9  # of max_num_seqs
LIMIT_S = 600  # of one run


class Side(NamedTuple):
    engines: int
    mps: bool = False

    @property
    def name(self) -> str:
        how = "" if self.engines == 1 else (", MPS" if self.mps else ", sliced")
        return f"{self.engines}{how}"

    def at_once(self, share: float) -> float:
        """Return how many steps of ``share`` run at the same time at most, each at full speed."""
        return min(self.engines, 1 / share) if self.mps else 1.0


SIDES = (Side(1), Side(2), Side(2, mps=True), Side(4), Side(4, mps=True))


class Setting(NamedTuple):
    """A model on the device. ``share``: the part of the device's throughput that a step uses.
    ``median_tokens``: of the answers. ``wanted``: targets, by name of the side and of the figure."""

    max_num_seqs: int
    step_ms: float
    share: float
    rows: int
    median_tokens: int
    wanted: dict[tuple[str, str], float]
    sides: Sequence[Side] = SIDES

    @property
    def name(self) -> str:
        return f"{self.max_num_seqs}x{self.step_ms:g}"

    @property
    def targets(self) -> set[str]:
        """The names of the sides that have a target."""
        return {side for side, _ in self.wanted}


class Run(NamedTuple):
    """One run. ``rate``: tokens/s while all engines are full. ``reached``: this divided by what the
    device allows. ``full_s``: how long all engines were full."""

    rate: float
    reached: float
    full_s: float
    whole_s: float


# The device is idle with and without MPS.
HOST_BOUND = (Side(1), Side(2, mps=True), Side(4, mps=True))
RATIO, REACHED = "ratio", "reached"
SETTINGS = (
    Setting(512, 0.01, 0.25, 6144, 30, {("2, MPS", RATIO): 1.2}, HOST_BOUND),
    Setting(16, 200, 0.25, 192, 8, {("4, MPS", REACHED): 0.9}),
    Setting(16, 100, 1.0, 160, 8, {("4, MPS", REACHED): 0.9}),
)


def main() -> None:
    args = arguments(
        __doc__,
        "one round, half of the rows, only what has a target",
        {"only": ONLY},
        rounds=(3, 1),
        part=(1.0, 0.5),
    )
    settings = [each for each in SETTINGS if not args.only or each.name in args.only]
    figures: list[Figure] = []
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        build_demo_model(folder / "model", text_only=True)
        for setting in settings:
            runs: dict[Side, list[Run]] = {
                side: []
                for side in setting.sides
                if not args.quick or side.engines == 1 or side.name in setting.targets
            }
            write(folder / "rows.jsonl", round(args.part * setting.rows))
            for number in range(args.rounds):
                for side, its in runs.items():
                    its.append(run(setting, side, folder))
                    said = f"{setting.name} {number + 1} {side.name}: {its[-1]}"
                    print(said, file=sys.stderr, flush=True)
            table(setting, runs)
            figures += figures_of(setting, runs)
            results += [
                {
                    "setting": setting.name,
                    "engines": side.name,
                    "runs": [it._asdict() for it in its],
                }
                for side, its in runs.items()
            ]
    report("sharing", figures, rounds=args.rounds, results=results)


def run(setting: Setting, side: Side, folder: Path) -> Run:
    """Run ``batchkit run`` in a folder of its own."""
    with tempfile.TemporaryDirectory(dir=folder) as name:
        here = Path(name)
        (here / "device").touch()
        costs = {
            "step_ms": setting.step_ms,
            "token_us": 0,
            "image_ms": 0,
            "median_tokens": setting.median_tokens,
            "share": setting.share,
            "device": str(here / "device"),
            "steps": str(here / "{pid}.steps"),
        }
        environment = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
        environment |= mps_stand_in.install(here, works=side.mps)
        environment |= {
            "PYTHONPATH": os.pathsep.join([str(HERE.parent), str(HERE)]),
            COSTS: json.dumps(costs),
        }
        environment.pop("CUDA_MPS_PIPE_DIRECTORY", None)
        (here / "job.toml").write_text(tomlkit.dumps(job(setting, side, folder)))
        command = [sys.executable, "-m", "batchkit", "run", "job.toml"]
        done = bounded.run(command, cwd=here, limit_s=LIMIT_S, environment=environment)
        if done.code:
            raise SystemExit(f"{setting.name}, {side.name}: {done.message}")
        summary = json.loads(done.stdout[-1])
        timelines = [
            list(struct.iter_unpack("ddi", path.read_bytes())) for path in here.glob("*.steps")
        ]
    if len(timelines) != side.engines:
        raise SystemExit(f"{setting.name}, {side.name}: {len(timelines)} engines took part")
    rate, full_s = rate_of(timelines, FULL * setting.max_num_seqs)
    allowed = setting.max_num_seqs / setting.step_ms * 1e3 * side.at_once(setting.share)
    return Run(rate, rate / allowed, full_s, summary["seconds"])


def job(setting: Setting, side: Side, folder: Path) -> dict[str, Any]:
    options = {
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 512,
        "max_num_seqs": setting.max_num_seqs,
        "kv_cache_memory_bytes": 2**28,
        "worker_cls": "accelerator.SimulatedWorker",
    }
    return {
        "name": "sharing",
        "input": {"path": str(folder / "rows.jsonl")},
        "prompt": {"user": "{{ q }}"},
        "engine": {"model": str(folder / "model"), "options": options},
        "sampling": {"temperature": 0, "max_tokens": 256, "min_tokens": 1},
        "run": {"fail_on_error": True},
    } | ({} if side.engines == 1 else {"workers": {"per_gpu": side.engines}})


def rate_of(
    timelines: Sequence[Sequence[tuple[float, float, int]]], full: float
) -> tuple[float, float]:
    """Return the tokens per second while all engines had ``full`` requests in a step, and how many
    seconds this lasted. ``timelines``: begin, end and requests of each engine's steps."""
    fulls = [[step for step in timeline if step[2] >= full] for timeline in timelines]
    if not all(fulls):
        raise SystemExit("an engine was never full: more rows are necessary")
    start, end = max(steps[0][1] for steps in fulls), min(steps[-1][1] for steps in fulls)
    if end <= start:
        raise SystemExit("the engines were never full at the same time: more rows are necessary")
    tokens = sum(n for timeline in timelines for _, ended, n in timeline if start < ended <= end)
    return tokens / (end - start), end - start


def table(setting: Setting, runs: dict[Side, list[Run]]) -> None:
    print(f"\n{setting.name}, a step uses {setting.share:.0%} of the device")
    print(
        f"{'engines':>10} {'tok/s':>8} {'ratio':>6} {'spread':>12} {'reached':>8} {'spread':>12}",
        end="",
    )
    print(f" {'full s':>7} {'whole s':>8} {'ratio':>6}")
    for side, its in runs.items():
        ratios, whole = ratios_of(runs, side), whole_ratios_of(runs, side)
        reached = [it.reached for it in its]
        is_bound = setting.step_ms >= 1
        print(
            f"{side.name:>10} {median(it.rate for it in its):>8,.0f} {median(ratios):>6.2f}"
            f" {spread(ratios):>12} {f'{median(reached):.1%}' if is_bound else '':>8}"
            f" {spread(reached, 3) if is_bound else '':>12} {median(it.full_s for it in its):>7.1f}"
            f" {median(it.whole_s for it in its):>8.1f} {median(whole):>6.2f}",
            flush=True,
        )


def figures_of(setting: Setting, runs: dict[Side, list[Run]]) -> list[Figure]:
    found = []
    for side in runs:
        if side.engines == 1:
            continue
        what = f"{setting.name}, {side.name}"
        ratio, reached = (setting.wanted.get((side.name, name)) for name in (RATIO, REACHED))
        found.append(
            Figure(f"{what}, against one engine", median(ratios_of(runs, side)), wanted=ratio)
        )
        if reached is not None:
            share = median(it.reached for it in runs[side])
            found.append(Figure(f"{what}, of what the device allows", share, wanted=reached))
    return found


def ratios_of(runs: dict[Side, list[Run]], side: Side) -> list[float]:
    one = runs[Side(1)]
    return [its.rate / alone.rate for its, alone in zip(runs[side], one, strict=True)]


def whole_ratios_of(runs: dict[Side, list[Run]], side: Side) -> list[float]:
    one = runs[Side(1)]
    return [alone.whole_s / its.whole_s for its, alone in zip(runs[side], one, strict=True)]


def median(found: Any) -> float:
    return statistics.median(found)


if __name__ == "__main__":
    main()
