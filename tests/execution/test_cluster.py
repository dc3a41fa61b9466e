"""Several workers on a real Ray: what they answer, and what is left when one of them dies.

Where only the counting matters, the dry-run engine stands in for a model.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path
from typing import Any

import psutil
import pytest

from batchkit.commands.status import status
from batchkit.commands.verify import verify
from batchkit.execution.cluster.local import private_folder
from batchkit.storage.ledger import RESULTS
from tests.support.chat_server import MODEL, ChatServer, serving
from tests.support.faulty_runs import (
    IN,
    N_ROWS,
    assert_only_failed,
    ended_in,
    question_rows,
    running,
    start,
)
from tests.support.own_process import batchkit, begin
from tests.support.paths import ROOT
from tests.support.rows import write_jsonl
from tests.support.waiting import until

TWO = ["run.workers=2"]

# Eight rows at once in each worker, a step of them in half a second.
DRY_RUN = """
name = "faulty"
input.path = "rows.jsonl"
prompt.user = "{{ q }}"

[engine]
kind = "dry-run"
options = { latency_s = 0.5, max_num_seqs = 8 }
"""


def answers(n_rows: int) -> list[str]:
    """The texts of an undisturbed run of ``DRY_RUN``."""
    return [f"dry-run: no model answered row {n}" for n in range(n_rows)]


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory, text_model: Path) -> list[str]:
    """The texts of an undisturbed run without Ray."""
    ended = start(tmp_path_factory.mktemp("calm"), text_model, question_rows({}), {}, [IN])
    assert ended.exit == 0, ended.stderr
    return [record["text"] for record in ended.records]


def test_answers_do_not_depend_on_the_number_of_workers(tmp_path: Path) -> None:
    rows = question_rows({})
    settings = ["run.workers=1", "input.limit=12"]
    some = start(tmp_path, tmp_path, rows, {}, settings, job=DRY_RUN)
    assert some.exit == 0, some.stderr
    ended = start(tmp_path, tmp_path, rows, {}, ["run.workers=3"], job=DRY_RUN)
    assert_only_failed(ended, answers(N_ROWS), {})
    assert verify(tmp_path / "output/faulty").is_sound
    shares = [worker["rows"] for worker in status(tmp_path / "output/faulty").workers]
    assert sum(shares) == N_ROWS - 12
    assert len(shares) == 3


def test_a_worker_that_is_killed_costs_nothing_but_a_second_run_of_its_rows(
    tmp_path: Path,
) -> None:
    rows = [row for _ in range(10) for row in question_rows({})]  # many are left when it dies
    with running(tmp_path, tmp_path, rows, {}, TWO, job=DRY_RUN) as process:
        wait_for_records(tmp_path, 4)
        os.kill(workers_of(process.pid)[0].pid, signal.SIGKILL)
        ended = ended_in(tmp_path, process)
    assert_only_failed(ended, answers(10 * N_ROWS), {})
    assert len(ended.stdout.splitlines()) == 1, "Ray's own words go elsewhere"
    assert sum(worker["restarts"] for worker in status(tmp_path / "output/faulty").workers) == 1
    assert verify(tmp_path / "output/faulty").is_sound


def test_a_driver_that_is_killed_goes_on_from_its_ledger(
    tmp_path: Path,
) -> None:
    rows = question_rows({})
    with running(tmp_path, tmp_path, rows, {}, TWO, job=DRY_RUN) as process:
        wait_for_records(tmp_path, 4)
        workers = workers_of(process.pid)
        process.kill()
    ended = start(tmp_path, tmp_path, rows, {}, TWO, job=DRY_RUN)
    assert_only_failed(ended, answers(N_ROWS), {})
    assert "resumed" in ended.stderr
    assert verify(tmp_path / "output/faulty").is_sound
    assert not psutil.wait_procs(workers, timeout=30)[1], "the dead driver's workers are gone"


def test_a_row_that_kills_workers_is_found_and_fails_alone(tmp_path: Path) -> None:
    rows = question_rows({})
    deaths: list[int] = []

    def kill_the_asker_of_9(text: str, body: dict[str, Any]) -> str:
        if text == rows[9]["q"]:
            asker = worker_that_asks(process.pid, server)
            deaths.append(asker.pid)
            asker.kill()
        return f"answered: {text}"

    with serving(kill_the_asker_of_9) as server:
        settings = [*TWO, *at(server, max_num_seqs=2)]  # few rows in a lease: few deaths
        with running(tmp_path, tmp_path, rows, {}, settings, job=DRY_RUN) as process:
            ended = ended_in(tmp_path, process)
    texts = [f"answered: {row['q']}" for row in rows]
    assert_only_failed(ended, texts, {9: "engine_crash"})
    assert "row 9 (id 9) alone kills workers: failed" in ended.stderr
    assert 2 <= len(deaths) <= 6


# With vLLM: this test, and test_settings_that_a_poison_row_cost_are_taken_back.
def test_an_engine_in_a_worker_is_kept_going_as_on_one_machine(
    calm: list[str], tmp_path: Path, text_model: Path
) -> None:
    rows = question_rows({5: "error"})
    ended = start(tmp_path, text_model, rows, {"once": {"oom": 4}}, TWO)
    assert_only_failed(ended, calm, {5: "engine_crash"})
    assert "next engine with max_num_seqs = 4" in ended.stderr
    assert ended.manifest["engine_steps"] == [{"max_num_seqs": 4}]
    assert verify(tmp_path / "output/faulty").is_sound
    workers = status(tmp_path / "output/faulty").workers
    assert sum(worker["rows"] for worker in workers) == N_ROWS
    assert sum(worker["restarts"] for worker in workers) == 0
    restarts = sum(worker["engine_restarts"] for worker in workers)
    assert restarts == ended.manifest["starts"][-1]["engine_restarts"] > 1


def test_a_slow_worker_answers_its_share_and_no_more(tmp_path: Path) -> None:
    rows = [{"q": f"tell me of {n}"} for n in range(3 * N_ROWS)]
    askers: list[int] = []
    both = threading.Event()

    def slowly_to_one(text: str, body: dict[str, Any]) -> str:
        asker = worker_that_asks(process.pid, server).pid
        with server.lock:
            askers.extend([asker] if asker not in askers else [])
        if len(askers) == 2:
            both.set()
        both.wait()
        time.sleep(2.0 if asker == askers[0] else 0.05)
        return f"answered: {text}"

    with serving(slowly_to_one) as server:
        settings = [*TWO, *at(server, max_num_seqs=4)]
        with running(tmp_path, tmp_path, rows, {}, settings, job=DRY_RUN) as process:
            ended = ended_in(tmp_path, process)
    assert_only_failed(ended, [f"answered: {row['q']}" for row in rows], {})
    few, many = sorted(worker["rows"] for worker in status(tmp_path / "output/faulty").workers)
    assert few + many == len(rows)
    assert few <= len(rows) / 4, "half of them with static halves"


def test_a_node_that_is_gone_costs_nothing_but_a_second_run_of_its_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ray.cluster_utils import Cluster

    # A worker has the environment of its node.
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    killed = threading.Event()

    def once_it_is_killed(text: str, body: dict[str, Any]) -> str:
        killed.wait()
        return f"answered: {text}"

    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False}
    )
    try:
        raylet = psutil.Process(cluster.add_node(num_cpus=1).all_processes["raylet"][0].process.pid)
        with serving(once_it_is_killed) as server:
            address = f"run.ray_address={cluster.address}"
            settings = [*TWO, address, *at(server, max_num_seqs=8)]
            rows = question_rows({})
            with running(tmp_path, tmp_path, rows, {}, settings, job=DRY_RUN) as process:
                while server.inside < 16:  # eight of each worker
                    assert process.poll() is None
                    time.sleep(0.05)
                for one in [raylet, *raylet.children(recursive=True)]:
                    one.kill()
                killed.set()
                ended = ended_in(tmp_path, process)
    finally:
        killed.set()
        cluster.shutdown()
    assert_only_failed(ended, [f"answered: {row['q']}" for row in rows], {})
    lost = [worker for worker in status(tmp_path / "output/faulty").workers if worker["restarts"]]
    assert [(one["restarts"], one["state"]) for one in lost] == [(1, "waiting for a place")]
    assert int(re.findall(r"worker \d died .* with (\d+) rows", ended.log)[0]) >= 8
    assert verify(tmp_path / "output/faulty").is_sound


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_all_workers_and_keeps_what_is_finished(
    signum: signal.Signals, tmp_path: Path
) -> None:
    with running(tmp_path, tmp_path, question_rows({}), {}, TWO, job=DRY_RUN) as process:
        wait_for_records(tmp_path, 4)
        family = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signum)
        stdout, stderr = process.communicate(timeout=90)
    summary = json.loads(stdout)
    assert process.returncode == summary["exit"] == 128 + signum, stderr
    assert 4 <= summary["ok"] < N_ROWS
    assert not psutil.wait_procs(family, timeout=30)[1], "nothing is left behind"


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_ray_starts_ends_the_run_at_once(
    signum: signal.Signals, tmp_path: Path
) -> None:
    (tmp_path / "job.toml").write_text(
        'name = "faulty"\n[input]\npath = "rows.jsonl"\n[prompt]\nuser = "{{ q }}"\n'
        '[engine]\nkind = "dry-run"\n[run]\nworkers = 2\n'
    )
    write_jsonl(tmp_path / "rows.jsonl", [{"q": "a"}])
    with begin("run", "job.toml", cwd=tmp_path) as process:
        family = psutil.Process(process.pid)
        while not any(one.name() == "gcs_server" for one in family.children()):
            assert process.poll() is None
            time.sleep(0.02)
        process.send_signal(signum)
        _, stderr = process.communicate(timeout=60)
    assert process.returncode == 128 + signum, stderr
    assert f"stopped by {signum.name}" in stderr


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_models_load_ends_the_run_at_once(
    signum: signal.Signals, tmp_path: Path, text_model: Path
) -> None:
    with running(tmp_path, text_model, question_rows({}), {}, TWO) as process:
        while not any(one.name() == "ray::Actor.exchange" for one in workers_of(process.pid)):
            assert process.poll() is None
            time.sleep(0.05)
        workers = workers_of(process.pid)
        family = [*workers, *(child for one in workers for child in one.children(recursive=True))]
        process.send_signal(signum)
        _, stderr = process.communicate(timeout=60)
    assert process.returncode == 128 + signum, stderr
    assert f"stopped by {signum.name}" in stderr
    assert not psutil.wait_procs(family, timeout=30)[1], "no worker, and nothing of its engine"


def dry_run_job(folder: Path) -> list[str]:
    """The arguments of a run of one row in ``folder``, over two workers."""
    (folder / "job.toml").write_text(
        '[input]\npath = "rows.jsonl"\n[prompt]\nuser = "{{ q }}"\n[engine]\nkind = "dry-run"\n'
    )
    write_jsonl(folder / "rows.jsonl", [{"q": "a"}])
    return ["run", "job.toml", "--workers", "2"]


CLI_AFTER = "import sys; {first}; from batchkit.cli import cli; cli(sys.argv[1:])"


def test_a_ray_of_the_run_listens_on_this_machine_alone(tmp_path: Path) -> None:
    arguments = [*dry_run_job(tmp_path), "--set", "engine.options.latency_s=300"]
    program = CLI_AFTER.format(first="import ray")  # which reads the environment
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    del environment["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"], environment["RAY_AUTH_TOKEN"]
    with subprocess.Popen(
        [sys.executable, "-c", program, *arguments],
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        env=environment,
    ) as process:
        try:
            while not workers_of(process.pid):
                assert process.poll() is None
                time.sleep(0.1)
            family = psutil.Process(process.pid).children(recursive=True)
            listening = [
                (one.name(), ip_address(connection.laddr.ip))
                for one in [psutil.Process(process.pid), *family]
                for connection in one.net_connections("inet")
                if connection.status == psutil.CONN_LISTEN
            ]
        finally:
            process.terminate()
            process.communicate(timeout=60)
    assert {"gcs_server", "raylet"} <= {name for name, _ in listening}
    assert [found for found in listening if not is_loopback(found[1])] == []


def is_loopback(address: IPv4Address | IPv6Address) -> bool:
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return (mapped or address).is_loopback


def test_rays_folder_of_a_driver_that_was_killed_goes_at_the_next_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with tempfile.TemporaryDirectory(prefix="b", dir="/tmp") as home:  # a short one, for Ray
        monkeypatch.setattr(tempfile, "tempdir", home)
        older = Path(home, "batchkit-ray-older")  # of a driver that locked nothing, and may live
        older.mkdir()
        (older / "session").touch()
        killed = subprocess.run(
            [
                *(sys.executable, "-c"),
                """if True:
                import os
                from batchkit.execution.cluster.local import private_folder
                with private_folder() as made:
                    print(made, flush=True)
                    os.kill(os.getpid(), 9)
                """,
            ],
            env={**os.environ, "TMPDIR": home, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=False,
        )
        left = Path(killed.stdout.strip())
        assert left.is_dir()
        with private_folder() as first, private_folder() as second:
            assert not left.exists()
            assert set(Path(home).iterdir()) == {older, first, second}
        assert set(Path(home).iterdir()) == {older}


def test_ray_that_is_too_slow_to_start_is_one_message(tmp_path: Path) -> None:
    slow = (
        "import ray\ndef init(**_): raise Exception('The current node timed out during startup.')\n"
        "ray.init = init\n"
    )
    program = CLI_AFTER.format(first="exec(sys.argv.pop(1))")
    done = subprocess.run(
        [sys.executable, "-c", program, slow, *dry_run_job(tmp_path)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False,
    )
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    errors = [line for line in done.stderr.splitlines() if "error:" in line]
    assert len(errors) == 1
    assert "Ray did not start on this machine (Exception: The current node timed out" in errors[0]
    assert "run the same command again" in errors[0]


@pytest.mark.parametrize("answer", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"", None])
def test_an_address_that_listens_and_is_no_ray_is_refused_at_once(
    answer: bytes | None, tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        held: list[socket.socket] = []

        def serve() -> None:
            with suppress(OSError):  # closed
                while True:
                    connection, _ = server.accept()
                    held.append(connection)
                    if answer is not None:
                        connection.sendall(answer)
                        connection.close()

        threading.Thread(target=serve, daemon=True).start()
        arguments = [*dry_run_job(tmp_path), "--ray-address", address]
        done = batchkit(*arguments, cwd=tmp_path, timeout_s=60)
    assert done.returncode == 2
    assert f"can't join Ray at {address}" in done.stderr
    assert "Traceback" not in done.stderr


def test_settings_that_a_poison_row_cost_are_taken_back(
    calm: list[str], tmp_path: Path, text_model: Path
) -> None:
    ended = start(tmp_path, text_model, question_rows({5: "oom"}), {}, TWO)
    assert_only_failed(ended, calm, {5: "oom"})
    assert "next engine with max_num_seqs = 4" in ended.stderr
    assert ended.manifest["engine_steps"] == []


def test_a_model_that_can_not_be_loaded_stops_the_run_with_its_remedy(tmp_path: Path) -> None:
    ended = start(tmp_path, Path("no/such/model"), question_rows({}), {}, TWO)
    assert ended.exit in (1, 2)
    assert "no/such/model" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_two_hundred_thousand_rows_over_four_workers(tmp_path: Path) -> None:
    """Counting: the dry-run engine answers at once."""
    few, many = (counted(tmp_path, n_rows) for n_rows in (10_000, 200_000))
    assert many - few < 64, "MiB of the driver's memory"


def counted(folder: Path, n_rows: int) -> float:
    """The driver's peak in MiB, over a run of which every row came back once."""
    (folder / "job.toml").write_text(
        'name = "counted"\n[input]\npath = "rows.jsonl"\n[prompt]\nuser = "{{ q }}"\n'
        '[engine]\nkind = "dry-run"\n[run]\nworkers = 4\n'
    )
    write_jsonl(folder / "rows.jsonl", ({"q": f"what about {n}?"} for n in range(n_rows)))
    command = [sys.executable, "-m", "batchkit", "run", "job.toml", "--fresh"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environment
    ) as process:
        _, code, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(code)
        assert process.stderr is not None
        assert process.returncode == 0, process.stderr.read()
    found = verify(folder / "output/counted")
    assert (found.is_sound, found.ok, found.records) == (True, n_rows, n_rows)
    return float(usage.ru_maxrss / 1024)


def wait_for_records(folder: Path, n: int, within_s: float = 120) -> None:
    log = folder / "output/faulty" / RESULTS
    until(lambda: log.exists() and log.read_bytes().count(b"\n") >= n, within_s)


def at(server: ChatServer, **options: Any) -> list[str]:
    """Settings that have ``DRY_RUN`` ask ``server``."""
    pairs = ", ".join(f"{name} = {value}" for name, value in options.items())
    return [
        "engine.kind=openai-server",
        f"engine.base_url={server.url}",
        f"engine.model={MODEL}",
        f"engine.options={{ {pairs} }}",
    ]


def worker_that_asks(pid: int, server: ChatServer) -> psutil.Process:
    """The worker of the run ``pid`` whose request this thread of ``server`` is answering."""
    for worker in workers_of(pid):
        with suppress(psutil.NoSuchProcess):
            for connection in worker.net_connections("tcp"):
                if connection.laddr == server.here.client:
                    return worker
    raise AssertionError("no worker has this connection")


def workers_of(pid: int) -> list[psutil.Process]:
    """The actors' processes of the run ``pid``."""
    family = psutil.Process(pid).children(recursive=True)
    return [one for one in family if one.name().startswith("ray::Actor")]
