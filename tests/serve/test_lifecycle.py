"""Batches on real vLLM, on one server that all tests of this file share. ``test_storm.py`` kills one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from batchkit import Run
from batchkit.runs.status import status
from tests.support.api_server import (
    Served,
    content,
    ended,
    faults_of,
    job_file,
    lines_of,
    request,
    serving,
    submit,
)
from tests.support.command_line import batchkit
from tests.support.forks import Fork
from tests.support.waiting import until

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("serve")


@pytest.fixture(scope="module")
def served(folder: Path, demo_model: Path) -> Iterator[Served]:
    with serving(job_file(folder, demo_model), cwd=folder, start=Fork) as found:
        yield found


@pytest.fixture
def client(served: Served) -> Iterator[openai.OpenAI]:
    with served.client() as found:
        yield found


@pytest.fixture
def ask(demo_model: Path) -> Callable[..., dict[str, Any]]:
    def make(custom_id: str, text: str = "Hello", **body: Any) -> dict[str, Any]:
        return request(custom_id, demo_model.name, text, **{"min_tokens": 2, **body})

    return make


def test_the_engine_stays_loaded_from_batch_to_batch(
    client: openai.OpenAI, folder: Path, ask: Callable[..., dict[str, Any]]
) -> None:
    for n in range(3):
        batch = ended(client, submit(client, [ask(f"{n}-{row}", f"Row {row}") for row in range(5)]))
        assert batch.status == "completed"
        run = Run(folder / "output/serve/batches" / batch.id)
        assert (run.status().ok, run.verify().exit_code) == (5, 0)
        log = (run.folder / "run.log").read_text()
        assert ("loading model" in log) == (n == 0)


def test_a_row_that_fails_is_a_line_of_the_error_file(
    client: openai.OpenAI, ask: Callable[..., dict[str, Any]]
) -> None:
    rows = [ask("good"), ask("long", "word " * 5000), ask("bad", temperature="hot")]
    batch = ended(client, submit(client, rows))
    assert batch.status == "completed"
    assert batch.request_counts is not None
    assert batch.request_counts.model_dump() == {"total": 3, "completed": 1, "failed": 2}
    assert [line["custom_id"] for line in content(client, batch.output_file_id)] == ["good"]
    failed = content(client, batch.error_file_id)
    codes = {line["custom_id"]: line["error"]["code"] for line in failed}
    assert codes == {"long": "prompt_too_long", "bad": "invalid_request"}


def test_prompt_tokens_of_the_prefix_cache_are_counted(
    client: openai.OpenAI, ask: Callable[..., dict[str, Any]]
) -> None:
    text = "The same long beginning. " * 25
    batch = ended(client, submit(client, [ask(str(n), f"{text}{n}") for n in range(40)]))
    lines = content(client, batch.output_file_id)
    found = [line["response"]["body"]["usage"].get("prompt_tokens_details") for line in lines]
    cached = [details["cached_tokens"] for details in found if details is not None]
    assert batch.usage is not None
    assert batch.usage.input_tokens_details.cached_tokens == sum(cached) > 0
    assert batch.usage.input_tokens > sum(cached)


def test_a_short_batch_does_not_wait_for_a_long_one_which_is_then_cancelled(
    client: openai.OpenAI, ask: Callable[..., dict[str, Any]]
) -> None:
    rows = [ask(str(n), f"Row {n}", max_tokens=32, min_tokens=32) for n in range(3000)]
    long = submit(client, rows)

    until(lambda: _completed(client, long.id) > 20, within_s=120)
    short = ended(client, submit(client, [ask(str(n)) for n in range(10)]))
    assert short.status == "completed"
    assert client.batches.retrieve(long.id).status == "in_progress"
    before = _completed(client, long.id)
    until(lambda: _completed(client, long.id) > before, within_s=120)
    assert client.batches.cancel(long.id).status == "cancelling"
    cancelled = ended(client, long)
    assert cancelled.status == "cancelled"
    assert cancelled.cancelling_at is not None
    answers = content(client, cancelled.output_file_id)
    others = content(client, cancelled.error_file_id)
    assert before < len(answers) < 3000
    assert {line["error"]["code"] for line in others} == {"batch_cancelled"}
    assert sorted(int(line["custom_id"]) for line in [*answers, *others]) == list(range(3000))


def test_a_flex_request_whose_client_leaves_is_cancelled(
    client: openai.OpenAI, ask: Callable[..., dict[str, Any]]
) -> None:
    rows = [ask(str(n), f"Row {n}", max_tokens=32, min_tokens=32) for n in range(1000)]
    long = submit(client, rows)
    until(lambda: _completed(client, long.id) > 20, within_s=120)
    body = ask("a", max_tokens=400)["body"] | {"extra_body": {"min_tokens": 400}}
    del body["min_tokens"]
    with pytest.raises(openai.APITimeoutError):
        client.chat.completions.create(**body, service_tier="flex", timeout=0.3)
    left = client.batches.list(limit=1).data[0]
    assert left.id != long.id
    assert ended(client, left).status == "cancelled"
    client.batches.cancel(long.id)
    ended(client, long)


def test_a_response_in_the_background_can_be_cancelled(
    client: openai.OpenAI, demo_model: Path
) -> None:
    made = client.responses.create(
        model=demo_model.name,
        input="Hello",
        background=True,
        max_output_tokens=400,
        extra_body={"min_tokens": 400},
    )
    until(lambda: client.responses.retrieve(made.id).status == "in_progress")
    assert client.responses.cancel(made.id).status == "cancelled"
    batch = client.batches.retrieve(made.id.replace("resp", "batch"))
    assert ended(client, batch).status == "cancelled"
    assert client.responses.retrieve(made.id).status == "cancelled"


def _completed(client: openai.OpenAI, name: str) -> int:
    counts = client.batches.retrieve(name).request_counts
    return 0 if counts is None else counts.completed


@pytest.mark.release
def test_a_higher_priority_goes_first(
    client: openai.OpenAI, ask: Callable[..., dict[str, Any]]
) -> None:
    rows = [ask(str(n), f"Row {n}", max_tokens=32, min_tokens=32) for n in range(300)]
    first = submit(client, rows)
    urgent = submit(client, rows[:50], extra_body={"priority": 5})
    assert ended(client, urgent).status == "completed"
    assert client.batches.retrieve(first.id).status in ("in_progress", "finalizing")
    assert ended(client, first).status == "completed"


@pytest.mark.release
def test_a_row_that_kills_the_engine_fails_alone_beside_another_batch(
    tmp_path: Path, demo_model: Path, ask: Callable[..., dict[str, Any]]
) -> None:
    job = job_file(tmp_path, demo_model, worker_cls="tests.support.failing_worker.FailingWorker")
    rows = [ask(str(n), f"Row {n}", max_tokens=24, min_tokens=24) for n in range(200)]
    bad = [*rows[:40], ask("bad", max_tokens=24, extra_args={"poison": "error"}), *rows[40:]]
    with serving(job, cwd=tmp_path, start=Fork) as served, served.client() as client:
        batches = [submit(client, bad), submit(client, rows)]
        until(lambda: all(_completed(client, batch.id) > 0 for batch in batches), within_s=120)
        (with_bad, other) = (ended(client, batch, within_s=200) for batch in batches)
        assert len(content(client, other.output_file_id)) == 200
        assert other.error_file_id is None
        assert len(content(client, with_bad.output_file_id)) == 200
        (line,) = content(client, with_bad.error_file_id)
        assert (line["custom_id"], line["error"]["code"]) == ("bad", "engine_crash")
    checked = batchkit("serve", "--check", "--folder", tmp_path / "output/serve")
    assert checked.exit_code == 0, checked.stdout


def test_completions_and_responses_are_served_too(client: openai.OpenAI, demo_model: Path) -> None:
    bodies: dict[str, dict[str, Any]] = {
        "/v1/completions": {"prompt": "Hello"},
        "/v1/responses": {"input": "Hello", "max_output_tokens": 8},
    }
    for endpoint, body in bodies.items():
        body = {"model": demo_model.name, **body}
        line = {"custom_id": "a", "method": "POST", "url": endpoint, "body": body}
        batch = ended(client, submit(client, [line], endpoint=endpoint))
        assert batch.status == "completed"
        (found,) = [*content(client, batch.output_file_id), *content(client, batch.error_file_id)]
        if endpoint == "/v1/responses" and found["response"]:
            openai.types.responses.Response.model_validate(found["response"]["body"])


def test_rows_of_each_batch_are_computed_again_alone_if_the_server_is_told(
    tmp_path: Path, demo_model: Path, ask: Callable[..., dict[str, Any]]
) -> None:
    """Two batches share the engine. One of them waits while a row of the other runs alone."""
    job = job_file(tmp_path, demo_model)
    rows = [ask(str(n), f"Row {n}", temperature=0, max_tokens=24, min_tokens=24) for n in range(60)]
    with (
        serving(job, "--self-check", "4", cwd=tmp_path, start=Fork) as served,
        served.client() as client,
    ):
        batches = [submit(client, rows) for _ in range(2)]
        for batch in batches:
            found = ended(client, batch)
            assert (found.status, found.request_counts.completed) == ("completed", 60)  # type: ignore[union-attr]
    for batch in batches:
        checked = status(tmp_path / "output/serve/batches" / batch.id).checked
        assert (checked.rows, checked.equal) == (4, 4)


def test_a_model_that_does_not_load_fails_the_batch_and_not_the_server(tmp_path: Path) -> None:
    (tmp_path / "broken").mkdir()
    server = serving("--model", "broken", cwd=tmp_path, start=Fork)
    with server as served, served.client() as client:
        for _ in range(2):
            batch = ended(client, submit(client, [request("a", "broken")]))
            assert batch.status == "failed"
            assert faults_of(batch)[0].code == "batch_failed"
            (line,) = content(client, batch.error_file_id)
            assert line["error"]["code"] == "batch_failed"


@pytest.mark.release
def test_sigterm_lets_requests_finish_and_the_next_server_goes_on(
    tmp_path: Path, demo_model: Path, ask: Callable[..., dict[str, Any]]
) -> None:
    slow = {"worker_cls": "tests.support.failing_worker.FailingWorker"}
    job = job_file(tmp_path, demo_model, **slow, additional_config={"step_s": 0.4})
    rows = [ask(str(n), f"Row {n}", min_tokens=8) for n in range(40)]
    body = ask("flex", max_tokens=40)["body"] | {"extra_body": {"min_tokens": 40}}
    del body["min_tokens"]
    with (
        serving(job, cwd=tmp_path, start=Fork) as served,
        served.client() as client,
        ThreadPoolExecutor(1) as pool,
    ):
        asked = pool.submit(client.chat.completions.create, **body, service_tier="flex")
        batch = submit(client, lines_of(rows))
        until(lambda: _completed(client, batch.id) > 0, within_s=120)
        served.process.terminate()
        with pytest.raises(openai.InternalServerError, match="is stopping; ask again"):
            asked.result()
        assert served.process.wait(60) == 0
    with serving(job, cwd=tmp_path, start=Fork) as served, served.client() as client:
        for one in client.batches.list():
            lines = content(client, ended(client, one).output_file_id)
            ids = [*map(str, range(40))] if one.id == batch.id else ["flex"]
            assert sorted(line["custom_id"] for line in lines) == sorted(ids)
