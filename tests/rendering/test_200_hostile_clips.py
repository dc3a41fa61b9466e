"""A run over 200 clips that are broken or mean harm: each is its own row's failure, or heard as far as it goes, in bounded
time and memory, and no process is left."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import psutil
import pytest
import tomlkit

from batchkit.storage.log import RESULTS
from batchkit.storage.newest import read_newest
from tests.support.hostile_clips import hostile_clips
from tests.support.own_process import begin
from tests.support.rows import write_jsonl

pytestmark = pytest.mark.slow

_MOST_BYTES = 2**31  # of the run and all its processes; each decoder may have 1.03 GiB
_MOST_S = 240


def test_200_hostile_clips_fail_alone_in_bounded_time_and_memory(tmp_path: Path) -> None:
    hostile, rows = hostile_clips(), []
    assert len(hostile) >= 200
    (tmp_path / "clips").mkdir()
    for n, clip in enumerate(hostile):
        (tmp_path / f"clips/{n}").write_bytes(clip.data)
        part = {"type": f"{clip.kind}_url", f"{clip.kind}_url": {"url": f"{n}"}}
        rows.append({"id": clip.name, "messages": [{"role": "user", "content": [part]}]})
    write_jsonl(tmp_path / "rows.jsonl", rows)
    job = {
        "name": "run",
        "input": {"path": "rows.jsonl", "id": "id"},
        "media": {"root": "clips", "max_decode_bytes": 2**24},
        "engine": {"kind": "dry-run"},
        "run": {"check_rows": 0},
    }
    (tmp_path / "job.toml").write_text(tomlkit.dumps(job), encoding="utf-8")

    began, most, seen = time.monotonic(), [0], set[int]()
    with begin("run", "job.toml", cwd=tmp_path) as process:
        watch = threading.Thread(target=_watch, args=(process.pid, most, seen))
        watch.start()
        stdout, stderr = process.communicate(timeout=_MOST_S)
        watch.join()
    took_s = time.monotonic() - began

    assert process.returncode == 3, stderr[-2000:]
    records = [*read_newest(tmp_path / "output/run" / RESULTS)]
    failed = {its["id"]: its["error"] for its in records if its["status"] == "failed"}
    print(
        f"{len(failed)} of {len(records)} failed, {took_s:.0f} s, {most[0] / 2**20:,.0f} MiB; {stdout}"
    )
    assert {error["kind"] for error in failed.values()} == {"media"}
    assert [clip.name for clip in hostile if clip.must_fail and clip.name not in failed] == []
    assert all(len(error["message"]) < 500 for error in failed.values())
    assert most[0] < _MOST_BYTES
    assert json.loads(stdout)["total"] == len(hostile)
    assert [pid for pid in seen if psutil.pid_exists(pid)] == []


def _watch(pid: int, most: list[int], seen: set[int]) -> None:
    """The most memory of the process and all below it, at a time."""
    while psutil.pid_exists(pid):
        total = 0
        try:
            main = psutil.Process(pid)
            if main.status() == psutil.STATUS_ZOMBIE:
                return
            for process in (main, *main.children(recursive=True)):
                seen.add(process.pid)
                total += process.memory_info().rss
        except psutil.Error:
            continue
        most[0] = max(most[0], total)
        time.sleep(0.02)
