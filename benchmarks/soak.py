"""Rounds of a real run with all kinds of faults at once, each compared with an undisturbed run.

    python benchmarks/soak.py [--minutes 30] [--seed 0] [--rows 400]

Planted, with real vLLM on the demo model (tests/support/failing_worker.py is its worker):

- in each round 3 to 5 poison rows: whenever the engine runs one, it is out of memory, raises, is
  killed, or hangs
- one such fault at random in each engine's life, 6 s after its first step on average
- SIGKILL to the run itself, 45 s after its start on average; the same command starts it again

Counted against the answers of an undisturbed run:

- lost: rows without a record; twice: rows with two ok records; differing: ok rows with another text
- poison_ok: poison rows that were answered; innocent_failed: other rows that failed
- unsound: runs that `batchkit verify` does not pass
- stopped: how often a run ended on its own, or hung, before all of its rows were settled
- left_over: processes of a run that outlive it, and its files in /dev/shm

If one of these is not 0, the exit code is 1 and the folder is kept. The same --seed plants the same
kinds of faults in the same rows and engines; when they occur depends on the machine. When the time
is over, the current round continues to its end with only its poison rows. A round takes some
minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from random import Random
from typing import Any

import psutil

from batchkit.commands.demo_model import build_demo_model
from batchkit.storage.log import RESULTS, read_lines
from batchkit.storage.newest_lines import read_newest

ROOT = Path(__file__).parents[1]
SHM = Path("/dev/shm")
FAULTS = "BATCHKIT_TEST_FAULTS"
KINDS = ("oom", "error", "kill", "hang")
FAULT_MEAN_S, KILL_MEAN_S = 6.0, 45.0
STEP_S = 0.01  # added to each step: the demo model is too fast for a fault to hit it
PATIENCE_S = 900.0  # for a round to end once only its poison rows cause faults
MOST_STOPS = 3  # of one round's run, before the round is given up
GRACE_S = 10.0  # for processes of a run to end after it

GOOD = ("rows", "ok", "poison_failed", "random_faults", "engine_restarts", "kills")
BAD = (
    "lost", "twice", "differing", "poison_ok", "innocent_failed", "unsound", "stopped", "left_over",
)  # fmt: skip

JOB = """
name = "soak"
[input]
path = "rows.jsonl"
[prompt]
user = "{{ q }}"
[engine]
model = "../model"
[engine.options]
dtype = "float32"
enforce_eager = true
max_model_len = 512
max_num_seqs = 8
kv_cache_memory_bytes = 134217728
worker_cls = "tests.support.failing_worker.FailingWorker"
[sampling]
sampling_column = "params"
[run]
stall_timeout_s = 5
"""


@dataclass(frozen=True)
class Round:
    """A round: a run of all rows in a separate folder. ``until``: the time at which random faults
    and kills stop."""

    folder: Path
    seed: str
    poison: Mapping[int, str]
    until: float

    @property
    def output(self) -> Path:
        return self.folder / "output/soak"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rows", type=int, default=400)
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="batchkit-soak-"))
    build_demo_model(folder / "model", text_only=True)
    calm = calm_texts(folder, args.rows)
    faults, totals = Counter[str](), Counter[str]()
    rounds, started = 0, time.time()
    until = started + args.minutes * 60
    while time.time() < until:
        rounds += 1
        began = time.time()
        this = plan(folder, rounds, args.rows, args.seed, until)
        struck, found = run_round(this, calm)
        faults += struck
        totals.update(found)
        print(f"round {rounds}, {time.time() - began:.0f} s: {summary(struck, found)}", flush=True)
    minutes = round((time.time() - started) / 60, 1)
    report({"minutes": minutes, "seed": args.seed, "rounds": rounds}, faults, totals)
    if any(totals[name] for name in BAD):
        print(f"its folder is kept: {folder}", file=sys.stderr)
        raise SystemExit(1)
    shutil.rmtree(folder)


def calm_texts(folder: Path, n_rows: int) -> list[str]:
    """Return the texts of an undisturbed run."""
    calm = Round(folder / "calm", "calm", {}, until=0)
    write_job(calm, n_rows)
    code = start(calm).wait()
    if code:
        raise SystemExit(f"the undisturbed run ended with {code}: {last_words(calm)}")
    return [record["text"] for record in read_newest(calm.output / RESULTS)]


def plan(folder: Path, number: int, n_rows: int, seed: int, until: float) -> Round:
    random = Random(f"{seed}/{number}/poison")
    rows = random.sample(range(n_rows), random.randint(3, 5))
    poison = dict(zip(rows, cycle(random.sample(KINDS, len(KINDS)))))
    this = Round(folder / f"round-{number}", f"{seed}/{number}", poison, until)
    write_job(this, n_rows)
    return this


def write_job(this: Round, n_rows: int) -> None:
    this.folder.mkdir()
    (this.folder / "job.toml").write_text(JOB)
    with (this.folder / "rows.jsonl").open("w") as file:
        for n in range(n_rows):
            # Heavy-tailed, as answers are: most are short, a few are ten times as long.
            params: dict[str, Any] = {"max_tokens": (6, 9, 12, 16, 24, 8, 96, 11)[n * 5 % 8]}
            if n in this.poison:
                params["extra_args"] = {"poison": this.poison[n]}
            row = {"q": f"tell me of {n}" + " tea" * (n * 7 % 40), "params": params}
            file.write(json.dumps(row) + "\n")


def run_round(this: Round, calm: list[str]) -> tuple[Counter[str], Counter[str]]:
    """Run it to its end through all faults; count the faults by kind, and their outcomes."""
    shm_before = set(SHM.iterdir())
    found = run_to_the_end(this)
    found["left_over"] = count_left_over(this, shm_before)
    found.update(count_records(this, calm))
    verify = [sys.executable, "-m", "batchkit", "verify", str(this.output)]
    done = subprocess.run(verify, env=environment(this), capture_output=True, check=False)
    found["unsound"] = int(done.returncode != 0)
    found["engine_restarts"] = engine_restarts(this)
    struck = strikes(this)
    found["random_faults"] = sum(strike["why"] == "random" for strike in struck)
    return Counter(strike["kind"] for strike in struck), found


def run_to_the_end(this: Round) -> Counter[str]:
    """Kill the run and start it again until its rows are settled; ``kills`` and ``stopped``."""
    random = Random(f"{this.seed}/kills")
    found = Counter[str]()
    while found["stopped"] < MOST_STOPS:
        process = start(this)
        kill_at = time.time() + random.expovariate(1 / KILL_MEAN_S)
        give_up_at = this.until + PATIENCE_S
        is_kill = kill_at < this.until
        code = wait(process, kill_at if is_kill else give_up_at)
        if code in (0, 3):
            break
        if code is None and is_kill:
            found["kills"] += 1
            continue
        found["stopped"] += 1
        ended = (
            f"no end {PATIENCE_S:.0f} s after the last fault" if code is None else f"exit {code}"
        )
        print(f"{this.folder.name}: {ended}: {last_words(this)}", file=sys.stderr)
    return found


def start(this: Round) -> subprocess.Popen[bytes]:
    with (this.folder / "stderr.log").open("ab") as stderr:
        return subprocess.Popen(
            [sys.executable, "-m", "batchkit", "run", "job.toml"],
            cwd=this.folder,
            env=environment(this),
            stdout=subprocess.DEVNULL,
            stderr=stderr,
        )


def environment(this: Round) -> dict[str, str]:
    random = {"seed": this.seed, "kinds": KINDS, "mean_s": FAULT_MEAN_S, "until": this.until}
    faults = {"folder": str(this.folder), "random": random, "step_s": STEP_S}
    # One thread: two threads on busy cores wait for each other and are ten times slower.
    fixed = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return {**os.environ, **fixed, FAULTS: json.dumps(faults)}


def wait(process: subprocess.Popen[bytes], until: float) -> int | None:
    """Return the exit code of ``process``. If it still runs at ``until``, kill it (but not its
    engine's process), and return None."""
    try:
        return process.wait(timeout=max(0.0, until - time.time()))
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return None


def count_records(this: Round, calm: list[str]) -> Counter[str]:
    """Count the rows by outcome, and the differences between the log and the undisturbed run."""
    log = this.output / RESULTS
    records = [line.record for line in read_lines(log) if line.record is not None]
    answers = Counter(record.index for record in records if record.status == "ok")
    newest = {record["index"]: record for record in read_newest(log)}
    failed = {index for index, record in newest.items() if record["status"] == "failed"}
    ok = newest.keys() - failed
    return Counter(
        rows=len(calm),
        ok=len(ok),
        poison_failed=len(failed & this.poison.keys()),
        lost=len(calm) - len(newest),
        twice=sum(count > 1 for count in answers.values()),
        differing=sum(newest[index]["text"] != calm[index] for index in ok),
        poison_ok=len(ok & this.poison.keys()),
        innocent_failed=len(failed - this.poison.keys()),
    )


def count_left_over(this: Round, shm_before: set[Path]) -> int:
    """Count processes that outlive the run by GRACE_S, and new files in /dev/shm that no process
    maps; kill the processes."""
    deadline = time.monotonic() + GRACE_S
    while (left := processes_of(this)) and time.monotonic() < deadline:
        time.sleep(0.2)
    for process in left:
        print(f"{this.folder.name}: left over: {process}", file=sys.stderr)
        process.kill()
    files = sorted(set(SHM.iterdir()) - shm_before - held_in_shm())
    for path in files:
        print(f"{this.folder.name}: left over: {path}", file=sys.stderr)
    return len(left) + len(files)


def held_in_shm() -> set[Path]:
    """Return the files in /dev/shm that some process has mapped, usually one of another program."""
    held = set()
    for process in psutil.process_iter():
        try:
            held |= {Path(m.path) for m in process.memory_maps() if m.path.startswith(str(SHM))}
        except psutil.Error:
            continue
    return held


def processes_of(this: Round) -> list[psutil.Process]:
    """Return the processes with the round's environment: its engines, and the processes that they
    started."""
    found = []
    for process in psutil.process_iter():
        try:
            if f'"{this.folder}"' in process.environ().get(FAULTS, ""):
                found.append(process)
        except psutil.Error:  # another user's, or it just ended
            continue
    return found


def engine_restarts(this: Round) -> int:
    """Return the number of engine restarts that the run has counted. A restart that a kill
    interrupts is not counted."""
    path = this.output / "manifest.json"
    starts = json.loads(path.read_text())["starts"] if path.exists() else []
    return sum(start.get("engine_restarts", 0) for start in starts)


def strikes(this: Round) -> list[dict[str, Any]]:
    path = this.folder / "strikes.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def last_words(this: Round) -> str:
    lines = (this.folder / "stderr.log").read_text(errors="replace").strip().splitlines()
    return lines[-1] if lines else "it said nothing"


def summary(struck: Counter[str], found: Counter[str]) -> str:
    names = [*GOOD, *(name for name in BAD if found[name])]
    counts = ", ".join(f"{name} {found[name]}" for name in names)
    outcome = "BAD" if any(found[name] for name in BAD) else "good"
    return f"{outcome}: {counts}, faults {struck.total()}"


def report(run: dict[str, Any], faults: Counter[str], totals: Counter[str]) -> None:
    counts = {name: totals[name] for name in (*GOOD, *BAD)}
    by_kind = {kind: faults[kind] for kind in KINDS}
    for name, value in {**run, **by_kind, **counts}.items():
        print(f"{name:>16} {value:>8}")
    print(json.dumps({"benchmark": "soak", **run, "faults": by_kind, **counts}))


if __name__ == "__main__":
    main()
