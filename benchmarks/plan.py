"""``batchkit plan``: how often its 90 % intervals hold the truth, and one whole job after its forecast.

    python benchmarks/plan.py [--jobs 50] [--first 1000] [--rows 50000] [--only simulated|vllm] [--quick]

**simulated**: no vLLM. An event simulation of an engine answers the sample, and later all other rows,
of 50 jobs that differ in size, batch, times of a step, and lengths of answers: lognormal and Pareto
tails up to max_tokens, longer answers to longer prompts, and a share that runs into max_tokens. Its step
is not exactly linear in what it holds, and each part of the sample, and the run, is a few per cent
faster or slower than another. The weights of the forecast were chosen with the jobs 0 to 279, so
those from 1000 on are new to it.
The forecast is computed by ``commands/plan`` itself. At least 85 % of the totals should be inside.

**vllm**: ``plan`` and then ``run``, real vLLM with a simulated accelerator (accelerator.py): is what the
run took inside the intervals?
"""

from __future__ import annotations

import heapq
import json
import math
import os
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import frame
import numpy as np
import tomlkit
from frame import HERE, Figure, arguments, report
from text import OPTIONS, SAMPLING, write

from batchkit.commands.demo_model import build_demo_model
from batchkit.commands.plan.forecast import EngineCount, Prices, Rest, rest_of
from batchkit.commands.plan.lengths import Lengths
from batchkit.commands.plan.sample import Sample, waves_of
from batchkit.commands.plan.throughput import Wave
from batchkit.commands.trial.measurement import TimedAnswer

SAMPLED = 64
WANTED = 0.85
MOST_TOKENS = 4096
FIGURES = ("completion_tokens", "seconds", "price")
PRICES = Prices(0.1e-6, 0.4e-6, 2.5 / 3600)
COSTS = {"step_ms": 40, "token_us": 20, "image_ms": 0, "median_tokens": 12}
SEQS = 256


class SimulatedJob(NamedTuple):
    """Rows, and the seconds of a step: ``step_s + sequence_s * running ** power + prompt tokens *
    prompt_token_s``; ``drift``: how much slower the run is than the sample."""

    lengths: str
    prompts: np.ndarray[Any, Any]
    answers: np.ndarray[Any, Any]
    max_num_seqs: int
    step_s: float
    sequence_s: float
    power: float
    prompt_token_s: float
    drift: float


def lengths_of_answers(rng: np.random.Generator, prompts: Any) -> Mapping[str, Any]:
    n = len(prompts)
    stuck = rng.random(n) < 0.06
    return {
        "lognormal 0.5": rng.lognormal(math.log(200), 0.5, n),
        "lognormal 0.9": rng.lognormal(math.log(60), 0.9, n),
        "lognormal 1.3": rng.lognormal(math.log(60), 1.3, n),
        "Pareto 2": 30 * (1 + rng.pareto(2, n)),
        "Pareto 1.5": 30 * (1 + rng.pareto(1.5, n)),
        "as the prompt": prompts * rng.lognormal(-0.7, 0.4, n),
        "6 % cut off": np.where(stuck, MOST_TOKENS, rng.lognormal(math.log(60), 0.5, n)),
    }


def simulated_job(number: int) -> SimulatedJob:
    rng = np.random.default_rng(number)
    n = int(10 ** rng.uniform(3, 4.3))
    prompts = np.round(rng.lognormal(math.log(300), 0.8, n)).clip(5, 8000)
    tails = lengths_of_answers(rng, prompts)
    name = [*tails][number % len(tails)]
    return SimulatedJob(
        lengths=name,
        prompts=prompts,
        answers=np.round(tails[name]).clip(1, MOST_TOKENS),
        max_num_seqs=int(rng.choice([16, 64, 256])),
        step_s=rng.uniform(0.005, 0.03),
        sequence_s=10 ** rng.uniform(-6, -4),
        power=rng.uniform(0.95, 1.1),
        prompt_token_s=10 ** rng.uniform(-6, -4.5),
        drift=rng.lognormal(0, 0.03),
    )


def event_simulation(
    job: SimulatedJob, rows: Sequence[int], window: int, rng: np.random.Generator
) -> Iterator[TimedAnswer]:
    """Yield the answers to ``rows`` in a simulation. At most ``window`` rows run at a time, and
    each gets one token per step. Steps between two events take the same time; at random, this time
    is a few percent shorter or longer than by the formula."""
    waiting, running = (
        iter(rows),
        list[tuple[int, int, float]](),
    )  # the step of its end, row, its begin
    step, now = 0, 0.0
    while True:
        read = 0
        while len(running) < window and (row := next(waiting, None)) is not None:
            heapq.heappush(running, (step + int(job.answers[row]), row, now))
            read += int(job.prompts[row])
        if not running:
            return
        n_steps = running[0][0] - step
        step_s = job.step_s + job.sequence_s * len(running) ** job.power
        now += (n_steps * step_s + read * job.prompt_token_s) * rng.lognormal(0, 0.03)
        step = running[0][0]
        while running and running[0][0] == step:
            _, row, began = heapq.heappop(running)
            answer = int(job.answers[row])
            yield TimedAnswer(row, began, now, int(job.prompts[row]), answer, answer)


def answered(job: SimulatedJob, rows: Sequence[int], window: int, rng: np.random.Generator) -> Wave:
    slower = rng.lognormal(0, 0.03)
    found = [
        replace(row, began=slower * row.began, ended=slower * row.ended)
        for row in event_simulation(job, rows, window, rng)
    ]
    return Wave(window, found, max(row.ended for row in found))


def forecast_and_truth(number: int) -> tuple[str, Rest, Mapping[str, float]]:
    job, rng = simulated_job(number), np.random.default_rng(number)
    sampled: list[int] = rng.permutation(len(job.prompts))[:SAMPLED].tolist()
    waves = [
        answered(job, sampled[start:end], window, rng)
        for start, end, window in waves_of(SAMPLED, job.max_num_seqs)
    ]
    sample = Sample(waves, 30.0, job.max_num_seqs)
    lengths = Lengths(
        rows=len(job.prompts),
        left=len(job.prompts),
        counted=len(job.prompts),
        indexes=np.arange(len(job.prompts)),
        sizes=job.prompts,
        unit="tokens",
        is_exact=True,
        most_tokens=MOST_TOKENS,
        deduplicated=0,
        reused=0,
        order="window",
        row_s=0.0,
    )
    engines = EngineCount(1, job.max_num_seqs, in_batches=False)
    found = rest_of(lengths, sample, engines, PRICES, seed=number)
    others = np.setdiff1d(np.arange(len(job.prompts)), sampled)
    ran = [*event_simulation(job, others.tolist(), job.max_num_seqs, rng)]
    truth = {
        "prompt_tokens": float(job.prompts[others].sum()),
        "completion_tokens": float(job.answers[others].sum()),
        "seconds": job.drift * max(row.ended for row in ran),
    }
    truth["price"] = sum(price * value for price, value in zip(PRICES, truth.values(), strict=True))
    return job.lengths, found, truth


def simulated(numbers: range) -> dict[str, Any]:
    inside: dict[tuple[str, str], list[bool]] = defaultdict(list)
    widths: dict[str, list[float]] = defaultdict(list)
    for number in numbers:
        name, found, truth = forecast_and_truth(number)
        for figure in FIGURES:
            low, _, high = getattr(found, figure)
            is_inside = low <= truth[figure] <= high
            inside[name, figure].append(is_inside)
            inside["all", figure].append(is_inside)
            widths[name].append((high - low) / truth[figure])
        missed = [
            f"{figure} {truth[figure]:.4g} in {low:.4g} … {high:.4g}"
            for figure in FIGURES
            for low, _, high in [getattr(found, figure)]
            if not low <= truth[figure] <= high
        ]
        if missed:
            print(f"job {number}, {name}: missed {'; '.join(missed)}", file=sys.stderr)
    print(f"{'lengths of answers':>18} {'jobs':>5} " + " ".join(f"{name:>17}" for name in FIGURES))
    for name in dict.fromkeys(name for name, _ in inside):
        shares = [float(np.mean(inside[name, figure])) for figure in FIGURES]
        jobs = len(inside[name, FIGURES[0]])
        print(f"{name:>18} {jobs:>5} " + " ".join(f"{share:>17.2f}" for share in shares))
    return {figure: float(np.mean(inside["all", figure])) for figure in FIGURES}


def on_vllm(n_rows: int, folder: Path) -> dict[str, Any]:
    build_demo_model(folder / "model", text_only=True)
    options = {**OPTIONS, "max_num_seqs": SEQS, "worker_cls": "accelerator.SimulatedWorker"}
    job = {
        "name": "plan",
        "input": {"path": str(write(folder / "rows.jsonl", n_rows))},
        "prompt": {"user": "{{ q }}"},
        "engine": {"model": str(folder / "model"), "options": options},
        "sampling": SAMPLING,
        "budget": {"price_per_gpu_hour": 2.5},
        "output": {"dir": str(folder / "output")},
    }
    (folder / "job.toml").write_text(tomlkit.dumps(job))
    forecast = batchkit(folder, "plan", "--rows", str(SAMPLED), "--json")
    ran = batchkit(folder, "run")
    status = batchkit(folder, "status", "--json")
    took = {
        "prompt_tokens": status["prompt_tokens"],
        "completion_tokens": status["completion_tokens"],
        "seconds": ran["seconds"],
        "price": ran["price"],
    }
    print(f"{'':>18} {'low':>12} {'expected':>12} {'high':>12} {'it took':>12}")
    found = {}
    for figure, value in took.items():
        low, expected, high = forecast[figure].values()
        found[figure] = {**forecast[figure], "took": value, "inside": low <= value <= high}
        outcome = "inside" if low <= value <= high else "OUTSIDE"
        print(
            f"{figure:>18} {low:>12,.6g} {expected:>12,.6g} {high:>12,.6g} {value:>12,.6g}  {outcome}"
        )
    return found


def batchkit(folder: Path, command: str, *args: str) -> dict[str, Any]:
    """Run a command of batchkit, and return the JSON of its last line."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parent)]),
        "SIMULATED_ACCELERATOR": json.dumps(COSTS),
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    job = folder / "job.toml"
    return frame.batchkit(folder, command, job, *args, environment=environment).summary


def main() -> None:
    args = arguments(
        __doc__,
        "14 jobs, 2,000 rows",
        {
            "first": {"type": int, "default": 1000, "help": "number of the first simulated job"},
            "only": {"choices": ["simulated", "vllm"]},
        },
        jobs=(50, 14),
        rows=(50_000, 2_000),
    )
    n_jobs, n_rows = args.jobs, args.rows
    found: dict[str, Any] = {"jobs": n_jobs, "rows": n_rows}
    if args.only != "vllm":
        found["inside"] = simulated(range(args.first, args.first + n_jobs))
    if args.only != "simulated":
        with tempfile.TemporaryDirectory() as folder:
            found["vllm"] = on_vllm(n_rows, Path(folder))
    figures = [
        Figure(f"{figure} inside, of {n_jobs} simulated jobs", share, "", WANTED)
        for figure, share in found.get("inside", {}).items()
    ] + [
        Figure(f"{figure}, run by forecast, {n_rows:,} rows", one["took"] / one["expected"])
        for figure, one in found.get("vllm", {}).items()
    ]
    report("plan", figures, **found)
    is_inside = all(one["inside"] for one in found.get("vllm", {}).values())
    if not is_inside or any(figure.outcome == "MISSED" for figure in figures):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
