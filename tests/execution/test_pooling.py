"""Rows that are classified or scored instead of answered with a text: the dry-run engine's answers
in records, and what reads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomlkit

from batchkit import ProductionBatchProcessor
from batchkit.errors import JobError
from batchkit.execution.records import failed_unless_whole, to_record
from batchkit.storage.ledger import line_of
from batchkit.storage.lines import failure_kind
from batchkit.types import Completion, Pair, Pooled, Request, Row, Usage
from tests.support.command_line import batchkit
from tests.support.dry_runs import records, run, status, verify, write_rows

pytestmark = pytest.mark.usefixtures("in_an_empty_folder")
PAIR = {"query": "{{ q }}", "documents": "{{ d }}"}


def write_job(task: str, **tables: Any) -> None:
    job = {"name": "a", "task": task, "input": {"path": "in.jsonl"}, "engine": {"kind": "dry-run"}}
    Path("job.toml").write_text(tomlkit.dumps({**job, **tables}))


def completed(pooled: Pooled, pair: Pair | None = None) -> Completion:
    request = Request(Row(3, "3", {}), None, None, {}, "hash", pair=pair)
    return Completion(request, usage=Usage(5, 0), pooled=pooled)


def test_classified_rows_have_label_and_probabilities() -> None:
    write_rows(20)
    write_job("classify", prompt={"user": "{{ q }}"})
    assert run().json["ok"] == 20
    for record in records():
        assert record["text"] is None
        assert sum(record["probabilities"]) == pytest.approx(1)
        likeliest = record["probabilities"].index(max(record["probabilities"]))
        assert record["label"] == f"LABEL_{likeliest}"
        assert record["usage"] == {"prompt_tokens": 2, "completion_tokens": 0}
        assert failure_kind(record) is None
    assert (status()["ok"], verify()["ok"]) == (20, 20)


def test_sampling_cannot_be_adjusted_where_nothing_is_sampled() -> None:
    write_rows(1)
    write_job("classify", prompt={"user": "{{ q }}"})
    with pytest.raises(JobError, match=r'adjust_sampling: is for task = "generate", and task is'):
        ProductionBatchProcessor("job.toml", adjust_sampling=dict)


def test_a_document_gets_a_score_and_a_list_an_order() -> None:
    write_rows([{"q": "x", "d": "one"}, {"q": "x", "d": ["a", "b", "c"]}])
    write_job("score", pair=PAIR)
    assert run().exit_code == 0
    one, several = sorted(records(), key=lambda record: record["index"])
    assert 0 < one["score"] < 1
    assert "order" not in one
    assert sorted(several["order"]) == [0, 1, 2]
    best_first = [several["score"][n] for n in several["order"]]
    assert best_first == sorted(several["score"], reverse=True)


def test_a_row_without_a_document_fails_alone() -> None:
    write_rows([{"q": "x", "d": "one"}, {"q": "x", "d": []}, {"q": "x"}])
    write_job("score", pair=PAIR)
    assert run().exit_code == 3
    kinds = {r["index"]: (r["error"] or {}).get("kind") for r in records()}
    assert kinds == {0: None, 1: "invalid_request", 2: "template"}


def test_the_label_is_scored() -> None:
    write_rows([{"q": f"q{n}", "right": "LABEL_0"} for n in range(30)])
    scoring = {"scorers": ["em"], "reference": "right"}
    write_job("classify", prompt={"user": "{{ q }}"}, scoring=scoring)
    assert run().exit_code == 0
    labels = [record["label"] for record in records()]
    assert 0 < labels.count("LABEL_0") < 30
    assert [r["prediction"] for r in records()] == labels
    share = 100 * labels.count("LABEL_0") / 30
    assert batchkit("score", "output/a", "--json").json["overall"]["em"] == pytest.approx(share)


def test_a_vector_travels_beside_its_line() -> None:
    vector = b"\0\0\x80?"
    line = line_of(to_record(completed(Pooled(vector=vector)), keep=[]), vector)
    assert line.vector is not None
    assert line.vector.tolist() == [1.0]
    assert b"vector" not in line.raw


@pytest.mark.parametrize(
    "pooled",
    [
        Pooled(vector=b"\0\0\x80?\0\0\xc0\x7f"),  # 1, NaN
        Pooled(probabilities=[0.5, float("nan")], label="a"),
        Pooled(scores=[float("inf")]),
    ],
    ids=["vector", "probabilities", "scores"],
)
def test_a_number_that_is_not_finite_is_no_answer(pooled: Pooled) -> None:
    found = failed_unless_whole(completed(pooled, Pair("q", ["d"], is_list=False)))
    assert found.error is not None
    assert found.error.kind == "invalid_output"
    assert to_record(found, keep=[]).score is None


def test_a_number_past_the_range_of_the_stored_type_is_no_answer() -> None:
    whole = completed(Pooled(vector=np.array([1, 70_000], "<f4").tobytes()))
    assert failed_unless_whole(whole).error is None
    error = failed_unless_whole(whole, "float16").error
    assert error is not None
    assert error.kind == "invalid_output"
    assert 'has 70,000, which float16 can\'t hold; set output.vector_dtype = "float32"' in str(
        error
    )


def test_a_finite_answer_is_kept() -> None:
    found = completed(Pooled(scores=[1.0, 3.0, 2.0]), Pair("q", ["a", "b", "c"], is_list=True))
    assert failed_unless_whole(found) == found
    record = to_record(found, keep=[])
    assert (record.score, record.order) == ([1.0, 3.0, 2.0], [1, 2, 0])


def test_validate_and_dry_run_show_the_pair() -> None:
    write_rows([{"q": "tea?", "d": ["one", "two"]}])
    write_job("score", pair=PAIR)
    assert "\npooling: {}\nquery: tea?\ndocument: one\ndocument: two" in run("--dry-run").stdout
    assert batchkit("validate", "job.toml").exit_code == 0
