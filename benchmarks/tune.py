"""How near `batchkit tune` comes to the best options of simulated devices, against random search and Optuna's default
sampler with as many trials.

A device here is a formula, no engine: rows a second for each choice of the options, with 1.5 % of noise in what a
trial shows. The optimum is known, as every choice is looked at. The search is batchkit's own code; only what runs a
trial is replaced. Devices drawn at random by ``--seed`` are ones that nobody has looked at while the search was written.

    pip install optuna; python benchmarks/tune.py --seed 7
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from random import Random
from typing import Any
from unittest.mock import patch

from frame import Figure, arguments, report

from batchkit.commands.trial import Trial
from batchkit.commands.trial.measurement import Figures, Idle
from batchkit.commands.tuning.known import Tried
from batchkit.commands.tuning.tune import SearchLimits, Tuned, tune
from batchkit.config.tables import JobConfig

NOISE = 0.015
RAM_GIB = 64.0  # host memory for KV caches
# n-gram speculation: number of guesses, and how many are right on average if nine of ten are.
GUESSED = 5
RIGHT = sum(0.9**n for n in range(1, GUESSED + 1))
N_GRAM = {"method": "ngram", "num_speculative_tokens": GUESSED, "prompt_lookup_max": 4}
SPACE: dict[str, list[Any]] = {
    "max_num_seqs": [round(2 ** (n / 2)) for n in range(6, 23)],
    "max_num_batched_tokens": [2**n for n in range(9, 17)],
    "async_scheduling": [True, False],
    "enable_prefix_caching": [True, False],
    "enable_chunked_prefill": [True, False],
    "enforce_eager": [True, False],
    "gpu_memory_utilization": [0.92, 0.95],
    "run.render_threads": [2**n for n in range(1, 7)],
    "workers.per_gpu": [1, 2, 4],
    "kv_offloading_size": [0.0, RAM_GIB],
    "speculative_config": [None, N_GRAM],
}
ACROSS = {2: [(1, 1), (1, 2), (2, 1)]}  # by number of GPUs: tensor parallel, workers
DEFAULT = {
    "max_num_seqs": 1024,
    "max_num_batched_tokens": 8192,
    "async_scheduling": True,
    "enable_prefix_caching": True,
    "enable_chunked_prefill": True,
    "enforce_eager": False,
    "gpu_memory_utilization": 0.92,
    "run.render_threads": 4,
    "workers.per_gpu": 1,
    "kv_offloading_size": 0.0,
    "speculative_config": None,
}
FLIPPED = {
    "gpu_memory_utilization": [0.95],
    "kv_offloading_size": [RAM_GIB],
    "speculative_config": [N_GRAM],
}
_NOT_WALKED = (*FLIPPED, "run.render_threads", "workers.per_gpu")
WALKED = {name: DEFAULT[name] for name in DEFAULT if name not in _NOT_WALKED}


@dataclass(frozen=True)
class Device:
    """A simulated device. Costs are in milliseconds. A step costs ``step``, ``seq`` for each
    sequence, ``token`` for each prompt token, and ``host`` for scheduling, which asynchronous
    scheduling hides; ``core`` for what it does not hide. While one engine's core works, another one on
    the GPU can compute. ``kv``: number of sequences that fit into the KV cache; more are preempted. A
    row has ``prompt`` and ``answer`` tokens; ``shared``: fraction of the prompt that rows share.
    ``crowd``: cost of each further sequence for all others, which makes a smaller batch faster.
    ``image``: time of a thread to render a row, on 16 cores. ``weights``: fraction of a GPU's
    memory for the weights, which tensor parallelism divides. ``talk``: cost of tensor parallelism
    per step.

    ``copied``: fraction of the answer's tokens where speculation makes guesses, because the answer copies the prompt. At
    least a tenth of the tokens have guesses, which are wrong if nothing is copied. A guessed token costs as much as a
    prompt token. vLLM does not schedule asynchronously with n-gram speculation. ``evicted``: fraction of the shared
    prompt that the KV cache has lost when the next row needs it. With ``kv_offloading_size``, these tokens and those of
    preempted sequences are read from the host's memory instead of computed again; each takes ``load``."""

    name: str
    step: float = 8.0
    seq: float = 0.02
    token: float = 0.01
    host: float = 1.0
    core: float = 0.0
    kv: int = 2048
    prompt: int = 300
    answer: int = 100
    shared: float = 0.0
    eager: float = 0.3
    crowd: float = 0.0
    image: float = 0.0
    gpus: int = 1
    weights: float = 0.3
    talk: float = 3.0
    copied: float = 0.0
    evicted: float = 0.0
    load: float = 0.002

    def choices(self) -> Iterator[dict[str, Any]]:
        """Yield all choices of ``SPACE`` and of the GPUs, also with as many sequences as the KV
        cache holds. Threads that render nothing are left out."""
        space = SPACE if self.image else {**SPACE, "run.render_threads": [4]}
        for values in itertools.product(*space.values()):
            for across, workers in ACROSS.get(self.gpus, [(1, 1)]):
                ours = {"tensor_parallel_size": across, "workers.count": workers}
                chosen = {**dict(zip(SPACE, values, strict=True)), **ours}
                yield chosen
                if chosen["max_num_seqs"] == DEFAULT["max_num_seqs"]:
                    yield {**chosen, "max_num_seqs": self.holds(chosen)}

    def seen(self, options: Mapping[str, Any]) -> tuple[float, Idle]:
        """Return the rows per second that a trial shows, and what the engine waits for
        meanwhile."""
        chosen = {**DEFAULT, "workers.count": 1, **options}
        size = chosen["max_num_seqs"]
        workers = chosen["workers.count"] * _sharing(chosen)
        engines = workers * self.engine(chosen)
        rendered = (
            1e9 if not self.image else 1000 / self.image * min(16, chosen["run.render_threads"])
        )
        if rendered < engines:
            running = workers * size * rendered / engines
            return rendered, Idle(1 - rendered / engines, 0.0, 0.0, running, 0)
        held = min(size, self.holds(chosen))
        full = 0.0 if held == size else 0.8
        return engines, Idle(0.0, 0.0, full, workers * held, 100 * (held < size))

    def rows_per_s(self, options: Mapping[str, Any]) -> float:
        return self.seen(options)[0]

    def holds(self, chosen: Mapping[str, Any]) -> int:
        """Return the number of sequences that fit into the KV cache of an engine."""
        across = chosen.get("tensor_parallel_size", 1)
        free = chosen["gpu_memory_utilization"] * across / _sharing(chosen) - self.weights
        return int(self.kv * free / (0.92 - self.weights))

    def engine(self, chosen: Mapping[str, Any]) -> float:
        size, budget = chosen["max_num_seqs"], chosen["max_num_batched_tokens"]
        if budget < size or self.holds(chosen) < 1:
            return 0.0
        across, kv = chosen.get("tensor_parallel_size", 1), self.holds(chosen)
        running = min(size, kv)
        guesses, offloads = bool(chosen["speculative_config"]), bool(chosen["kv_offloading_size"])
        lost = 0.3 * max(0.0, 1 - kv / size)  # what preempted sequences compute again
        shared = self.prompt * self.shared * chosen["enable_prefix_caching"]
        loaded = shared * self.evicted * offloads
        prompt = self.prompt - shared * (1 - self.evicted) - loaded
        if offloads:
            lost *= self.load / self.token
        step = self.step * (1 + self.eager * chosen["enforce_eager"]) / across
        step += self.talk * (across > 1)
        is_hidden = chosen["async_scheduling"] and not guesses
        host = self.core + self.host * (0.1 if is_hidden else 1.0)
        step += 0.02 * self.step * chosen["enable_prefix_caching"]
        step += (self.seq * running + self.crowd * max(0, running - 128) ** 2 / 1000) / across
        guessed = GUESSED * max(0.1, self.copied) * running * guesses
        answered = running * (1 + RIGHT * self.copied * guesses)
        # Each step takes up as many new rows as end in it, but no more prompt than the budget holds.
        new = min(answered / self.answer, max(0.0, budget - running - guessed) / prompt)
        step += (
            self.token / across * new * prompt * (1.0 if chosen["enable_chunked_prefill"] else 1.25)
        )
        step += (self.token * guessed + self.load * new * loaded) / across
        step = max(step + host, _sharing(chosen) * step)
        if budget > 16384:  # a long step makes the others wait
            step *= 1 + 0.05 * math.log2(budget / 16384)
        return 1000 * new / step * (1 - lost)


def _sharing(chosen: Mapping[str, Any]) -> int:
    """Return the number of engines that share a GPU. Engines that each need several GPUs share none."""
    return int(chosen["workers.per_gpu"]) if chosen.get("tensor_parallel_size", 1) == 1 else 1


DEVICES = [
    Device("bound by decoding", step=20, seq=0.005),
    Device("bound by sequences", step=2, seq=0.02, crowd=0.02),
    Device("bound by prompts", prompt=3000, answer=20, token=0.02),
    Device("short of KV cache", kv=200, seq=0.01),
    Device("bound by the host", step=2, host=6, seq=0.01),
    Device("shared prompts", prompt=2000, answer=30, shared=0.8),
    Device("nothing shared, small", step=1, seq=0.05, prompt=100, answer=30),
    Device("bound by images", step=4, seq=0.01, image=60, prompt=800, answer=40),
    Device("two GPUs", step=12, seq=0.02, kv=300, gpus=2),
    Device("two GPUs, large weights", step=40, seq=0.01, kv=24, weights=0.8, gpus=2),
    Device("bound by the scheduler", step=0.5, seq=0.001, token=0.001, core=8, weights=0.1),
    Device("bound by the device", step=30, seq=0.02, core=1),
    Device("its default is best", step=12, seq=0.004, kv=1024, shared=0.3),
    Device("copying", step=15, prompt=400, answer=400, kv=96, copied=0.3),
    Device("KV in RAM", prompt=4000, answer=60, kv=160, shared=0.6, evicted=0.8, token=0.02),
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
    return max(device.rows_per_s(choice) for choice in device.choices())


class Simulated:
    """Trials of a simulated device, which take no time."""

    def __init__(self, device: Device, random: Random) -> None:
        self.rows = self.total = 1_000_000
        self.signum: int | None = None
        self._device, self._random = device, random

    def run(self, job: JobConfig, at_once: int, seconds: float, least: float = 0.0) -> Trial:
        run = {
            "workers.count": job.workers.count or 1,
            "run.render_threads": job.run.render_threads,
            "workers.per_gpu": job.workers.per_gpu or 1,
        }
        rate, idle = self._device.seen({**job.engine.options, **run})
        if not rate:
            return Trial("error: the budget is too small", "", 1.0)
        rows = round(1000 * rate * self._random.gauss(1, NOISE))
        tokens = rows * self._device.prompt, rows * self._device.answer
        return Trial(
            "ok", "", 30.0, figures=Figures(1000.0, rows, *tokens, 0.0, 0.0, True), idle=idle
        )


class Forgetful:
    """A replacement for the file of earlier trials that stores nothing."""

    def __init__(self, job: JobConfig) -> None: ...

    def of(self, options: Any) -> None: ...

    def keep(self, tried: Any) -> None: ...

    def keep_gain(self, options: Any, ratio: float) -> None: ...


def tuned(device: Device, random: Random) -> Tuned:
    @contextmanager
    def trials_of(job: JobConfig, rows: int | None, command: str) -> Iterator[Simulated]:
        yield Simulated(device, random)

    room = "batchkit.commands.tuning."
    options = {**WALKED, **FLIPPED}
    with (
        patch(f"{room}tune.Known", Forgetful),
        patch(f"{room}tune.draw", lambda *given: None),
        patch(f"{room}options.visible_gpus", lambda: device.gpus),
        patch("batchkit.execution.places.visible_gpus", lambda: device.gpus),
    ):
        job = JobConfig(engine={"kind": "vllm", "model": "none"})  # type: ignore[arg-type]
        given = {"options": options, "trials_of": trials_of}
        return tune(job, SearchLimits(600, None, 10), **given)  # type: ignore[arg-type]


def searched(found: Tuned) -> list[Tried]:
    """Return the trials of the search, without the final comparison of the default with the best
    options."""
    again = [n for n, tried in enumerate(found.trials) if not tried.options][1:]
    return found.trials[: again[0]] if again else found.trials


def at_random(device: Device, random: Random, n_trials: int) -> float:
    """Return the true rate of the choice that looked best among ``n_trials`` random choices, one of
    which is the default."""
    across = ACROSS.get(device.gpus, [(1, 1)])
    choices: list[dict[str, Any]] = [DEFAULT]
    for _ in range(n_trials - 1):
        options = {name: random.choice(values) for name, values in SPACE.items()}
        group, workers = random.choice(across)
        choices.append({**options, "tensor_parallel_size": group, "workers.count": workers})
    seen = [
        (device.rows_per_s(choice) * random.gauss(1, NOISE), n) for n, choice in enumerate(choices)
    ]
    return device.rows_per_s(choices[max(seen)[1]])


def by_optuna(device: Device, random: Random, n_trials: int) -> float:
    """Return the same for Optuna's default sampler, which gets the result of the default first; NaN
    if Optuna is not installed."""
    if find_spec("optuna") is None:
        return math.nan
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    sampler = optuna.samplers.TPESampler(seed=random.randrange(2**31))
    study = optuna.create_study(direction="maximize", sampler=sampler)
    # Values by number: Optuna takes no tables.
    study.enqueue_trial({n: SPACE[n].index(value) for n, value in DEFAULT.items()} | {"across": 0})
    across = ACROSS.get(device.gpus, [(1, 1)])
    chosen = list[dict[str, Any]]()
    for _ in range(n_trials):
        trial = study.ask()
        options = {
            name: values[trial.suggest_categorical(name, [*range(len(values))])]
            for name, values in SPACE.items()
        }
        group, workers = across[trial.suggest_categorical("across", [*range(len(across))])]
        chosen.append({**options, "tensor_parallel_size": group, "workers.count": workers})
        study.tell(trial, device.rows_per_s(chosen[-1]) * random.gauss(1, NOISE))
    return device.rows_per_s(chosen[study.best_trial.number])


def main() -> None:
    args = arguments(__doc__, "one round", rounds=(21, 1), seed=(7, 7))
    random = Random(args.seed)
    devices = [*DEVICES, *(drawn(random, n) for n in (1, 2))]
    heads = "default  tune  random  Optuna  trials   (share of the optimum, median of "
    print(f"{'device':24} {heads}{args.rounds})")
    shares = dict[str, list[float]](tune=[], random=[], optuna=[], default=[])
    most_trials, wide, least = 0, list[float](), math.inf
    for device in devices:
        best, rounds = optimum(device), list[tuple[float, ...]]()
        for _ in range(args.rounds):
            found = tuned(device, random)
            options = found.best if found.is_gain else {}
            n_trials = len(searched(found))
            others = [search(device, random, n_trials) for search in (at_random, by_optuna)]
            rates = (device.rows_per_s(options), *others, device.rows_per_s({}))
            rounds.append((*(rate / best for rate in rates), n_trials))
            least = min(least, rates[0] / rates[-1])
        *medians, trials = map(statistics.median, zip(*rounds, strict=True))
        most_trials = max(most_trials, *(int(each[-1]) for each in rounds))
        for name, share in zip(shares, medians, strict=True):
            shares[name].append(share)
        ours, chance, theirs, default = medians
        if default <= 1 / 1.25:
            wide.append(ours / default)
        print(
            f"{device.name:24} {default:7.3f} {ours:5.3f} {chance:7.3f} {theirs:7.3f} {trials:7.0f}"
        )
    near = sum(share >= 0.97 for share in shares["tune"])
    print(
        f"97 % of the optimum on {near} of {len(devices)} devices, in at most {most_trials} choices;"
    )
    print(
        f"where the optimum is 1.25 x the default or more, at least {min(wide):.2f} x the default"
    )
    mean = {name: statistics.mean(values) for name, values in shares.items()}
    by = mean["tune"] / mean["optuna"]
    against_optuna = [] if math.isnan(by) else [Figure("tune: against Optuna", by, "×", 1.0)]
    wanted = 15 if args.rounds > 1 else 11  # in one round, noise hides gains of 3 %
    report(
        "tune",
        [
            Figure(f"tune: devices of {len(devices)} at 97 % of the optimum", near, "", wanted),
            Figure("tune: least gain where 1.25 can be had", min(wide), "×", 1.2),
            Figure("tune: least of all rounds against the default", least, "×", 1.0),
            Figure("tune: against random search", mean["tune"] / mean["random"], "×", 1.0),
            *against_optuna,
        ],
        trials=most_trials,
    )


if __name__ == "__main__":
    main()
