"""A run folder with two processes, planted links and mounts."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import socket
import stat
from pathlib import Path
from typing import Any

import pytest

from batchkit.commands.score import score_run
from batchkit.errors import LostLockError, StoreError
from batchkit.execution.processor import ProductionBatchProcessor
from batchkit.storage.job_toml import job_of_run
from batchkit.storage.runfolder import claim
from tests.support import own_process
from tests.support.command_line import batchkit
from tests.support.dry_runs import (
    RUN,
    manifest,
    n_records,
    prepare,
    records,
    run,
    settled,
    status,
    verify,
    write_job,
    write_rows,
)
from tests.support.mounts import mounted
from tests.support.rollouts import THREE, write
from tests.support.waiting import until

pytestmark = [pytest.mark.usefixtures("in_an_empty_folder"), pytest.mark.slow]


# The lock


def test_run_that_lost_its_lock_stops_and_writes_nothing_more(start: Any) -> None:
    options = {"kind": "dry-run", "options": {"latency_s": 0.02}}
    prepare(400, engine=options, run={"max_in_flight": 4, "checkpoint_interval_s": 0.1})
    first = start("run", "job.toml")
    until(lambda: n_records() >= 20)
    (RUN / ".lock").unlink()
    second = start("run", "job.toml")
    assert first.wait(timeout=60) == 1
    said = Path("stderr-0").read_text()
    assert "Traceback" not in said
    assert "another process may be working" in said
    assert second.wait(timeout=120) == 0
    assert settled() == dict.fromkeys(range(400), "ok")
    assert manifest()["starts"][-1]["exit"] == 0
    assert verify()["checkpoint_matches"]


def test_scoring_that_lost_its_lock_writes_nothing_more() -> None:
    """Another process may have begun a run there meanwhile."""
    prepare(3, scoring={"extract": "text", "scorers": ["em"]})
    run()
    other = job_of_run(RUN, ['scoring.extract="number"'])
    ours = {name: (RUN / name).read_bytes() for name in ("job.toml", "starts.jsonl")}
    before = {path.name for path in RUN.iterdir()}

    def say(text: str) -> None:
        (RUN / ".lock").unlink(missing_ok=True)

    with pytest.raises(LostLockError, match="another process may be working"):
        score_run(RUN, other, say=say)
    assert {name: (RUN / name).read_bytes() for name in ours} == ours
    assert {path.name for path in RUN.iterdir()} <= before | {".holder.json"}


def test_process_that_stalls_before_it_locks_gets_no_folder_that_another_began(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare(3)
    run()
    write_job(engine={"options": {"latency_s": 60}})
    real = fcntl.flock

    def stalling(opened: int, how: int) -> None:
        monkeypatch.setattr(fcntl, "flock", real)
        start("run", "job.toml", "--fresh")
        until(lambda: Path("output/a.1").exists() and (RUN / "manifest.json").exists())
        real(opened, how)

    monkeypatch.setattr(fcntl, "flock", stalling)
    with pytest.raises(StoreError, match="is working in this run folder"), claim(RUN):
        pass


@pytest.mark.parametrize(
    ("host", "who", "advice"),
    [
        ("node-7", "process 4711 on node-7 is working in this run folder (since noon)", True),
        (socket.gethostname(), f"process 4711 on {socket.gethostname()} is working", False),
        (None, "output/a: another process is working in this run folder (since a m", False),
    ],
)
def test_the_holder_of_a_lock_is_named_as_far_as_it_is_known(
    host: str | None, who: str, advice: bool
) -> None:
    """A machine that is gone may leave its lock on a file system over the network."""
    prepare(3)
    run()
    if host is not None:
        holder = {"pid": 4711, "host": host, "since": "noon"}
        (RUN / ".holder.json").write_text(json.dumps(holder))
    with (RUN / ".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        found, shown = run(), batchkit("status", str(RUN)).stdout
    assert found.exit_code == 1
    assert who in found.stderr
    assert ("If that machine is gone, remove" in found.stderr) == advice
    assert f"{who.split(' is')[0].removeprefix('output/a: ')} works on it" in shown


def test_two_retries_at_once_answer_no_row_twice() -> None:
    write_rows([{"q": "x"}, *[{"other": "x"}] * 30])
    write_job()
    assert run().json["failed"] == 30
    changes = ["--set", "prompt.user=fine", "--set", "engine.options.latency_s=0.05"]
    both = [own_process.begin("retry-failed", "output/a", *changes, cwd=Path()) for _ in range(3)]
    for one in both:
        one.communicate(timeout=60)
    assert 0 in [one.returncode for one in both]
    assert verify()["duplicates"] == 0


def test_retry_that_waited_for_a_requeue_answers_no_row_twice() -> None:
    """Its rows were found by the indexes that they had before."""
    rows = [{"key": "a", "q": "x"}, {"key": "b"}, {"key": "c", "q": "x"}]
    write_rows(rows)
    write_job(input={"id": "key"})
    run()
    before = ProductionBatchProcessor("job.toml", quiet=True)
    write_rows([{"key": "new", "q": "x"}, *rows])
    assert run("--on-change", "requeue").exit_code == 3
    before.retry({1: 1})
    assert (verify()["duplicates"], len(records())) == (0, 4)


# Links and mounts


@pytest.mark.parametrize("is_there", [False, True])
@pytest.mark.parametrize(
    ("name", "tables"),
    [
        ("results.jsonl", {}),
        ("steps.jsonl", {"steps": THREE}),
        ("run.log", {}),
        ("checkpoint.json.tmp", {}),
        ("manifest.json.tmp", {}),
        ("starts.jsonl", {}),
        (".holder.json", {}),
        ("engine.log", {"engine": {"kind": "vllm", "model": "nowhere"}}),
    ],
    ids=str,
)
def test_nothing_is_written_through_a_planted_link(name: str, tables: Any, is_there: bool) -> None:
    write(None, 3, **({} if "steps" in tables else {"prompt": {"user": "{{ q }}"}}), **tables)
    RUN.mkdir(parents=True)
    target = Path("precious.txt").absolute()
    if is_there:
        target.touch()
    (RUN / name).symlink_to(target)
    found = run()
    assert target.exists() == is_there
    assert not is_there or target.read_text() == ""
    if name.endswith((".jsonl", ".log")):
        assert found.exit_code == 1
    if found.exit_code == 1:
        assert f"{name}: " in found.stderr
        assert "is a symbolic link; batchkit does not write through links" in found.stderr


def test_run_that_lies_where_nothing_can_be_written_is_read_and_merged_from_a_copy() -> None:
    prepare(3)
    run()
    with mounted(RUN, "--bind", "-o", "ro", source=RUN):
        assert status()["ok"] == 3
        assert batchkit("verify").exit_code == 0
        found = batchkit("merge", str(RUN), "--into", "output/b")
        assert found.exit_code == 2
        assert "Read-only file system" in found.stderr
        assert "or name a copy of the run" in found.stderr
        shutil.copytree(RUN, "copy")
    assert batchkit("merge", "copy", "--into", "output/b").exit_code == 0


def test_run_folder_that_is_a_mount_is_not_moved_aside_and_this_is_reported() -> None:
    prepare(3)
    run()
    with mounted(RUN, "--bind", source=RUN):
        found = run("--fresh")
        assert (found.exit_code, "can't be moved aside" in found.stderr) == (1, True)
        assert len(settled()) == 3


def test_folder_that_can_not_be_synced_can_be_a_run_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.fsync

    def fsync(opened: int) -> None:
        if stat.S_ISDIR(os.fstat(opened).st_mode):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        real(opened)

    monkeypatch.setattr(os, "fsync", fsync)
    prepare(3)
    assert run().exit_code == 0
    assert len(settled()) == 3


def test_run_folder_can_be_a_link_itself() -> None:
    """Only what is planted inside is not followed: people put run folders on larger disks."""
    prepare(3)
    large = Path("large-disk")
    large.mkdir()
    Path("output").symlink_to(large.resolve())
    assert run().exit_code == 0
    assert len(settled()) == 3
    shutil.rmtree(large)
