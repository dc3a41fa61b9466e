"""Machines that vanish with their disks, at random instants, before a store that delays, drops and repeats requests."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Iterator
from itertools import groupby, pairwise
from pathlib import Path
from random import Random

import pytest

from batchkit.storage.log import RESULTS
from batchkit.storage.store.objects import Objects
from batchkit.storage.store.seals import Chain, Seal
from tests.support.dry_runs import write_job
from tests.support.embed_runs import stored
from tests.support.object_servers import SERVERS, object_server
from tests.support.own_process import batchkit, begin
from tests.support.rows import read_jsonl, write_jsonl
from tests.support.store_proxy import Rule, StoreProxy, puts, store_proxy
from tests.support.waiting import until

pytestmark = pytest.mark.release

N_KILLS = int(os.environ.get("STORE_KILLS", "20"))
SEED = int(os.environ.get("STORE_SEED", "20261130"))
N_TAKEOVERS = int(os.environ.get("STORE_TAKEOVERS", "2"))
N_ROWS = 400 * N_KILLS
SLOW = ["--set", "run.max_in_flight=8"]


class Cloud:
    """A store behind a proxy, and machines with a disk each."""

    def __init__(self, folder: Path, proxy: StoreProxy, store: str, kind: str) -> None:
        self.folder, self.proxy, self.store, self.kind = folder, proxy, store, kind
        self.n_machines = 0

    def machine(self) -> Path:
        """Return the working directory of a new machine."""
        self.n_machines += 1
        here = self.folder / f"machine{self.n_machines}"
        shutil.copytree(self.folder / "job", here)
        return here

    def chain(self) -> Chain:
        """Read the chain without faults."""
        rules, self.proxy.rules = self.proxy.rules, ()
        try:
            return Chain(Objects(f"{self.store}/a")).catch_up()
        finally:
            self.proxy.rules = rules

    def sealed(self) -> int:
        """Return how many bytes of records are in the store."""
        return self.chain().checksum(RESULTS).end

    def seals(self) -> Iterator[Seal]:
        objects = Objects(f"{self.store}/a")
        number = 1
        while (raw := objects.get(f"seals/{number:08}.json")) is not None:
            yield Seal.model_validate_json(raw)
            number += 1

    def finish(self) -> None:
        """Run to the end on a new machine, and check every row, and every seal."""
        here = self.machine()
        ended = batchkit("run", "job.toml", cwd=here)
        assert ended.returncode == 0, ended.stderr
        found = json.loads(batchkit("verify", "output/a", "--json", cwd=here).stdout)
        assert found["ok"] == found["rows"] == found["records"] == N_ROWS
        assert found["lost"] == found["duplicates"] == found["torn_bytes"] == 0
        assert found["bad_vectors"] == 0
        records = read_jsonl(here / "output/a" / RESULTS)
        if self.kind == "vectors":
            assert sorted(stored(here / "output/a")) == [*range(N_ROWS)]
        else:
            texts = {record["index"]: record["text"] for record in records}
            assert texts == {n: f"dry-run: no model answered row {n}" for n in range(N_ROWS)}
        seals = [*self.seals()]
        assert [seal.number for seal in seals] == [*range(1, len(seals) + 1)]
        assert all(a.fence <= b.fence for a, b in pairwise(seals))
        for fence, its in groupby(seals, key=lambda seal: seal.fence):
            first, *others = its  # each writer claims the run once, before its other seals
            assert (first.state, first.number) == ("claimed", fence)
            assert all(seal.state != "claimed" for seal in others)
            assert {seal.owner for seal in others} <= {first.owner}
        ends = [part for seal in seals for part in seal.parts if part.file == RESULTS]
        assert all(a.end == b.at for a, b in pairwise(ends))


@pytest.fixture(
    params=[*((name, "records") for name in SERVERS), ("moto", "vectors")], ids="-".join
)
def cloud(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Cloud]:
    job = tmp_path / "job"
    server_name, kind = request.param
    job.mkdir()
    monkeypatch.chdir(job)
    write_jsonl(job / "in.jsonl", [{"id": f"r{n}", "q": f"question {n}"} for n in range(N_ROWS)])
    with object_server(server_name, tmp_path) as server, store_proxy(server.url, 7) as proxy:
        for name, value in server.environment(proxy.url).items():
            monkeypatch.setenv(name, value)
        store = f"{server.store}/runs"
        write_job(
            input={"path": "in.jsonl", "id": "id"},
            engine={"kind": "dry-run", "options": {"latency_s": 0.02}},
            run={"store_interval_s": 0.2, "checkpoint_interval_s": 0.2},
            output={"store": store},
            **({"task": "embed"} if kind == "vectors" else {}),
        )
        yield Cloud(tmp_path, proxy, store, kind)


@pytest.mark.timeout(1200)
def test_machines_vanish_before_a_faulty_store(cloud: Cloud) -> None:
    random, done = Random(SEED), [0]
    for number in range(N_KILLS):
        here = cloud.machine()
        cloud.proxy.rules = [
            Rule("delay", seconds=0.05),
            Rule("drop_request", probability=0.03),
            Rule("drop_reply", probability=0.05),
            Rule("duplicate", probability=0.05, only=puts),
            Rule("hold", seconds=0.3, passes=2, probability=0.03),
            Rule("slow_down", probability=0.03),
            Rule("old_listing"),
        ]
        with begin("run", "job.toml", *SLOW, cwd=here) as process:
            if number % 2:
                until(lambda: process.poll() is not None or cloud.sealed() > done[-1])
            time.sleep(random.uniform(0, 1.5))
            ended, _ = process.poll(), process.kill()
            _, stderr = process.communicate()
            assert ended is None, stderr
        shutil.rmtree(here)
        done.append(cloud.sealed())
    cloud.proxy.rules = ()
    assert sum(a < b for a, b in pairwise(done)) >= N_KILLS // 2
    cloud.finish()
    print(f"{N_KILLS} machines; sealed bytes after each: {done}")


@pytest.mark.timeout(600)
def test_takeovers_at_random_instants(cloud: Cloud) -> None:
    random = Random(SEED)
    for _ in range(N_TAKEOVERS):
        cloud.proxy.rules = [Rule("delay", seconds=0.05), Rule("drop_reply", probability=0.05)]
        with begin("run", "job.toml", *SLOW, cwd=cloud.machine()) as first:
            time.sleep(random.uniform(0.5, 2))
            first.send_signal(signal.SIGSTOP)
            with begin("run", "job.toml", *SLOW, cwd=cloud.machine()) as second:
                time.sleep(random.uniform(5, 7))  # around the first one's timeout
                first.send_signal(signal.SIGCONT)
                time.sleep(random.uniform(0, 1))
                for process in (first, second):
                    process.kill()
    cloud.proxy.rules = ()
    cloud.finish()
