"""A run as a process: its lock, signals, and a disk that is full."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from batchkit.storage.checkpoint import read_checkpoint
from tests.support import own_process
from tests.support.command_line import batchkit
from tests.support.dry_runs import (
    RUN,
    manifest,
    n_records,
    prepare,
    run,
    settled,
    status,
    verify,
)
from tests.support.mounts import small_disk
from tests.support.paths import ROOT
from tests.support.waiting import until

pytestmark = [pytest.mark.usefixtures("in_an_empty_folder"), pytest.mark.slow]


def test_second_process_is_refused_and_the_holder_of_the_run_is_named(start: Any) -> None:
    prepare(40, engine={"options": {"latency_s": 600.0}})
    first = start("run", "job.toml")
    until(lambda: RUN.exists() and (RUN / "manifest.json").exists())
    found = run()
    assert found.exit_code == 1
    assert f"process {first.pid} on " in found.stderr
    assert "is working in this run folder" in found.stderr
    assert status()["held_by"]["pid"] == first.pid
    assert batchkit("retry-failed", str(RUN)).exit_code == 0  # it finds nothing to do
    assert run("--fresh").exit_code == 1
    assert not Path("output/a.1").exists()

    first.kill()
    first.wait()
    assert status()["held_by"] is None


def test_a_run_at_work_has_a_checkpoint_and_its_status_counts_the_whole_job(start: Any) -> None:
    """Its last start was limited, this one is not."""
    often = {"max_in_flight": 4, "checkpoint_interval_s": 0.1}
    prepare(24, engine={"options": {"latency_s": 2.0}}, run=often)
    run("--limit", "4")
    start("run", "job.toml")
    until(lambda: (known := read_checkpoint(RUN)) is not None and 8 <= known.totals.ok < 24)
    found = status()
    assert found["held_by"] is not None
    assert found["total"] == 24
    assert found["pending"] == 24 - found["ok"]


SLOW = {"engine": {"options": {"latency_s": 2.0}}, "run": {"max_in_flight": 12}}


INT, TERM = signal.SIGINT, signal.SIGTERM


@pytest.mark.parametrize(("signums", "n_ok"), [([INT], 24), ([INT, INT], 12), ([TERM], 12)])
def test_sigint_finishes_what_is_in_flight_and_a_second_one_or_sigterm_stops_now(
    start: Any, signums: list[signal.Signals], n_ok: int
) -> None:
    prepare(40, **SLOW)
    process = start("run", "job.toml")
    until(lambda: n_records() == 12)
    time.sleep(0.5)  # the next twelve are in flight
    for signum in signums:
        process.send_signal(signum)
        time.sleep(0.3)
    stdout, _ = process.communicate()
    code = 128 + signums[0]
    assert process.returncode == code
    assert settled() == dict.fromkeys(range(n_ok), "ok")
    summary = json.loads(stdout)
    assert (summary["exit"], summary["ok"], summary["total"]) == (code, n_ok, 40)
    assert "run the same command to continue" in Path("stderr-0").read_text()
    assert manifest()["starts"][-1]["exit"] == code
    counts = {"ok": n_ok, "lost": 0, "pending": 40 - n_ok, "torn_bytes": 0}
    assert verify() | counts | {"checkpoint_matches": True} == verify()


def test_disk_that_fills_up_stops_the_run_in_good_order() -> None:
    prepare(300, run={"max_in_flight": 10, "checkpoint_interval_s": 0.01})
    script = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, 30_000));"
        "from batchkit.cli import cli; cli(sys.argv[1:], prog_name='batchkit')"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, "run", "job.toml"], capture_output=True, text=True
    )
    assert done.returncode == 1
    assert "batchkit: error:" in done.stderr
    assert "File too large" in done.stderr
    assert "Traceback" not in done.stderr
    assert 0 < len(settled()) < 300
    assert verify()["lost"] == verify()["torn_bytes"] == 0

    assert run().exit_code == 0
    assert settled() == dict.fromkeys(range(300), "ok")


@pytest.mark.parametrize("room", ["some", "none"])
def test_run_on_a_full_disk_says_so_and_resumes(tmp_path: Path, room: str) -> None:
    """Everything in the run folder meets the full disk here: log, checkpoint, manifest, run.log."""
    with small_disk(Path("output")) as disk:
        prepare(600, run={"max_in_flight": 10, "checkpoint_interval_s": 0.02})
        ballast = disk / "ballast"
        ballast.write_bytes(bytes({"some": 150_000, "none": 256 * 1024}[room]))
        # Its own process: what is raised while closing must not reach this one.
        done = own_process.batchkit("run", "job.toml", cwd=Path())
        assert done.returncode == 1
        assert "No space left" in done.stderr
        assert "Traceback" not in done.stderr
        if room == "some":
            assert 0 < len(settled()) < 600

        ballast.unlink()
        assert run("--limit", "500").exit_code == 0
        assert settled() == dict.fromkeys(range(500), "ok")


def test_run_log_that_can_not_be_written_costs_no_answer() -> None:
    """Its disk is full while that of the ledger is not."""
    prepare(3)
    RUN.mkdir(parents=True)
    (RUN / "run.log").symlink_to("/dev/full")
    assert run().exit_code in (0, 1)  # going on is as good as a clear stop; a traceback is neither
    (RUN / "run.log").unlink()
    assert run().exit_code == 0
    assert settled() == dict.fromkeys(range(3), "ok")


def test_run_outlives_a_reader_that_hangs_up() -> None:
    prepare(3000, run={"max_in_flight": 8, "checkpoint_interval_s": 0.01})
    command = f"{sys.executable} -m batchkit run job.toml 2>&1 | head -1"
    subprocess.run(["bash", "-c", command], check=True, capture_output=True, timeout=60)
    assert len(settled()) == 3000


DOORS = {
    "module": ["-m", "batchkit"],
    # As pip writes it for the console script.
    "script": ["-c", "from batchkit.__main__ import main; main()"],
}


def write(folder: Path, rows: int) -> None:
    (folder / "in.jsonl").write_text('{"q": "a"}\n' * rows)
    (folder / "job.toml").write_text(
        'input.path = "in.jsonl"\nprompt.user = "{{ q }}"\nengine.kind = "dry-run"\n'
    )


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize(
    "imported", ["click", "pydantic", "batchkit.types", "batchkit.engines.request_checks"]
)
def test_ctrl_c_once_a_module_is_imported_is_one_line(
    door: str, imported: str, tmp_path: Path
) -> None:
    """Python prints each module once it is imported."""
    write(tmp_path, rows=100_000)  # more than it gets to
    command = [sys.executable, "-X", "importtime", *DOORS[door], "validate", "job.toml"]
    process = subprocess.Popen(
        command,
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        # A shell has what it runs in the background ignore SIGINT, and these tests with it.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stderr is not None
    assert any(line.split()[-1] == imported for line in process.stderr)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    said = [line for line in stderr.splitlines() if not line.startswith("import time:")]
    assert (process.returncode, len(said)) == (130, 1), stderr


def test_limit_that_nobody_foresaw_is_one_line(tmp_path: Path) -> None:
    write(tmp_path, rows=1)
    code = "import sys; from batchkit.cli import cli; sys.setrecursionlimit(60); cli()"
    done = subprocess.run(
        [sys.executable, "-c", code, "validate", "job.toml"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("batchkit: error: something in the job or its files is nested")
    assert done.stderr.count("\n") == 1
