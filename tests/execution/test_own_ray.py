"""A Ray that the run starts for itself: its start, its end, what it opens, and what it costs."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path
from typing import Any

import psutil
import pytest

from batchkit.runs.status import status
from batchkit.runs.verify import verify
from batchkit.storage.log import RESULTS
from tests.support.command_line import batchkit
from tests.support.faulty_runs import (
    N_ROWS,
    assert_only_failed,
    ended_in,
    question_rows,
    running,
    wait_for_records,
)
from tests.support.own_process import begin, is_stopped_by
from tests.support.paths import ROOT
from tests.support.ray_head import RayHead, actors_below
from tests.support.rows import write_jsonl
from tests.support.waiting import until

pytestmark = [pytest.mark.ray, pytest.mark.release]

# Eight rows at once in each worker, a step of them in half a second.
DRY_RUN = """
name = "faulty"
input.path = "rows.jsonl"
prompt.user = "{{ q }}"

[engine]
kind = "dry-run"
options = { latency_s = 0.5, max_num_seqs = 8 }
"""


@pytest.fixture
def one_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The arguments of a run of one row in the working directory, over two workers."""
    monkeypatch.chdir(tmp_path)
    Path("job.toml").write_text(
        '[input]\npath = "rows.jsonl"\n[prompt]\nuser = "{{ q }}"\n[engine]\nkind = "dry-run"\n'
    )
    write_jsonl(Path("rows.jsonl"), [{"q": "a"}])
    return ["run", "job.toml", "--workers", "2"]


def test_a_run_that_is_killed_over_two_workers_goes_on_from_its_ledger_over_three(
    tmp_path: Path, ray_head: RayHead
) -> None:
    rows = question_rows({})
    with running(tmp_path, tmp_path, rows, {}, ["workers.count=2"], job=DRY_RUN) as process:
        driver = psutil.Process(process.pid)
        until(lambda: len(actors_below(driver)) == 2)  # each begins when Ray gets to it
        wait_for_records(tmp_path, 4)
        workers = actors_below(driver)
        process.kill()
    n_before = (tmp_path / "output/faulty" / RESULTS).read_bytes().count(b"\n")
    settings = ["workers.count=3", f"workers.ray_address={ray_head.address}"]
    with running(tmp_path, tmp_path, rows, {}, settings, job=DRY_RUN) as process:
        ended = ended_in(tmp_path, process)
    texts = [f"dry-run: no model answered row {n}" for n in range(N_ROWS)]
    assert_only_failed(ended, texts, {})
    assert "resumed" in ended.stderr
    assert verify(tmp_path / "output/faulty").is_sound
    shares = [worker["rows"] for worker in status(tmp_path / "output/faulty").workers]
    assert len(shares) == 3
    assert sum(shares) == N_ROWS - n_before
    assert len(workers) == 2
    assert not psutil.wait_procs(workers, timeout=30)[1], "the dead driver's workers are gone"


@pytest.mark.parametrize("first", ["import ray; ", ""], ids=["imported before", "not imported"])
def test_a_ray_of_the_run_listens_on_this_machine_alone_and_ends_with_it(
    first: str, tmp_path: Path, one_row: list[str]
) -> None:
    write_jsonl(Path("rows.jsonl"), question_rows({}))
    options = "engine.options={latency_s = 0.5, max_num_seqs = 2}"
    program = f"import sys; {first}from batchkit.cli import cli; cli(sys.argv[1:])"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    del environment["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"], environment["RAY_AUTH_TOKEN"]
    with subprocess.Popen(
        [sys.executable, "-c", program, *one_row, "--set", 'name="faulty"', "--set", options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
    ) as process:
        try:
            wait_for_records(tmp_path, 4)
            family = psutil.Process(process.pid).children(recursive=True)
            listening = [
                (one.name(), ip_address(connection.laddr.ip))
                for one in [psutil.Process(process.pid), *family]
                for connection in one.net_connections("inet")
                if connection.status == psutil.CONN_LISTEN
            ]
            made = re.findall(
                r"/\S*/batchkit-ray-\w+", " ".join(part for one in family for part in one.cmdline())
            )
            modes = {Path(folder).stat().st_mode for folder in made}
        finally:
            process.terminate()
            stdout, stderr = process.communicate(timeout=90)
    assert {"gcs_server", "raylet"} <= {name for name, _ in listening}
    assert [found for found in listening if not is_loopback(found[1])] == []
    assert {mode & 0o077 for mode in modes} == {0}, "nobody else may look into Ray's files"
    summary = json.loads(stdout)
    assert process.returncode == summary["exit"] == 143, stderr
    assert 4 <= summary["ok"] < N_ROWS
    assert not psutil.wait_procs(family, timeout=30)[1], "nothing is left behind"


def is_loopback(address: IPv4Address | IPv6Address) -> bool:
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return (mapped or address).is_loopback


def test_a_ray_whose_head_is_gone_ends_the_run_within_seconds(tmp_path: Path) -> None:
    settings = ["workers.count=2", "engine.options={latency_s = 3.0, max_num_seqs = 1}"]
    rows = question_rows({})
    with running(tmp_path, tmp_path, rows, {}, settings, job=DRY_RUN) as process:
        wait_for_records(tmp_path, 2)
        workers = actors_below(psutil.Process(process.pid))
        family = psutil.Process(process.pid).children(recursive=True)
        (head,) = [one for one in family if one.name() == "gcs_server"]
        head.kill()
        stderr = process.communicate(timeout=40)[1]  # Ray's own end comes after 60 s
    assert process.returncode == 1, stderr
    (line,) = [line for line in stderr.splitlines() if "Ray's head at" in line]
    assert "Every finished row is on disk" in line
    assert verify(tmp_path / "output/faulty").is_sound
    assert not psutil.wait_procs(workers, timeout=30)[1], "no engine is left behind"


def test_one_process_may_start_ray_more_than_once(one_row: list[str], tmp_path: Path) -> None:
    """As a program does that calls a processor twice, or a run whose engines have turns."""
    program = (
        "import os\n"
        "from batchkit import ProductionBatchProcessor\n"
        "for name in ('a', 'b'):\n"
        "    processor = ProductionBatchProcessor('twice.toml', quiet=True)\n"
        "    assert processor.process(name=name).ok == 1\n"
        "assert 'RAY_AUTH_MODE' not in os.environ  # a child could join no Ray without tokens\n"
    )
    Path("twice.toml").write_text(Path("job.toml").read_text() + "[workers]\ncount = 1\n")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", program], env=environment, check=True, timeout=200)


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_ray_starts_ends_the_run_at_once(
    signum: signal.Signals, tmp_path: Path, one_row: list[str]
) -> None:
    with begin(*one_row, cwd=tmp_path) as process:
        family = psutil.Process(process.pid)

        def ray_starts() -> bool:
            return any(one.name() == "gcs_server" for one in family.children())

        is_stopped_by(signum, process, ray_starts)


def test_ray_that_is_too_slow_to_start_is_one_message(
    one_row: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray

    def init(**_: Any) -> None:
        raise Exception("The current node timed out during startup.")

    monkeypatch.setattr(ray, "init", init)
    done = batchkit(*one_row)
    assert done.exit_code == 1, done.stderr
    assert "Traceback" not in done.stderr
    errors = [line for line in done.stderr.splitlines() if "error:" in line]
    assert len(errors) == 1
    assert "Ray did not start on this machine (Exception: The current node timed out" in errors[0]
    assert "run the same command again" in errors[0]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--ray-address", "127.0.0.1:9"], "can't join Ray at 127.0.0.1:9"),
        (["--set", "workers.gpus=1"], "need 2 GPUs, 1 each; this machine has 0"),
        (["--workers", "0"], "--workers"),
    ],
)
def test_workers_that_can_not_start_are_reported_at_once(
    arguments: list[str], words: str, one_row: list[str]
) -> None:
    done = batchkit(*one_row, *arguments)
    assert done.exit_code == 2
    assert words in done.stderr


def test_many_rows_over_four_workers_take_no_more_of_the_drivers_memory_than_few(
    tmp_path: Path, one_row: list[str]
) -> None:
    """Counting: the dry-run engine answers at once."""
    n_rows = 50_000
    write_jsonl(Path("rows.jsonl"), ({"q": f"what about {n}?"} for n in range(n_rows)))
    settings = ["--set", 'name="faulty"', "--set", "workers.count=4"]
    with begin(*one_row, *settings, cwd=tmp_path, start=subprocess.Popen) as process:
        wait_for_records(tmp_path, n_rows // 10)
        few = many = peak_mib(process.pid)
        while process.poll() is None:
            with suppress(ValueError):  # it has just ended
                many = peak_mib(process.pid)
            time.sleep(0.02)
        assert process.stderr is not None
        assert process.returncode == 0, process.stderr.read()
    assert many - few < 16, "MiB of the driver's memory"
    found = verify(tmp_path / "output/faulty")
    assert (found.is_sound, found.ok, found.records) == (True, n_rows, n_rows)


def peak_mib(pid: int) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1024
