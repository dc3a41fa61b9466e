"""The self-check: false alarms on sound engines, and its cost.

    python benchmarks/self_check.py [--runs 50] [--rows 32] [--cost-rows 20000] [--quick]

- False alarms: ``--runs`` runs without a fault, each with other prompts, spread over six engines: vLLM and
  transformers with SmolLM2-135M in float32 and bfloat16, vLLM with SmolLM2-135M at temperature 1, and vLLM with the
  demo model. Every run computes 8 of its rows again alone. Needs ``make real-models``.
- Cost: a run on real vLLM with a simulated accelerator (256 requests at once, 12 ms a step), with the default self-check
  and without. By default, it lasts some minutes; 1 % of its time is allowed.
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import text
from frame import HERE, Figure, arguments, report
from sides import Setting, run_side

from batchkit.commands.demo_model import build_demo_model

SMALL = {"enforce_eager": True, "max_model_len": 512, "kv_cache_memory_bytes": 2**28}
WORDS = ("tea", "rain", "bread", "a river", "the moon", "an old clock", "snow", "a train", "music")
DTYPES = ("float32", "bfloat16")
CHECKED = 8


class Sound(NamedTuple):
    """An engine without a fault."""

    kind: str
    model: str
    dtype: str
    temperature: float = 0.0

    @property
    def label(self) -> str:
        drawn = f", temperature {self.temperature:g}" if self.temperature else ""
        return f"{self.kind}, {Path(self.model).name}, {self.dtype}{drawn}"


def main() -> None:
    args = arguments(
        __doc__, "six runs, a short cost", runs=(50, 6), rows=(32, 16), cost_rows=(20_000, 2_000)
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        build_demo_model(folder / "demo", text_only=True)
        found = [*alarms(folder, args.runs, args.rows), *cost(folder, args.cost_rows)]
    report("self_check", found)


def alarms(folder: Path, n_runs: int, n_rows: int) -> Iterator[Figure]:
    """Print the verdicts of runs without a fault."""
    sys.path[1:1] = [str(HERE.parent), str(HERE.parent / "scripts")]
    from real_models.__main__ import default_cache

    smollm = str(default_cache() / "smollm2-135m-instruct")
    engines = [
        *(Sound(kind, smollm, dtype) for kind in ("vllm", "transformers") for dtype in DTYPES),
        Sound("vllm", smollm, "bfloat16", 1.0),
        Sound("vllm", str(folder / "demo"), "float32"),
    ]
    print(
        f"{'engine':>52} {'runs':>5} {'rows':>5} {'equal':>6} {'near ties':>10} {'different':>10}"
    )
    n_alarms = 0
    for place, engine in enumerate(engines):
        its_runs = len(range(place, n_runs, len(engines)))
        counts, gaps = verdicts(folder, engine, its_runs, n_rows)
        n_alarms += counts["different"]
        print(
            f"{engine.label:>52} {its_runs:>5} {counts['rows']:>5} {counts['equal']:>6}"
            f" {counts['near_ties']:>10} {counts['different']:>10}"
            + (f"  largest gap of a near tie {max(gaps):.3g}" if gaps else "")
        )
    print()
    yield Figure("different rows in runs without a fault", n_alarms, "rows", 0, at_most=True)


def verdicts(
    folder: Path, engine: Sound, n_runs: int, n_rows: int
) -> tuple[Counter[str], list[float]]:
    """Return the sum of the self-checks of ``n_runs`` runs, and the gaps of near ties."""
    from batchkit import JobConfig, ProductionBatchProcessor
    from batchkit.storage.starts import read_history

    options: dict[str, Any] = {"dtype": engine.dtype, "max_num_seqs": 16, "max_model_len": 512}
    if engine.kind == "vllm":
        options |= SMALL
    job = JobConfig(
        name=f"sound-{engine.kind}-{engine.dtype}-{engine.temperature:g}",
        engine={"kind": engine.kind, "model": engine.model, "options": options},
        sampling={"temperature": engine.temperature, "max_tokens": 40},
        self_check={"rows": CHECKED, "max_different": 1.0},
        output={"dir": str(folder / "output" / Path(engine.model).name)},
    )
    counts, gaps = Counter[str](), list[float]()
    with ProductionBatchProcessor(job) as processor:
        for number in range(n_runs):
            prompts = [
                f"Write {n % 7 + 1} sentences about {WORDS[(n + number) % len(WORDS)]}, number {number}."
                for n in range(n_rows)
            ]
            summary = processor.process(prompts, name=f"{job.name}-{number}")
            checked = read_history(Path(summary.folder)).self_checks
            counts.update(checked.counts())
            gaps += [its["gap"] for its in checked.differences if its["kind"] == "near_tie"]
    return counts, gaps


def cost(folder: Path, n_rows: int) -> Iterator[Figure]:
    """Print the share of a run's time that the default self-check takes."""
    from batchkit.storage.starts import read_history

    options = {**text.OPTIONS, "max_num_seqs": 256}
    job = {
        "prompt": {"user": "{{ q }}"},
        "engine": {"model": str(folder / "demo"), "options": options},
        "sampling": text.SAMPLING,
        "output": {"dir": str(folder / "cost")},
    }
    rows = text.write(folder / "rows.jsonl", n_rows)
    costs = {**text.STEP, "step_ms": 12, "token_us": 4}
    found = run_side(Setting("256x12", rows, costs, {}, as_on_gpu=True), "batchkit", job, "cost")
    checked = read_history(folder / "cost" / "cost").self_checks
    share = checked.seconds / found["seconds"]
    print(f"{n_rows:,} rows in {found['seconds']:.0f} s; {checked.in_words()}")
    yield Figure("share of a run that the self-check takes", share, "", 0.01, at_most=True)
    yield Figure("rows computed again", checked.rows, "rows")


if __name__ == "__main__":
    main()
