"""Requests for an engine of any kind, and what it makes of them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

from PIL import Image

from batchkit.engines.base import Engine
from batchkit.types import Completion, Request, Row


def request(index: int, text: str = "tell me about tea", **sampling: Any) -> Request:
    messages = [{"role": "user", "content": f"{text} {index}"}]
    row = Row(index, str(index), {})
    return Request(row, messages, None, {"temperature": 0.0, "max_tokens": 8, **sampling}, "")


def collect(engine: Engine, n: int, within_s: float = 120) -> list[Completion]:
    done: list[Completion] = []
    deadline = time.monotonic() + within_s
    while len(done) < n and time.monotonic() < deadline:
        done += engine.poll(0.05)
    return done


def ask(engine: Engine, *requests: Request) -> list[Completion]:
    """The answers, in the order of the requests."""
    for one in requests:
        engine.submit(one)
    done = {id(c.request): c for c in collect(engine, len(requests))}
    return [done[id(one)] for one in requests]


def with_image(size: tuple[int, int], n: int = 1) -> Request:
    parts: list[dict[str, Any]] = [
        {"type": "image_pil", "image_pil": Image.new("RGB", size, (90, 20, 160))} for _ in range(n)
    ]
    messages = [{"role": "user", "content": [*parts, {"type": "text", "text": "what is it?"}]}]
    sampling = {"temperature": 0.0, "max_tokens": 8}
    return Request(
        Row(1, "1", {}), messages, None, sampling, "", media_bytes=n * 4 * size[0] * size[1]
    )


def plain(prompt: str, **sampling: Any) -> Request:
    sampling = {"temperature": 0.0, "max_tokens": 8, **sampling}
    return Request(Row(1, "1", {}), None, prompt, sampling, "")


class Locked(Mapping[str, Any]):
    """A value that can't be sent to an engine, and whose own code says why."""

    def __getitem__(self, key: str) -> Any:
        raise TypeError("planted: it holds a lock")

    def __iter__(self) -> Iterator[str]:
        return iter("a")

    def __len__(self) -> int:
        return 1
