"""How near `batchkit tune` comes to the best options of simulated devices, against random search with as many trials.

A device here is a formula, no engine: rows a second for each choice of the options, with 1.5 % of noise in what a
trial shows. The optimum is known, as every choice is looked at. The search is batchkit's own code; only what runs a
trial is replaced. Devices drawn at random by ``--seed`` are ones that nobody has looked at while the search was written.

    python benchmarks/tune.py --seed 7
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from random import Random
from typing import Any
from unittest.mock import patch

from frame import Figure, arguments, report

from batchkit.commands.trial import Trial
from batchkit.commands.trial.measurement import Figures
from batchkit.commands.tuning.tune import Tuned, tune
from batchkit.config.tables import JobConfig

NOISE = 0.015
SPACE: dict[str, list[Any]] = {
    "max_num_seqs": [2**n for n in range(3, 12)],
    "max_num_batched_tokens": [2**n for n in range(9, 17)],
    "async_scheduling": [True, False],
    "enable_prefix_caching": [True, False],
    "enable_chunked_prefill": [True, False],
    "enforce_eager": [True, False],
}
DEFAULT = {
    "max_num_seqs": 1024,
    "max_num_batched_tokens": 8192,
    "async_scheduling": True,
    "enable_prefix_caching": True,
    "enable_chunked_prefill": True,
    "enforce_eager": False,
}


@dataclass(frozen=True)
class Device:
    """Milliseconds: a step costs ``step``, ``seq`` for each sequence, ``token`` for each token of a prompt, and ``host``
    for scheduling, which asynchronous scheduling hides. ``kv``: sequences that fit; more are preempted. A row has
    ``prompt`` and ``answer`` tokens, of the prompt a share ``shared`` with others. ``crowd``: what each further sequence
    costs the others, which makes a smaller batch faster."""

    name: str
    step: float = 8.0
    seq: float = 0.02
    token: float = 0.01
    host: float = 1.0
    kv: int = 2048
    prompt: int = 300
    answer: int = 100
    shared: float = 0.0
    eager: float = 0.3
    crowd: float = 0.0

    def rows_per_s(self, options: Mapping[str, Any]) -> float:
        chosen = {**DEFAULT, **options}
        size, budget = chosen["max_num_seqs"], chosen["max_num_batched_tokens"]
        if budget < size:
            return 0.0
        running = min(size, self.kv)
        lost = 0.3 * max(0.0, 1 - self.kv / size)  # what preempted sequences compute again
        prompt = self.prompt * (1 - self.shared * chosen["enable_prefix_caching"])
        step = self.step * (1 + self.eager * chosen["enforce_eager"])
        step += self.host * (0.1 if chosen["async_scheduling"] else 1.0)
        step += 0.02 * self.step * chosen["enable_prefix_caching"]
        step += self.seq * running + self.crowd * max(0, running - 128) ** 2 / 1000
        # Each step takes up as many new rows as end in it, but no more prompt than the budget holds.
        new = min(running / self.answer, max(0.0, budget - running) / prompt)
        step += self.token * new * prompt * (1.0 if chosen["enable_chunked_prefill"] else 1.25)
        if budget > 16384:  # a long step makes the others wait
            step *= 1 + 0.05 * math.log2(budget / 16384)
        return 1000 * new / step * (1 - lost)


DEVICES = [
    Device("bound by decoding", step=20, seq=0.005),
    Device("bound by sequences", step=2, seq=0.02, crowd=0.02),
    Device("bound by prompts", prompt=3000, answer=20, token=0.02),
    Device("short of KV cache", kv=200, seq=0.01),
    Device("bound by the host", step=2, host=6, seq=0.01),
    Device("shared prompts", prompt=2000, answer=30, shared=0.8),
    Device("nothing shared, small", step=1, seq=0.05, prompt=100, answer=30),
    Device("its default is best", step=12, seq=0.004, kv=1024, shared=0.3),
]


def drawn(random: Random, n: int) -> Device:
    return Device(
        f"drawn {n}",
        step=random.uniform(1, 25),
        seq=10 ** random.uniform(-3, -1),
        token=10 ** random.uniform(-2.5, -1.5),
        host=random.uniform(0.2, 6),
        kv=int(2 ** random.uniform(6, 11)),
        prompt=int(10 ** random.uniform(1.7, 3.5)),
        answer=int(10 ** random.uniform(1, 2.7)),
        shared=random.choice([0.0, 0.5, 0.9]),
        crowd=random.choice([0.0, 0.0, 0.02]),
    )


def optimum(device: Device) -> float:
    choices = itertools.product(*SPACE.values())
    return max(device.rows_per_s(dict(zip(SPACE, choice, strict=True))) for choice in choices)


class Simulated:
    """Trials of a device that cost nothing."""

    def __init__(self, device: Device, random: Random) -> None:
        self.rows = self.total = 1_000_000
        self.signum: int | None = None
        self._device, self._random = device, random

    def run(self, job: JobConfig, at_once: int, seconds: float) -> Trial:
        rate = self._device.rows_per_s(job.engine.options)
        if not rate:
            return Trial("error: the budget is too small", "", 1.0)
        rows = round(1000 * rate * self._random.gauss(1, NOISE))
        return Trial("ok", "", 30.0, figures=Figures(1000.0, rows, 0, 0, 0.0, 0.0, True))


class Forgetful:
    """No file of what earlier trials have shown."""

    def __init__(self, job: JobConfig) -> None: ...

    def of(self, options: Any) -> None: ...

    def keep(self, tried: Any) -> None: ...

    def keep_gain(self, options: Any, ratio: float) -> None: ...


def tuned(device: Device, random: Random) -> Tuned:
    @contextmanager
    def trials_of(job: JobConfig, rows: int | None) -> Iterator[Simulated]:
        yield Simulated(device, random)

    room = "batchkit.commands.tuning.tune."
    with (
        patch(f"{room}trials_of", trials_of),
        patch(f"{room}speed_options", lambda job: DEFAULT),
        patch(f"{room}Known", Forgetful),
    ):
        job = JobConfig(engine={"kind": "dry-run"})  # type: ignore[arg-type]
        return tune(job, minutes=600, rows=None, seconds=10)


def at_random(device: Device, random: Random, n_trials: int) -> float:
    """The true rate of what looked best among so many choices, the default one of them."""
    choices = [DEFAULT] + [
        {name: random.choice(values) for name, values in SPACE.items()} for _ in range(n_trials - 1)
    ]
    seen = [
        (device.rows_per_s(choice) * random.gauss(1, NOISE), n) for n, choice in enumerate(choices)
    ]
    return device.rows_per_s(choices[max(seen)[1]])


def main() -> None:
    args = arguments(__doc__, "one round", rounds=(5, 1), seed=(7, 7))
    random = Random(args.seed)
    devices = [*DEVICES, *(drawn(random, n) for n in (1, 2))]
    print(
        f"{'device':24} default  tune  random  trials   (share of the optimum, median of {args.rounds})"
    )
    ours, theirs, most_trials = list[float](), list[float](), 0
    for device in devices:
        best, shares, others, counts = optimum(device), list[float](), list[float](), list[int]()
        for _ in range(args.rounds):
            found = tuned(device, random)
            options = found.best if found.is_gain else {}
            n_trials = len({tuple(sorted(tried.options.items())) for tried in found.trials})
            shares.append(device.rows_per_s(options) / best)
            others.append(at_random(device, random, n_trials) / best)
            counts.append(n_trials)
        ours.append(statistics.median(shares))
        theirs.append(statistics.median(others))
        most_trials = max(most_trials, *counts)
        default = device.rows_per_s({}) / best
        print(
            f"{device.name:24} {default:7.3f} {ours[-1]:5.3f} {theirs[-1]:7.3f} {statistics.median(counts):7.0f}"
        )
    near = sum(share >= 0.97 for share in ours)
    print(
        f"tune reaches 97 % of the optimum on {near} of {len(devices)} devices, in at most {most_trials} choices"
    )
    report(
        "tune",
        [
            Figure("tune: devices of ten at 97 % of the optimum", near, "", 9),
            Figure(
                "tune: against random search",
                statistics.mean(ours) / statistics.mean(theirs),
                "×",
                1.0,
            ),
        ],
        trials=most_trials,
    )


if __name__ == "__main__":
    main()
