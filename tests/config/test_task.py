"""``task``, ``[pair]`` and ``[pooling]``: which keys fit together."""

from __future__ import annotations

from typing import Any

import pytest

from batchkit.config.tables import JobConfig
from batchkit.errors import JobError
from batchkit.storage.identity import identity
from tests.support.dry_runs import job

PAIR = {"query": "{{ q }}", "documents": "{{ d }}"}


def refusal(**tables: Any) -> str:
    with pytest.raises(JobError) as caught:
        job(**tables)
    return str(caught.value)


OF_GENERATE = 'is for task = "generate"'
SERVER = {"kind": "openai-server", "model": "m", "base_url": "http://localhost/v1"}


@pytest.mark.parametrize(
    ("task", "tables", "expected"),
    [
        ("embedding", {}, 'task: found "embedding", expected "generate", "embed"'),
        ("generate", {"pair": PAIR}, '[pair]: is for task = "score", but task is "generate"'),
        ("generate", {"pooling": {"dimensions": 4}}, "[pooling]: is for pooling tasks"),
        ("embed", {"pair": PAIR}, '[pair]: is for task = "score", but task is "embed"'),
        ("embed", {"sampling": {"top_p": 0.5}}, f"[sampling]: {OF_GENERATE}"),
        ("embed", {"output": {"parse": "json"}}, f"output.parse: {OF_GENERATE}"),
        ("embed", {"retry": {"reask": 1, "reask_note": "Again."}}, f"retry.reask: {OF_GENERATE}"),
        ("embed", {"scoring": {"scorers": ["em"]}}, f"[scoring]: {OF_GENERATE}"),
        ("embed", {"steps": [{"name": "a", "prompt": {"user": "x"}}]}, f"[[steps]]: {OF_GENERATE}"),
        ("embed", {"prompt": {"user": "x", "lora": "{{ a }}"}}, f"prompt.lora: {OF_GENERATE}"),
        ("embed", {"prompt": {"system": "Be brief."}}, "unless prompt.chat = true"),
        ("embed", {"pooling": {"dimensions": 0}}, "pooling.dimensions: found 0, expected whole"),
        ("classify", {"pooling": {"dimensions": 4}}, 'pooling.dimensions: is for task = "embed"'),
        ("token_classify", {"pooling": {"dimensions": 4}}, 'pooling.dimensions: is for task = "e'),
        ("score", {"pair": {"documents": "x"}}, "pair.query: is missing"),
        ("score", {"pair": {"query": "x"}}, "pair.documents: is missing"),
        (
            "score",
            {"pair": PAIR, "prompt": {"user": "x"}},
            'prompt.user: task = "score" reads pair.query',
        ),
        ("token_embed", {"engine": SERVER}, '"openai-server" does not support the task "token_em'),
        (
            "embed",
            {"engine": {"kind": "transformers", "model": "m"}},
            'engine.kind: "transformers" does not support the task "embed"',
        ),
    ],
)
def test_a_key_that_does_not_fit_the_task_is_named(
    task: str, tables: dict[str, Any], expected: str
) -> None:
    assert expected in refusal(task=task, **tables)


def test_all_keys_that_do_not_fit_are_reported_together() -> None:
    found = refusal(task="score", sampling={"max_tokens": 5}, prompt={"user": "x"})
    assert "test: 4 problems" in found
    for key in ("[sampling]", "pair.query", "pair.documents", "prompt.user"):
        assert f"\n  {key}: " in found


@pytest.mark.parametrize(
    ("prompt", "is_chat"),
    [
        ({"user": "x"}, False),
        ({"user": "x", "chat": True}, True),
        ({"user": "x", "images": ["{{ file }}"]}, True),
        ({"system": "x", "chat": True}, True),
    ],
)
def test_texts_to_embed_are_sent_as_they_are(prompt: dict[str, Any], is_chat: bool) -> None:
    assert job(prompt={"user": "x"}).prompt.chat  # what else is generated from
    found = job(task="embed", prompt=prompt)
    assert found.prompt.chat is is_chat
    assert JobConfig.model_validate(found.model_dump()).model_dump() == found.model_dump()


def test_what_decides_the_answers_of_a_pooling_task_is_identity() -> None:
    scored = identity(job(task="score", pair=PAIR, pooling={"use_activation": False}))
    assert scored.job["task"] == "score"
    assert scored.job["pair.documents"] == "{{ d }}"
    assert scored.job["pooling.use_activation"] is False
    assert "output.vector_dtype" not in scored.job
    assert identity(job(task="embed")).job["output.vector_dtype"] == "float32"
