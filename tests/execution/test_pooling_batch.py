"""OpenAI batch files for pooling models, as ``vllm run-batch`` takes them: on the dry-run engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomlkit

from batchkit.storage.vectors import Vectors
from tests.support.command_line import batchkit
from tests.support.dry_runs import RUN, records, run, status, verify
from tests.support.rows import read_jsonl, write_jsonl

pytestmark = pytest.mark.usefixtures("in_an_empty_folder")
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
    assert errors() == {
        4: "body: has 2 texts; a row has one answer: make each of them a line of its own, with its"
        " own custom_id",
        5: "body.input: found [1, 2], expected a text; numbers of tokens are not supported",
    }
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
    one, several, ranked, best, alone, *odd = [r for r in records() if not r["error"]]
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
    for body in bodies:
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


def test_lines_of_another_task_among_others_fail_alone() -> None:
    write(
        "embed",
        line(0, "/v1/chat/completions", messages=CHAT),
        line(1, "/v1/embeddings", input="tea"),
        line(2, "/v1/score", text_1="a", text_2="b"),
        line(3, "/v1/audio/transcriptions", input="tea"),
    )
    assert run().exit_code == 3
    found = errors()
    assert found.keys() == {0, 2, 3}
    assert 'task = "generate"' in found[0]
    assert 'task = "score"' in found[2]
    assert "'/v1/audio/transcriptions' is not one of" in found[3]
    assert {r["error"]["kind"] for r in records() if r["error"]} == {"invalid_request"}


def test_rows_without_a_body_need_a_pair() -> None:
    write("score", {"q": "tea", "d": "one"})
    assert run().exit_code == 3
    assert "pair.query and pair.documents are not set, and the row has no body" in errors()[0]


def test_templates_may_read_a_body_of_any_task() -> None:
    lines = [line(0, "/v1/embeddings", input="tea"), line(1, "/v1/score", text_1="a", text_2="b")]
    write(None, *lines, prompt={"user": "{{ body | tojson }}"})
    assert run().exit_code == 0


def test_validate_and_dry_run_show_what_a_line_compares() -> None:
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
