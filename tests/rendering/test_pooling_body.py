"""Bodies of OpenAI batch lines for pooling models."""

from __future__ import annotations

from typing import Any

import pytest

from batchkit.config.tables import TaskName
from batchkit.errors import RequestError, WrongTaskError
from batchkit.rendering.body import endpoint_of, input_of, pooling_of, sides_of, task_of

CHAT = [{"role": "user", "content": "tea"}]
PARTS = [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "a.png"}}]


@pytest.mark.parametrize(
    ("url", "job_task", "task"),
    [
        ("/v1/chat/completions", "generate", "generate"),
        ("/v1/completions", "generate", "generate"),
        ("/v1/responses", "generate", "generate"),
        ("/v1/embeddings", "embed", "embed"),
        ("/v1/embeddings", "token_embed", "token_embed"),
        ("/v1/embeddings", "score", "embed"),
        ("/classify", "classify", "classify"),
        ("/classify", "score", "classify"),
        ("/classify", "token_classify", "token_classify"),
        ("/score", "score", "score"),
        ("/v1/score", "embed", "score"),
        ("/v1/score", "token_embed", "score"),
        ("/v2/rerank/", "classify", "score"),
        (None, "embed", "embed"),
        ("", "score", "score"),
    ],
)
def test_a_line_goes_by_its_own_task(url: str | None, job_task: TaskName, task: str) -> None:
    assert task_of(endpoint_of(url, job_task), job_task) == task


@pytest.mark.parametrize(
    ("url", "job_task", "serves"),
    [
        ("/v1/embeddings", "generate", "chat/completions, completions, responses"),
        ("/v1/rerank", "generate", "chat/completions, completions, responses"),
        ("/v1/responses", "embed", "embeddings, score, rerank"),
        ("/classify", "embed", "embeddings, score, rerank"),
        ("/v1/embeddings", "classify", "classify, score, rerank"),
        ("/v1/score", "token_classify", "classify"),
        ("/v1/chat/completions", "score", "embeddings, classify, score, rerank"),
    ],
)
def test_a_line_that_no_engine_of_the_job_serves_says_what_to_set(
    url: str, job_task: TaskName, serves: str
) -> None:
    with pytest.raises(WrongTaskError) as refused:
        endpoint_of(url, job_task)
    for part in (f"url: {url}", f'task = "{job_task}", which serves {serves}: ', "--set task="):
        assert part in str(refused.value)


@pytest.mark.parametrize("job_task", ["generate", "embed"])
@pytest.mark.parametrize("url", ["/v1/audio/translations", "embeddings", "/v1/images/edits"])
def test_a_url_that_no_task_has_is_refused(url: str, job_task: TaskName) -> None:
    with pytest.raises(RequestError, match=f"{url}' is not one of chat/completions"):
        endpoint_of(url, job_task)


@pytest.mark.parametrize(
    ("body", "messages", "text"),
    [
        ({"input": "tea"}, None, "tea"),
        ({"input": ["tea"]}, None, "tea"),
        ({"input": ""}, None, ""),
        ({"messages": CHAT}, CHAT, None),
        ({"input": CHAT}, CHAT, None),
    ],
)
def test_what_is_embedded_is_a_text_or_a_chat(body: Any, messages: Any, text: str | None) -> None:
    assert input_of(body) == (messages, text)


@pytest.mark.parametrize("query", ["query", "queries", "text_1", "data_1"])
@pytest.mark.parametrize("documents", ["documents", "items", "text_2", "data_2"])
def test_the_sides_of_a_pair_have_vllms_names(query: str, documents: str) -> None:
    assert sides_of({query: "tea", documents: "a"}) == ("tea", ["a"], False)
    several = sides_of({query: ["tea"], documents: ["a", {"content": PARTS}]})
    assert several == ("tea", ["a", PARTS], True)


NO_INPUT: list[tuple[Any, str]] = [
    ("tea", "body: found str, expected a JSON object"),
    ({}, "neither input nor messages"),
    ({"input": ["tea", "coffee"]}, "2 texts, but a row has one answer"),
    ({"messages": [CHAT, CHAT, CHAT]}, "3 conversations"),
    ({"input": [[1, 2], [3]]}, "2 lists"),
    ({"input": [1, 2]}, "found [1, 2], expected a text"),
    ({"input": []}, "found [], expected a text"),
    ({"input": {"text": "tea"}}, "expected a text"),
]
NO_PAIR: list[tuple[Any, str]] = [
    ([], "body: found list"),
    ({"documents": ["a"]}, "has none of query, queries"),
    ({"query": "tea"}, "has none of documents, items"),
    ({"query": "tea", "documents": []}, "has no documents"),
    ({"queries": ["a", "b"], "documents": ["a", "b"]}, "2 queries; a row has one query"),
    ({"query": 3, "documents": ["a"]}, "found 3, expected text"),
    ({"query": "tea", "documents": ["a", None]}, "found None, expected text"),
    ({"query": "tea", "documents": [{"text": "a"}]}, "expected text, or"),
]


@pytest.mark.parametrize(
    ("read", "body", "message"),
    [
        *((input_of, *case) for case in NO_INPUT),
        *((sides_of, *case) for case in NO_PAIR),
    ],
)
def test_what_can_not_be_answered_is_refused(read: Any, body: Any, message: str) -> None:
    with pytest.raises(RequestError) as refused:
        read(body)
    assert message in str(refused.value)


def test_parameters_are_what_is_neither_input_nor_form() -> None:
    body = {
        "model": "m",
        "input": "tea",
        "encoding_format": "base64",
        "dimensions": 4,
        "use_activation": None,
        "truncate_prompt_tokens": -1,
        "user": "me",
    }
    assert pooling_of(body) == {"dimensions": 4, "truncate_prompt_tokens": -1}
