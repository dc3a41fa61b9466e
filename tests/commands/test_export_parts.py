"""Folders in ``output.export``: Parquet parts that are written during the run, each row once."""

from __future__ import annotations

import io
import json
import shutil
import signal
from functools import partial
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from batchkit.runs.parts import PartsFolder
from batchkit.storage.store.objects import Objects
from batchkit.storage.store.seals import Chain
from tests.support import embed_runs
from tests.support.command_line import batchkit
from tests.support.dry_runs import (
    LOG,
    RUN,
    n_records,
    prepare,
    records,
    rows_that_fail,
    run,
    write_job,
    write_rows,
)
from tests.support.hub_server import hub
from tests.support.own_process import batchkit as in_a_process
from tests.support.own_process import begin
from tests.support.store_stand_in import StoreStandIn
from tests.support.waiting import until

pytestmark = pytest.mark.usefixtures("in_an_empty_folder")
OUT = Path("out/parts")
STORE = "standin://bucket/out"
OFTEN = {"checkpoint_interval_s": 0.05}
SLOW = {**OFTEN, "max_in_flight": 1}  # 50 rows per second
FAST = ("--set", "run.max_in_flight=256")


def export_to(*places: str | Path, every_s: float = 0.1) -> dict[str, Any]:
    return {"export": [*map(str, places)], "export_every_s": every_s}


def parts(folder: Path = OUT) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.glob("part-*"))}


def has_more_parts(n: int) -> bool:
    return len(parts()) > n


def in_store() -> dict[str, bytes]:
    fs = fsspec.filesystem("standin")
    return {Path(path).name: fs.cat_file(path) for path in sorted(fs.find("/bucket/out"))}


def ranges(found: dict[str, bytes]) -> list[list[int]]:
    read = [pq.read_metadata(io.BytesIO(content)).metadata for content in found.values()]
    return [json.loads(about[b"batchkit.part"])["range"] for about in read]


def assert_consecutive(found: dict[str, bytes]) -> None:
    """The parts are numbered from 0, and their ranges follow each other from the log's beginning."""
    assert [*found] == [f"part-{number:05}.parquet" for number in range(len(found))]
    spans = ranges(found)
    assert [start for start, _ in spans] == [0, *(end for _, end in spans[:-1])]


def rows_in(folder: Path = OUT) -> pd.DataFrame:
    """The whole folder, as a user reads it without knowing its rules."""
    frame = pd.read_parquet(folder)
    assert frame["index"].is_unique
    return frame.set_index("index").sort_index()


def in_log() -> dict[int, tuple[str, str | None]]:
    return {record["index"]: (record["status"], record["text"]) for record in records()}


def assert_same_as_log(frame: pd.DataFrame) -> None:
    texts = (None if pd.isna(text) else text for text in frame["text"])
    found = zip(frame["status"], texts, strict=True)
    assert dict(zip(frame.index, found, strict=True)) == in_log()


def test_parts_are_written_during_the_run_and_each_row_is_in_them_once() -> None:
    options = {"latency_s": 0.02, "max_num_seqs": 4}
    prepare(300, engine={"options": options}, run=OFTEN, output=export_to(OUT))
    ended = run().ok()
    found = parts()
    assert len(found) > 1
    assert_consecutive(found)
    assert_same_as_log(rows_in())
    assert f"{OUT}: 300 rows in {len(found)} parts" in ended.stderr


def test_with_an_interval_of_0_there_are_parts_only_at_the_end() -> None:
    prepare(50, engine={"options": {"latency_s": 0.05, "max_num_seqs": 4}}, run=OFTEN)
    write_job(run=OFTEN, output=export_to(OUT, every_s=0))
    run().ok()
    assert len(parts()) == 1
    assert_same_as_log(rows_in())


def test_a_killed_run_continues_behind_its_last_part() -> None:
    options = {"latency_s": 0.02}
    prepare(400, engine={"options": options}, run=SLOW, output=export_to(OUT))
    before: dict[str, bytes] = {}
    for _ in range(2):
        with begin("run", "job.toml", cwd=Path.cwd()) as process:
            until(partial(has_more_parts, len(before)))
            process.send_signal(signal.SIGKILL)
            process.communicate()
        assert {name: content for name, content in parts().items() if name in before} == before
        before = parts()
    assert n_records() < 400
    run(*FAST).ok()
    assert {name: content for name, content in parts().items() if name in before} == before
    assert_consecutive(parts())
    assert_same_as_log(rows_in())
    assert [path.name for path in OUT.iterdir() if path.suffix != ".parquet"] == []


def test_a_machine_that_continues_from_the_store_continues_behind_the_last_part() -> None:
    store = f"file://{Path('store').absolute()}"
    output = {**export_to(OUT), "store": store}
    run_table = {**SLOW, "store_interval_s": 0.5}
    prepare(400, engine={"options": {"latency_s": 0.02}}, run=run_table, output=output)
    for number in (2, 3):
        with begin("run", "job.toml", cwd=Path.cwd()) as process:
            until(partial(has_more_parts, number))
            process.send_signal(signal.SIGKILL)
            process.communicate()
        before = parts()
        in_chain = Chain(Objects(f"{store}/a")).catch_up().checksum(LOG.name)
        assert ranges(before)[-1][1] <= in_chain.end
        shutil.rmtree("output")  # the machine's disk
    run(*FAST).ok()
    assert {name: parts()[name] for name in before} == before
    assert_consecutive(parts())
    assert_same_as_log(rows_in())


def test_failed_rows_are_in_a_file_of_their_own_until_a_retry_answers_them() -> None:
    rows_that_fail(40, every=10)
    write_job(run={"check_rows": 0}, output=export_to(OUT))
    assert run().exit_code == 3
    assert_same_as_log(rows_in())
    before, (_, end) = parts(), ranges(parts())[-1]
    assert set(pd.read_parquet(OUT / "failed.parquet")["index"]) == {9, 19, 29, 39}
    assert (rows_in()["error_kind"] == "template").sum() == 4
    batchkit("retry-failed", RUN, "--set", "vars.q=now").ok()
    assert not (OUT / "failed.parquet").exists()
    assert {name: parts()[name] for name in before} == before
    assert ranges(parts())[-1] == [end, LOG.stat().st_size]
    assert_same_as_log(rows_in())


def test_rows_that_fail_again_stay_in_the_file_of_failed_rows() -> None:
    write_rows([{"q": f"x {n}"} if n % 4 else {"other": n} for n in range(20)])
    write_job(run={"check_rows": 0}, output=export_to(OUT))
    assert run().exit_code == 3
    assert batchkit("retry-failed", RUN, "--kind", "template").exit_code == 3
    assert_same_as_log(rows_in())
    assert set(rows_in()["attempt"]) == {1, 2}
    found = {path.name: path.stat().st_mtime_ns for path in OUT.iterdir()}
    assert run().exit_code == 3  # nothing is due, and nothing is written again
    assert {path.name: path.stat().st_mtime_ns for path in OUT.iterdir()} == found


def test_a_store_that_comes_back_gets_every_row() -> None:
    StoreStandIn.begin()
    StoreStandIn.down = True
    options = {"latency_s": 0.02, "max_num_seqs": 2}
    prepare(60, engine={"options": options}, run=OFTEN, output=export_to(STORE))
    ended = run()
    told = f"{STORE}: not written: the network is down; the answered rows are safe in "
    assert told in ended.refused(1).splitlines()[-1]
    assert "the same command again writes the rest" in ended.stderr.splitlines()[-1]
    assert ended.stderr.count("next attempt in 0.1 s") > 1
    assert ended.json["exit"] == 1
    assert ended.json["ok"] == 60
    assert in_store() == {}
    StoreStandIn.down = False
    run().ok()
    assert_consecutive(in_store())
    (table,) = (pq.read_table(io.BytesIO(content)) for content in in_store().values())
    assert sorted(table["index"].to_pylist()) == [*range(60)]


def test_an_upload_that_arrives_after_its_error_loses_no_row() -> None:
    StoreStandIn.begin()
    prepare(50)
    run().ok()
    lines = LOG.read_bytes().splitlines(keepends=True)
    ends = [len(b"".join(lines[:n])) for n in (20, 50)]
    folder = PartsFolder(RUN, STORE)
    StoreStandIn.loses_replies = True
    with pytest.raises(Exception, match="no reply"):
        folder.write(ends[0])
    StoreStandIn.loses_replies = False
    folder.write(ends[1])
    StoreStandIn.deliver()
    found = in_store()
    assert ranges(found) == [[0, ends[0]], ends]
    tables = [pq.read_table(io.BytesIO(content)) for content in found.values()]
    assert sorted(pa.concat_tables(tables)["index"].to_pylist()) == [*range(50)]


def test_a_large_log_becomes_several_parts_of_whole_lines() -> None:
    prepare(200)
    run().ok()
    end = LOG.stat().st_size
    written = PartsFolder(RUN, str(OUT), most_bytes=end // 10).finish(end)
    assert written.parts == len(parts()) > 5
    assert_consecutive(parts())
    assert_same_as_log(rows_in())


@pytest.mark.parametrize("n_bytes", [0, 100, -1])
def test_a_part_that_was_half_uploaded_is_written_again(n_bytes: int) -> None:
    prepare(200)
    run().ok()
    end = LOG.stat().st_size
    folder = PartsFolder(RUN, str(OUT), most_bytes=end // 4)
    folder.write(end)
    *_, last = sorted(OUT.iterdir())
    last.write_bytes(last.read_bytes()[:n_bytes])
    folder.write(end)
    assert_consecutive(parts())
    assert_same_as_log(rows_in())


@pytest.mark.parametrize("change", ["fresh", "a part is missing", "foreign", "shorter log"])
def test_a_folder_with_parts_of_something_else_is_refused(change: str) -> None:
    prepare(100, output=export_to(OUT, every_s=0))
    run().ok()
    if change == "a part is missing":
        first = (OUT / "part-00000.parquet").rename(OUT / "part-00001.parquet")
        (OUT / "part-00002.parquet").write_bytes(first.read_bytes())
    elif change == "foreign":
        pq.write_table(pa.table({"a": [1]}), OUT / "part-00000.parquet")
    elif change == "shorter log":  # a copy from before the last part
        LOG.write_bytes(b"".join(LOG.read_bytes().splitlines(keepends=True)[:50]))
        (RUN / "checkpoint.json").unlink()
    before = parts()
    told = run(*["--fresh"] * (change == "fresh")).refused()
    assert f"output.export: {OUT}: has parts of another run" in told
    assert parts() == before
    for path in OUT.iterdir():
        path.unlink()
    run().ok()
    assert_same_as_log(rows_in())


@pytest.mark.parametrize(
    ("place", "problem"),
    [
        ("./in", "has the input"),
        ("./in/../in/", "has the input"),
        ("output/other", "is a run folder"),
        ("out/file", "is a file"),
    ],
)
def test_a_folder_that_can_t_get_parts_is_refused_before_the_run(place: str, problem: str) -> None:
    prepare(3, name="other")
    run().ok()
    for path in (Path("in/rows.jsonl"), Path("out/file")):
        path.parent.mkdir()
        path.write_bytes(Path("in.jsonl").read_bytes())
    write_job(input={"path": "in/*.jsonl"}, output=export_to(place))
    assert f"{problem}; name another folder" in run().refused()
    assert not RUN.exists()


def test_a_dry_run_of_a_job_writes_no_parts() -> None:
    prepare(3, output=export_to(OUT))
    run("--dry-run").ok()
    assert not OUT.exists()


def test_parts_of_parsed_answers_have_the_same_columns() -> None:
    options = {"latency_s": 0.02, "max_num_seqs": 2}
    prepare(150, engine={"options": options}, run=OFTEN)
    output = {**export_to(OUT), "parse": "json", "keep": ["key"]}
    write_job(engine={"options": options}, run=OFTEN, output=output)
    run().ok()
    schemas = [pq.read_schema(path) for path in OUT.iterdir()]
    assert len(schemas) > 1
    assert all(schema.equals(schemas[0]) for schema in schemas)
    frame = rows_in()
    assert [*frame["key"]] == [f"k{n}" for n in range(150)]
    parsed = [record["parsed"] for record in sorted(records(), key=lambda one: one["index"])]
    assert [*map(json.loads, frame["parsed"])] == parsed


def test_parts_have_the_vectors_of_their_rows() -> None:
    embed_runs.prepare(20, failing=(3,), run={"check_rows": 0}, output=export_to(OUT))
    assert run().exit_code == 3
    frame, stored = rows_in(), embed_runs.stored()
    assert frame["embedding"].isna().sum() == 1
    for index, vector in stored.items():
        np.testing.assert_array_equal(frame["embedding"][index], vector)


def splits_in(card: str) -> dict[str, str]:
    """The files of each split that a dataset's card names."""
    about = yaml.safe_load(card.removeprefix("---\n").partition("---\n")[0])
    (config,) = about["configs"]
    return {one["split"]: one["path"] for one in config["data_files"]}


def test_a_dataset_on_the_hub_gets_the_parts_and_a_card() -> None:
    rows_that_fail(20, every=10)
    output = export_to("hf://datasets/me/answers")
    write_job(run={"check_rows": 0}, output=output, vars={"api_key": "very-secret-word"})
    with hub() as server:
        environment = {"HF_ENDPOINT": server.url, "HF_TOKEN": server.token, "HF_HOME": "hf"}
        environment["HF_HUB_DISABLE_XET"] = "1"

        def ran(*args: str | Path) -> str:
            ended = in_a_process(*args, cwd=Path.cwd(), **environment)
            assert ended.returncode in (0, 3), ended.stderr
            return server.files["README.md"].decode()

        card = ran("run", "job.toml")
        assert splits_in(card) == {"train": "part-*.parquet", "failed": "failed.parquet"}
        (before,) = (name for name in server.files if name.startswith("part-"))
        assert "18 ok, 2 failed of 20 rows" in card
        assert "very-secret-word" not in card
        content = server.files[before]
        card = ran("retry-failed", "job.toml", "--set", "vars.q=now")
    assert "20 ok, 0 failed of 20 rows" in card
    assert splits_in(card) == {"train": "part-*.parquet"}
    assert sorted(server.files) == ["README.md", before, "part-00001.parquet"]
    assert server.files[before] == content


def test_an_interrupted_run_leaves_the_rest_to_the_next_start() -> None:
    options = {"latency_s": 0.02}
    prepare(400, engine={"options": options}, run=SLOW, output=export_to(OUT))
    with begin("run", "job.toml", cwd=Path.cwd()) as process:
        until(lambda: len(parts()) > 0)
        process.send_signal(signal.SIGTERM)
        process.communicate()
    assert process.returncode == 128 + signal.SIGTERM
    assert sum(map(len, [pd.read_parquet(path) for path in OUT.iterdir()])) <= n_records() < 400
    run(*FAST).ok()
    assert_consecutive(parts())
    assert_same_as_log(rows_in())
