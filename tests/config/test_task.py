"""``task``, ``[pair]`` and ``[pooling]``: which keys fit together."""

from __future__ import annotations

from typing import Any

import pytest

from batchkit.config.loading import make_job
from batchkit.config.tables import JobConfig
from batchkit.errors import JobError
from batchkit.storage.identity import identity
from batchkit.storage.job_toml import toml_of

PAIR = {"query": "{{ q }}", "documents": "{{ d }}"}


def job(**tables: Any) -> JobConfig:
    return make_job({"engine": {"kind": "dry-run"}, **tables}, "a.toml")


def refusal(**tables: Any) -> str:
    with pytest.raises(JobError) as caught:
        job(**tables)
    return str(caught.value)


@pytest.mark.parametrize(
    ("tables", "expected"),
    [
        ({"task": "embedding"}, 'task: found "embedding", expected "generate", "embed"'),
        ({"pair": PAIR}, '[pair]: is for task = "score", but task is "generate"'),
        ({"pooling": {"dimensions": 4}}, "[pooling]: is for pooling tasks"),
        ({"task": "embed", "pair": PAIR}, '[pair]: is for task = "score", but task is "embed"'),
        ({"task": "embed", "sampling": {"top_p": 0.5}}, '[sampling]: is for task = "generate"'),
        ({"task": "embed", "output": {"parse": "json"}}, 'output.parse: is for task = "generate"'),
        (
            {"task": "embed", "retry": {"reask": 1, "reask_note": "Again."}},
            'retry.reask: is for task = "generate"',
        ),
        ({"task": "embed", "scoring": {"scorers": ["em"]}}, '[scoring]: is for task = "generate"'),
        (
            {"task": "classify", "pooling": {"dimensions": 4}},
            'pooling.dimensions: is for task = "embed"',
        ),
        (
            {"task": "embed", "pooling": {"dimensions": 0}},
            "pooling.dimensions: found 0, expected whole number ≥ 1",
        ),
        ({"task": "embed", "prompt": {"system": "Be brief."}}, "unless prompt.chat = true"),
        ({"task": "score", "pair": {"documents": "x"}}, "pair.query: is missing"),
        ({"task": "score", "pair": {"query": "x"}}, "pair.documents: is missing"),
        (
            {"task": "score", "pair": PAIR, "prompt": {"user": "x"}},
            'prompt.user: task = "score" uses [pair]',
        ),
        (
            {"task": "embed", "engine": {"kind": "transformers", "model": "m"}},
            'engine.kind: "transformers" does not support the task "embed"',
        ),
        (
            {"task": "token_classify", "pooling": {"dimensions": 4}},
            'pooling.dimensions: is for task = "embed"',
        ),
        (
            {
                "task": "token_embed",
                "engine": {
                    "kind": "openai-server",
                    "model": "m",
                    "base_url": "http://localhost/v1",
                },
            },
            'engine.kind: "openai-server" does not support the task "token_embed"',
        ),
    ],
    ids=lambda found: None if isinstance(found, str) else "-".join(found),
)
def test_a_key_that_does_not_fit_the_task_is_named(tables: dict[str, Any], expected: str) -> None:
    assert expected in refusal(**tables)


def test_all_keys_that_do_not_fit_are_reported_together() -> None:
    found = refusal(task="score", sampling={"max_tokens": 5}, prompt={"user": "x"})
    assert "a.toml: 4 problems" in found
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
    found = job(task="embed", prompt=prompt)
    assert found.prompt.chat is is_chat
    assert JobConfig.model_validate(found.model_dump()).model_dump() == found.model_dump()


def test_generated_answers_are_chats() -> None:
    assert job(prompt={"user": "x"}).prompt.chat


def test_what_decides_the_answers_of_a_pooling_task_is_identity() -> None:
    scored = identity(job(task="score", pair=PAIR, pooling={"use_activation": False}))
    assert scored["task"] == "score"
    assert scored["pair.documents"] == "{{ d }}"
    assert scored["pooling.use_activation"] is False
    assert "output.vector_dtype" not in scored
    assert identity(job(task="embed"))["output.vector_dtype"] == "float32"


def test_a_pooling_job_is_written_down_and_read_again() -> None:
    import tomllib

    found = job(task="score", pair=PAIR, pooling={"use_activation": False})
    again = make_job(tomllib.loads(toml_of(found)), "job.toml")
    assert identity(again) == identity(found)
