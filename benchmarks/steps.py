"""A job with two steps against two jobs, one after the other, and against Ray Data LLM with two stages.

    python benchmarks/steps.py [--rounds 3] [--only NAME] [--quick]

The second step asks about the first one's answer. Real vLLM with a simulated accelerator
(accelerator.py), rows and lengths of text.py. Every side's clock runs from the first step of the engine
to the last change of its results; of the two jobs it is the sum, so that the second load of the model
is not counted. Ray Data has an engine for each stage, and streams blocks of rows from one to the other;
both engines are on one accelerator, which works on one step at a time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import struct
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import tomlkit
from commands import adopt_orphans, timed
from models import build_ending_model
from ray_data import SCRIPT, STAGES
from sides import check
from text import OPTIONS, SAMPLING, STEP, write

THEN = "Is this right? "
STEPS, JOBS, RAY = "batchkit", "two jobs", "Ray, two stages"
WANTED = {JOBS: 1.3, RAY: 1.5}


class Shape(NamedTuple):
    max_num_seqs: int
    step_ms: float
    rows: int

    @property
    def name(self) -> str:
        return f"{self.max_num_seqs}x{self.step_ms:g}"


SHAPES = (Shape(64, 15, 300), Shape(256, 12, 1000), Shape(256, 12, 2000))


class Found(NamedTuple):
    seconds: float
    answers: list[Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", action="append", help="a shape, for example 64x15")
    parser.add_argument("--quick", action="store_true", help="one round of the first shape")
    args = parser.parse_args()
    if args.quick:
        args.rounds, args.only = 1, [SHAPES[0].name]
    adopt_orphans()
    results = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        build_ending_model(folder / "model", text_only=True)
        for shape in SHAPES:
            if not args.only or shape.name in args.only:
                results += measured(shape, folder, args.rounds)
    for line in results:
        spread = f"{min(line['ratios']):.2f}–{max(line['ratios']):.2f}"
        wanted = "" if line["wanted"] is None else f"wanted {line['wanted']:.1f}"
        print(
            f"{line['setting']:>8} {line['rows']:>6} {line['side']:>16} {line['seconds']:>7.2f} s"
            f" {line['ratio']:>5.2f} ({spread}) {wanted}".rstrip()
        )
    report = {"benchmark": "steps", "rounds": args.rounds, "answers_equal": True}
    print(json.dumps({**report, "results": results}))


def measured(shape: Shape, folder: Path, rounds: int) -> list[dict[str, Any]]:
    rows = write(folder / f"{shape.rows}.jsonl", shape.rows)
    sides = {STEPS: run_steps, JOBS: run_two_jobs, RAY: run_ray}
    took: dict[str, list[float]] = {side: [] for side in sides}
    expected: list[Any] = []
    for number in range(rounds):
        for side, run in sides.items():
            scratch = folder / f"{shape.name}-{shape.rows}-{number}-{side}".replace(" ", "_")
            scratch.mkdir()
            found = run(shape, rows, folder / "model", scratch)
            expected = expected or found.answers
            check(f"{shape.name}, {side}, round {number + 1}", found.answers, expected)
            took[side].append(found.seconds)
            print(f"{shape.name} {number + 1} {side}: {found.seconds:.2f} s", file=sys.stderr)
    return [
        {
            "setting": shape.name,
            "rows": shape.rows,
            "side": side,
            "seconds": statistics.median(seconds),
            "ratios": (ratios := [s / ours for s, ours in zip(seconds, took[STEPS], strict=True)]),
            "ratio": statistics.median(ratios),
            "wanted": WANTED.get(side),
        }
        for side, seconds in took.items()
    ]


def run_steps(shape: Shape, rows: Path, model: Path, folder: Path) -> Found:
    steps = [
        {"name": "answer", "prompt": {"user": "{{ q }}"}},
        {"name": "check", "prompt": {"user": THEN + "{{ steps.answer.text }}"}},
    ]
    seconds = run_batchkit(
        "steps", {"input": {"path": str(rows)}, "steps": steps}, shape, model, folder
    )
    return Found(seconds, answers_of(folder, "steps"))


def run_two_jobs(shape: Shape, rows: Path, model: Path, folder: Path) -> Found:
    first = {"input": {"path": str(rows)}, "prompt": {"user": "{{ q }}"}}
    seconds = run_batchkit("first", first, shape, model, folder)
    then = {
        "input": {"path": str(folder / "output" / "first" / "results.jsonl")},
        "prompt": {"user": THEN + "{{ text }}"},
        "output": {"keep": ["index"]},
    }
    seconds += run_batchkit("second", then, shape, model, folder)
    return Found(seconds, answers_of(folder, "second"))


def run_batchkit(
    name: str, job: Mapping[str, Any], shape: Shape, model: Path, folder: Path
) -> float:
    options = {**options_of(shape), "worker_cls": "stamped.SimulatedWorker"}
    table = {
        "name": name,
        "engine": {"model": str(model), "options": options},
        "sampling": SAMPLING,
        **job,
    }
    (folder / f"{name}.toml").write_text(tomlkit.dumps(table))
    command = [sys.executable, "-m", "batchkit", "run", f"{name}.toml"]
    stamps = run(name, command, shape, folder, {})
    written = (folder / "output" / name / "results.jsonl").stat().st_mtime
    return written - stamps[1]


def run_ray(shape: Shape, rows: Path, model: Path, folder: Path) -> Found:
    device = folder / "device"
    device.write_bytes(struct.pack("d", 0.0))
    table = {
        "model": str(model),
        "options": {**options_of(shape), "worker_cls": "stamped.SimulatedWorker"},
        "stages": STAGES["Ray, fewer"],
        "sampling": SAMPLING,
        "then": THEN,
    }
    command = [sys.executable, str(SCRIPT), str(rows), "results", json.dumps(table)]
    stamps = run("ray", command, shape, folder, {"device": str(device)})
    files = sorted((folder / "results").glob("*.json"))
    lines = [json.loads(line) for file in files for line in file.open()]
    lines.sort(key=lambda line: int(line["q"].partition(":")[0]))
    written = max(file.stat().st_mtime for file in files)
    return Found(written - stamps[2], [[line["text"], line["completion_tokens"]] for line in lines])


def run(
    name: str, command: Sequence[str], shape: Shape, folder: Path, costs: Mapping[str, Any]
) -> list[float]:
    """The times that its workers wrote, in order: models loaded, then first steps."""
    costs = {**STEP, "step_ms": shape.step_ms, "token_us": 4, **costs}
    return timed(name, command, folder, name, costs)[1]


def options_of(shape: Shape) -> dict[str, Any]:
    return {**OPTIONS, "max_num_seqs": shape.max_num_seqs}


def answers_of(folder: Path, name: str) -> list[Any]:
    """The texts of the second step, in the order of the rows of the first; its own tokens."""
    log = folder / "output" / name / "results.jsonl"
    records = [json.loads(line) for line in log.open()]
    if name == "second":  # its rows are in the order in which the first job ended them
        order = {r["index"]: r["fields"]["index"] for r in records}
        records.sort(key=lambda r: order[r["index"]])
        return [[r["text"], r["usage"]["completion_tokens"]] for r in records]
    generations = [json.loads(line) for line in (log.parent / "steps.jsonl").open()]
    found = {g["index"]: g for g in generations if g["step"] == "check"}
    return [
        [r["text"], found[r["index"]]["usage"]["completion_tokens"]]
        for r in sorted(records, key=lambda r: r["index"])
    ]


if __name__ == "__main__":
    main()
