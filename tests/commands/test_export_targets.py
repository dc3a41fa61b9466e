"""Files and addresses that an export writes: the grammar of ``export RUN FILE …`` and of ``output.export``."""

from __future__ import annotations

import io
import json
from pathlib import Path

import fsspec
import pyarrow.parquet as pq
import pytest

from tests.support.command_line import batchkit
from tests.support.dry_runs import RUN, run, write_job, write_rows
from tests.support.hub_server import HubServer, hub
from tests.support.own_process import batchkit as in_a_process

BUCKET = "memory://bucket/answers"


@pytest.fixture(autouse=True)
def _run(in_an_empty_folder: None) -> None:
    fsspec.filesystem("memory").store.clear()
    write_rows(3)
    write_job()
    assert run().exit_code == 0


def stored(path: str) -> bytes:
    found: bytes = fsspec.filesystem("memory").cat_file(path)
    return found


def test_the_suffix_or_as_names_the_format() -> None:
    own = f"{RUN}/results.parquet"
    for args, files in (
        ([RUN, "a.parquet", "b.csv"], ["a.parquet", "b.csv"]),
        (["c.jsonl"], ["c.jsonl"]),
        (["job.toml", "d.csv"], ["d.csv"]),
        ([RUN, "out.jsonl", "--as", "openai"], ["out.jsonl", "out.errors.jsonl"]),
        ([RUN, "--as", "parquet"], [own]),
        (["--parquet", RUN], [own]),
        ([RUN, "e.csv", "--parquet"], ["e.csv", own]),
    ):
        ended = batchkit("export", *args, "--json").ok()
        shown = [json.loads(line)["path"] for line in ended.stdout.splitlines()]
        assert sorted(shown) == sorted(files)
        for file in files:
            Path(file).unlink()


def test_an_address_gets_the_file() -> None:
    ended = batchkit("export", str(RUN), f"{BUCKET}/a.parquet", "--csv", f"{BUCKET}/b.csv").ok()
    assert f"{BUCKET}/a.parquet: 3 rows" in ended.stdout
    assert pq.read_table(io.BytesIO(stored("/bucket/answers/a.parquet"))).num_rows == 3
    assert stored("/bucket/answers/b.csv").startswith(b"index,id,")


def test_messages_about_an_address_name_it_and_not_the_temporary_file() -> None:
    write_rows([{"key": "k", "q": "=1+1"}])
    write_job(name="b", output={"keep": ["q"]})
    run().ok()
    ended = batchkit("export", "output/b", f"{BUCKET}/b.csv").ok()
    assert f"{BUCKET}/b.csv: a spreadsheet would run 1 of its texts" in ended.stderr
    said = batchkit("export", "output/b", f"{BUCKET}/b.jsonl", "--as", "csv").refused()
    assert f"error: {BUCKET}/b.jsonl: --csv writes .csv files" in said


def test_a_format_of_several_files_puts_all_of_them_beside_each_other() -> None:
    batchkit("export", str(RUN), f"{BUCKET}/out.jsonl", "--as", "openai").ok()
    names = {Path(name).name for name in fsspec.filesystem("memory").ls("/bucket/answers", False)}
    assert names == {"out.jsonl", "out.errors.jsonl"}


def test_a_run_writes_its_exports_at_its_end() -> None:
    targets = ["parquet", "own.csv", f"{BUCKET}/end.parquet"]
    write_job(name="b", output={"export": targets}, engine={"options": {"latency_s": 0.0}})
    ended = run("--output", f"{BUCKET}/more.jsonl").ok()
    assert f"writes exports to {BUCKET}/end.parquet" in ended.stderr
    assert Path("output/b/results.parquet").is_file()
    assert Path("own.csv").is_file()
    assert pq.read_table(io.BytesIO(stored("/bucket/answers/end.parquet"))).num_rows == 3
    assert len(stored("/bucket/answers/more.jsonl").splitlines()) == 3


@pytest.mark.parametrize("command", ["run", "export"])
def test_an_upload_that_fails_stops_no_other_export_and_no_run(command: str) -> None:
    names = ("answers", "others")
    first, last = (f"hf://datasets/me/{name}/data/c.parquet" for name in names)
    targets = [first, "a.csv", last, "b.csv"]
    write_job(name="c", output={"export": targets})
    args = ("run", "job.toml") if command == "run" else ("export", RUN, *targets)
    with hub() as server:
        environment = {"HF_ENDPOINT": server.url, "HF_TOKEN": "wrong", "HF_HOME": "hf"}
        ended = in_a_process(*args, cwd=Path.cwd(), **environment)
    assert ended.returncode == (command == "export"), ended.stderr
    said = [line for line in ended.stderr.splitlines() if "not written" in line]
    for address in (first, last):
        (line,) = (
            line for line in said if f"error: {address}: not written: Client error '401" in line
        )
        assert line.endswith("; correct this and run `batchkit export` again")
    assert Path("a.csv").is_file()
    assert Path("b.csv").is_file()


def test_a_dataset_on_the_hub_gets_the_files() -> None:
    batchkit("export", str(RUN), "a.parquet", "a.jsonl").ok()
    addresses = ["hf://datasets/me/answers", "hf://datasets/me/answers/more/a.jsonl"]
    with hub() as server:
        send(server, *addresses)
    card = server.files.pop("README.md").decode()
    assert "3 ok, 0 failed of 3 rows" in card
    assert 'path: "data/a.parquet"' in card
    assert {one["name"]: (one["type"], one["visibility"]) for one in server.created} == {
        "answers": ("dataset", "private")
    }
    assert server.files == {
        "data/a.parquet": Path("a.parquet").read_bytes(),
        "more/a.jsonl": Path("a.jsonl").read_bytes(),
    }


def send(server: HubServer, *addresses: str) -> None:
    environment = {"HF_ENDPOINT": server.url, "HF_TOKEN": server.token, "HF_HOME": "hf"}
    environment["HF_HUB_DISABLE_XET"] = "1"
    ended = in_a_process("export", RUN, *addresses, cwd=Path.cwd(), **environment)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize("text", ["# Mine", None])
def test_only_a_card_that_batchkit_wrote_is_written_again(text: str | None) -> None:
    with hub() as server:
        send(server, "hf://datasets/me/answers")
        if text is not None:
            server.files["README.md"] = text.encode()
        write_rows(4)
        run("--on-change", "requeue").ok()
        send(server, "hf://datasets/me/answers")
    card = server.files["README.md"].decode()
    assert (card == text) if text is not None else ("4 ok, 0 failed of 4 rows" in card)


def test_an_export_that_can_t_be_written_stops_no_other_export() -> None:
    targets = ["output/c/run.log/a.csv", "output/c/run.log/b.csv", "end.csv"]
    write_job(name="c", output={"export": targets})
    ended = run()
    assert ended.exit_code == 1
    for path in targets[:2]:
        assert f"error: {path}: " in ended.stderr
    assert Path("end.csv").is_file()


def test_an_address_that_only_a_run_folder_names_is_left_out() -> None:
    write_job(name="d", output={"export": [f"{BUCKET}/d.csv"]})
    assert run("--limit", "1").exit_code == 0
    write_job(name="d")
    again = batchkit("run", "output/d/job.toml", "--set", "input.limit=2")
    assert "output.export is ignored" in again.stderr


@pytest.mark.parametrize(
    ("address", "problem"),
    [
        ("s3:///a.parquet", "names no bucket; give s3://BUCKET/FILE"),
        ("gs:///out/a.csv", "names no bucket; give gs://BUCKET/FILE"),
        ("s3://a.parquet", "names no file; give s3://BUCKET/FILE"),
        ("hf://datasets/me", "names no dataset; give hf://datasets/OWNER/NAME"),
    ],
)
def test_an_address_without_a_bucket_is_refused_before_anything_is_read(
    address: str, problem: str
) -> None:
    (RUN / "results.jsonl").unlink()
    assert f"{address}: {problem}" in batchkit("export", str(RUN), address).refused()
    write_job(name="e", output={"export": [address]})
    assert f"{address}: {problem}" in run().refused()
    assert not Path("output/e").exists()


def test_a_password_in_an_address_is_refused() -> None:
    ended = batchkit("export", str(RUN), "s3://me:secret-word@bucket/a.csv").refused()
    assert "contains a password" in ended
    assert "secret-word" not in ended
