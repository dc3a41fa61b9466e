"""Every benchmark in its quick form, one after the other, and their results in one table.

    python benchmarks/all.py [--only text,counting,…]        (make bench)

Each is a fresh process; its table is printed line by line. Quick forms have few rows and one round:
if a figure misses by little, run the script itself on a quiet machine before you conclude anything.
Left out: soak.py (half an hour of faults), gold_charts.py (needs its data), pretrained.py (needs pretrained models) and
gpu.py.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import bounded
from frame import Figure, figures_of

HERE = Path(__file__).parent
LIMIT_S = 600  # for each; the longest takes a third of it on two cores
SCRIPTS = [
    "startup",
    "counting",
    "metrics",
    "rollouts",
    "checkpoint",
    "ledger",
    "parquet",
    "vectors",
    "merge",
    "view",
    "text",
    "images",
    "clips",
    "order",
    "planning",
    "duplicates",
    "adapters",
    "embed",
    "run_batch",
    "serving",
    "ray_data",
    "steps",
    "plan",
    "restarts",
    "vanish",
    "workers",
    "sharing",
    "llama_slots",
    "transformers_batch",
]
NEEDS = {"ray_data": "ray", "steps": "ray", "workers": "ray"}


class Ran(NamedTuple):
    """The result of one script. ``problem``: why the script failed or was skipped; "" if it has
    figures."""

    script: str
    seconds: float
    figures: list[Figure]
    problem: str = ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default=",".join(SCRIPTS), metavar="NAME,…")
    chosen = parser.parse_args().only.split(",")
    if unknown := [name for name in chosen if name not in SCRIPTS]:
        parser.error(f"--only: no {', '.join(unknown)}; there are {', '.join(SCRIPTS)}")
    began = time.monotonic()
    runs = [run(script) for script in chosen if is_there(script)]
    seconds = time.monotonic() - began
    table(runs)
    failed = [ran for ran in runs if ran.problem]
    print(f"{len(runs)} benchmarks in {seconds / 60:.1f} min, {len(failed)} failed")
    results = [
        ran._asdict() | {"figures": [figure.to_json() for figure in ran.figures]} for ran in runs
    ]
    print(json.dumps({"benchmark": "all", "seconds": round(seconds, 1), "results": results}))
    raise SystemExit(1 if failed else 0)


def is_there(script: str) -> bool:
    needed = NEEDS.get(script)
    if needed is None or find_spec(needed) is not None:
        return True
    print(f"\n{script}: skipped, {needed} is not installed", flush=True)
    return False


def run(script: str) -> Ran:
    print(f"\n{script} --quick", flush=True)
    began = time.monotonic()
    done = bounded.run(
        [sys.executable, str(HERE / f"{script}.py"), "--quick"],
        cwd=HERE.parent,
        limit_s=LIMIT_S,
        environment={**os.environ, "PYTHONUNBUFFERED": "1"},
        on_line=lambda line: None if line.startswith('{"benchmark"') else print(line, flush=True),
    )
    seconds = round(time.monotonic() - began, 1)
    if done.code or done.is_late:
        print(f"{script} FAILED: {done.message}", flush=True)
        how = "took too long" if done.is_late else f"exit code {done.code}"
        return Ran(script, seconds, [], f"failed: {how}")
    return Ran(script, seconds, list(figures_of(json.loads(done.stdout[-1]))))


def table(runs: list[Ran]) -> None:
    print(f"\n{'benchmark':>12} {'s':>5}  {'what':<52} {'found':>12} {'wanted':>10}")
    for ran in runs:
        if ran.problem:
            print(f"{ran.script:>12} {ran.seconds:>5.0f}  {ran.problem}")
        for figure in ran.figures:
            found = f"{number(figure.found)} {figure.unit}"
            wanted = ""
            if figure.wanted is not None:
                wanted = f"{'≤' if figure.at_most else '≥'} {number(figure.wanted)}"
            print(
                f"{ran.script:>12} {ran.seconds:>5.0f}  {figure.what:<52} {found:>12} {wanted:>10}"
                f"  {figure.outcome}".rstrip()
            )


def number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:,.2f}"


if __name__ == "__main__":
    main()
