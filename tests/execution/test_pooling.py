"""Rows that are classified or scored instead of answered with a text: the dry-run engine's answers
in records, what reads them, and OpenAI batch files for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow.parquet as pq
import pytest
import tomlkit

from batchkit.config.tables import JobConfig
from batchkit.execution.completions import failed_unless_whole, to_record
from batchkit.execution.start import Start
from batchkit.storage.lines import failure_kind
from batchkit.storage.vectors import Vectors
from batchkit.types import Completion, Pair, Pooled, Request, Row, Usage
from tests.support.command_line import batchkit
from tests.support.dry_runs import RUN, records, run, status, verify, write_rows
from tests.support.rows import read_jsonl, write_jsonl

pytestmark = pytest.mark.usefixtures("in_an_empty_folder")
PAIR = {"query": "{{ q }}", "documents": "{{ d }}"}


def write_job(task: str, **tables: Any) -> None:
    job = {"name": "a", "task": task, "input": {"path": "in.jsonl"}, "engine": {"kind": "dry-run"}}
    Path("job.toml").write_text(tomlkit.dumps({**job, **tables}))


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


def test_classified_rows_have_probabilities_and_a_label_that_is_scored() -> None:
    write_rows([{"q": f"question {n}", "right": "LABEL_0"} for n in range(30)])
    scoring = {"scorers": ["em"], "reference": "right"}
    write_job("classify", prompt={"user": "{{ q }}"}, scoring=scoring)
    assert run().exit_code == 0
    labels = [record["label"] for record in records()]
    assert 0 < labels.count("LABEL_0") < 30
    assert [r["prediction"] for r in records()] == labels
    for record in records():
        assert (record["text"], failure_kind(record)) == (None, None)
        assert sum(record["probabilities"]) == pytest.approx(1)
        likeliest = record["probabilities"].index(max(record["probabilities"]))
        assert record["label"] == f"LABEL_{likeliest}"
        assert record["usage"] == {"prompt_tokens": 2, "completion_tokens": 0}
    assert (status()["ok"], verify()["ok"]) == (30, 30)
    share = 100 * labels.count("LABEL_0") / 30
    assert batchkit("score", "output/a", "--json").json["overall"]["em"] == pytest.approx(share)


ONE, LIST = Pair("q", ["d"], is_list=False), Pair("q", ["a", "b", "c"], is_list=True)
LARGE = Pooled(vector=np.array([1, 70_000], "<f4").tobytes())


@pytest.mark.parametrize(
    ("pooled", "pair", "dtype", "fault"),
    [
        (Pooled(vector=b"\0\0\x80?\0\0\xc0\x7f"), None, "float32", "not finite"),  # 1, NaN
        (Pooled(probabilities=[0.5, float("nan")], label="a"), None, "float32", "not finite"),
        (Pooled(scores=[float("inf")]), ONE, "float32", "not finite"),
        (LARGE, None, "float16", 'has 70,000, which float16 can\'t hold; set output.vector_dtype = "float32"'),
        (LARGE, None, "float32", None),
        (Pooled(scores=[1.0, 3.0, 2.0]), LIST, "float32", None),
    ],
)  # fmt: skip
def test_a_number_that_can_not_be_stored_is_no_answer(
    pooled: Pooled, pair: Pair | None, dtype: str, fault: str | None
) -> None:
    request = Request(Row(3, "3", {}), None, None, {}, "hash", pair=pair)
    whole = Completion(request, usage=Usage(5, 0), pooled=pooled)
    found = failed_unless_whole(whole, dtype)
    record = to_record(Start.of(JobConfig(engine={"kind": "dry-run"})), found)
    if fault is None:
        assert found == whole
        assert record.score == pooled.scores
        assert record.order == (None if pooled.scores is None else [1, 2, 0])
    else:
        assert found.error is not None
        assert found.error.kind == "invalid_output"
        assert fault in str(found.error)
        assert record.score is None


CHAT = [{"role": "user", "content": "tea"}]


def line(number: int, url: str | None, **body: Any) -> dict[str, Any]:
    request = {"custom_id": f"c{number}", "method": "POST", "body": {"model": "m", **body}}
    return request if url is None else {**request, "url": url}


def write(task: str | None, *lines: dict[str, Any], **tables: Any) -> None:
    write_jsonl(Path("batch.jsonl"), lines)
    job: dict[str, Any] = {} if task is None else {"task": task}
    job |= {"name": "a", "input": {"path": "batch.jsonl"}, "engine": {"kind": "dry-run"}, **tables}
    Path("job.toml").write_text(tomlkit.dumps(job))


def errors() -> dict[int, str]:
    return {r["index"]: r["error"]["message"] for r in records() if r["error"]}


def exported() -> list[dict[str, Any]]:
    assert batchkit("export", "job.toml", "--openai").exit_code == 0
    return [answer["response"]["body"] for answer in read_jsonl(RUN / "results.openai.jsonl")]


def test_lines_for_embeddings_have_a_vector_each() -> None:
    write(
        "embed",
        line(0, "/v1/embeddings", input="tea"),
        line(1, "/v1/embeddings", input=["coffee"], encoding_format="base64", user="me"),
        line(2, "/v1/embeddings", input="tea", dimensions=4),
        line(3, None, messages=CHAT),
        line(4, "/v1/embeddings", input=["tea", "coffee"]),
        line(5, "/v1/embeddings", input=[1, 2]),
    )
    assert run().exit_code == 3
    assert errors().keys() == {4, 5}
    found = {r["id"]: r["embedding"]["dimensions"] for r in records() if not r["error"]}
    assert found == {"c0": 8, "c1": 8, "c2": 4, "c3": 8}
    assert (status()["ok"], verify()["ok"]) == (4, 4)


def test_the_export_is_read_by_openais_own_types() -> None:
    embeddings = pytest.importorskip("openai.types")
    lines = [line(n, "/v1/embeddings", input=f"text {n}") for n in range(30)]
    write("embed", *lines, line(30, "/v1/embeddings", input=["a", "b"]))
    assert run().exit_code == 3
    bodies = [embeddings.CreateEmbeddingResponse.model_validate(body) for body in exported()]
    vectors = Vectors(RUN)
    by_index = {record["index"]: record for record in records()}
    for index, body in enumerate(bodies):
        (item,) = body.data
        assert np.array_equal(np.array(item.embedding, "f4"), vectors.of(by_index[index]))
        assert (item.index, body.object, body.usage.total_tokens) == (0, "list", 2)
    assert len(bodies) == 30
    (failed,) = read_jsonl(RUN / "results.openai.errors.jsonl")
    assert (failed["custom_id"], failed["error"]["code"]) == ("c30", "invalid_request")


def test_lines_for_scores_and_rerank_are_exported_in_their_shapes() -> None:
    documents = ["one", {"content": [{"type": "text", "text": "two"}]}, "three"]
    write(
        "score",
        line(0, "/v1/score", text_1="tea", text_2="one"),
        line(1, "/score", queries="tea", documents=documents),
        line(2, "/v1/rerank", query="tea", documents=documents),
        line(3, "/v1/rerank", query="tea", documents=documents, top_n=2),
        line(4, "/v1/rerank", query="tea", documents="one"),
        line(5, "/v1/score", queries=["tea", "coffee"], documents=["one", "two"]),
        line(6, "/v1/rerank", query="tea", documents=documents, top_n="2"),
        line(7, "/v1/rerank", query="tea", documents=documents, top_n=-1),
    )
    assert run().exit_code == 3
    assert "has 2 queries" in errors().pop(5)
    in_order = sorted(records(), key=lambda record: record["index"])
    one, several, ranked, best, alone, *odd = [r for r in in_order if not r["error"]]
    bodies = exported()
    assert [item["score"] for item in bodies[0]["data"]] == [one["score"]]
    assert [item["score"] for item in bodies[1]["data"]] == several["score"]
    assert [item["index"] for item in bodies[1]["data"]] == [0, 1, 2]
    assert [item["index"] for item in bodies[2]["results"]] == ranked["order"]
    scores = [item["relevance_score"] for item in bodies[2]["results"]]
    assert scores == sorted(ranked["score"], reverse=True)
    shown = {item["index"]: item["document"] for item in bodies[2]["results"]}
    assert shown[0] == {"text": "one", "multi_modal": None}
    assert shown[1] == {"text": None, "multi_modal": [{"type": "text", "text": "two"}]}
    assert [item["index"] for item in bodies[3]["results"]] == best["order"][:2]
    assert [item["relevance_score"] for item in bodies[4]["results"]] == [alone["score"]]
    for record, body in zip(odd, bodies[5:], strict=True):  # a count that is none: all of them
        assert [item["index"] for item in body["results"]] == record["order"]
    for body in bodies[:3]:  # the others are copies of equal requests
        assert body["usage"]["prompt_tokens"] == body["usage"]["total_tokens"] > 0


def test_scores_of_a_batch_file_that_is_gone_are_not_exported_in_a_shape_that_may_be_wrong() -> (
    None
):
    write("score", line(0, "/v1/rerank", query="tea", documents=["one"]))
    assert run().exit_code == 0
    Path("batch.jsonl").unlink()
    refused = batchkit("export", "job.toml", "--openai")
    assert refused.exit_code == 2
    assert "batch.jsonl" in refused.stderr
    assert not (RUN / "results.openai.jsonl").exists()


def test_lines_to_classify_are_exported_as_vllms_server_answers() -> None:
    write("classify", line(0, "/classify", input="tea"), line(1, "/classify", messages=CHAT))
    assert run().exit_code == 0
    for record, body in zip(records(), exported(), strict=True):
        (item,) = body["data"]
        assert item == {
            "index": 0,
            "label": record["label"],
            "probs": record["probabilities"],
            "num_classes": len(record["probabilities"]),
        }


@pytest.mark.parametrize("count", [1, 3, 40])
def test_a_file_for_another_task_is_one_error_that_says_what_to_set(count: int) -> None:
    write(None, *[line(n, "/v1/embeddings", input="tea") for n in range(count)])
    refused = run()
    assert refused.exit_code == 2
    for part in ("url: /v1/embeddings", 'task = "embed"', "--set task=embed", "was not loaded"):
        assert part in refused.stderr
    assert refused.stderr.count("/v1/embeddings") == 1
    assert run("--set", "task=embed").exit_code == 0
    assert len(records()) == count


MIXED = [
    line(0, "/v1/chat/completions", messages=CHAT),
    line(1, "/v1/embeddings", input="tea"),
    line(2, "/v1/score", text_1="a", text_2="b"),
    line(3, "/v1/images/generations", input="tea"),
    line(4, "/v2/rerank", query="a", documents=["b", "c"]),
    line(5, "/v1/completions", prompt="tea"),
    line(6, "/v1/responses", input="tea"),
    line(7, "/classify", input="tea"),
]
CHAT_SHAPES = {0: "chat.completion", 5: "text_completion", 6: "response"}


@pytest.mark.parametrize(
    ("task", "shapes"),
    [
        (None, CHAT_SHAPES),
        ("embed", {1: "embedding", 2: "score", 4: "rerank"}),
        ("token_embed", {1: "pooling", 2: "score", 4: "rerank"}),
        ("classify", {2: "score", 4: "rerank", 7: "classify"}),
        ("token_classify", {7: "pooling"}),
        ("score", {1: "embedding", 2: "score", 4: "rerank", 7: "classify"}),
    ],
)
def test_each_line_of_a_mixed_file_goes_by_its_own_task_or_fails_alone(
    task: str | None, shapes: dict[int, str]
) -> None:
    write(task, *MIXED)
    assert run().exit_code == 3
    assert errors().keys() == {*range(8)} - shapes.keys()
    assert "'/v1/images/generations' is not one of" in errors()[3]
    for number, message in errors().items():
        assert MIXED[number]["url"] in message
        assert number == 3 or f'task = "{task or "generate"}", which serves' in message
    assert {r["error"]["kind"] for r in records() if r["error"]} == {"invalid_request"}
    assert [_shape(body) for body in exported()] == [*shapes.values()]
    assert (status()["ok"], verify()["ok"]) == (len(shapes), len(shapes))
    assert batchkit("export", "job.toml", "--parquet", "--csv", "--jsonl").exit_code == 0
    if task in ("embed", "token_embed"):
        assert batchkit("export", "job.toml", "--npy").exit_code == 0
        assert orjson.loads((RUN / "results.ids.json").read_bytes()) == ["c1"]
    table = pq.read_table(RUN / "results.parquet").to_pylist()
    assert [row["index"] for row in table if row["status"] == "ok"] == [*shapes]
    for row in table:
        shape = shapes.get(row["index"], "")
        assert (row.get("embedding") is not None) == (shape in ("embedding", "pooling"))
        assert (row.get("score") is not None) == (shape in ("score", "rerank"))
        assert (row.get("label") is not None) == (shape == "classify")


def _shape(body: dict[str, Any]) -> str:
    if body.get("object") != "list":
        return body.get("object") or "rerank"
    return body["data"][0].get("object") or "classify"


def test_the_answer_of_steps_has_the_shape_of_its_line() -> None:
    steps = [{"name": "draft"}, {"name": "revise", "prompt": {"user": "{{ steps.draft.text }}"}}]
    write(None, *MIXED[5:7], steps=steps)
    assert run().exit_code == 0
    assert [_shape(body) for body in exported()] == ["text_completion", "response"]


@pytest.mark.parametrize("first", [1, 25, 300])
def test_lines_that_the_job_can_answer_may_come_last(first: int) -> None:
    write(None, *[line(n, "/v1/embeddings", input="tea") for n in range(first)],
          line(first, "/v1/chat/completions", messages=CHAT))  # fmt: skip
    assert run().exit_code == 3
    assert (status()["ok"], status()["failed"]) == (1, first)


def test_rows_without_a_body_need_a_pair() -> None:
    write("score", {"q": "tea", "d": "one"})
    assert run().exit_code == 3
    assert "set pair.query and pair.documents, or give each row a field" in errors()[0]


def test_templates_may_read_a_body_of_any_task() -> None:
    lines = [line(0, "/v1/embeddings", input="tea"), line(1, "/v1/score", text_1="a", text_2="b")]
    write(None, *lines, prompt={"user": "{{ body | tojson }}"})
    assert run().exit_code == 0


def test_validate_and_dry_run_show_what_is_compared() -> None:
    compared = "\npooling: {}\nquery: tea?\ndocument: one\ndocument: two"
    write_rows([{"q": "tea?", "d": ["one", "two"]}])
    write_job("score", pair=PAIR)
    assert compared in run("--dry-run").stdout
    assert batchkit("validate", "job.toml").exit_code == 0
    write("score", line(0, "/v1/rerank", query="tea?", documents=["one", "two"], top_n=1))
    assert "query: tea?\ndocument: one\ndocument: two" in run("--dry-run").stdout
    assert batchkit("validate", "job.toml").exit_code == 0


def test_images_of_a_line_are_opened() -> None:
    from PIL import Image

    Image.new("RGB", (8, 8)).save("a.png")
    parts = [{"type": "image_url", "image_url": {"url": name}} for name in ("a.png", "b.png")]
    good, bad = ([{"role": "user", "content": [part]}] for part in parts)
    write(
        "embed",
        line(0, "/v1/embeddings", messages=good),
        line(1, "/v1/embeddings", messages=bad),
        media={"root": "."},
    )
    assert run().exit_code == 3
    assert errors().keys() == {1}
    sides = [{"content": [part]} for part in parts]
    write(
        "score",
        line(0, "/v1/score", text_1="tea", text_2=["x", sides[0]]),
        line(1, "/v1/score", text_1=sides[0], text_2=["x", sides[1]]),
        media={"root": "."},
    )
    assert run("--fresh").exit_code == 3
    assert errors().keys() == {1}
    assert {r["error"]["kind"] for r in records() if r["error"]} == {"media"}
