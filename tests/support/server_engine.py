"""The engine for servers, opened on a chat server of the tests."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from typing import Any

from batchkit.config.loading import make_job
from batchkit.config.tables import JobConfig
from batchkit.engines.base import Engine
from batchkit.engines.registry import open_engine
from batchkit.types import Completion, Request, Row
from tests.support.chat_server import MODEL, ChatServer
from tests.support.engine_requests import collect
from tests.support.jobs import with_tables


def job(server: ChatServer, options: dict[str, Any] | None = None, **tables: Any) -> JobConfig:
    made: dict[str, Any] = {
        "name": "a",
        "engine": {"kind": "openai-server", "model": MODEL, "base_url": server.url},
        "output": {"dir": "/nowhere/output"},
    }
    engine = {**tables.pop("engine", {}), "options": options or {}}
    return make_job(with_tables(made, {**tables, "engine": engine}), "test")


def request(index: int, text: str = "", **sampling: Any) -> Request:
    messages = [{"role": "user", "content": text or f"row {index}"}]
    return Request(Row(index, str(index), {}), messages, None, {"max_tokens": 64, **sampling}, "")


@contextmanager
def opened(server: ChatServer, *args: Any, **kwargs: Any) -> Iterator[Engine]:
    with closing(open_engine(job(server, *args, **kwargs))) as engine:
        yield engine


def ask(engine: Engine, requests: Iterable[Request], within_s: float = 20) -> list[Completion]:
    """What comes back for ``requests``, by row."""
    waiting = [engine.submit(one) for one in requests]
    done = collect(engine, len(waiting), within_s)
    assert engine.poll(0.02) == []
    done.sort(key=lambda completion: completion.request.row.index)
    assert [c.request.row.index for c in done] == list(range(len(waiting)))
    return done


def texts(done: Iterable[Completion]) -> list[str]:
    return [c.choices[0].text if c.error is None else type(c.error).__name__ for c in done]


KEY = "sk-very-secret"
