"""A job with two steps against two jobs, one after the other, and against Ray Data LLM with two stages.

    python benchmarks/steps.py [--rounds 3] [--only NAME] [--quick]

The second step asks about the first one's answer. Real vLLM with a simulated accelerator
(accelerator.py), rows and lengths of text.py. Two clocks, the same for every side:

- **at work**: from the first step of the engine to the last change of its results. Of the two jobs it
  is the sum, so that their second load of the model is not counted.
- **whole**: from the start of the command, or of the first of two, to the end of the last.

What can be gained of two jobs is computed from the same lengths (``most``): steps that each takes if a place of
the batch that becomes free is filled at once, and nothing else costs time. No side knows a length beforehand.

Ray Data has an engine for each stage, and streams blocks of rows from one to the other;
both engines are on one accelerator, which works on one step at a time.
"""

from __future__ import annotations

import heapq
import json
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import tomlkit
from commands import adopt_orphans, timed
from frame import Figure, arguments, report, spread
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
    """The results of one side. ``lengths``: the numbers of tokens of each row's two answers."""

    at_work_s: float
    whole_s: float
    answers: list[Any]
    lengths: Sequence[tuple[int, int]] = ()


def main() -> None:
    only = {"only": {"action": "append", "help": "a shape, for example 64x15"}}
    args = arguments(__doc__, "one round of the first shape", only, rounds=(3, 1))
    if args.quick:
        args.only = [SHAPES[0].name]
    adopt_orphans()
    results = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        build_ending_model(folder / "model", text_only=True)
        for shape in SHAPES:
            if not args.only or shape.name in args.only:
                results += measured(shape, folder, args.rounds)
    print(f"{'setting':>18} {'side':>16} {'at work':>26} {'whole':>26}")
    for line in results:
        clocks = "".join(f" {of_clock(line[clock]):>26}" for clock in ("at_work", "whole"))
        wanted = "" if line["wanted"] is None else f"  wanted {line['wanted']:.2f}"
        print(f"{line['setting']:>18} {line['side']:>16}{clocks}{wanted}")
    figures = [
        Figure(
            f"{line['setting']}, against {line['side']}", line["at_work"]["ratio"], wanted=wanted
        )
        for line in results
        if (wanted := line["wanted"]) is not None
    ]
    report("steps", figures, rounds=args.rounds, answers_equal=True, results=results)


def of_clock(found: Mapping[str, Any]) -> str:
    return f"{found['seconds']:>7.2f} s {found['ratio']:.2f} ({spread(found['ratios'])})"


def measured(shape: Shape, folder: Path, rounds: int) -> list[dict[str, Any]]:
    rows = write(folder / f"{shape.rows}.jsonl", shape.rows)
    sides = {STEPS: run_steps, JOBS: run_two_jobs, RAY: run_ray}
    took: dict[str, list[Found]] = {side: [] for side in sides}
    expected: list[Any] = []
    for number in range(rounds):
        for side, run in sides.items():
            scratch = folder / f"{shape.name}-{shape.rows}-{number}-{side}".replace(" ", "_")
            scratch.mkdir()
            found = run(shape, rows, folder / "model", scratch)
            expected = expected or found.answers
            check(f"{shape.name}, {side}, round {number + 1}", found.answers, expected)
            took[side].append(found)
            times = f"{found.at_work_s:.2f} s at work, {found.whole_s:.1f} s in all"
            print(f"{shape.name} {number + 1} {side}: {times}", file=sys.stderr, flush=True)
    best = most(took[STEPS][0].lengths, shape.max_num_seqs)
    print(f"{shape.name}, {shape.rows} rows: at most {best:.2f} x two jobs", file=sys.stderr)
    wanted = {**WANTED, JOBS: min(WANTED[JOBS], best)}
    return [
        {
            "setting": f"{shape.name}, {shape.rows} rows",
            "side": side,
            "at_work": against([f.at_work_s for f in found], [f.at_work_s for f in took[STEPS]]),
            "whole": against([f.whole_s for f in found], [f.whole_s for f in took[STEPS]]),
            "wanted": wanted.get(side),
        }
        for side, found in took.items()
    ]


def most(lengths: Sequence[tuple[int, int]], places: int) -> float:
    """Return the steps of two jobs, one after the other, divided by the steps of one job in which
    each row's second answer follows its first."""
    two_jobs = sum(steps_of([(row[n],) for row in lengths], places) for n in (0, 1))
    return two_jobs / steps_of(lengths, places)


def steps_of(rows: Sequence[tuple[int, ...]], places: int) -> int:
    """Rows in this order; a place takes the next row when it has ended all answers of one. A token is a step, and so is
    the stop token of each answer."""
    free = [0] * places
    for row in rows:
        heapq.heapreplace(free, free[0] + sum(row) + len(row))
    return max(free)


def against(seconds: Sequence[float], ours: Sequence[float]) -> dict[str, Any]:
    """Return the median, and the ratio to batchkit's time in each round."""
    ratios = [theirs / own for theirs, own in zip(seconds, ours, strict=True)]
    ratio = statistics.median(ratios)
    return {"seconds": statistics.median(seconds), "ratios": ratios, "ratio": ratio}


def run_steps(shape: Shape, rows: Path, model: Path, folder: Path) -> Found:
    steps = [
        {"name": "answer", "prompt": {"user": "{{ q }}"}},
        {"name": "check", "prompt": {"user": THEN + "{{ steps.answer.text }}"}},
    ]
    job = {"input": {"path": str(rows)}, "steps": steps}
    clocks = run_batchkit("steps", job, shape, model, folder)
    return Found(*clocks, answers_of(folder, "steps"), lengths_of(folder / "output" / "steps"))


def run_two_jobs(shape: Shape, rows: Path, model: Path, folder: Path) -> Found:
    first = {"input": {"path": str(rows)}, "prompt": {"user": "{{ q }}"}}
    at_work_s, whole_s = run_batchkit("first", first, shape, model, folder)
    then = {
        "input": {"path": str(folder / "output" / "first" / "results.jsonl")},
        "prompt": {"user": THEN + "{{ text }}"},
        "output": {"keep": ["index"]},
    }
    more_s, more_whole_s = run_batchkit("second", then, shape, model, folder)
    return Found(at_work_s + more_s, whole_s + more_whole_s, answers_of(folder, "second"))


def run_batchkit(
    name: str, job: Mapping[str, Any], shape: Shape, model: Path, folder: Path
) -> tuple[float, float]:
    """Return the seconds from the first step to the last result, and of the whole command."""
    options = {**options_of(shape), "worker_cls": "stamped.SimulatedWorker"}
    table = {
        "name": name,
        "engine": {"model": str(model), "options": options},
        "sampling": SAMPLING,
        **job,
    }
    (folder / f"{name}.toml").write_text(tomlkit.dumps(table))
    command = [sys.executable, "-m", "batchkit", "run", f"{name}.toml"]
    whole_s, stamps = run(name, command, shape, folder, {})
    written = (folder / "output" / name / "results.jsonl").stat().st_mtime
    return written - stamps[1], whole_s


def run_ray(shape: Shape, rows: Path, model: Path, folder: Path) -> Found:
    device = folder / "device"
    device.touch()
    table = {
        "model": str(model),
        "options": {**options_of(shape), "worker_cls": "stamped.SimulatedWorker"},
        "stages": STAGES["Ray, fewer"],
        "sampling": SAMPLING,
        "then": THEN,
    }
    command = [sys.executable, str(SCRIPT), str(rows), "results", json.dumps(table)]
    whole_s, stamps = run("ray", command, shape, folder, {"device": str(device)})
    files = sorted((folder / "results").glob("*.json"))
    lines = [json.loads(line) for file in files for line in file.open()]
    lines.sort(key=lambda line: int(line["q"].partition(":")[0]))
    written = max(file.stat().st_mtime for file in files)
    answers = [[line["text"], line["completion_tokens"]] for line in lines]
    return Found(written - stamps[2], whole_s, answers)


def run(
    name: str, command: Sequence[str], shape: Shape, folder: Path, costs: Mapping[str, Any]
) -> tuple[float, list[float]]:
    """Run ``command`` on a simulated accelerator of ``shape``. Returns the same as ``timed``."""
    costs = {**STEP, "step_ms": shape.step_ms, "token_us": 4, **costs}
    return timed(name, command, folder, name, costs)


def options_of(shape: Shape) -> dict[str, Any]:
    return {**OPTIONS, "max_num_seqs": shape.max_num_seqs}


def answers_of(folder: Path, name: str) -> list[Any]:
    """Return the text and the number of tokens of each answer of the second step, in the order of
    the rows of the first step."""
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


def lengths_of(run: Path) -> list[tuple[int, int]]:
    found: dict[int, dict[str, int]] = {}
    for generation in map(json.loads, (run / "steps.jsonl").open()):
        tokens = generation["usage"]["completion_tokens"]
        found.setdefault(generation["index"], {})[generation["step"]] = tokens
    return [(found[index]["answer"], found[index]["check"]) for index in sorted(found)]


if __name__ == "__main__":
    main()
