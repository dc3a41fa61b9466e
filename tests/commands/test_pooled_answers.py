"""Labels and scores in exports, reports and the terminal."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import tomlkit

from batchkit.config.loading import load_job
from batchkit.execution.processor import ProductionBatchProcessor
from batchkit.storage.lines import answers_in_words
from tests.support.command_line import batchkit
from tests.support.dry_runs import RUN, records, run, write_rows
from tests.support.rows import write_jsonl

pytestmark = pytest.mark.usefixtures("in_an_empty_folder")
PAIR = {"query": "{{ q }}", "documents": "{{ d }}"}
CLASSIFY = {"task": "classify", "prompt": {"user": "{{ q }}"}}
SCORE = {"task": "score", "pair": PAIR}


def write_job(**tables: Any) -> None:
    job = {"name": "a", "input": {"path": "in.jsonl"}, "engine": {"kind": "dry-run"}, **tables}
    Path("job.toml").write_text(tomlkit.dumps(job))


def ran(rows: Any, **tables: Any) -> list[dict[str, Any]]:
    write_rows(rows)
    write_job(**tables)
    run()
    return sorted(records(), key=lambda record: record["index"])


def parquet() -> dict[str, list[Any]]:
    assert batchkit("export", "--parquet", str(RUN)).exit_code == 0
    (path,) = RUN.glob("*.parquet")
    found: dict[str, list[Any]] = pq.read_table(path).to_pydict()
    return found


def test_labels_are_columns() -> None:
    made = ran([*({"q": f"q{n}"} for n in range(600)), {"other": 1}], **CLASSIFY)
    found = parquet()
    assert found["label"] == [record.get("label") for record in made]
    assert found["probabilities"] == [record.get("probabilities") for record in made]
    assert found["label"][-1] is None
    assert "score" not in found


def test_scores_of_single_documents_are_numbers() -> None:
    made = ran([{"q": "x", "d": f"d{n}"} for n in range(30)], **SCORE)
    found = parquet()
    assert found["score"] == [record["score"] for record in made]
    assert "order" not in found


def test_scores_of_lists_are_lists_and_so_are_those_beside_them() -> None:
    made = ran([{"q": "x", "d": "one"}, {"q": "x", "d": ["a", "b"]}, {"q": "x"}], **SCORE)
    found = parquet()
    assert found["score"] == [[made[0]["score"]], made[1]["score"], None]
    assert found["order"] == [None, made[1]["order"], None]
    assert batchkit("export", "--csv", str(RUN)).exit_code == 0
    _, row, _ = csv.DictReader((RUN / "results.csv").open())
    assert json.loads(row["score"]) == made[1]["score"]


def test_a_column_of_the_input_with_such_a_name_is_kept_apart() -> None:
    write_job(**CLASSIFY)
    rows = [{"q": "tea", "label": "right"}]
    summary = ProductionBatchProcessor(load_job(Path("job.toml")), quiet=True).process(rows)
    frame = summary.to_pandas()
    assert frame["label"][0].startswith("LABEL_")
    assert frame["fields.label"][0] == "right"


def test_show_and_report_have_the_answers() -> None:
    (record,) = ran([{"q": "tea?", "d": ["a", "b"]}], **SCORE)
    best = record["order"][0]
    assert f"→ document {best}: " in batchkit("show", str(RUN)).stdout
    assert batchkit("report", str(RUN)).exit_code == 0
    assert f"document {best}: " in (RUN / "report.html").read_text()


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({"label": "good", "probabilities": [0.25, 0.75]}, ["good (0.75)"]),
        ({"score": 0.123456}, ["0.1235"]),
        ({"score": [0.1, 0.9], "order": [1, 0]}, ["document 1: 0.9, document 0: 0.1"]),
        ({"embedding": {"dimensions": 1024}}, ["embedding of 1,024 dimensions"]),
        ({"text": "a"}, ["a"]),
        ({"text": "a", "choices": [{"text": "a"}, {"text": "b"}]}, ["a", "b"]),
        (
            {"text": "", "tool_calls": [{"function": {"name": "f", "arguments": '{"x": 1}'}}]},
            ['f({"x": 1})'],
        ),
        ({"text": None}, [""]),
    ],
)
def test_an_answer_in_words(record: dict[str, Any], expected: list[str]) -> None:
    assert answers_in_words(record) == expected
    scores = [n / 1000 for n in range(1000)]
    (found,) = answers_in_words({"score": scores, "order": list(range(999, -1, -1))})
    assert found.startswith("document 999: 0.999, ")
    assert found.endswith(", … and 980 more")


def test_merged_runs_that_differ_in_a_label_are_reported() -> None:
    ran([{"q": "tea"}], **CLASSIFY)
    other = Path("output/b")
    other.mkdir()
    for path in RUN.iterdir():
        if path.is_file() and path.name not in ("checkpoint.json", ".lock"):
            (other / path.name).write_bytes(path.read_bytes())
    (record,) = records()
    write_jsonl(other / "results.jsonl", [{**record, "label": "another"}])
    ended = batchkit("merge", str(RUN), str(other), "--into", "output/c")
    assert ended.exit_code == 0, ended.stderr
    assert "1 with differing ones" in ended.stdout + ended.stderr
