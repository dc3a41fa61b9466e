"""A server of pooling models, beside ``chat_server.py``: no model, but the endpoints of `vllm serve`.

A vector depends on the text alone, a score on the words that both sides share. Items of a list are in the
opposite order, so that only their indexes say which is which.
"""

from __future__ import annotations

import base64
import hashlib
import struct
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from tests.support.chat_server import MODEL, ChatServer, Refused, error, read_content, serving

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
