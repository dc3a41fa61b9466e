"""The gain from ordering rows by their adapter, and the cost of a hundred adapters.

    python benchmarks/adapters.py [--rounds 3] [--rows 96] [--adapters 100] [--quick]

Real vLLM on the CPU, a tiny Qwen2 with random weights and adapters of rank 8, in the run's own process.
- eight: each row with eight adapters, of which four fit into a batch; ordered within the look-ahead, and shuffled without
  one. All rows begin with the same 200 words.
- Ray: the same rows through Ray Data LLM at its defaults, whose column ``model`` names a row's adapter. Both from the moment
  when the model is loaded, which for batchkit includes that each adapter is tried, to the last change of the results.
- many: eight rows with each adapter, of which four fit into a batch, against as many rows without any.
"""

from __future__ import annotations

import json
import random
import shutil
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tomlkit
from commands import adopt_orphans, timed
from frame import Ended, Figure, arguments, batchkit, report, spread
from ray_data import SCRIPT

from batchkit.commands.demo_loras import write_lora
from batchkit.commands.demo_model import SAMPLE_TEXT, build_demo_model

EIGHT, FITTING, EACH, RANK = 8, 4, 8, 8
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
    adopt_orphans()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        build_demo_model(folder / "model", text_only=True)
        names = [f"a{n}" for n in range(max(EIGHT, args.adapters))]
        for seed, adapter in enumerate(names):
            write_lora(folder / adapter, folder / "model", rank=RANK, seed=seed, strength=0.5)
        ratios, seconds = [], dict[str, list[float]]()
        for _ in range(args.rounds):
            ordered = run(folder, names[:EIGHT], args.rows, look_ahead=1_000)
            shuffled = run(folder, names[:EIGHT], args.rows, look_ahead=1)
            ratios.append(shuffled.summary["seconds"] / ordered.summary["seconds"])
            for side, ended in (("ordered", ordered), ("shuffled", shuffled)):
                seconds.setdefault(side, []).append(ended.summary["seconds"])
        against_ray = [beside_ray(folder, names[:EIGHT], args.rows) for _ in range(args.rounds)]
        many = run(folder, names[: args.adapters], EACH, look_ahead=1_000)
        none = run(folder, [], EACH * args.adapters, look_ahead=1_000)
    ratio = statistics.median(ratios)
    for side, found in seconds.items():
        print(f"{side:>9}: {statistics.median(found):6.2f} s ({spread(found)})")
    print(f"ordered is {ratio:.2f} × as fast as shuffled ({spread(ratios)})")
    by_ray = statistics.median(against_ray)
    print(f"Ray Data LLM takes {by_ray:.2f} × the time of batchkit ({spread(against_ray)})")
    for what, ended in ((f"{args.adapters} adapters", many), ("none", none)):
        said = ended.summary
        print(
            f"{what:>13}: {said['seconds']:6.2f} s, loaded in {said['load_seconds']:.1f} s, {ended.peak_mib:,.0f} MiB"
        )
    figures = [
        Figure("eight adapters, shuffled / ordered", ratio, wanted=1.2),
        Figure("eight adapters, Ray Data LLM", by_ray, "×", 1.15),
        Figure(f"{args.adapters} adapters, time / none", _ratio(many, none, "seconds")),
        Figure(f"{args.adapters} adapters, more to load", _more_to_load(many, none), "s"),
        Figure(f"{args.adapters} adapters, more memory", many.peak_mib - none.peak_mib, "MiB"),
    ]
    report("adapters", figures, rows=args.rows, rounds=args.rounds)


def run(folder: Path, names: Sequence[str], n_rows: int, *, look_ahead: int) -> Ended:
    """Run each row once for each adapter, with the rows in random order."""
    write_job(folder, names, n_rows, look_ahead=look_ahead)
    return batchkit(folder, "run", "job.toml", "--fresh")


def beside_ray(folder: Path, names: Sequence[str], n_rows: int) -> float:
    """Return Ray's time divided by batchkit's time."""
    rows = write_job(folder, names, n_rows, look_ahead=1_000, worker_cls="stamped.CpuWorker")
    shutil.rmtree(folder / "output", ignore_errors=True)
    ours = after_load(folder, "ours", [sys.executable, "-m", "batchkit", "run", "job.toml"])
    theirs = after_load(folder, "ray", ray_command(folder, rows))
    shutil.rmtree(folder / "results")
    return theirs / ours


def ray_command(folder: Path, rows: Sequence[dict[str, str]]) -> list[str]:
    path = folder / "ray.jsonl"
    lines = [{"q": row["q"], "model": str(folder / row["a"])} for row in rows]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    loras = {"enable_lora": True, "max_loras": FITTING, "max_lora_rank": RANK}
    table = {
        "model": str(folder / "model"),
        "options": {**OPTIONS, **loras, "worker_cls": "stamped.CpuWorker"},
        "stages": {},
        "sampling": {"max_tokens": 16},
    }
    return [sys.executable, str(SCRIPT), str(path), "results", json.dumps(table)]


def after_load(folder: Path, name: str, command: Sequence[str]) -> float:
    """Return the seconds from the time at which the model is loaded to the last change of the
    results."""
    (folder / f"{name}.stamps").unlink(missing_ok=True)
    _, stamps = timed(name, command, folder, name, None)
    pattern = {"ours": "output/adapters/results.jsonl", "ray": "results/*.json"}[name]
    return max(path.stat().st_mtime for path in folder.glob(pattern)) - stamps[0]


def write_job(
    folder: Path, names: Sequence[str], n_rows: int, *, look_ahead: int, worker_cls: str = "auto"
) -> list[dict[str, str]]:
    """Write a job, and return its rows."""
    beginning = " ".join(SAMPLE_TEXT.split()[:200])
    rows = [
        {"q": f"{beginning} Question {n}?", "a": a} for n in range(n_rows) for a in names or [""]
    ]
    random.Random(1).shuffle(rows)
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options: dict[str, Any] = {**OPTIONS, "worker_cls": worker_cls}
    options |= {"max_loras": FITTING} if names else {}
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
    return rows


def _ratio(a: Ended, b: Ended, name: str) -> float:
    return float(a.summary[name] / b.summary[name])


def _more_to_load(a: Ended, b: Ended) -> float:
    return float(a.summary["load_seconds"] - b.summary["load_seconds"])


if __name__ == "__main__":
    main()
