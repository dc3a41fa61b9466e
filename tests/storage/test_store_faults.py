"""A store that is slow, overloaded, out of reach or closed to the run in its middle: the run continues without it."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from subprocess import Popen
from typing import NamedTuple

import pytest

from batchkit.storage.log import RESULTS
from batchkit.storage.store.objects import Objects
from batchkit.storage.store.ranges import RANGE
from batchkit.storage.store.seals import Chain
from tests.support.dry_runs import write_job
from tests.support.object_servers import ObjectServer, moto_server
from tests.support.own_process import batchkit, begin
from tests.support.rows import write_jsonl
from tests.support.store_proxy import Rule, StoreProxy, store_proxy
from tests.support.waiting import until

pytestmark = pytest.mark.slow

N_ROWS = 200


class Machine(NamedTuple):
    folder: Path
    proxy: StoreProxy
    store: str

    def begin(self) -> Popen[str]:
        """Begin a run, and return when the store has some rows."""
        process = begin("run", "job.toml", "--set", "run.max_in_flight=2", cwd=self.folder)
        until(lambda: self.chain().checksum(RESULTS).end > 0)
        return process

    def chain(self) -> Chain:
        return Chain(Objects(f"{self.store}/a")).catch_up()

    @property
    def log(self) -> Path:
        return self.folder / "output/a" / RESULTS

    def n_rows(self) -> int:
        return self.log.read_bytes().count(b"\n")

    def check_sealed(self) -> None:
        assert self.chain().checksum(RESULTS).end == self.log.stat().st_size
        assert self.n_rows() == N_ROWS


@pytest.fixture(scope="module")
def moto(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectServer]:
    with moto_server(tmp_path_factory.mktemp("server")) as server:
        yield server


@pytest.fixture
def machine(
    request: pytest.FixtureRequest,
    moto: ObjectServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Machine]:
    monkeypatch.chdir(tmp_path)
    write_jsonl(
        tmp_path / "in.jsonl", [{"id": f"r{n}", "q": f"question {n}"} for n in range(N_ROWS)]
    )
    store = f"{moto.store}/{request.node.name.replace('[', '-').removesuffix(']')}"
    write_job(
        input={"path": "in.jsonl", "id": "id"},
        engine={"kind": "dry-run", "options": {"latency_s": 0.03}},
        run={"store_interval_s": 0.1, "checkpoint_interval_s": 0.1},
        output={"store": store},
    )
    with store_proxy(moto.url) as proxy:
        for name, value in moto.environment(proxy.url).items():
            monkeypatch.setenv(name, value)
        yield Machine(tmp_path, proxy, store)


@pytest.mark.parametrize("fault", ["slow_down", "expired", "drop_request"])
def test_a_store_that_fails_for_a_while(fault: str, machine: Machine) -> None:
    with machine.begin() as process:
        before = machine.n_rows()
        machine.proxy.rules = [Rule(fault)]
        until(lambda: machine.n_rows() > before + 50)  # nothing waits for the store
        machine.proxy.rules = ()
        _, stderr = process.communicate(timeout=60)
        assert process.returncode == 0, stderr
    machine.check_sealed()


def test_a_joined_machine_waits_for_a_store_that_is_gone_for_a_while(machine: Machine) -> None:
    """It can't take ranges without the store."""
    rows = [{"id": f"r{n}", "q": f"question {n}"} for n in range(6 * RANGE)]
    write_jsonl(machine.folder / "in.jsonl", rows)
    with begin("run", "job.toml", "--join", cwd=machine.folder) as process:
        until(lambda: len(Objects(f"{machine.store}/a.joined").names("ranges")) >= 2)
        machine.proxy.rules = [Rule("drop_request")]
        time.sleep(5)  # longer than a request is tried
        machine.proxy.rules = ()
        _, stderr = process.communicate(timeout=60)
        assert process.returncode == 0, stderr
    assert machine.n_rows() == len(rows)


def test_a_run_says_how_far_the_store_is_behind(machine: Machine) -> None:
    with machine.begin() as process:
        machine.proxy.rules = [Rule("slow_down")]
        until(
            lambda: (
                "s behind, and the run continues" in (machine.log.parent / "run.log").read_text()
            )
        )
        machine.proxy.rules = ()
        assert process.wait(60) == 0
    machine.check_sealed()


def test_a_slow_store(machine: Machine) -> None:
    machine.proxy.rules = [Rule("delay", seconds=0.5)]
    ended = batchkit("run", "job.toml", "--set", "run.max_in_flight=8", cwd=machine.folder)
    assert ended.returncode == 0, ended.stderr
    machine.proxy.rules = ()
    machine.check_sealed()


@pytest.mark.release
def test_a_store_that_is_gone_at_the_end(machine: Machine) -> None:
    with machine.begin() as process:
        machine.proxy.rules = [Rule("drop_request")]
        _, stderr = process.communicate(timeout=200)
        assert process.returncode == 1
        assert "The newest rows are not in the store" in stderr
        assert str(machine.log.parent) in stderr
        assert machine.n_rows() == N_ROWS
    machine.proxy.rules = ()
    again = batchkit("run", "job.toml", cwd=machine.folder)
    assert again.returncode == 0, again.stderr
    machine.check_sealed()


def test_a_store_without_conditional_writes_is_refused(machine: Machine) -> None:
    machine.proxy.rules = [Rule("unconditional")]
    ended = batchkit("run", "job.toml", cwd=machine.folder)
    assert ended.returncode == 2
    assert "the store has no conditional writes" in ended.stderr
    assert not (machine.folder / "output/a/manifest.json").exists()


@pytest.mark.parametrize(
    ("command", "store"), [("run", "s3://no-bucket/runs"), ("status", "s3://no-bucket/runs/a")]
)
def test_a_bucket_that_is_missing(command: str, store: str, machine: Machine) -> None:
    words = [store] if command == "status" else ["job.toml", "--set", f"output.store={store}"]
    ended = batchkit(command, *words, cwd=machine.folder)
    assert ended.returncode == 1
    assert "NoSuchBucket" in ended.stderr
    assert ended.stderr.endswith("; check the name of the bucket\n")


def test_a_listing_that_lags_hides_no_seal(machine: Machine) -> None:
    machine.proxy.rules = [Rule("old_listing")]
    with machine.begin() as process:
        assert process.wait(60) == 0
    shutil.rmtree(machine.folder / "output")
    ended = batchkit("run", "job.toml", cwd=machine.folder)
    assert ended.returncode == 0, ended.stderr
    assert machine.n_rows() == N_ROWS
    machine.check_sealed()
