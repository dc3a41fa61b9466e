"""What a webhook is told, and how often; the SDK checks the signature."""

from __future__ import annotations

import base64
import sqlite3
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from openai import InvalidWebhookSignatureError, OpenAI

from tests.support.api_server import Served, ended, request, serving, submit
from tests.support.command_line import batchkit
from tests.support.waiting import until
from tests.support.web import Page, web_server

pytestmark = pytest.mark.slow

DRY = ("--set", "engine.kind=dry-run", "--model", "tiny")
SECRET = f"whsec_{base64.b64encode(b'a secret of thirty-two bytes ...').decode()}"


class Listener:
    """Notes what it is sent; answers with ``status``."""

    def __init__(self) -> None:
        self.status, self.got = 200, list[tuple[bytes, dict[str, str]]]()

    def __call__(self, *args: Any) -> Page:
        listener = self

        class Hook(Page):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                listener.got.append((body, {k.lower(): v for k, v in self.headers.items()}))
                self.reply(listener.status, b"", content_length=0)

        return Hook(*args)

    def events(self) -> list[Any]:
        client = OpenAI(api_key="none", webhook_secret=SECRET)
        return [client.webhooks.unwrap(body, headers) for body, headers in self.got]


@pytest.fixture
def listener() -> Listener:
    return Listener()


@pytest.fixture
def server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., AbstractContextManager[Served]]:
    monkeypatch.setenv("BATCHKIT_WEBHOOK_SECRET", SECRET)
    return lambda url, *more: serving(*DRY, "--webhook", url, *more, cwd=tmp_path)


def test_each_end_of_a_batch_is_told_once(
    listener: Listener, server: Callable[..., AbstractContextManager[Served]]
) -> None:
    def ask(n: int, model: str = "tiny") -> list[dict[str, Any]]:
        return [request(str(row), model, f"Row {row}") for row in range(n)]

    slow = ("--set", "engine.options={latency_s = 0.5, max_num_seqs = 4}")
    with web_server(listener) as url, server(url, *slow) as served, served.client() as client:
        told = {}
        told[ended(client, submit(client, ask(1))).id] = "batch.completed"
        told[ended(client, submit(client, ask(1, "gpt-6"))).id] = "batch.failed"
        told[ended(client, submit(client, ask(100), window="1s")).id] = "batch.expired"
        long = submit(client, ask(100))
        client.batches.cancel(long.id)
        told[ended(client, long).id] = "batch.cancelled"
        until(lambda: len(listener.got) >= 4, within_s=30)
    assert {event.data.id: event.type for event in listener.events()} == told
    assert len({event.id for event in listener.events()}) == len(listener.got) == 4
    body, headers = listener.got[0]
    with pytest.raises(InvalidWebhookSignatureError):
        OpenAI(api_key="none").webhooks.unwrap(body + b" ", headers, secret=SECRET)


def test_what_was_not_taken_is_sent_again_also_after_a_kill(
    tmp_path: Path, listener: Listener, server: Callable[..., AbstractContextManager[Served]]
) -> None:
    listener.status = 503
    with web_server(listener) as url:
        with server(url) as served, served.client() as client:
            batch = ended(client, submit(client, [request("a", "tiny")]))
            until(lambda: len(listener.got) == 2, within_s=30)
            served.kill()
        listener.status = 204
        with server(url):
            until(lambda: len(listener.got) == 3, within_s=30)
    events = listener.events()
    assert {event.data.id for event in events} == {batch.id}
    assert len({event.id for event in events}) == 1
    with sqlite3.connect(tmp_path / "output/serve/serve.db") as database:
        kinds = database.execute("SELECT DISTINCT kind FROM objects").fetchall()
    assert ("event",) not in kinds


@pytest.mark.parametrize(
    ("url", "secret", "found"),
    [
        ("http://127.0.0.1:1", "", "BATCHKIT_WEBHOOK_SECRET"),
        ("http://127.0.0.1:1", "whsec_???", "base64"),
        ("file:///etc/passwd", "x", "http://"),
    ],
)
def test_a_webhook_that_can_not_be_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str, secret: str, found: str
) -> None:
    monkeypatch.setenv("BATCHKIT_WEBHOOK_SECRET", secret)
    refused = batchkit("serve", *DRY, "--webhook", url, "--folder", tmp_path / "serve").refused()
    assert found in refused
