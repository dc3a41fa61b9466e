"""What the API answers, through the unmodified SDK; rows are answered by the engine ``dry-run``."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI
from openai.pagination import SyncCursorPage, SyncPage
from openai.types import Batch, FileDeleted, FileObject, Model, Upload
from openai.types.responses import Response
from openai.types.uploads import UploadPart
from pydantic import BaseModel

from tests.support.api_server import (
    CHAT,
    Served,
    content,
    ended,
    faults_of,
    lines_of,
    new_keys,
    request,
    serving,
    submit,
)
from tests.support.command_line import batchkit
from tests.support.mounts import small_disk
from tests.support.paths import ROOT
from tests.support.waiting import until

pytestmark = pytest.mark.slow

RESPONSES = "/v1/responses"
DRY = ("--set", "engine.kind=dry-run", "--model", "tiny")
JSON = {"headers": {"content-type": "application/json"}}
MULTIPART = {"content-type": "multipart/form-data; boundary=x"}


def ask(custom_id: str, text: str = "Hello", model: str = "tiny", **body: Any) -> dict[str, Any]:
    return request(custom_id, model, text, **body)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(*DRY, cwd=tmp_path_factory.mktemp("api")) as found:
        yield found


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[OpenAI]:
    with served.client() as found:
        yield found


def test_a_batch_goes_through_its_states_to_its_answers(client: OpenAI) -> None:
    made = submit(client, [ask("a"), ask("b", "Bye")], metadata={"day": "monday"})
    assert (made.status, made.object, made.endpoint) == ("validating", "batch", CHAT)
    batch = ended(client, made)
    assert batch.status == "completed"
    times = made.created_at, batch.in_progress_at, batch.finalizing_at, batch.completed_at
    assert list(times) == sorted(times)  # type: ignore[type-var]
    assert batch.expires_at == made.created_at + 24 * 3600
    assert batch.metadata == {"day": "monday"}
    assert batch.request_counts is not None
    assert batch.request_counts.model_dump() == {"total": 2, "completed": 2, "failed": 0}
    assert batch.usage is not None
    assert batch.usage.total_tokens == batch.usage.input_tokens + batch.usage.output_tokens
    assert batch.error_file_id is None
    lines = content(client, batch.output_file_id)
    assert [line["custom_id"] for line in lines] == ["a", "b"]
    for line in lines:
        openai.types.chat.ChatCompletion.model_validate(line["response"]["body"], strict=True)


def test_all_objects_are_those_of_the_sdk(client: OpenAI, served: Served) -> None:
    batch = ended(client, submit(client, [ask("a")]))
    new = {"bytes": 1, "filename": "a", "mime_type": "a", "purpose": "batch"}
    with served.http() as http:

        def check(kind: type[BaseModel], method: str, path: str, **more: Any) -> str:
            answer = http.request(method, path, **more)
            return str(kind.model_validate(answer.json(), strict=True).model_dump().get("id"))

        check(Batch, "GET", f"/v1/batches/{batch.id}")
        check(SyncCursorPage[Batch], "GET", "/v1/batches")
        check(FileObject, "GET", f"/v1/files/{batch.output_file_id}")
        check(FileDeleted, "DELETE", f"/v1/files/{batch.output_file_id}")
        check(SyncCursorPage[FileObject], "GET", "/v1/files")
        check(SyncPage[Model], "GET", "/v1/models")
        check(Model, "GET", "/v1/models/tiny")
        upload = check(Upload, "POST", "/v1/uploads", json=new)
        part = check(UploadPart, "POST", f"/v1/uploads/{upload}/parts", files={"data": b"x"})
        check(Upload, "POST", f"/v1/uploads/{upload}/complete", json={"part_ids": [part]})
        check(
            Upload, "POST", f"/v1/uploads/{check(Upload, 'POST', '/v1/uploads', json=new)}/cancel"
        )


def test_the_example_of_the_page_does_what_it_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (ROOT / "docs/serving.md").read_text()
    (program,) = re.findall(r"```python\n(import time.*?)```", page, re.DOTALL)
    (line,) = re.findall(r"```json\n(.*?)```", page, re.DOTALL)
    (tmp_path / "batch.jsonl").write_text(line)
    monkeypatch.chdir(tmp_path)
    with serving("--model", "batchkit-demo", *DRY[:2], cwd=tmp_path) as served:
        exec(program.replace("http://127.0.0.1:8080/", served.url), {})
    assert '"custom_id":"1"' in capsys.readouterr().out


@pytest.mark.parametrize(
    ("lines", "code", "line", "param"),
    [
        (b"", "empty_file", None, None),
        (b"\n\n", "empty_file", None, None),
        (b"{broken\n", "invalid_json_line", 1, None),
        (b"[1]\n", "invalid_json_line", 1, None),
        (b"\n[\n{},\n{}\n]\n", "invalid_json_line", 2, None),
        (lines_of([ask("a"), ask("a")]), "duplicate_custom_id", 2, "custom_id"),
        (lines_of([ask("a"), ask("")]), "missing_required_parameter", 2, "custom_id"),
        (lines_of([ask("a") | {"method": "GET"}]), "invalid_method", 1, "method"),
        (lines_of([ask("a") | {"url": "/v1/embeddings"}]), "mismatched_endpoint", 1, "url"),
        (lines_of([ask("a") | {"body": 3}]), "missing_required_parameter", 1, "body"),
        (lines_of([ask("a", model="gpt-6")]), "model_not_found", 1, "body.model"),
        (lines_of([ask("a", stream=True)]), "invalid_value", 1, "body.stream"),
    ],
)
def test_a_file_with_a_wrong_line_fails_with_its_number(
    client: OpenAI, lines: bytes, code: str, line: int | None, param: str | None
) -> None:
    batch = ended(client, submit(client, lines))
    assert batch.status == "failed"
    assert batch.failed_at is not None
    (found,) = faults_of(batch)
    assert (found.code, found.line, found.param) == (code, line, param)
    assert batch.output_file_id is batch.error_file_id is None


@pytest.mark.parametrize(
    ("path", "content_type", "status", "words"),
    [
        ("/files", "application/json", 404, "add /v1 to base_url"),
        ("/chat/completions", "application/json", 404, "add /v1 to base_url"),
        ("/v1/nothing", "application/json", 404, "Not Found: POST /v1/nothing"),
        (CHAT, "application/json", 400, 'use /v1/batches, or set service_tier = "flex" and wait'),
        *(
            (path, "application/x-www-form-urlencoded", 400, "content-type: application/json")
            for path in ("/v1/batches", "/v1/uploads", CHAT)
        ),
    ],
)
def test_a_request_as_for_another_server_is_told_what_to_change(
    served: Served, path: str, content_type: str, status: int, words: str
) -> None:
    with served.http() as http:
        body = json.dumps(ask("a")["body"])
        answer = http.post(path, content=body, headers={"content-type": content_type})
    assert answer.status_code == status
    assert words in answer.json()["error"]["message"]


def test_a_million_wrong_lines_give_a_hundred_errors(client: OpenAI) -> None:
    batch = ended(client, submit(client, b"{\n" * 1_000_000))
    assert len(faults_of(batch)) == 100


@pytest.mark.parametrize(
    "changed",
    [
        {"endpoint": "/v1/embeddings"},
        {"endpoint": "/v1/moderations"},
        {"endpoint": "https://elsewhere/v1/chat/completions"},
        {"completion_window": "soon"},
        {"completion_window": "0h"},
        {"metadata": {str(n): "x" for n in range(17)}},
        {"metadata": {"x": "y" * 513}},
        {"output_expires_after": {"anchor": "created_at", "seconds": 5}},
        {"extra_body": {"priority": 5000}},
    ],
)
def test_a_batch_that_can_not_be_is_a_bad_request(client: OpenAI, changed: dict[str, Any]) -> None:
    file = client.files.create(file=("in.jsonl", lines_of([ask("a")])), purpose="batch")
    given: Any = {"input_file_id": file.id, "endpoint": CHAT, "completion_window": "24h"}
    with pytest.raises(openai.BadRequestError) as caught:
        client.batches.create(**{**given, **changed})
    (name,) = changed.get("extra_body") or changed
    assert caught.value.type == "invalid_request_error"
    assert str(caught.value.param).startswith(name)


def test_lists_are_pages_of_the_newest_first(client: OpenAI) -> None:
    made = [ended(client, submit(client, [ask("a")])).id for _ in range(5)]
    first = client.batches.list(limit=2)
    assert [batch.id for batch in first.data] == made[:-3:-1]
    assert first.has_more
    found = [batch.id for batch in client.batches.list(limit=2)]
    assert found[:5] == made[::-1]
    assert len(found) == len({*found})
    files = [file.id for file in client.files.list(order="asc", limit=3, purpose="batch_output")]
    assert files == [file.id for file in client.files.list(purpose="batch_output")][::-1]


def test_what_is_not_there_is_404(client: OpenAI) -> None:
    for call in (
        client.files.retrieve,
        client.files.delete,
        client.files.content,
        client.batches.retrieve,
        client.batches.cancel,
        client.models.retrieve,
        client.uploads.cancel,
    ):
        with pytest.raises(openai.NotFoundError):
            call("file-nothing")
    with pytest.raises(openai.NotFoundError):
        client.batches.create(input_file_id="x", endpoint=CHAT, completion_window="24h")


def test_a_file_can_be_read_back_and_deleted(client: OpenAI) -> None:
    given: Any = {"expires_after": {"anchor": "created_at", "seconds": 3600}}
    file = client.files.create(file=("ä b.jsonl", b"\x00\xffbytes"), purpose="user_data", **given)
    assert (file.filename, file.bytes, file.purpose) == ("ä b.jsonl", 7, "user_data")
    assert file.expires_at == file.created_at + 3600
    assert client.files.content(file.id).read() == b"\x00\xffbytes"
    assert client.files.delete(file.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.content(file.id)


def test_an_upload_in_parts_is_a_file(client: OpenAI) -> None:
    lines = lines_of([ask(str(n)) for n in range(100)])
    upload = client.uploads.create(
        bytes=len(lines), filename="in.jsonl", mime_type="application/jsonl", purpose="batch"
    )
    assert upload.status == "pending"
    halves = lines[5000:], lines[:5000]
    late, early = (client.uploads.parts.create(upload.id, data=half).id for half in halves)
    with pytest.raises(openai.BadRequestError, match="5,000 bytes"):
        client.uploads.complete(upload.id, part_ids=[early])
    done = client.uploads.complete(upload.id, part_ids=[early, late])
    assert isinstance(done, Upload)
    assert done.file is not None
    assert client.files.content(done.file.id).read() == lines
    batch = client.batches.create(
        input_file_id=done.file.id, endpoint=CHAT, completion_window="24h"
    )
    assert len(content(client, ended(client, batch).output_file_id)) == 100
    with pytest.raises(openai.ConflictError):
        client.uploads.complete(upload.id, part_ids=[early, late])


def test_an_upload_is_completed_once(client: OpenAI) -> None:
    def complete(upload: str, part: str) -> int:
        try:
            client.uploads.complete(upload, part_ids=[part])
        except openai.APIStatusError as error:
            return error.status_code
        return 200

    given: Any = {"filename": "a", "mime_type": "a", "purpose": "user_data"}
    for _ in range(5):
        upload = client.uploads.create(bytes=1 << 20, **given)
        part = client.uploads.parts.create(upload.id, data=bytes(1 << 20)).id
        with ThreadPoolExecutor(4) as pool:
            codes = [*pool.map(complete, [upload.id] * 4, [part] * 4)]
        assert codes.count(200) == 1
        assert {*codes} <= {200, 404, 409}


def test_a_batch_that_has_ended_can_not_be_cancelled(client: OpenAI) -> None:
    batch = ended(client, submit(client, [ask("a")]))
    with pytest.raises(openai.ConflictError, match="completed"):
        client.batches.cancel(batch.id)


def test_a_batch_past_its_window_expires_with_the_rest_as_errors(client: OpenAI) -> None:
    batch = ended(client, submit(client, [ask(str(n)) for n in range(60_000)], window="1s"))
    assert batch.status == "expired"
    assert batch.expired_at is not None
    done, failed = (content(client, of) for of in (batch.output_file_id, batch.error_file_id))
    assert {line["error"]["code"] for line in failed} == {"batch_expired"}
    ids = [int(line["custom_id"]) for line in [*done, *failed]]
    assert sorted(ids) == list(range(60_000))


def flex(client: OpenAI, **more: Any) -> Any:
    said = [{"role": "user", "content": "Hi"}]
    given: Any = {"model": "tiny", "service_tier": "flex", "messages": said, **more}
    return client.chat.completions.create(**given)


def test_flex_requests_wait_for_their_answer(client: OpenAI) -> None:
    before = len([*client.batches.list()])
    with ThreadPoolExecutor(8) as pool:
        answers = [*pool.map(lambda n: flex(client, max_tokens=n), range(1, 9))]
    for answer in answers:
        assert answer.choices[0].message.content
        assert answer.service_tier == "flex"
    assert len([*client.batches.list()]) == before + 8
    with pytest.raises(openai.BadRequestError) as caught:
        flex(client, model="gpt-6")
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
    wrong: tuple[dict[str, Any], ...] = ({"stream": True}, {"messages": None}, {"model": 1 << 70})
    tiers: tuple[dict[str, Any], ...] = tuple(
        {"service_tier": "auto", "extra_body": body} for body in ({}, {"background": True})
    )
    for more in (*wrong, *tiers):
        with pytest.raises(openai.BadRequestError):
            flex(client, **more)


def test_a_response_in_the_background_is_asked_for_until_it_is_there(
    client: OpenAI, served: Served
) -> None:
    asked = {"model": "tiny", "input": "Hi"}
    with served.http() as http:

        def read(method: str, path: str = "", **more: Any) -> Response:
            answer = http.request(method, f"/v1/responses{path}", **more)
            return Response.model_validate(answer.json(), strict=True)

        made = read("POST", json=asked | {"background": True})
        assert (made.status, made.background, made.output) == ("queued", True, [])
        until(lambda: client.responses.retrieve(made.id).status == "completed")
        answer = read("GET", f"/{made.id}")
        assert answer.output_text
        assert read("POST", f"/{made.id}/cancel") == answer
        assert read("POST", json=asked | {"service_tier": "flex"}).output_text
    batch = client.batches.retrieve(made.id.replace("resp", "batch"))
    client.files.delete(str(batch.output_file_id))
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(made.id)


@pytest.mark.parametrize("wrong", [{"model": "gpt-6"}, {"previous_response_id": "resp_1"}])
def test_a_wrong_response_in_the_background_fails(client: OpenAI, wrong: dict[str, Any]) -> None:
    asked: dict[str, Any] = {"model": "tiny", "input": "Hi", "background": True} | wrong
    made = client.responses.create(**asked)
    until(lambda: client.responses.retrieve(made.id).status == "failed")
    client.files.delete(client.batches.retrieve(made.id.replace("resp", "batch")).input_file_id)
    found = client.responses.retrieve(made.id)
    assert found.model == asked["model"]
    assert found.error is not None
    assert found.error.code == "invalid_prompt"
    assert next(iter(wrong)) in found.error.message


def test_a_response_can_neither_stream_nor_be_had_at_once(client: OpenAI) -> None:
    wrong: tuple[dict[str, Any], ...] = ({}, {"background": True, "stream": True})
    for more in wrong:
        with pytest.raises(openai.BadRequestError):
            client.responses.create(model="tiny", input="Hi", **more)


def test_a_response_names_its_model(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(input="Hi", background=True)
    assert caught.value.param == "model"


@pytest.mark.parametrize(
    ("endpoint", "model", "n_lines"),
    [(CHAT, "tiny", 1), (RESPONSES, "tiny", 1), (RESPONSES, "gpt-6", 2)],
)
def test_a_batch_is_no_response(client: OpenAI, endpoint: str, model: str, n_lines: int) -> None:
    body = {"model": model, "input": "Hi"} if endpoint == RESPONSES else ask("")["body"]
    lines = [ask(str(n)) | {"url": endpoint, "body": body} for n in range(n_lines)]
    batch = ended(client, submit(client, lines, endpoint=endpoint))
    for call in (client.responses.retrieve, client.responses.cancel):
        with pytest.raises(openai.NotFoundError):
            call(batch.id.replace("batch", "resp"))


def test_models_health_metrics_and_the_pages(client: OpenAI, served: Served) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    ended(client, submit(client, [ask("a")]))
    with served.http() as http:
        assert http.get("/health").json() == {"status": "ok"}
        assert 'batchkit_batches{status="completed"}' in http.get("/metrics").text
        assert http.get("/").headers["content-type"].startswith("text/html")
        assert http.get("/api/runs").json()[0]["state"] == "finished"


@pytest.mark.parametrize(
    ("method", "path", "more", "code"),
    [
        ("POST", "/v1/files", {"content": b"x"}, 400),
        ("POST", "/v1/files", {"data": {"purpose": "batch"}}, 400),
        ("POST", "/v1/files", {"files": {"file": b"x"}}, 400),
        ("POST", "/v1/files", {"files": {"file": b"x"}, "data": {"purpose": "harm"}}, 400),
        ("POST", "/v1/files", {"content": b"--x\r\nbroken", "headers": MULTIPART}, 400),
        ("POST", "/v1/batches", {"content": b"{"}, 400),
        ("POST", "/v1/batches", {"json": []}, 400),
        ("POST", "/v1/batches", {"content": b"x" * (2 << 20)}, 413),
        ("POST", RESPONSES, {"json": {"background": True, "model": "x" * 5000}}, 400),
        ("POST", RESPONSES, {"content": rb'{"background": true, "model": "\ud800"}'} | JSON, 400),
        ("GET", "/v1/batches?limit=0", {}, 400),
        ("GET", "/v1/batches?limit=x", {}, 400),
        ("GET", "/v1/files/..%2F..%2Fserve.db/content", {}, 404),
        ("GET", "/v1/files/%2e%2e/content", {}, 404),
        ("GET", "/v1/files/a%00b", {}, 404),
        ("PUT", "/v1/files", {}, 405),
        ("GET", "/v1/nothing", {}, 404),
        ("GET", "/health", {"headers": {"host": "evil.example"}}, 403),
        ("GET", "/v1/files", {"headers": {"host": "127.0.0.1.evil.example"}}, 403),
    ],
)
def test_bad_requests_are_refused_in_openais_shape(
    served: Served, method: str, path: str, more: dict[str, Any], code: int
) -> None:
    with served.http() as http:
        answer = http.request(method, path, **more)
    assert answer.status_code == code, answer.text
    assert {*answer.json()["error"]} == {"message", "type", "param", "code"}


def test_an_upload_that_breaks_off_leaves_nothing(tmp_path: Path) -> None:
    with serving(*DRY, "--max-file-gb", "0.001", cwd=tmp_path) as served, served.http() as http:
        large = http.post("/v1/files", files={"file": b"x" * (3 << 20)}, data={"purpose": "batch"})
        assert large.status_code == 413

        def chunks() -> Iterator[bytes]:
            yield b'--x\r\ncontent-disposition: form-data; name="file"; filename="a"\r\n\r\n'
            for _ in range(64):
                yield b"y" * 65536

        answer = http.post("/v1/files", content=chunks(), headers=MULTIPART)
        assert answer.status_code == 413
        assert not [*(tmp_path / "output/serve/incoming").iterdir()]
        assert not [*(tmp_path / "output/serve/files").iterdir()]


def test_a_key_sees_only_what_is_its_own(tmp_path: Path) -> None:
    keys = ("--api-key-file", tmp_path / "keys.txt")
    one, other = new_keys("one", "other", cwd=tmp_path)
    assert "has a key 'one'" in batchkit("serve", *keys, "--new-key", "one").refused()
    text = (tmp_path / "keys.txt").read_text()
    assert one not in text
    assert (tmp_path / "keys.txt").stat().st_mode & 0o077 == 0
    with serving(*DRY, *keys, cwd=tmp_path) as served:
        with served.http() as http:
            assert http.get("/health").status_code == 200
            for path in ("/v1/files", "/v1/batches", "/metrics", "/", "/api/runs", "/openapi.json"):
                assert http.get(path).status_code == 401, path
        mine, theirs = served.client(one), served.client(other)
        with pytest.raises(openai.AuthenticationError):
            served.client(one[:-1]).files.list()
        batch = ended(mine, submit(mine, [ask("a")]))
        upload = mine.uploads.create(bytes=1, filename="a", mime_type="a", purpose="batch")
        assert [*theirs.files.list()] == [*theirs.batches.list()] == []
        assert [found.id for found in mine.batches.list()] == [batch.id]
        file = str(batch.output_file_id)
        tries: list[Any] = [
            lambda: theirs.batches.retrieve(batch.id),
            lambda: theirs.batches.cancel(batch.id),
            lambda: theirs.files.retrieve(file),
            lambda: theirs.files.content(file),
            lambda: theirs.files.delete(file),
            lambda: theirs.uploads.cancel(upload.id),
            lambda: theirs.uploads.parts.create(upload.id, data=b"x"),
            lambda: theirs.uploads.complete(upload.id, part_ids=[]),
            lambda: theirs.batches.create(
                input_file_id=batch.input_file_id, endpoint=CHAT, completion_window="24h"
            ),
        ]
        for one_try in tries:
            with pytest.raises(openai.NotFoundError):
                one_try()
        assert theirs.batches.list(after=batch.id).data == []
        with served.http(other) as http:
            assert 'status="completed"' not in http.get("/metrics").text
            assert http.get("/v1/files", headers={"host": "gateway"}).status_code == 200
        with served.http() as http:
            asked = http.get("/").headers["www-authenticate"]
            assert asked == 'Basic realm="batchkit"'
            assert http.get("/", headers={"authorization": "Basic x"}).status_code == 401
            shown = [http.get("/api/runs", auth=("me", key)).json() for key in (one, other)]
            assert [[run["run"] for run in runs] for runs in shown] == [[batch.id], []]
            for page in (f"/run/{batch.id}", f"/api/runs/{batch.id}/rows"):
                codes = [http.get(page, auth=("", key)).status_code for key in (one, other)]
                assert codes == [200, 404]
            assert http.get("/v1/files", auth=("", one)).status_code == 401


def test_a_key_has_limits(tmp_path: Path) -> None:
    keys = ("--api-key-file", tmp_path / "keys.txt")
    (key,) = new_keys("one", cwd=tmp_path)
    file = tmp_path / "keys.txt"
    file.write_text(f"{file.read_text().strip()} batches=1 rows=700\n")
    slow = ("--set", "engine.options={latency_s = 1.0, max_num_seqs = 4}")
    with serving(*DRY, *slow, *keys, cwd=tmp_path) as served, served.client(key) as client:
        long = submit(client, [ask(str(n)) for n in range(700)])
        with pytest.raises(openai.RateLimitError) as caught:
            submit(client, [ask("a")])
        assert caught.value.code == "batch_limit_exceeded"
        client.batches.cancel(long.id)
        ended(client, long)
        longer = ended(client, submit(client, [ask(str(n)) for n in range(701)]))
        assert (longer.status, longer.output_file_id) == ("failed", None)
        assert faults_of(longer)[0].code == "row_limit_exceeded"
    file.write_text(file.read_text().replace("batches=1 rows=700", "bytes=1000"))
    with (
        serving(*DRY, *keys, "--folder", "new", cwd=tmp_path) as served,
        served.client(key) as client,
    ):
        made = client.files.create(file=b"x" * 600, purpose="vision")
        with pytest.raises(openai.RateLimitError) as caught:
            client.files.create(file=b"x" * 600, purpose="vision")
        assert caught.value.code == "storage_limit_exceeded"
        upload = client.uploads.create(bytes=600, filename="a", mime_type="a", purpose="vision")
        with pytest.raises(openai.RateLimitError):
            client.uploads.parts.create(upload.id, data=b"x" * 600)
        part = client.uploads.parts.create(upload.id, data=b"x" * 300).id
        with pytest.raises(openai.RateLimitError):
            client.uploads.complete(upload.id, part_ids=[part, part])
        client.uploads.cancel(upload.id)
        assert [path.name for path in (tmp_path / "new/files").iterdir()] == [made.id]
        client.files.delete(made.id)
        client.files.create(file=b"x" * 600, purpose="vision")
    file.write_text(file.read_text().replace("bytes=1000", "bytes=some"))
    assert "line 1 is not a key" in batchkit("serve", *DRY, *keys).stderr


@pytest.mark.release
def test_a_full_disk_makes_batches_wait(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "24m") as disk:
        args = (*DRY, "--folder", disk / "serve")
        with serving(*args, cwd=tmp_path) as served, served.client() as client:
            batch = submit(client, [ask(str(n)) for n in range(10_000)])
            with (disk / "ballast").open("wb", buffering=0) as ballast, suppress(OSError):
                while True:
                    ballast.write(bytes(4096))
            with pytest.raises(openai.InternalServerError, match="No space"):
                submit(client, [ask("a")] * 1000)
            until(lambda: "retrying in 10 s" in "".join(served.stderr))
            (disk / "ballast").unlink()
            lines = content(client, ended(client, batch).output_file_id)
            assert sorted(int(line["custom_id"]) for line in lines) == list(range(10_000))
        assert batchkit("serve", "--check", "--folder", disk / "serve").exit_code == 0


def test_a_head_without_an_end_is_refused(served: Served) -> None:
    """Its limits are in tests/commands/test_connections.py."""
    url = httpx.URL(served.url)
    with socket.create_connection((url.host, url.port), timeout=60) as client:
        client.sendall(b"GET / HTTP/1.1\r\na: " + b"b" * 20_000)
        assert client.recv(12)[9:] == b"400"


def test_others_need_a_key(tmp_path: Path) -> None:
    args = (*DRY, "--host", "0.0.0.0", "--folder", tmp_path / "serve")
    assert "--new-key" in batchkit("serve", *args).refused()


def test_a_folder_has_one_server_and_check_reports_what_differs(tmp_path: Path) -> None:
    folder = tmp_path / "output/serve"
    with serving(*DRY, cwd=tmp_path) as served, served.client() as client:
        batch = ended(client, submit(client, [ask("a"), ask("b")]))
        second = batchkit("serve", *DRY, "--port", "0", "--folder", folder).refused(1)
        assert "another server works with this folder" in second
    fine = batchkit("serve", "--check", "--folder", folder).ok()
    assert fine.stdout == f"{folder}: 2 files, 1 batches, no problem\n"
    (folder / "files" / str(batch.output_file_id)).write_bytes(b"short")
    (folder / "files" / "stray").write_bytes(b"")
    (folder / "batches" / batch.id / "results.jsonl").write_bytes(b"")
    bad = batchkit("serve", "--check", "--folder", folder)
    assert bad.exit_code == 1
    assert bad.stdout.count("\n  ") == 3, bad.stdout


def test_the_sdk_reads_a_batch_whose_answers_were_removed(client: OpenAI, served: Served) -> None:
    batch = ended(client, submit(client, [ask("a")]))
    client.files.delete(str(batch.output_file_id))
    assert client.batches.retrieve(batch.id).output_file_id == batch.output_file_id
    with served.http() as http, pytest.raises(httpx.HTTPStatusError, match="404"):
        http.get(f"/v1/files/{batch.output_file_id}/content").raise_for_status()
