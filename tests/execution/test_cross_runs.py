"""Runs of rows × values: they are continued, split, repaired, compared and exported as all others."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import tomlkit

from batchkit.config.tables import JobConfig
from batchkit.execution.processor import ProductionBatchProcessor
from batchkit.runs.run import Run
from tests.support.chat_server import MODEL, ChatServer, serving
from tests.support.command_line import batchkit
from tests.support.dry_runs import LOG, RUN, run, shard
from tests.support.jobs import with_tables
from tests.support.rows import read_jsonl, write_jsonl

pytestmark = pytest.mark.usefixtures("in_an_empty_folder")

N, VALUES = 30, ["", "a", "b"]
ALL = N * len(VALUES)


def write_job(**tables: Any) -> None:
    job: dict[str, Any] = {
        "name": "a",
        "input": {"path": "in.jsonl", "id": "id", "cross": {"adapter": VALUES}},
        "prompt": {"user": "{{ q }}", "lora": "{{ adapter }}"},
        "engine": {"kind": "dry-run"},
    }
    Path("job.toml").write_text(tomlkit.dumps(with_tables(job, tables)))
    kinds = ["even", "odd"]
    write_jsonl(
        Path("in.jsonl"),
        ({"id": f"r{n}", "q": f"row {n}", "right": n, "kind": kinds[n % 2]} for n in range(N)),
    )


def ids(log: Path = LOG) -> list[str]:
    return [record["id"] for record in sorted(read_jsonl(log), key=lambda one: int(one["index"]))]


EVERY = [f"r{n}/{value}" for n in range(N) for value in VALUES]


def is_sound(folder: Path, n_rows: int = ALL) -> None:
    found = batchkit("verify", folder, "--json").json
    assert (found["rows"], found["records"], found["ok"]) == (n_rows, n_rows, n_rows)
    for name in ("lost", "duplicates", "pending", "failed"):
        assert not found[name]


def test_a_run_is_continued_past_its_limit() -> None:
    write_job()
    assert run("--set", "input.limit=7").exit_code == 0
    assert ids() == EVERY[:21]
    done = run()
    assert done.exit_code == 0
    assert json.loads(done.stdout)["skipped"] == 21
    assert ids() == EVERY
    is_sound(RUN)
    assert batchkit("status", RUN, "--json").json["total"] == ALL


def test_shards_have_whole_rows_and_merge_into_one_run() -> None:
    write_job()
    folders = [shard(number, 3) for number in range(3)]
    for number in range(3):
        assert run("--shard", f"{number}/3").exit_code == 0
        its = ids(folders[number] / "results.jsonl")
        assert len({one.split("/")[0] for one in its}) * len(VALUES) == len(its)
    assert batchkit("merge", *folders, "--into", "output/whole").exit_code == 0
    assert ids(Path("output/whole/results.jsonl")) == EVERY
    is_sound(Path("output/whole"))


def test_a_sample_draws_rows_with_all_their_values() -> None:
    write_job()
    done = run("--set", "run.sample=5")
    assert "run.sample: 15 of 90 rows" in done.stderr
    drawn = ids()
    assert len(drawn) == 15
    assert len({one.split("/")[0] for one in drawn}) == 5
    assert run().exit_code == 0
    assert ids() == EVERY


def test_another_value_keeps_the_answers_of_the_others() -> None:
    write_job()
    assert run().exit_code == 0
    write_job(input={"cross": {"adapter": [*VALUES, "c"]}})
    refused = run()
    assert refused.exit_code == 2
    assert 'input.cross: {"adapter":["","a","b"]} → {"adapter":["","a","b","c"]}' in refused.stderr
    done = run("--on-change", "requeue")
    assert "requeue: 90 records kept" in done.stderr
    assert json.loads(done.stdout)["skipped"] == 90
    assert ids() == [f"r{n}/{value}" for n in range(N) for value in (*VALUES, "c")]
    is_sound(RUN, N * 4)


def test_exports_have_a_line_for_each_value() -> None:
    write_job(
        sampling={"temperature": "{{ t }}"}, input={"cross": {"adapter": ["", "a"], "t": [0, 0.5]}}
    )
    assert run().exit_code == 0
    assert batchkit("export", RUN, "--csv", "out.csv").exit_code == 0
    table = pd.read_csv("out.csv", keep_default_na=False)
    assert list(table["id"][:4]) == ["r0//0", "r0//0.5", "r0/a/0", "r0/a/0.5"]
    assert list(table["adapter"][:4]) == ["", "", "a", "a"] == list(table["lora"][:4])
    assert list(table["t"][:4]) == [0, 0.5, 0, 0.5]


def test_rows_of_a_frame_come_back_with_its_index() -> None:
    frame = pd.DataFrame({"q": ["x", "y"]}, index=["first", "second"])
    job = JobConfig(
        input={"cross": {"adapter": VALUES}},
        prompt={"user": "{{ q }} {{ adapter }}"},
        engine={"kind": "dry-run"},
    )
    done = ProductionBatchProcessor(job, quiet=True).process(frame)
    found = done.to_pandas()
    assert list(found.index) == ["first"] * 3 + ["second"] * 3
    assert list(found["adapter"]) == VALUES * 2


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("{{ q }}", "sampling.temperature: found 'row 0', expected a number"),
        ("{{ missing }}", "sampling.temperature: '{{ missing }}' is undefined"),
    ],
)
def test_a_sampling_value_that_is_no_number_fails_its_row(value: str, words: str) -> None:
    write_job(sampling={"temperature": value})
    done = run()
    assert done.exit_code == 2
    assert words in done.stderr


@pytest.fixture
def server() -> Iterator[ChatServer]:
    """``a`` is right in 24 of 30 rows, ``b`` in all even ones, the model alone in none."""

    def answer(text: str, body: dict[str, Any]) -> str:
        n = int(text.split()[-1])
        right = {MODEL: False, "a": n < 24, "b": n % 2 == 0}[body["model"]]
        return str(n) if right else "nothing"

    with serving(answer) as found:
        found.names += ["a", "b"]
        yield found


def write_scored_job(server: ChatServer, **tables: Any) -> None:
    engine = {"kind": "openai-server", "model": MODEL, "base_url": server.url}
    scoring = {"reference": "right", "scorers": ["em"]}
    write_job(**with_tables({"engine": engine, "scoring": scoring}, tables))


def test_values_are_compared_over_the_same_rows(server: ChatServer) -> None:
    write_scored_job(server, scoring={"group_by": "kind"})
    done = run()
    assert done.exit_code == 0, done.stderr
    found = Run(RUN).compare()
    assert found.runs == ["adapter = (none)", "adapter = a", "adapter = b"]
    deltas = {(delta.run[-1], delta.group): delta for delta in found.deltas}
    assert {key: (delta.n, delta.delta) for key, delta in deltas.items()} == {
        ("a", "even"): (15, 80.0),
        ("a", "odd"): (15, 80.0),
        ("a", None): (30, 80.0),
        ("b", "even"): (15, 100.0),
        ("b", "odd"): (15, 0.0),
        ("b", None): (30, 50.0),
    }
    assert deltas["a", None].low < 80 < deltas["a", None].high
    assert (deltas["b", None].better, deltas["b", None].worse) == (15, 0)
    for text in (done.stderr, batchkit("report", RUN).stdout, batchkit("score", RUN).stdout):
        assert "## adapter = b against adapter = (none)" in text
        assert "EM better: r0, r2, r4" in text
    values = json.loads(batchkit("report", RUN, "--json").stdout)["values"]
    assert len(values["deltas"]) == 6


def test_scores_are_grouped_by_the_value(server: ChatServer) -> None:
    write_scored_job(server)
    assert run().exit_code == 0
    found = json.loads(batchkit("score", RUN, "--json").stdout)["metrics"]
    assert {name: group["em"] for name, group in found.items()} == {
        "(none)": 0.0,
        "a": 80.0,
        "b": 50.0,
    }


def test_a_reference_run_without_values_has_the_answer_of_each() -> None:
    prompt = {"user": "{{ q }}", "lora": ""}
    extract = {"extract": "final-answer"}
    write_job(name="first", input={"cross": {}}, prompt=prompt, scoring=extract)
    assert run().exit_code == 0
    write_job(scoring={**extract, "reference_run": "output/first", "scorers": ["em"]})
    assert run().exit_code == 0
    found = json.loads(batchkit("score", RUN, "--json").stdout)
    assert (found["scored"], found["unscored"]) == (ALL, 0)
    right = [record["id"] for record in read_jsonl(LOG) if record["scores"]["em"]]
    assert right == ["r0/"]  # the dry-run engine answers with the row's place


def test_a_name_that_the_server_lacks_fails_its_rows(server: ChatServer) -> None:
    write_scored_job(server, input={"cross": {"adapter": ["a", "z"]}})
    assert run().exit_code == 3
    failed = [record for record in read_jsonl(LOG) if record["status"] == "failed"]
    assert {record["id"][-1] for record in failed} == {"z"}
    assert failed[0]["error"]["kind"] == "invalid_request"
    assert (
        "prompt.lora: the server has no adapter 'z'; it answered 404"
        in failed[0]["error"]["message"]
    )


def test_a_server_that_does_not_choose_by_name_ends_the_run(server: ChatServer) -> None:
    own = server.answer
    server.answer = lambda path, body: {**own(path, body), "model": MODEL}  # type: ignore[method-assign]
    write_scored_job(server, input={"cross": {"adapter": ["a", "b"]}})
    done = run()
    assert done.exit_code == 1
    assert f"answered as model {MODEL!r}, but the row needs 'a'" in done.stderr
