"""Exports to a real object store, and inputs from it: what is written, and errors with advice."""

from __future__ import annotations

import io
import subprocess
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from batchkit.config.urls import CHECK_KEYS
from tests.support.command_line import batchkit
from tests.support.dry_runs import LOG, RUN, run, write_job, write_rows
from tests.support.object_store import BUCKET, ObjectStore, install, object_store
from tests.support.own_process import batchkit as in_a_process
from tests.support.own_process import begin
from tests.support.rows import read_jsonl
from tests.support.waiting import until

pytestmark = pytest.mark.release

FILES = ("a.parquet", "b.jsonl", "c.csv")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectStore]:
    packages = install(tmp_path_factory.mktemp("packages"))
    with object_store(packages, tmp_path_factory.mktemp("store")) as store:
        yield store


@pytest.fixture(autouse=True)
def _run(in_an_empty_folder: None) -> None:
    write_rows(3)
    write_job()
    run().ok()


def s3(
    store: ObjectStore, *args: str | Path, **environment: str
) -> subprocess.CompletedProcess[str]:
    """batchkit with s3fs and the store's keys."""
    variables = {**store.environment, **environment}
    return in_a_process(*args, cwd=Path.cwd(), start=subprocess.Popen, **variables)


def refusal(ended: subprocess.CompletedProcess[str], exit_code: int) -> str:
    """The one line with which a command ends."""
    assert ended.returncode == exit_code, ended.stderr
    (line,) = (line for line in ended.stderr.splitlines() if "error: " in line)
    assert ended.stderr.endswith(f"{line}\n")
    return line.partition("error: ")[2]


def local_exports() -> dict[str, bytes]:
    batchkit("export", RUN, *FILES).ok()
    return {name: Path(name).read_bytes() for name in FILES}


@pytest.mark.parametrize("prefix", ["plain", "a b/Zoë 日本/50%+1"])
def test_an_address_gets_the_bytes_of_the_local_export(store: ObjectStore, prefix: str) -> None:
    addresses = [f"s3://{BUCKET}/{prefix}/{name}" for name in FILES]
    ended = s3(store, "export", RUN, *addresses)
    assert ended.returncode == 0, ended.stderr
    assert [line.partition(": ")[0] for line in ended.stdout.splitlines()] == addresses
    assert {name: store.get(f"{prefix}/{name}") for name in FILES} == local_exports()


def test_a_run_reads_its_rows_from_the_store_and_writes_its_exports_there(
    store: ObjectStore,
) -> None:
    store.put("in/rows 1.jsonl", Path("in.jsonl").read_bytes())
    exports = [f"s3://{BUCKET}/end/a.jsonl", "s3://none/b.csv", f"s3://{BUCKET}/end/c.jsonl"]
    write_job(
        name="b", input={"path": f"s3://{BUCKET}/in/rows 1.jsonl"}, output={"export": exports}
    )
    ended = s3(store, "run", "job.toml")
    assert ended.returncode == 0, ended.stderr
    found = read_jsonl(Path("output/b/results.jsonl"))
    assert [one["text"] for one in found] == [one["text"] for one in read_jsonl(LOG)]
    batchkit("export", "output/b", "here.jsonl").ok()
    for key in ("end/a.jsonl", "end/c.jsonl"):
        assert store.get(key) == Path("here.jsonl").read_bytes()
    assert ended.stderr.count("s3://none/b.csv: not written: ") == 1


def test_a_store_that_is_killed_and_comes_back_gets_each_row_in_one_part(
    store: ObjectStore,
) -> None:
    folder = f"s3://{BUCKET}/parts"
    write_rows(400)
    write_job(
        name="parts",
        engine={"options": {"latency_s": 0.05, "max_num_seqs": 2}},
        run={"checkpoint_interval_s": 0.1},
        output={"export": [folder], "export_every_s": 0.5},
    )
    environment = store.environment
    with begin("run", "job.toml", cwd=Path.cwd(), start=subprocess.Popen, **environment) as process:
        until(lambda: store.get("parts/part-00000.parquet"))
        store.kill()
        _, stderr = process.communicate(timeout=240)
    assert process.returncode == 1, stderr
    assert f"{folder}: not written: " in stderr.splitlines()[-1]
    assert "next attempt in 0.5 s" in stderr
    store.start()
    ended = s3(store, "run", "job.toml")
    assert ended.returncode == 0, ended.stderr
    found = list[int]()
    for number in count():
        if (content := store.get(f"parts/part-{number:05}.parquet")) is None:
            break
        found += pq.read_table(io.BytesIO(content))["index"].to_pylist()
    assert number > 1
    assert sorted(found) == [*range(400)]


WRONG = {"AWS_SECRET_ACCESS_KEY": "wrong"}
NO_KEYS = dict.fromkeys(("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"), "")
NO_KEYS["AWS_EC2_METADATA_DISABLED"] = "true"


@pytest.mark.parametrize(
    ("path", "environment", "problem"),
    [
        (f"s3://{BUCKET}/none.jsonl", {}, "no such file; check input.path"),
        ("s3://none/rows.jsonl", {}, "no such file; check input.path"),
        (f"s3://{BUCKET}/rows.jsonl", WRONG, f"can't be opened: Forbidden; {CHECK_KEYS}"),
    ],
)
def test_an_input_that_can_t_be_read_has_advice(
    store: ObjectStore, path: str, environment: dict[str, str], problem: str
) -> None:
    store.put("rows.jsonl", Path("in.jsonl").read_bytes())
    for command in ("validate", "run"):
        ended = s3(store, command, "job.toml", "--set", f"input.path={path}", **environment)
        assert refusal(ended, 2) == f"{path}: {problem}", command


@pytest.mark.parametrize(
    ("bucket", "environment", "problem"),
    [
        (BUCKET, WRONG, CHECK_KEYS),
        (BUCKET, NO_KEYS, CHECK_KEYS),
        ("none", {}, "The specified bucket does not exist"),
    ],
)
def test_an_upload_that_the_store_refuses_has_advice(
    store: ObjectStore, bucket: str, environment: dict[str, str], problem: str
) -> None:
    address = f"s3://{bucket}/refused.csv"
    found = refusal(s3(store, "export", RUN, address, **environment), 1)
    assert found.startswith(f"{address}: not written: ")
    assert found.endswith(f"{problem}; correct this and run `batchkit export` again")
    assert store.get("refused.csv") is None


def test_an_upload_during_which_the_store_is_killed_is_sent_again(store: ObjectStore) -> None:
    addresses = [f"s3://{BUCKET}/killed/{name}" for name in FILES]
    command = ("export", RUN, *addresses)
    store.stop_answering()
    with begin(*command, cwd=Path.cwd(), start=subprocess.Popen, **store.environment) as process:
        until(lambda: store.is_asked_by(process))
        store.kill()
        _, stderr = process.communicate(timeout=120)
    store.start()
    assert process.returncode == 1, stderr
    said = [line for line in stderr.splitlines() if "error: " in line]
    for address in addresses:
        assert sum(f"error: {address}: not written: " in line for line in said) == 1, stderr
    assert len(said) == len(addresses)
    assert [store.get(f"killed/{name}") for name in FILES] == [None, None, None]
    assert s3(store, *command).returncode == 0
    assert {name: store.get(f"killed/{name}") for name in FILES} == local_exports()
