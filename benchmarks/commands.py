"""batchkit's command against another tool's: same rows, same vLLM, whole processes.

The rows are those of text.py; answers end by a stop token, and max_tokens is the same for all. Once
computed on the CPU, once with a simulated accelerator whose steps take 15 ms. A tool loads the model
in its command, so there are three clocks, the same for all; the last two begin with a time that the
worker writes (stamped.py), and end with the last change of the results file:

- **whole command**: from its start to its exit.
- **after load**, to which the wanted ratios apply: from the loaded model. What a tool does earlier
  is not counted: batchkit and Ray Data read rows and fill in templates, Ray Data also tokenises;
  run-batch begins after the load. batchkit's fsyncs are counted, except for the last.
- **from the first step** of the engine: leaves out how long a tool takes from a loaded model to the
  first request, which is negligible in a run of hours.

Each tool runs with its own defaults and all its processes; OMP_NUM_THREADS is unset, as for most
users. A command that leaves a process behind, or exits with an error, ends the benchmark.
"""

from __future__ import annotations

import ctypes
import json
import os
import statistics
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import text
import tomlkit
from frame import HERE, arguments, spread
from sides import COSTS, TIME_LIMIT_S, Setting, check

OPTIONS = {**text.OPTIONS, "max_num_seqs": 64}
STAMPS = "STAMPS"  # as in stamped.py, which imports vLLM
LEAVE_S = 20
PR_SET_CHILD_SUBREAPER = 36  # <linux/prctl.h>


class Tool(NamedTuple):
    """A tool whose command runs in a separate folder.

    ``command``: returns the words of the command for the rows, the engine's options and the folder.
    ``results``: a pattern for the files that the command writes into the folder. ``answers``: reads
    these files; returns text and number of tokens of each answer, in the order of the rows.
    """

    name: str
    command: Callable[[Path, Mapping[str, Any], Path], Sequence[str]]
    results: str
    answers: Callable[[Sequence[Path]], list[Any]]


class Took(NamedTuple):
    whole_s: float
    after_load_s: float
    from_first_step_s: float


class Line(NamedTuple):
    """The results of a tool in a setting: medians. A ratio is the tool's time divided by batchkit's
    time in the same round."""

    setting: str
    tool: str
    rows: int
    times: Took
    ratios: Sequence[Took]
    wanted: float | None

    @property
    def ratio(self) -> float:
        return statistics.median(ratio.after_load_s for ratio in self.ratios)

    @property
    def outcome(self) -> str:
        if self.wanted is None:
            return ""
        return f"{self.wanted:.2f} {'holds' if self.ratio >= self.wanted else 'MISSED'}"


def options(doc: str, *more: str) -> Namespace:
    """Return the script's options. ``more``: settings that run only if they are named."""
    setting = {
        "setting": {"choices": ["CPU", "simulated", *more], "help": "left out: CPU, simulated"}
    }
    return arguments(doc, "one round, few rows", setting, rounds=(3, 1), rows=(600, 200))


def settings(only: str | None, rows: Path, wanted: Mapping[str, float]) -> list[Setting]:
    both = [Setting("CPU", rows, None, wanted), Setting("simulated", rows, text.STEP, wanted)]
    return [setting for setting in both if only in (None, setting.name)]


def compare(
    benchmark: str,
    folder: Path,
    settings: Sequence[Setting],
    job: Mapping[str, Any],
    tools: Sequence[Tool],
    *,
    rounds: int,
) -> None:
    """Run all, interleaved; print a table and one JSON line. Exits with 1 if answers differ."""
    adopt_orphans()
    lines: list[Line] = []
    for setting in settings:
        took: dict[str, list[Took]] = {}
        expected: list[Any] = []
        for number in range(rounds):
            for tool in [batchkit(job), *tools]:
                scratch = folder / f"{setting.name}-{number}-{tool.name}".replace(" ", "_")
                scratch.mkdir()
                times, answers = _run(tool, setting, job["engine"]["options"], scratch)
                took.setdefault(tool.name, []).append(times)
                expected = expected or answers
                check(f"{setting.name}, {tool.name}, round {number + 1}", answers, expected)
                times_text = f"{times.after_load_s:.2f} s after load, {times.whole_s:.1f} s in all"
                print(
                    f"{setting.name} {number + 1} {tool.name}: {times_text}",
                    file=sys.stderr,
                    flush=True,
                )
        lines += _lines(setting, took, len(expected))
    _print(lines)
    results = [
        {
            **line._asdict(),
            "times": line.times._asdict(),
            "ratios": [ratio._asdict() for ratio in line.ratios],
            "ratio": line.ratio,
        }
        for line in lines
    ]
    report = {"benchmark": benchmark, "rounds": rounds, "answers_equal": True, "results": results}
    print(json.dumps(report))


def batchkit(job: Mapping[str, Any]) -> Tool:
    def command(rows: Path, options: Mapping[str, Any], folder: Path) -> list[str]:
        engine = {**job["engine"], "options": dict(options)}
        source = {**job.get("input", {}), "path": str(rows)}
        table = {**job, "name": "batchkit", "input": source, "engine": engine}
        (folder / "job.toml").write_text(tomlkit.dumps(table))
        return [sys.executable, "-m", "batchkit", "run", "job.toml"]

    def answers(files: Sequence[Path]) -> list[Any]:
        records = [json.loads(line) for file in files for line in file.open()]
        records.sort(key=lambda record: int(record["index"]))
        return [[record["text"], record["usage"]["completion_tokens"]] for record in records]

    return Tool("batchkit", command, "output/batchkit/results.jsonl", answers)


def _lines(setting: Setting, took: Mapping[str, Sequence[Took]], rows: int) -> Iterator[Line]:
    for name, theirs in took.items():
        times = Took(*map(statistics.median, zip(*theirs, strict=True)))
        ratios = [
            Took(*(other / ours for ours, other in zip(*pair, strict=True)))
            for pair in zip(took["batchkit"], theirs, strict=True)
        ]
        yield Line(setting.name, name, rows, times, ratios, setting.wanted.get(name))


def _print(lines: Sequence[Line]) -> None:
    """Print, for each tool, its seconds, their ratio to batchkit's, and the smallest and largest
    ratio of the rounds."""
    clocks = {"after load": "after_load_s", "first step": "from_first_step_s", "whole": "whole_s"}
    print(
        f"{'setting':>10} {'tool':>14} {'rows':>5}", *(f"{name:>24}" for name in clocks), " wanted"
    )
    for line in lines:
        print(f"{line.setting:>10} {line.tool:>14} {line.rows:>5}", end="")
        for clock in clocks.values():
            ratios = [getattr(ratio, clock) for ratio in line.ratios]
            print(f" {getattr(line.times, clock):>6.2f} {statistics.median(ratios):>4.2f}", end="")
            print(f" {f'({spread(ratios)})':>12}", end="")
        print(f"  {line.outcome}".rstrip())


def _run(
    tool: Tool, setting: Setting, options: Mapping[str, Any], folder: Path
) -> tuple[Took, list[Any]]:
    worker = "stamped.CpuWorker" if setting.costs is None else "stamped.SimulatedWorker"
    command = tool.command(setting.rows, {**options, "worker_cls": worker}, folder)
    where = f"{setting.name}, {tool.name}"
    whole_s, (loaded, stepped) = timed(where, command, folder, "output", setting.costs)
    files = sorted(folder.glob(tool.results))
    if not files:
        raise SystemExit(f"{where}: no results at {folder / tool.results}")
    written = max(file.stat().st_mtime for file in files)
    return Took(whole_s, written - loaded, written - stepped), tool.answers(files)


def adopt_orphans() -> None:
    """Make processes that outlive their parents children of this process."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)


def timed(
    where: str, command: Sequence[str], folder: Path, name: str, costs: Mapping[str, Any] | None
) -> tuple[float, list[float]]:
    """Run ``command`` in ``folder``: its seconds, and the times that its workers wrote, in order: first
    models loaded, then first steps. Exits if it fails, or leaves a process behind."""
    stamps = folder / f"{name}.stamps"
    environment = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"} | {
        STAMPS: str(stamps),
        COSTS: json.dumps(costs),
        "PYTHONPATH": f"{HERE}{os.pathsep}{HERE.parent}",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
    }
    with (folder / f"{name}.log").open("wb") as output:
        began = time.monotonic()
        try:
            done = subprocess.run(
                command,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=folder,
                env=environment,
                timeout=TIME_LIMIT_S,
                check=False,
            )
            whole_s = time.monotonic() - began
        finally:
            left = _end_what_is_left()
    if done.returncode:
        log = (folder / f"{name}.log").read_text(errors="replace")[-4000:]
        raise SystemExit(f"{where}: exit code {done.returncode}: {log}")
    if left:
        raise SystemExit(f"{where}: left these running: {left}")
    return whole_s, sorted(map(float, stamps.read_text().split()))


def _end_what_is_left() -> list[str]:
    """Kill the processes that outlived the command that started them (``adopt_orphans``), and
    return their names."""
    deadline = time.monotonic() + LEAVE_S
    while left := [child for child in psutil.Process().children(recursive=True) if _runs(child)]:
        if time.monotonic() > deadline:
            names = [str(process) for process in left]
            for process in left:
                process.kill()
            return names
        time.sleep(0.2)
    return []


def _runs(process: psutil.Process) -> bool:
    try:
        process.wait(0)
    except psutil.TimeoutExpired:
        return True
    return False
