"""``batchkit.Run``: what a program reads of a run; the examples of docs/python.md are run."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import orjson
import pyarrow.parquet as pq
import pytest
import tomlkit

from batchkit import Run
from batchkit.errors import InputError, JobError, StoreError
from batchkit.storage.score_store import ScoreLine, write_scores
from tests.support.command_line import batchkit
from tests.support.dry_runs import process, write_job
from tests.support.rows import read_jsonl, write_jsonl

pytestmark = pytest.mark.usefixtures("in_an_empty_folder")
PAGE = Path(__file__).parents[2] / "docs" / "python.md"
NUMBER = {"extract": "number", "reference": "a", "scorers": ["em"], "group_by": "kind"}


def make_run(name: str = "reviews", n: int = 20, **tables: Any) -> Run:
    """Row 3 fails; the answer to row n ends in n, which every second row expects."""
    rows = [
        {"id": f"r{k}", "review": f"tea {k}", "kind": "ab"[k % 2], "a": str(k if k % 2 else -1)}
        for k in range(n)
    ]
    del rows[3]["review"]
    write_jsonl(Path("in.jsonl"), rows)
    job = {
        "name": name,
        "input": {"path": "in.jsonl", "id": "id"},
        "prompt": {"user": "{{ review }}"},
        "engine": {"kind": "dry-run"},
        "output": {"keep": ["a"]},
        **tables,
    }
    Path(f"{name}.toml").write_text(tomlkit.dumps(job))
    done = batchkit("run", f"{name}.toml")
    assert done.exit_code == 3, done.stderr
    return Run(f"output/{name}")


def test_the_examples_of_the_page_run(capsys: pytest.CaptureFixture[str]) -> None:
    make_run(scoring=NUMBER)
    make_run("reviews-8b", scoring=NUMBER)
    make_run("vectors", task="embed")
    section = (
        PAGE.read_text(encoding="utf-8").partition("## Reading a run")[2].partition("\n## ")[0]
    )
    names: dict[str, Any] = {}
    examples = re.findall(r"^```python\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
    assert len(examples) == 4
    for example in examples:
        exec(compile(example, str(PAGE), "exec"), names)
    shown = capsys.readouterr().out
    assert "19 1 0" in shown
    assert "r0 ok dry-run: no model answered row 0" in shown
    assert "reviews-8b against reviews" in shown
    assert shown.count("r3 (") == 0  # a row that failed has no vector


def test_a_job_file_names_its_run_and_so_does_nothing_at_all() -> None:
    made = make_run().folder.resolve()
    for run in (Run("reviews.toml"), Run(Path("output/reviews")), Run()):
        assert run.folder.resolve() == made
    assert repr(Run()) == "Run('output/reviews')"
    with pytest.raises(JobError, match="neither a run folder nor a job file"):
        Run("output/other")


def test_rows_are_the_newest_records_in_the_order_of_the_input() -> None:
    run = make_run()
    log = run.folder / "results.jsonl"
    lines = read_jsonl(log)
    write_jsonl(log, [*reversed(lines), {**lines[5], "text": "again"}])
    (run.folder / "checkpoint.json").unlink()
    rows = [*run.rows()]
    assert [row["index"] for row in rows] == [*range(20)]
    assert rows[5]["text"] == "again"
    assert [run.record(f"r{n}") for n in range(20)] == rows
    assert [run.record(n) for n in range(20)] == rows


def test_a_row_that_is_not_there() -> None:
    run = make_run()
    for row in ("r20", 20, -1, 2**40, ""):
        named = "index" if isinstance(row, int) else "id"
        with pytest.raises(KeyError, match=f"reviews: no record has the {named} {row!r}"):
            run.record(row)


def test_a_run_of_texts_has_no_vectors() -> None:
    with pytest.raises(
        JobError, match=r'reviews: has no vectors; vectors are for task = "embed", '
    ):
        next(make_run().vectors())


def test_a_record_has_its_newest_scores_and_follows_the_log() -> None:
    run = make_run(scoring=NUMBER)
    before = run.record("r1")
    assert before["scores"] == {"em": 1.0}
    line = ScoreLine(1, before["input_hash"], before["finished_at"], "late", {"em": 0.25})
    write_scores(run.folder, [line], before=lambda: None)
    assert run.record("r1")["scores"] == {"em": 0.25}
    with (run.folder / "results.jsonl").open("ab") as log:
        log.write(orjson.dumps({**before, "index": 20, "id": "r20", "text": "new"}) + b"\n")
    assert run.record("r20")["text"] == "new"
    assert run.status().ok == 20


def test_an_id_of_several_rows_is_refused_with_their_indexes() -> None:
    process([{"prompt": "a"}, {"prompt": "b"}])
    log = Path("output/a/results.jsonl")
    write_jsonl(log, [{**record, "id": "x"} for record in read_jsonl(log)])
    (log.parent / "checkpoint.json").unlink()
    with pytest.raises(JobError, match=r"id 'x' names several rows: 0, 1; give the index of one"):
        Run().record("x")
    assert Run().record(1)["id"] == "x"


def test_a_table_is_that_of_the_export_or_has_the_input_first() -> None:
    run = make_run()
    assert batchkit("export", "--parquet", "out.parquet").exit_code == 0
    assert run.to_arrow().equals(pq.read_table("out.parquet"))
    frame = run.to_pandas(inputs=True)
    assert [*frame.columns[:6]] == ["id", "review", "kind", "a", "index", "status"]
    assert frame["review"].isna().tolist() == [n == 3 for n in range(20)]
    assert frame["prompt_tokens"].dtype == "Int64"
    Path("in.jsonl").write_text('{"review": "other"}\n')
    with pytest.raises(InputError, match=r"changed since the run read it|made from another input"):
        run.to_arrow(inputs=True)
    assert run.to_arrow().num_rows == 20


def test_polars_gets_the_same_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "polars", SimpleNamespace(DataFrame=lambda table: [table]))
    run = make_run()
    assert run.to_polars()[0].equals(run.to_arrow())


def test_the_input_of_rows_from_python_is_gone() -> None:
    process([{"prompt": "a"}])
    with pytest.raises(JobError, match="its rows came from Python"):
        Run().to_arrow(inputs=True)


def test_scores_and_verify_say_what_the_commands_print() -> None:
    run = make_run(scoring=NUMBER)
    assert run.scores().to_json()["overall"] == batchkit("score", "--json").json["overall"]
    assert run.verify().to_json() == batchkit("verify", "--json").json
    assert run.verify().is_sound
    assert run.status().to_json() == batchkit("status", "--json").json


def test_steps_are_the_generations_of_a_row() -> None:
    steps = [{"name": "draft", "prompt": {"user": "{{ review }}"}}, {"name": "end"}]
    steps[1]["prompt"] = {"user": "{{ steps.draft.text }}"}
    Path("in.jsonl").write_text('{"review": "tea"}\n{"review": "cake"}\n')
    write_job(prompt=None, steps=steps)
    assert batchkit("run", "job.toml").exit_code == 0
    assert [step["step"] for step in Run().steps(1)] == ["draft", "end"]
    assert make_run("plain").steps("r0") == []


def test_damage_is_an_error_of_every_reading() -> None:
    run = make_run()
    log = run.folder / "results.jsonl"
    log.write_bytes(log.read_bytes().replace(b"no model", b"no\0model", 1))
    for read in (run.rows, run.to_arrow, run.scores, lambda: run.record(1)):
        with pytest.raises(StoreError, match="verify --repair"):
            read()  # type: ignore[operator]
    assert not run.verify().is_sound


def test_a_notebook_shows_counts_and_rows_as_text() -> None:
    run = make_run()
    log = run.folder / "results.jsonl"
    write_jsonl(log, [{**record, "text": "<script>x</script>"} for record in read_jsonl(log)])
    (run.folder / "checkpoint.json").unlink()
    shown = run._repr_html_()
    assert "reviews: 19 ok, 1 failed, 0 of 20 left" in shown
    assert "&lt;script&gt;" in shown
    assert "<script>" not in shown
    assert shown.count("<tr>") == 6


def test_a_run_gives_its_job_and_its_manifest() -> None:
    run = make_run(scoring=NUMBER)
    assert [*run.job().scoring.scorers] == ["em"]
    assert [start.exit for start in run.history().starts] == [3]
