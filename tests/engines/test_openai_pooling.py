"""Vectors, classes and scores of servers, over real HTTP to a server in this process."""

from __future__ import annotations

import base64
import hashlib
import re
import struct
import time
from array import array
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
from PIL import Image

from batchkit.engines.base import Engine
from batchkit.engines.registry import open_engine, open_preflight
from batchkit.errors import EngineError, JobError, RequestError
from batchkit.storage.vectors import Vectors
from batchkit.types import Completion, Content, Pair, Request, Row
from tests.support.chat_server import MODEL, ChatServer, Refused, error, read_content, serving
from tests.support.command_line import batchkit
from tests.support.server_engine import ask, job, opened, request
from tests.support.server_runs import RUN, answering, assert_settled, records, write_job

PAIR = {"query": "{{ q }}", "documents": "{{ d }}"}


# --- the server: no model, but the endpoints of `vllm serve`

# A vector depends on the text alone, a score on the words that both sides share. Items of a list are in the
# opposite order, so that only their indexes say which is which.
PATHS = frozenset(["/v1/embeddings", "/classify", "/v1/rerank"])
LABELS = ["short", "middle", "long"]


def vector(text: str, dimensions: int = 8) -> list[float]:
    digest = hashlib.sha256(text.encode()).digest()
    return [(digest[n % 32] - 128) / 128 for n in range(dimensions)]


def packed(numbers: list[float]) -> str:
    return base64.b64encode(struct.pack(f"<{len(numbers)}f", *numbers)).decode()


def score(query: str, document: str) -> float:
    both = set(query.split()) & set(document.split())
    return len(both) / (1 + len(document.split()))


class PoolingServer(ChatServer):
    """``paths`` are those that it has. ``numbers``: it knows no base64."""

    def __init__(
        self,
        before: Callable[[str, dict[str, Any]], str | None] = lambda text, body: None,
        *,
        paths: frozenset[str] = PATHS,
        numbers: bool = False,
        **kwargs: Any,
    ) -> None:
        self.paths = paths
        self.numbers = numbers
        super().__init__(before, counts=False, **kwargs)

    def answer(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        if body.get("model") != MODEL:
            raise Refused(404, error("The model does not exist.", "NotFoundError", code=404))
        documents: list[tuple[str, int]] = []
        if path == "/v1/rerank":
            sides = [body["query"], *body["documents"]]
            read = [read_content(s if isinstance(s, str) else s["content"]) for s in sides]
            (text, _), *documents = read
            seen = sum(count for _, count in read)
        else:
            messages = body.get("messages", [{"content": body.get("input")}])
            texts, images = zip(*(read_content(m["content"]) for m in messages), strict=True)
            text, seen = " ".join(texts), sum(images)
        with self.lock:
            self.bodies.append(body)
        self.before(text, body)
        longest = max((len(document.split()) for document, _ in documents), default=0)
        words = len(text.split()) + longest
        if words >= self.context:
            limit = f"This model's maximum context length is {self.context} tokens. However, "
            raise Refused(
                400, error(f"{limit}your request has more.", param="input_tokens", code=400)
            )
        time.sleep(self.latency_s)
        with self.lock:
            self.answered[text] += 1
        tokens = words + 4 * seen
        made: dict[str, Any] = {
            "object": "list",
            "model": MODEL,
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
        }
        if path == "/v1/embeddings":
            numbers = vector(f"{seen} {text}" if seen else text, body.get("dimensions") or 8)
            found: Any = numbers
            if body.get("encoding_format") == "base64" and not self.numbers:
                found = packed(numbers)
            return {**made, "data": [{"index": 0, "object": "embedding", "embedding": found}]}
        if path == "/classify":
            best = min(words, 2)
            probs = [0.8 if n == best else 0.1 for n in range(3)]
            item = {"index": 0, "label": LABELS[best], "probs": probs, "num_classes": 3}
            return {**made, "data": [item]}
        scores = [score(text, document) for document, _ in documents]
        results = [{"index": n, "relevance_score": s} for n, s in enumerate(scores)]
        return {**made, "results": results[::-1]}


pooling = partial(serving, of=PoolingServer)


# --- requests


def text(index: int, prompt: str = "", **params: Any) -> Request:
    return Request(Row(index, str(index), {}), None, prompt or f"row {index}", params, "")


def pair(index: int, query: Content, documents: list[Content], **params: Any) -> Request:
    sides = Pair(query, documents, is_list=True)
    return Request(Row(index, str(index), {}), None, None, params, "", pair=sides)


def chat(index: int, *parts: Any) -> Request:
    messages = [{"role": "user", "content": [*parts]}]
    return Request(Row(index, str(index), {}), messages, None, {}, "")


def picture() -> dict[str, Any]:
    return {"type": "image_pil", "image_pil": Image.effect_noise((64, 48), 100).convert("RGB")}


def numbers(completion: Completion) -> list[float]:
    assert completion.pooled is not None
    assert completion.pooled.vector is not None
    return array("f", completion.pooled.vector).tolist()


# --- what is sent, and what is made of the answer


@pytest.mark.parametrize("in_numbers", [False, True])
def test_a_text_has_its_vector_from_base64_and_from_numbers(in_numbers: bool) -> None:
    with (
        pooling(numbers=in_numbers, latency_s=0.02) as server,
        opened(server, task="embed") as engine,
    ):
        (done,) = ask(engine, [text(0, "how are you")])
    assert numbers(done) == vector("how are you")
    assert done.usage is not None
    assert (done.usage.prompt_tokens, done.usage.completion_tokens) == (3, 0)
    assert done.latency_s >= 0.02
    assert server.bodies == [{"model": MODEL, "input": "how are you", "encoding_format": "base64"}]


def test_pooling_parameters_and_the_jobs_own_fields_are_sent() -> None:
    options = {"extra_body": {"priority": 1}, "drop": ["encoding_format"]}
    with pooling() as server, opened(server, options, task="embed") as engine:
        (done,) = ask(engine, [text(0, dimensions=4, use_activation=False)])
    assert len(numbers(done)) == 4
    (body,) = server.bodies
    assert body.keys() == {"model", "input", "dimensions", "use_activation", "priority"}


def test_images_travel_in_messages_and_in_pairs() -> None:
    parts = [{"type": "text", "text": "a cat"}, picture()]
    template = {"chat_template_kwargs": {"instruction": "find it"}}
    with pooling() as server, opened(server, task="embed", prompt=template) as engine:
        (done,) = ask(engine, [chat(0, *parts)])
        assert numbers(done) == vector("1 a cat")
        assert server.bodies[0]["chat_template_kwargs"] == {"instruction": "find it"}
    with pooling() as server, opened(server, task="score", pair=PAIR) as engine:
        (done,) = ask(engine, [pair(0, "a cat", [parts, "a dog", [picture()]])])
    assert done.usage is not None
    assert done.usage.prompt_tokens == 2 + 2 + 4 * 2
    first, second, third = server.bodies[0]["documents"]
    kinds = [[part["type"] for part in its["content"]] for its in (first, third)]
    assert (kinds, second) == ([["text", "image_url"], ["image_url"]], "a dog")


def test_a_class_has_its_name_and_the_probabilities_of_all() -> None:
    with pooling() as server, opened(server, task="classify") as engine:
        one, two = ask(engine, [text(0, "word"), text(1, "some more words")])
    assert one.pooled is not None
    assert two.pooled is not None
    assert (one.pooled.label, one.pooled.probabilities) == ("middle", [0.1, 0.8, 0.1])
    assert (two.pooled.label, two.pooled.probabilities) == ("long", [0.1, 0.1, 0.8])


def scored(engine: Engine, requests: Iterable[Request]) -> list[Any]:
    return [done.pooled and done.pooled.scores for done in ask(engine, requests)]


DOCUMENTS = ["some tea", "tea for two", "coffee"]
EXPECTED = [score("tea for you", document) for document in DOCUMENTS]


def test_documents_are_scored_in_their_order() -> None:
    with pooling() as server, opened(server, task="score", pair=PAIR) as engine:
        requests = [pair(n, "tea for you", DOCUMENTS) for n in range(40)]
        found = scored(engine, [*requests, pair(40, "tea", ["tea"])])
    assert found == [EXPECTED] * 40 + [[score("tea", "tea")]]
    assert len(server.bodies) == 41


@pytest.mark.parametrize(
    ("task", "said"),
    [
        ("embed", ["/v1/embeddings", "404", "--embedding"]),
        ("classify", ["/classify", "--runner pooling"]),
        ("score", ["/v1/rerank", "--reranking"]),
    ],
)
def test_a_server_without_the_endpoint_stops_the_run_and_says_which_has_it(
    task: str, said: list[str]
) -> None:
    one = pair(0, "tea", ["tea"]) if task == "score" else text(0)
    tables = {"pair": PAIR} if task == "score" else {}
    with (
        pooling(paths=frozenset()) as server,
        opened(server, task=task, **tables) as engine,
        pytest.raises(EngineError) as stopped,
    ):
        ask(engine, [one])
    for part in said:
        assert part in str(stopped.value)


@pytest.mark.parametrize(
    ("owned_by", "task", "params", "message"),
    [
        ("tests", "generate", {"temprature": 1.0}, "sampling.temprature: .* did you mean 'temperature'"),
        ("tests", "generate", {"mirostat": 2}, "put a server's own parameters into engine.options.extra_body"),
        ("tests", "classify", {"softmax": True}, 'pooling.softmax: not a parameter of the API for task = "classify"'),
        ("tests", "score", {"use_activations": 1}, "did you mean 'use_activation'"),
        ("llamacpp", "generate", {"repetition_penalty": 1.1}, "engine.options.extra_body.repeat_penalty"),
        ("llamacpp", "generate", {"structured_outputs": {"choice": ["yes"]}}, "extra_body.grammar"),
        ("llamacpp", "generate", {"min_tokens": 5}, "sampling.min_tokens: llama.cpp's server would ignore this parameter; leave it out"),
        ("llamacpp", "embed", {"use_activation": False}, "extra_body.embd_normalize"),
        ("llamacpp", "embed", {"truncate_prompt_tokens": 8}, "leave it out"),
        ("llamacpp", "score", {"use_activation": True}, "leave it out"),
        ("llamacpp", "score", {"instruction": "Find it"}, "leave it out"),
    ],
)  # fmt: skip
def test_a_parameter_that_the_server_would_ignore_is_refused(
    owned_by: str, task: str, params: dict[str, Any], message: str
) -> None:
    def one(**params: Any) -> Request:
        if task == "generate":
            return request(0, **params)
        return pair(0, "tea", ["tea"], **params) if task == "score" else text(0, **params)

    table = {"sampling" if task == "generate" else "pooling": params}
    its = {"task": task, "pair": PAIR} if task == "score" else {"task": task}
    with (serving if task == "generate" else pooling)(model={"owned_by": owned_by}) as server:
        with pytest.raises(JobError, match=message):
            open_engine(job(server, **its, **table))
        with opened(server, **its) as engine:
            (refused,) = ask(engine, [one(**params)])
            assert server.bodies == []
            (answered,) = ask(engine, [one()])
        if owned_by == "tests":  # what validate can know
            with pytest.raises(RequestError, match=message):
                open_preflight(job(server, **its)).render(one(**params))
    assert isinstance(refused.error, RequestError)
    assert re.search(message, str(refused.error))
    assert answered.error is None


def test_llama_server_is_not_started_for_classes() -> None:
    engine = {"base_url": None, "model": "a.gguf", "server": {}}
    with pooling() as server, pytest.raises(JobError) as refused:
        open_preflight(job(server, {"max_model_len": 64}, task="classify", engine=engine))
    assert "llama-server" in str(refused.value)
    assert "vllm serve MODEL --runner pooling" in str(refused.value)


# --- refusals, and answers that are none


def embedded(found: Any, **more: Any) -> dict[str, Any]:
    return {"data": [{"index": 0, "embedding": found, **more}], "model": MODEL}


def classified(**item: Any) -> dict[str, Any]:
    return {"data": [{"index": 0, **item}], "model": MODEL}


def ranked(*items: Any) -> dict[str, Any]:
    return {"results": [{"index": n, "relevance_score": s} for n, s in items], "model": MODEL}


NO_ANSWERS: dict[str, dict[str, tuple[Any, str]]] = {
    "embed": {
        "no object": ([1], "Expected `object`, got `array`"),
        "a chat's answer": ({"choices": []}, "returned no list of results for 1 inputs"),
        "data that is text": ({"data": "x"}, "got `str` - at `$.data`"),
        "no vector at all": ({"data": []}, "returned 0 results for 1 inputs"),
        "two vectors": ({"data": [{"index": 0}, {"index": 1}]}, "returned 2 results"),
        "another index": (embedded([1.0], index=3), "have the indexes [3], expected 0 to 0"),
        "no embedding": ({"data": [{"index": 0}]}, "data[0].embedding has no numbers"),
        "an empty one": (embedded([]), "data[0].embedding has no numbers"),
        "an empty text": (embedded(""), "data[0].embedding has no numbers"),
        "null in it": (embedded([1.0, None]), "Expected `float`, got `null`"),
        "text in it": (embedded(["1"]), "Expected `float`, got `str`"),
        "truth in it": (embedded([True]), "Expected `float`, got `bool`"),
        "one for each token": (embedded([[1.0], [2.0]]), "Expected `float`, got `array`"),
        "no base64": (embedded("?#!"), "is not base64 of float32"),
        "a byte more": (embedded(packed([1.0])[:-2] + "AAAA"), "is not base64 of float32"),
        "an object": (embedded({"float": [1.0]}), "got `object`"),
        "an error with 200": ({"error": {"message": "broken"}}, "the answer contains an error: "),
    },
    "classify": {
        "no probabilities": (classified(label="a"), "data[0].probs has no numbers"),
        "none of them": (classified(label="a", probs=[]), "data[0].probs has no numbers"),
        "text": (classified(label="a", probs=["1"]), "Expected `float`, got `str`"),
        "a label that is a number": (classified(label=3, probs=[1.0]), "Expected `str | null`"),
    },
    "score": {
        "too few": (ranked((0, 0.5)), "returned 1 results for 2 inputs"),
        "too many": (ranked((0, 1), (1, 1), (2, 1)), "returned 3 results"),
        "no indexes": (ranked((None, 1), (None, 2)), "have the indexes"),
        "one index twice": (ranked((1, 0.5), (1, 0.5)), "have the indexes [1]"),
        "an index beyond": (ranked((0, 0.5), (2, 0.5)), "expected 0 to 1"),
        "true for 1": (ranked((0, 0.5), (True, 0.5)), "got `bool`"),
        "text": (ranked((0, "0.5"), (1, 1)), "Expected `float | null`, got `str`"),
        "nothing": (ranked((0, None), (1, 1)), "found 1 scores for 2 documents"),
    },
}


@pytest.mark.parametrize("task", NO_ANSWERS)
def test_what_is_no_vector_class_or_score_fails_its_row_and_says_why(task: str) -> None:
    cases = NO_ANSWERS[task]
    tables = {"pair": PAIR} if task == "score" else {}
    make = (lambda n, q: pair(n, q, ["tea", "a"])) if task == "score" else text
    bodies = [body for body, _ in cases.values()]
    with pooling(answering(bodies)) as server, opened(server, task=task, **tables) as engine:
        rows = [make(n, f"row {n}") for n in range(len(cases))]
        *failed, fine = ask(engine, [*rows, make(len(cases), "tea")])
    assert fine.error is None
    for (name, (_, message)), done in zip(cases.items(), failed, strict=True):
        assert done.error is not None, name
        assert (done.error.kind, message in str(done.error)) == ("server", True), (name, done.error)


def test_a_vector_of_another_size_than_asked_for_fails_its_row() -> None:
    two = answering([embedded([1.0, 2.0])])
    with pooling(two) as server, opened(server, task="embed") as engine:
        (done,) = ask(engine, [text(0, dimensions=4)])
    assert done.error is not None
    assert done.error.kind == "invalid_output"
    assert "2 dimensions, but pooling.dimensions is 4" in str(done.error)


@pytest.mark.usefixtures("in_an_empty_folder")
def test_a_run_embeds_its_rows_and_what_can_be_no_vector_of_its_model_fails_its_row() -> None:
    wrong: list[Any] = [
        embedded(packed([1.0] * 7 + [float("nan")])),
        embedded(packed([1.0] * 7 + [float("inf")])),
        embedded([1e300] * 8),
        embedded([1.0] * 7),
    ]

    def before(asked: str, body: dict[str, Any]) -> None:
        if "row " in asked:
            while len(server.answered) < 3:
                time.sleep(0.01)  # so that the size of the model's vectors is known
        answering(wrong)(asked, body)

    texts = ["tea", "coffee", "more tea", *(f"row {n}" for n in range(len(wrong)))]
    with pooling(before) as server:
        write_job(server, [{"q": q} for q in texts], task="embed", prompt={"user": "{{ q }}"})
        assert batchkit("run", "job.toml").exit_code == 3
        assert_settled(server)
    vectors = Vectors(RUN)
    for record, asked in zip(records(), texts, strict=True):
        if "row " in asked:
            assert record["error"]["kind"] == "invalid_output"
        else:
            assert vectors.of(record).tolist() == vector(asked)
    assert "7 dimensions, but vectors of other rows have 8" in records()[-1]["error"]["message"]


@pytest.mark.usefixtures("in_an_empty_folder")
def test_a_server_whose_vectors_have_another_size_at_the_next_start_stops_the_run() -> None:
    sizes = [8]

    def before(asked: str, body: dict[str, Any]) -> None:
        raise Refused(200, embedded(packed(vector(asked, sizes[0]))))

    with pooling(before) as server:
        write_job(server, 6, task="embed")
        assert batchkit("run", "job.toml", "--limit", "3").exit_code == 0
        sizes[0] = 16
        stopped = batchkit("run", "job.toml")
        assert stopped.exit_code == 1
        assert '{"dimensions":8} → {"dimensions":16}' in stopped.stderr
        assert len(records()) == 3
        sizes[0] = 8
        assert batchkit("run", "job.toml").exit_code == 0
    assert len(records()) == 6


def test_usage_may_be_the_sum_alone_or_missing() -> None:
    both = {"prompt_tokens": 4, "total_tokens": 9}
    usages: list[Any] = [{"total_tokens": 5}, both, None, "many", {}]
    bodies = [{**embedded([1.0]), "usage": usage} for usage in usages]
    with pooling(answering(bodies)) as server, opened(server, task="embed") as engine:
        done = ask(engine, map(text, range(5)))
    assert [one.usage and one.usage.prompt_tokens for one in done] == [5, 4, None, None, None]


# --- whole runs


@pytest.mark.usefixtures("in_an_empty_folder")
def test_a_run_scores_its_rows_and_a_number_that_is_none_fails_its_row() -> None:
    bodies: list[Any] = [ranked((0, float("nan"))), ranked((0, 10**400))]
    rows: list[dict[str, Any]] = [{"q": f"row {n}", "d": "a"} for n in range(2)]
    rows += [{"q": "tea for you", "d": DOCUMENTS}, {"q": "tea", "d": "tea"}]
    with pooling(answering(bodies)) as server:
        write_job(server, rows, task="score", pair=PAIR)
        assert batchkit("run", "job.toml").exit_code == 3
        assert_settled(server)
    nan, infinite, several, one = records()
    assert (nan["error"]["kind"], nan.get("score")) == ("invalid_output", None)
    assert (infinite["error"]["kind"], infinite.get("score")) == ("server", None)
    assert (several["score"], several["order"]) == (EXPECTED, [1, 0, 2])
    assert (one["score"], "order" in one) == (0.5, False)


@pytest.mark.usefixtures("in_an_empty_folder")
def test_a_run_classifies_its_rows() -> None:
    bodies = [classified(label=None, probs=[0.2, 0.7, 0.1])]
    with pooling(answering(bodies), context=9) as server:
        rows = [{"q": "tea"}, {"q": "x " * 9}, {"q": "row 0"}]
        write_job(server, rows, task="classify", prompt={"user": "{{ q }}"})
        assert batchkit("run", "job.toml").exit_code == 3
        assert_settled(server)
    fine, long, unnamed = records()
    assert (fine["label"], fine["probabilities"], fine["text"]) == ("middle", [0.1, 0.8, 0.1], None)
    assert long["error"]["kind"] == "prompt_too_long"
    assert unnamed["label"] == "LABEL_1"


@pytest.mark.usefixtures("in_an_empty_folder")
def test_a_text_that_is_too_long_is_cut_also_in_a_batch_file() -> None:
    long = "one " * 50 + "end"
    bodies = [
        ("embed", "/v1/embeddings", {"input": long}),
        ("score", "/v1/score", {"text_1": "tea for", "text_2": ["a", long]}),
    ]
    for task, url, body in bodies:
        with pooling(context=32) as server:
            rows = [{"custom_id": "a", "url": url, "body": body}]
            write_job(server, rows, task=task, retry={"on_too_long": "truncate-middle"})
            assert batchkit("run", "job.toml", "--fresh").exit_code == 0
        (record,) = records()
        assert record["truncated_tokens"] > 10
        sent = server.bodies[-1].get("input") or server.bodies[-1]["documents"][1]
        assert sent.startswith("one one")
        assert sent.endswith("one end")


@pytest.mark.usefixtures("in_an_empty_folder")
@pytest.mark.parametrize("task", ["embed", "score"])
def test_a_mixed_batch_file_is_answered_as_far_as_the_server_has_the_endpoints(task: str) -> None:
    lines = [
        ("/v1/embeddings", {"input": "tea"}),
        ("/v1/score", {"text_1": "tea for you", "text_2": DOCUMENTS}),
        ("/v2/rerank", {"query": "tea for you", "documents": DOCUMENTS}),
    ]
    rows = [{"custom_id": f"c{n}", "url": url, "body": body} for n, (url, body) in enumerate(lines)]
    with pooling() as server:
        write_job(server, rows, task=task)
        assert batchkit("run", "job.toml").exit_code == 0
    vector, *scored = records()
    assert vector["embedding"]["dimensions"] == 8
    assert [record["score"] for record in scored] == [EXPECTED, EXPECTED]

    own = {"embed": "/v1/embeddings", "score": "/v1/rerank"}[task]
    with pooling(paths=frozenset([own])) as server:
        write_job(server, rows, task=task)
        assert batchkit("run", "job.toml", "--fresh").exit_code == 3
    failed = {r["index"]: r["error"]["message"] for r in records() if r["error"]}
    assert failed.keys() == ({1, 2} if task == "embed" else {0})
    assert all("lacks this endpoint" in message for message in failed.values())
