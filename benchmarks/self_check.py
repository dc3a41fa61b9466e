"""The self-check: false alarms on sound engines, and its cost.

    python benchmarks/self_check.py [--runs 50] [--rows 32] [--cost-rows 20000] [--quick]

- False alarms: ``--runs`` runs without a fault, each with other prompts, spread over ten engines: vLLM and
  transformers with SmolLM2-135M in float32 and bfloat16, llama.cpp with its weights in 4 bits, the demo model in
  vLLM and transformers, and vLLM with both models at temperature 1. Every run computes 8 of its rows again alone. A
  run with a different row is a false alarm. Needs ``make real-models`` and ``make llama-server``.
- Cost: a run on real vLLM with a simulated accelerator (256 requests at once, 12 ms a step), with the default self-check
  and without. By default, it lasts some minutes; 1 % of its time is allowed.

``--runs 0`` and ``--cost-rows 0`` leave one of the two out.
"""

from __future__ import annotations

import os
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
DEMO, SMOLLM = "demo", "smollm2-135m-instruct"
CHECKED = 8
HEADINGS = ("runs", "alarms", "rows", "equal", "near ties", "different")


class Sound(NamedTuple):
    """An engine without a fault. ``kind``: as in ``[engine]``, or llama.cpp."""

    kind: str
    model: str
    dtype: str
    temperature: float = 0.0

    @property
    def label(self) -> str:
        drawn = f", temperature {self.temperature:g}" if self.temperature else ""
        return f"{self.kind}, {self.model}, {self.dtype}{drawn}"

    def table(self, folder: Path) -> dict[str, Any]:
        """Return the table ``[engine]``. ``folder``: has a folder for each model."""
        options: dict[str, Any] = {"max_num_seqs": 16, "max_model_len": 512}
        if self.kind == "llama.cpp":
            file = folder / self.model / "model.gguf"
            return {"kind": "openai-server", "model": str(file), "server": {}, "options": options}
        options |= {"dtype": self.dtype} | (SMALL if self.kind == "vllm" else {})
        return {"kind": self.kind, "model": str(folder / self.model), "options": options}


ENGINES = [
    *(Sound(kind, SMOLLM, dtype) for kind in ("vllm", "transformers") for dtype in DTYPES),
    Sound("llama.cpp", SMOLLM, "Q4_1"),
    *(Sound("vllm", DEMO, dtype) for dtype in DTYPES),
    Sound("transformers", DEMO, "bfloat16"),
    Sound("vllm", SMOLLM, "bfloat16", 1.0),
    Sound("vllm", DEMO, "float32", 1.0),
]


def main() -> None:
    args = arguments(
        __doc__, "six runs, a short cost", runs=(50, 6), rows=(32, 16), cost_rows=(20_000, 2_000)
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        build_demo_model(folder / DEMO, text_only=True)
        found = [
            *(alarms(folder, args.runs, args.rows) if args.runs else ()),
            *(cost(folder, args.cost_rows) if args.cost_rows else ()),
        ]
    report("self_check", found)


def alarms(folder: Path, n_runs: int, n_rows: int) -> Iterator[Figure]:
    """Print the verdicts of runs without a fault."""
    sys.path[1:1] = [str(HERE.parent), str(HERE.parent / "scripts")]
    from real_models.__main__ import default_cache

    from tests.support.llama_cpp import NONE_FOUND, llama_server

    (folder / SMOLLM).symlink_to(default_cache() / SMOLLM)
    if program := llama_server():
        (folder / "llama-server").symlink_to(program)
        os.environ["PATH"] = f"{folder}{os.pathsep}{os.environ['PATH']}"
    print(f"{'engine':>52}" + "".join(f"{heading:>11}" for heading in HEADINGS))
    n_alarms = 0
    for place, engine in enumerate(ENGINES):
        its_runs = len(range(place, n_runs, len(ENGINES)))
        if engine.kind == "llama.cpp" and program is None:
            print(f"{engine.label:>52} {NONE_FOUND}")
        elif its_runs:
            counts, gaps = verdicts(folder, engine, its_runs, n_rows)
            n_alarms += counts["alarms"]
            found = "".join(f"{counts[heading.replace(' ', '_')]:>11}" for heading in HEADINGS)
            gap = f"  largest gap of a near tie {max(gaps):.3g}" if gaps else ""
            print(f"{engine.label:>52}{found}{gap}", flush=True)
    print()
    yield Figure("false alarms in runs without a fault", n_alarms, "runs", 0, at_most=True)


def verdicts(
    folder: Path, engine: Sound, n_runs: int, n_rows: int
) -> tuple[Counter[str], list[float]]:
    """Return the sum of the self-checks of ``n_runs`` runs, and the gaps of near ties."""
    from batchkit import JobConfig, ProductionBatchProcessor
    from batchkit.storage.starts import read_history

    job = JobConfig(
        name=f"sound-{ENGINES.index(engine)}",
        engine=engine.table(folder),
        sampling={"temperature": engine.temperature, "max_tokens": 40},
        self_check={"rows": CHECKED, "max_different": 1.0},
        output={"dir": str(folder / "output")},
    )
    counts, gaps = Counter[str](runs=n_runs), list[float]()
    with ProductionBatchProcessor(job) as processor:
        for number in range(n_runs):
            prompts = [
                f"Write {n % 7 + 1} sentences about {WORDS[(n + number) % len(WORDS)]}, number {number}."
                for n in range(n_rows)
            ]
            summary = processor.process(prompts, name=f"{job.name}-{number}")
            checked = read_history(Path(summary.folder)).self_checks
            counts.update(checked.counts(), alarms=checked.different > 0)
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
