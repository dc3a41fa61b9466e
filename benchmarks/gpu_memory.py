"""The sections of gpu.py in which memory runs out: find-bs, and the ladder of a run.

Each request in a step takes memory that vLLM's profiling did not see (hungry.py), so that too many
at once end in the device's own error. Their number is roughly known beforehand.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import shapes
import text
import tomlkit
from gpu_place import Found, Place, SectionError, answer, environment, find_bs, wait_for_card

# Holds all GPU memory except some bytes, at once or when a word is in a file, until it is killed.
NEIGHBOUR = """
import sys, time, torch
from pathlib import Path
leave, log, word = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
torch.cuda.init()
if word:
    print("ready", flush=True)
    while not (log.is_file() and word in log.read_text()):
        time.sleep(0.2)
    time.sleep(3)
free = torch.cuda.mem_get_info()[0]
held = torch.empty(max(0, free - leave), dtype=torch.uint8, device="cuda")
print("ready", flush=True)
time.sleep(3600)
"""
EVENTS = ("engine died", "out of memory", "engine restart", "did not come up")
FITS, FITS_TINY = 20, 6  # requests at once
MAX_TOKENS = 256  # of each answer: random weights never end one


def find_bs_section(place: Place, found: Found) -> None:
    job, fits = hungry(place, 24 if place.tiny else 4000), fits_in(place)
    low, high = (2, 8) if place.tiny else (12, 48)
    seconds = 2 if place.tiny else 5
    tried = find_bs(place, job, low, high, seconds=seconds, hungry_bytes=bytes_each(place))
    found |= {"expected": fits, **tried}
    statuses = [line["status"] for line in tried["batch_sizes"]]
    if "ok" not in statuses or "OOM" not in statuses:
        raise SectionError(f"expected sizes that fit and sizes that don't, found {statuses}")


def ladder_section(place: Place, found: Found) -> None:
    results = found["results"] = []
    job, fits, each = hungry(place, 60 if place.tiny else 600), fits_in(place), bytes_each(place)
    too_many = with_options(job, max_num_seqs=16 if place.tiny else 128)
    results.append(survived(place, "too many at once", too_many, each))
    if place.tiny:
        # The first claim that fits would be half of what is free, and vLLM fills that with zeros.
        print("claim too large: skipped, it would take half of this machine's memory")
        print("memory taken while it runs: skipped, no card whose memory another could take")
        return
    with neighbour(leave=int(0.45 * place.memory_bytes)):
        greedy = with_options(job, worker_cls="auto", gpu_memory_utilization=0.8)
        results.append(survived(place, "claim too large", greedy, 0))
    name = "memory taken while it runs"
    few = with_options(job, max_num_seqs=fits * 3 // 4)
    with neighbour(leave=6 * each, log=log_of(place, name), word="generating;"):
        results.append(survived(place, name, few, each))


def hungry(place: Place, n: int) -> dict[str, Any]:
    """Return a job with ``n`` rows for the 0.5B shape."""
    model = shapes.build_shape(place.folder / "model", place.half_b, text_only=True)
    rows = text.write(place.folder / "rows.jsonl", n)
    options: dict[str, Any] = {"worker_cls": "hungry.Worker", "enforce_eager": True}
    if not place.tiny:
        options["gpu_memory_utilization"] = 0.5
    job = {"input": {"path": str(rows)}, "prompt": {"user": "{{ q }}"}}
    return {**job, **place.job(model, MAX_TOKENS, **options)}


def fits_in(place: Place) -> int:
    return FITS_TINY if place.tiny else FITS


def bytes_each(place: Place) -> int:
    """Return the bytes that each request takes: a share of the half of GPU memory that vLLM leaves
    free. On a CPU, a share of all memory, because the kernel refuses only more than that."""
    return place.memory_bytes // (1 if place.tiny else 2) // fits_in(place)


def with_options(job: Mapping[str, Any], **options: Any) -> dict[str, Any]:
    engine = job["engine"]
    return {**job, "engine": {**engine, "options": {**engine["options"], **options}}}


def survived(place: Place, name: str, job: Mapping[str, Any], each: int) -> dict[str, Any]:
    """Run a job that must run out of memory, recover and answer all rows.

    Raises:
        SectionError: a row has no answer, the ledger is not sound, or memory did not run out.
    """
    wait_for_card()
    log = log_of(place, name)
    work = log.parents[2]
    work.mkdir()
    table = {**job, "name": log.parent.name, "output": {"dir": str(log.parents[1])}}
    (work / "job.toml").write_text(tomlkit.dumps(table))
    here = replace(place, folder=work)
    summary = answer(here, "batchkit", "run", "job.toml", hungry_bytes=each)
    audit = answer(here, "batchkit", "verify", "job.toml", "--json")
    lines = log.read_text().splitlines()
    events = [line for line in lines if any(words in line for words in EVENTS)]
    print(f"{name}: {summary['ok']} of {summary['total']} rows, {summary['seconds']:.1f} s")
    for event in events:
        print(f"  {event if len(event) < 240 else f'{event[:120]} … {event[-110:]}'}", flush=True)
    if summary["ok"] != summary["total"] or audit["lost"] or audit["duplicates"]:
        raise SectionError(f"{name}: {summary}, {audit}")
    if not any("out of memory" in event for event in events):
        raise SectionError(f"{name}: memory did not run out, so this shows nothing")
    return {"case": name, "events": events, "verify": audit, **summary}


def log_of(place: Place, name: str) -> Path:
    label = name.replace(" ", "-")
    return place.folder / label / "output" / label / "run.log"


@contextmanager
def neighbour(*, leave: int, log: Path | None = None, word: str = "") -> Iterator[None]:
    """Run, during the block, a process that takes all GPU memory except ``leave`` bytes. With
    ``word``, it does so once ``log`` contains this word."""
    wait_for_card()
    held = subprocess.Popen(
        [sys.executable, "-c", NEIGHBOUR, str(leave), str(log), word],
        stdout=subprocess.PIPE,
        text=True,
        env=environment(),
    )
    with held:
        try:
            assert held.stdout is not None
            if not held.stdout.readline():
                raise SectionError("the neighbour on the card did not start")
            yield
        finally:
            held.kill()
