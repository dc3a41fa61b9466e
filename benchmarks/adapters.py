"""What ordering rows by their adapter gains, and what a hundred adapters cost.

    python benchmarks/adapters.py [--rounds 3] [--rows 96] [--adapters 100] [--quick]

Real vLLM on the CPU, a tiny Qwen2 with random weights and adapters of rank 8, in the run's own process.
- eight: each row with eight adapters, of which four fit into a batch; ordered within the look-ahead, and shuffled without
  one. All rows begin with the same 200 words.
- many: eight rows with each adapter, of which four fit into a batch, against as many rows without any.
"""

from __future__ import annotations

import json
import random
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path

import tomlkit
from frame import Ended, Figure, arguments, batchkit, report, spread

from batchkit.commands.demo_loras import write_lora
from batchkit.commands.demo_model import SAMPLE_TEXT, build_demo_model

EIGHT, FITTING, EACH = 8, 4, 8
OPTIONS = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 1024,
    "max_num_seqs": 32,
    "block_size": 32,
    "kv_cache_memory_bytes": 256 * 2**20,
}


def main() -> None:
    args = arguments(__doc__, "one round", rounds=(3, 1), rows=(96, 24), adapters=(100, 20))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        build_demo_model(folder / "model", text_only=True)
        names = [f"a{n}" for n in range(max(EIGHT, args.adapters))]
        for seed, adapter in enumerate(names):
            write_lora(folder / adapter, folder / "model", rank=8, seed=seed, strength=0.5)
        ratios, seconds = [], dict[str, list[float]]()
        for _ in range(args.rounds):
            ordered = run(folder, names[:EIGHT], args.rows, look_ahead=1_000)
            shuffled = run(folder, names[:EIGHT], args.rows, look_ahead=1)
            ratios.append(shuffled.summary["seconds"] / ordered.summary["seconds"])
            for side, ended in (("ordered", ordered), ("shuffled", shuffled)):
                seconds.setdefault(side, []).append(ended.summary["seconds"])
        many = run(folder, names[: args.adapters], EACH, look_ahead=1_000)
        none = run(folder, [], EACH * args.adapters, look_ahead=1_000)
    ratio = statistics.median(ratios)
    for side, found in seconds.items():
        print(f"{side:>9}: {statistics.median(found):6.2f} s ({spread(found)})")
    print(f"ordered is {ratio:.2f} × as fast as shuffled ({spread(ratios)})")
    for what, ended in ((f"{args.adapters} adapters", many), ("none", none)):
        said = ended.summary
        print(
            f"{what:>13}: {said['seconds']:6.2f} s, loaded in {said['load_seconds']:.1f} s, {ended.peak_mib:,.0f} MiB"
        )
    figures = [
        Figure("eight adapters, shuffled / ordered", ratio, wanted=1.2),
        Figure(f"{args.adapters} adapters, time / none", _ratio(many, none, "seconds")),
        Figure(f"{args.adapters} adapters, more to load", _more_to_load(many, none), "s"),
        Figure(f"{args.adapters} adapters, more memory", many.peak_mib - none.peak_mib, "MiB"),
    ]
    report("adapters", figures, rows=args.rows, rounds=args.rounds)


def run(folder: Path, names: Sequence[str], n_rows: int, *, look_ahead: int) -> Ended:
    """Each row once for each adapter, in random order."""
    beginning = " ".join(SAMPLE_TEXT.split()[:200])
    rows = [
        {"q": f"{beginning} Question {n}?", "a": a} for n in range(n_rows) for a in names or [""]
    ]
    random.Random(1).shuffle(rows)
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = {**OPTIONS, **({"max_loras": FITTING} if names else {})}
    engine = {"model": "model", "in_process": True, "options": options}
    prompt = {"user": "{{ q }}"}
    if names:
        engine["loras"] = {name: name for name in names}
        prompt["lora"] = "{{ a }}"
    job = {
        "name": "adapters",
        "input": {"path": "rows.jsonl"},
        "prompt": prompt,
        "engine": engine,
        "sampling": {"max_tokens": 16},
        "run": {"look_ahead": look_ahead},
    }
    (folder / "job.toml").write_text(tomlkit.dumps(job))
    return batchkit(folder, "run", "job.toml", "--fresh")


def _ratio(a: Ended, b: Ended, name: str) -> float:
    return float(a.summary[name] / b.summary[name])


def _more_to_load(a: Ended, b: Ended) -> float:
    return float(a.summary["load_seconds"] - b.summary["load_seconds"])


if __name__ == "__main__":
    main()
