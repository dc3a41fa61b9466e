"""Pooling tasks answer what ``vllm.LLM`` answers, float32, row by row; a bad row fails alone."""

from __future__ import annotations

import re
import shutil
import struct
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from PIL import Image

from batchkit.config.loading import make_job
from batchkit.config.tables import JobConfig
from batchkit.engines.process.launcher import Launcher
from batchkit.engines.registry import open_engine
from batchkit.errors import JobError, PromptTooLongError
from batchkit.storage.vectors import Vectors
from batchkit.types import Completion, Pair, Request, Row
from tests.support.engine_requests import ask
from tests.support.model_runs import OUTPUT, answered, run_job, write_job
from tests.support.pooling_models import (
    build_classifier,
    build_embedding_model,
    build_token_classifier,
)
from tests.support.small_vllm import SMALL, TEXT_ONLY
from tests.support.vllm_reference import pooled

pytestmark = pytest.mark.vllm

TEXTS = [f"question {n} " + "about tea and coffee " * (n * 7 % 23) for n in range(20)]
TOO_LONG = "word " * 600
BIO = ("O", "B-PER", "I-PER", "B-LOC", "I-LOC")
FULL = "Ada Lovelace of LONDON met Zoë Ångström; 北京, 😀 O'Brien-Smith!"
NAMES = [FULL, "x", "[SEP]", "", *TEXTS]
PAIR = {"query": "{{ q }}", "documents": "{{ d }}"}
NEAR = {"rel": 1e-5, "abs": 1e-5}


class Models(NamedTuple):
    embedding: Path
    classifier: Path
    cross_encoder: Path
    token_classifier: Path


@pytest.fixture(scope="module")
def models(text_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Models:
    folder = tmp_path_factory.mktemp("pooling")
    return Models(
        build_embedding_model(folder / "embedding", text_model),
        build_classifier(folder / "classifier", text_model),
        build_classifier(folder / "cross-encoder", text_model, labels=("relevant",)),
        build_token_classifier(folder / "token-classifier", labels=BIO),
    )


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., list[dict[str, Any]]]:
    """Runs a job; the newest record of each row."""

    def run_job(
        rows: list[dict[str, Any]],
        model: Path,
        exit_code: int,
        options: Mapping[str, Any] = TEXT_ONLY,
        **tables: Any,
    ) -> list[dict[str, Any]]:
        engine = {"model": str(model), "options": dict(options)}
        return answered(tmp_path, rows, exit_code, engine=engine, **tables)

    return run_job


def job_of(
    model: Path, task: str, options: Mapping[str, Any] = TEXT_ONLY, **tables: Any
) -> JobConfig:
    engine = {"model": str(model), "options": {**TEXT_ONLY, **options}}
    pair = {"pair": PAIR} if task == "score" else {}
    return make_job({"task": task, "engine": engine, **pair, **tables}, "test")


def embed(index: int, text: str, **params: Any) -> Request:
    return Request(Row(index, str(index), {}), None, text, params, "")


def score(index: int, query: str, documents: list[str]) -> Request:
    pair = Pair(query, documents, is_list=True)
    return Request(Row(index, str(index), {}), None, None, {}, "", pair=pair)


def vector_of(done: Completion) -> list[float]:
    assert done.pooled is not None, done.error
    vector = done.pooled.vector
    assert vector is not None
    return list(struct.unpack(f"<{len(vector) // 4}f", vector))


def reference(model: Path, options: Mapping[str, Any] = TEXT_ONLY, **call: Any) -> Any:
    """What one call of ``vllm.LLM`` answers."""
    (answers,) = pooled({**options, "model": str(model)}, [{"params": {}, **call}])
    return answers


def entities_of_transformers(model: Path, texts: list[str]) -> list[list[tuple[Any, ...]]]:
    """Their labels, places and scores."""
    from transformers import pipeline

    find = pipeline("token-classification", str(model), aggregation_strategy="simple")
    names = ("entity_group", "start", "end", "score")
    return [[tuple(entity[name] for name in names) for entity in find(text)] for text in texts]


def pictures(folder: Path, n: int) -> list[str]:
    paths = [str(folder / f"{number}.png") for number in range(n)]
    for number, path in enumerate(paths):
        Image.new("RGB", (128 + 32 * number, 96), (number * 80, 80, 140)).save(path)
    return paths


def kinds(records: list[dict[str, Any]]) -> dict[int, str]:
    return {record["index"]: record["error"]["kind"] for record in records if record["error"]}


def test_vectors_equal_those_of_llm_embed_and_pairs_of_them_are_compared(
    models: Models, launcher: Launcher
) -> None:
    """Parameters are vLLM's."""
    job = job_of(models.embedding, "embed", output={"prompt": True})
    with closing(open_engine(job, launcher)) as engine:
        *done, empty, long, short, raw, wrong = ask(
            engine,
            *(embed(n, text) for n, text in enumerate([*TEXTS, "", TOO_LONG])),
            embed(22, "tea", dimensions=16),
            embed(23, "tea", use_activation=False),
            embed(24, "tea", dimensions=1000),
        )
    with closing(open_engine(job_of(models.embedding, "score"), launcher)) as engine:
        (scored,) = ask(engine, score(0, "tea", TEXTS[:5]))
    calls = [
        {"method": "embed", "texts": TEXTS, "params": {}},
        {"method": "embed", "texts": ["tea"], "params": {"dimensions": 16}},
        {"method": "embed", "texts": ["tea"], "params": {"use_activation": False}},
        {"method": "score", "query": "tea", "documents": TEXTS[:5], "params": {}},
    ]
    options = {**TEXT_ONLY, "model": str(models.embedding)}
    expected, (expected_short,), (expected_raw,), expected_scores = pooled(options, calls)
    assert len({tuple(vector) for vector in expected}) == len(TEXTS)
    for its, vector, text in zip(done, expected, TEXTS, strict=True):
        assert vector_of(its) == pytest.approx(vector, **NEAR)
        assert its.prompt == text
        assert its.usage is not None
        assert its.usage.prompt_tokens > 2
    assert vector_of(short) == pytest.approx(expected_short, **NEAR)
    assert vector_of(raw) == pytest.approx(expected_raw, **NEAR)
    assert "the text is empty" in str(empty.error)
    assert isinstance(long.error, PromptTooLongError)
    assert "range [1, 64], got 1000" in str(wrong.error)
    assert scored.pooled is not None
    assert scored.pooled.scores == pytest.approx(expected_scores, **NEAR)


def test_token_vectors_equal_those_of_llm_encode_and_pairs_of_them_are_compared(
    models: Models, run: Any, launcher: Launcher, tmp_path: Path
) -> None:
    rows = [{"q": text} for text in [*TEXTS, "", TOO_LONG]]
    records = run(rows, models.embedding, 3, task="token_embed", prompt={"user": "{{ q }}"})
    options = {**TEXT_ONLY, "pooler_config": {"task": "token_embed"}}
    with closing(open_engine(job_of(models.embedding, "score", options), launcher)) as engine:
        asked = score(0, "tea", TEXTS[:5]), score(1, "tea", ["one", "", "three"])
        scored, refused = ask(engine, *asked)
    calls = [
        {"method": "token_embed", "params": {}, "texts": ["tea", *TEXTS]},
        {"method": "score", "params": {}, "query": "tea", "documents": TEXTS[:5]},
    ]
    (query, *expected), expected_scores = pooled({**options, "model": str(models.embedding)}, calls)
    vectors = Vectors(tmp_path / OUTPUT)
    assert len({len(matrix) for matrix in expected}) > 5
    for record, matrix in zip(records, expected, strict=False):
        assert len(matrix) == record["usage"]["prompt_tokens"]
        np.testing.assert_allclose(vectors.of(record), matrix, rtol=1e-5, atol=1e-5)
    assert kinds(records) == {20: "invalid_request", 21: "prompt_too_long"}
    by_numpy = [float((np.array(query) @ np.array(m).T).max(axis=1).sum()) for m in expected[:5]]
    assert scored.pooled is not None
    assert scored.pooled.scores == pytest.approx(expected_scores, **NEAR)
    assert scored.pooled.scores == pytest.approx(by_numpy, rel=1e-4)
    assert "document 1: the text is empty" in str(refused.error)


def test_entities_equal_those_of_transformers_and_scores_those_of_llm_encode(
    models: Models, run: Any, tmp_path: Path
) -> None:
    rows = [{"q": text} for text in [*NAMES, TOO_LONG]]
    tables = {"output": {"prompt": True}, "retry": {"on_too_long": "truncate-middle"}}
    model = models.token_classifier
    records = run(rows, model, 0, task="token_classify", prompt={"user": "{{ q }}"}, **tables)
    expected = reference(model, method="token_classify", texts=NAMES)
    vectors = Vectors(tmp_path / OUTPUT)
    for record, matrix in zip(records, expected, strict=False):
        assert len(matrix) == record["usage"]["prompt_tokens"]
        np.testing.assert_allclose(vectors.of(record), matrix, rtol=1e-5, atol=1e-5)
    texts = [*NAMES, records[-1]["prompt"]]
    assert len(texts[-1]) < len(TOO_LONG)
    assert records[-1]["truncated_tokens"] > 0
    by_transformers = entities_of_transformers(model, texts)
    assert len({entity[0] for entities in by_transformers for entity in entities}) == 2
    for record, text, entities in zip(records, texts, by_transformers, strict=True):
        found = [(e["label"], e["start"], e["end"]) for e in record["entities"]]
        assert found == [entity[:3] for entity in entities]
        for entity, (*_, score) in zip(record["entities"], entities, strict=True):
            assert entity["text"] == text[entity["start"] : entity["end"]]
            assert entity["score"] == pytest.approx(score, **NEAR)


def test_labels_without_names_are_numbered_and_tokens_of_a_chat_template_have_none(
    models: Models, launcher: Launcher, tmp_path: Path
) -> None:
    """A model with classes for whole texts gives them for tokens, too."""
    model = build_classifier(tmp_path / "unnamed", models.embedding, labels=None)
    text = "tea for Ada Lovelace,\n and  coffee"
    asked = Request(Row(1, "1", {}), [{"role": "user", "content": text}], None, {}, "")
    job = job_of(model, "token_classify", output={"prompt": True})
    with closing(open_engine(job, launcher)) as engine:
        plain, chat = ask(engine, embed(0, text), asked)
    options = {**TEXT_ONLY, "pooler_config": {"task": "token_classify"}}
    expected = reference(model, options, method="token_classify", texts=[text, chat.prompt])
    for done, matrix in zip((plain, chat), expected, strict=True):
        assert vector_of(done) == pytest.approx(np.ravel(matrix).tolist(), **NEAR)
        assert done.prompt is not None
        assert done.pooled is not None
        entities = done.pooled.entities or ()
        assert {entity["label"] for entity in entities} == {"LABEL_0", "LABEL_1"}
        assert "".join("".join(entity["text"].split()) for entity in entities) == "".join(
            re.sub(r"<\|.*?\|>", "", done.prompt).split()
        )
        for entity in entities:
            assert entity["text"] == done.prompt[entity["start"] : entity["end"]]


def test_a_tokenizer_that_does_not_know_places_is_refused(
    models: Models, launcher: Launcher, tmp_path: Path
) -> None:
    shutil.copytree(models.token_classifier, folder := tmp_path / "slow")
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "ByT5Tokenizer"}')
    with pytest.raises(JobError, match="use a model with a fast tokenizer") as caught:
        open_engine(job_of(folder, "token_classify"), launcher)
    assert "slow (" in str(caught.value)


def test_classes_equal_those_of_llm_classify(models: Models, run: Any) -> None:
    rows = [{"q": text, "right": "good"} for text in [*TEXTS, TOO_LONG, ""]]
    tables = {
        "prompt": {"user": "{{ q }}"},
        "scoring": {"scorers": ["em"], "reference": "right"},
        "retry": {"on_too_long": "truncate-middle"},
    }
    records = run(rows, models.classifier, 3, task="classify", **tables)
    expected = reference(models.classifier, method="classify", texts=TEXTS)
    for record, probabilities in zip(records, expected, strict=False):
        assert record["probabilities"] == pytest.approx(probabilities, **NEAR)
        assert record["label"] == ("bad", "fair", "good")[probabilities.index(max(probabilities))]
        assert record["prediction"] == record["label"]
        assert record["scores"]["em"] == float(record["label"] == "good")
    assert records[20]["truncated_tokens"] > 0
    assert 0 < records[20]["usage"]["prompt_tokens"] <= 512
    assert kinds(records) == {21: "invalid_request"}


def test_scores_equal_those_of_llm_score(models: Models, run: Any) -> None:
    rows = [
        {"q": "tea?", "d": TEXTS},
        {"q": "tea?", "d": TEXTS[3]},
        {"q": "tea?", "d": ["one", TOO_LONG]},
        {"q": "tea?", "d": []},
    ]
    records = run(rows, models.cross_encoder, 3, task="score", pair=PAIR)
    expected = reference(models.cross_encoder, method="score", query="tea?", documents=TEXTS)
    several, one = records[:2]
    assert several["score"] == pytest.approx(expected, **NEAR)
    assert several["order"] == sorted(range(len(TEXTS)), key=lambda n: -several["score"][n])
    assert one["score"] == pytest.approx(expected[3], **NEAR)
    assert kinds(records) == {2: "prompt_too_long", 3: "invalid_request"}
    message = records[2]["error"]["message"]
    assert re.match(r"document 1: the prompt has \d+ tokens; max_model_len is", message)


def test_images_are_embedded_as_a_chat_and_those_of_documents_are_scored(
    demo_model: Path, run: Any, tmp_path: Path
) -> None:
    files = pictures(tmp_path, 3)
    rows = [{"q": "what is shown?", "file": f"{n}.png"} for n in range(4)]
    prompt, output = {"user": "{{ q }}", "images": ["{{ file }}"]}, {"prompt": True}
    records = run(rows, demo_model, 3, SMALL, task="embed", prompt=prompt, output=output)
    found = [Vectors(tmp_path / OUTPUT).of(record).tolist() for record in records[:3]]
    rows = [
        {"q": "a cat", "d": ["one", "two"], "files": ["0.png", "1.png"]},
        {"q": "a cat", "d": ["one", "two"], "files": ["0.png", "none.png"]},
    ]
    pair = {**PAIR, "document_images": ["{{ files }}"]}
    scored = run(rows, demo_model, 3, SMALL, task="score", pair=pair, name="b")
    texts = [{"prompt": r["prompt"], "image": files[n]} for n, r in enumerate(records[:3])]
    documents = [{"text": text, "image": files[n]} for n, text in enumerate(("one", "two"))]
    calls = [
        {"method": "embed", "params": {}, "texts": texts},
        {"method": "score", "params": {}, "query": "a cat", "documents": documents},
    ]
    expected, expected_scores = pooled({**SMALL, "model": str(demo_model)}, calls)
    assert len({tuple(vector) for vector in expected}) == 3
    for vector, its in zip(found, expected, strict=True):
        assert vector == pytest.approx(its, **NEAR)
    assert "what is shown?" in records[0]["prompt"]
    assert kinds(records) == {3: "media"}
    assert expected_scores[0] != pytest.approx(expected_scores[1], abs=1e-3)
    assert scored[0]["score"] == pytest.approx(expected_scores, **NEAR)
    assert kinds(scored) == {1: "media"}


def test_the_texts_of_a_pair_are_shown_as_the_model_gets_them(
    models: Models, tmp_path: Path
) -> None:
    engine = {"model": str(models.cross_encoder), "options": TEXT_ONLY}
    write_job(
        tmp_path, [{"q": "tea?", "d": ["one", "two"]}], task="score", engine=engine, pair=PAIR
    )
    shown = run_job(tmp_path, "--dry-run").stdout
    assert "prompt tokens, images: none" in shown
    assert "\ntea?one\ntea?two" in shown


@pytest.mark.parametrize(
    ("name", "task", "pooling", "expected"),
    [
        ("classifier", "embed", {}, 'or set engine.options.convert = "embed"'),
        ("classifier", "score", {}, "has 3 classes, but a model that scores pairs has one class"),
        ("embedding", "classify", {}, "take a model with classes"),
        ("embedding", "token_classify", {}, "take a model with classes for tokens"),
        ("token_classifier", "classify", {}, 'task = "classify": vLLM runs'),
        ("embedding", "embed", {"dimension": 4}, "pooling.dimension: vLLM has no such parameter; did you mean 'dimensions'?"),
        ("embedding", "embed", {"task": "embed"}, "pooling.task: vLLM has no such parameter"),
        ("embedding", "embed", {"normalize": False}, "vLLM has no such parameter; did you mean 'use_activation'?"),
        ("embedding", "embed", {"use_activation": "yes"}, "pooling.use_activation: Expected `bool | null`, got `str`"),
        ("embedding", "embed", {"dimensions": 1000}, "pooling: Model"),
    ],
)  # fmt: skip
def test_what_the_model_can_not_do_is_refused_with_the_remedy(
    models: Models,
    launcher: Launcher,
    name: str,
    task: str,
    pooling: dict[str, Any],
    expected: str,
) -> None:
    with pytest.raises(JobError) as caught:
        open_engine(job_of(getattr(models, name), task, pooling=pooling), launcher)
    assert expected in str(caught.value)
