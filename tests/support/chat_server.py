"""A small server that speaks OpenAI's API over real HTTP: no model, but honest in everything else.

Its answer says what it was asked. Tokens are words, so that a test can count along. As a program
(``python -m tests.support.chat_server --port N``) it can also be made to die, to hang and to load slowly.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import os
import signal
import socket
import threading
import time
import wave
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

from tests.support.web import Page

MODEL = "tiny"


class Refused(Exception):
    """What the server answers instead; ``body`` is JSON, or bytes as they are."""

    def __init__(self, status: int, body: Any, **headers: str) -> None:
        super().__init__(status)
        self.status, self.body = status, body
        self.headers = headers


class HangUp(Exception):
    """The connection breaks off in the middle of the answer."""


class Raw(Exception):
    """The server sends ``parts`` as they are, ``wait_s`` after one another."""

    def __init__(self, *parts: bytes, wait_s: float = 0.0) -> None:
        super().__init__()
        self.parts, self.wait_s = parts, wait_s


def http(body: Any) -> bytes:
    """A whole HTTP response with ``body`` as JSON."""
    content = json.dumps(body).encode()
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(content), content)


class Flood(Exception):
    """The server sends ``chunk`` again and again, ``times`` in all, or until nobody listens."""

    def __init__(self, chunk: bytes, times: int, *, status: int = 200) -> None:
        super().__init__(status)
        self.chunk, self.times, self.status = chunk, times, status


def error(message: str, kind: str = "BadRequestError", **more: Any) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, **more}}


class ChatServer:
    """``before`` sees each prompt's text and body first; it may raise, or return what to say.

    A prompt that is too long is refused in llama.cpp's way, its tokens counted; without ``counts`` in
    vLLM's, which has ``/tokenize`` for that. ``model`` is what its list of models has besides the
    name. ``answered`` counts the prompts that got an answer; ``most`` is how many were in here at once;
    ``flooded`` counts the bytes that a ``Flood`` got rid of. ``here.client`` is the address that the
    thread's request came from.
    """

    paths: frozenset[str] = frozenset(["/v1/chat/completions", "/v1/completions"])

    def __init__(
        self,
        before: Callable[[str, dict[str, Any]], str | None] = lambda text, body: None,
        *,
        port: int = 0,
        latency_s: float = 0.0,
        context: int = 4096,
        key: str | None = None,
        counts: bool = True,
        ready_at: float = 0.0,
        model: dict[str, Any] | None = None,
    ) -> None:
        self.lists: Callable[[], object] = lambda: None  # called before it lists its models
        self.before, self.latency_s, self.context, self.key = before, latency_s, context, key
        self.counts, self.ready_at = counts, ready_at
        self.names = [MODEL]
        self.tokenize: Refused | None = None  # what it answers to that
        self.model = {"max_model_len": context} if model is None else model
        self.bodies: list[dict[str, Any]] = []
        self.answered: Counter[str] = Counter()
        self.inside = self.most = self.connections = self.flooded = 0
        self.lock = threading.Lock()  # each connection has a thread of its own
        self.here = threading.local()
        self._sockets: set[socket.socket] = set()
        self._http = _Http(("127.0.0.1", port), type("Handler", (_Handler,), {"of": self}))
        self.port: int = self._http.server_address[1]
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def kill(self) -> None:
        """As SIGKILL would: nobody listens any more, and what was open breaks off."""
        self._http.shutdown()
        self._http.server_close()
        for connection in list(self._sockets):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self._thread.join()

    def answer(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        if body.get("model") not in self.names:
            no_model = f"The model `{body.get('model')}` does not exist."
            raise Refused(404, error(no_model, "NotFoundError", param="model", code=404))
        is_chat = path == "/v1/chat/completions"
        text, images = _read(body["messages"]) if is_chat else (body["prompt"], 0)
        with self.lock:
            self.bodies.append(body)
        answer = self.before(text, body)
        words = text.split()
        if len(words) >= self.context and not self.counts:
            raise Refused(400, error("at least so many", param="input_tokens", code=400))
        if len(words) >= self.context:
            counts = {"n_prompt_tokens": len(words), "n_ctx": self.context}
            raise Refused(400, error("too long", "exceed_context_size_error", code=400, **counts))
        time.sleep(self.latency_s)
        said = (answer or f"{images} images, asked: {text}").split()
        most = body.get("max_tokens", 16)
        reason = "length" if len(said) > most else "stop"
        said = said[:most]
        n = body.get("n", 1)
        with self.lock:
            self.answered[text] += 1
        return {
            "object": "chat.completion" if is_chat else "text_completion",
            "model": body["model"],
            "choices": [
                {"index": i, "finish_reason": reason, **_said(said, body, is_chat)}
                for i in reversed(range(n))
            ],
            "usage": {
                "prompt_tokens": len(words) + 4 * images,
                "completion_tokens": n * len(said),
                "total_tokens": len(words) + 4 * images + n * len(said),
            },
        }


@contextmanager
def serving(*args: Any, of: type[ChatServer] = ChatServer, **kwargs: Any) -> Iterator[ChatServer]:
    server = of(*args, **kwargs)
    try:
        yield server
    finally:
        server.kill()


class _Http(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is none."""


class _Handler(Page):
    protocol_version = "HTTP/1.1"
    of: ChatServer

    def setup(self) -> None:
        super().setup()
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.of._sockets.add(self.connection)
        self.of.connections += 1

    def finish(self) -> None:
        self.of._sockets.discard(self.connection)
        super().finish()

    def do_GET(self) -> None:
        self._answer(lambda sent: self._models())

    def do_POST(self) -> None:
        with self.of.lock:
            self.of.inside += 1
            self.of.most = max(self.of.most, self.of.inside)
        try:
            self._answer(self._completions)
        finally:
            with self.of.lock:
                self.of.inside -= 1

    def _answer(self, make: Callable[[bytes], Any]) -> None:
        sent = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        try:
            if self.of.key and self.headers.get("Authorization") != f"Bearer {self.of.key}":
                raise Refused(401, error("Incorrect API key provided", code="invalid_api_key"))
            self._say(200, make(sent))
        except Refused as refused:
            self._say(refused.status, refused.body, **refused.headers)
        except HangUp:
            self.wfile.write(b'HTTP/1.1 200 OK\r\nContent-Length: 500\r\n\r\n{"choices": [')
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)
        except Raw as raw:
            for part in raw.parts:
                self.wfile.write(part)
                time.sleep(raw.wait_s)
        except Flood as flood:
            self._flood(flood)

    def _say(self, status: int, found: Any, **headers: str) -> None:
        body = found if isinstance(found, bytes) else json.dumps(found).encode()
        headers = {"Content_Type": "application/json", **headers}
        self.reply(status, body, **headers, Content_Length=len(body))

    def _flood(self, flood: Flood) -> None:
        self.close_connection = True
        self.reply(flood.status, b"", Connection="close")
        with suppress(OSError):
            for _ in range(flood.times):
                self.wfile.write(flood.chunk)
                self.of.flooded += len(flood.chunk)

    def _models(self) -> dict[str, Any]:
        if self.path != "/v1/models":
            raise Refused(404, {"detail": "Not Found"})
        self.of.lists()
        if time.monotonic() < self.of.ready_at:
            raise Refused(503, error("Loading model", "unavailable_error", code=503))
        of_each = {"owned_by": "tests", **self.of.model}
        return {"object": "list", "data": [{"id": name, **of_each} for name in self.of.names]}

    def _completions(self, sent: bytes) -> dict[str, Any]:
        if self.path == "/tokenize" and not self.of.counts:
            if self.of.tokenize is not None:
                raise self.of.tokenize
            body = json.loads(sent)
            text = body["prompt"] if "prompt" in body else _read(body["messages"])[0]
            return {"count": len(text.split())}
        if self.path not in self.of.paths:
            raise Refused(404, {"detail": "Not Found"})
        self.of.here.client = self.client_address
        return self.of.answer(self.path, json.loads(sent))


def _read(messages: list[dict[str, Any]]) -> tuple[str, int]:
    """The messages' text, and how many images there are in them, each opened."""
    read = [read_content(message["content"] or "") for message in messages]
    return " ".join(text for text, _ in read if text), sum(images for _, images in read)


def read_content(content: Any) -> tuple[str, int]:
    """The text of a message's content, and how many images there are in it, each opened."""
    texts, images = [], 0
    for part in [{"type": "text", "text": content}] if isinstance(content, str) else content:
        if part["type"] == "text":
            texts.append(part["text"])
            continue
        if part["type"] == "input_audio":
            with wave.open(io.BytesIO(base64.b64decode(part["input_audio"]["data"]))) as heard:
                texts.append(f"{heard.getnframes()} samples, {heard.getframerate()} a second")
            continue
        if part["type"] == "video_url":
            texts.append(part["video_url"]["url"])
            continue
        head, _, data = part["image_url"]["url"].partition(",")
        if head != "data:image/png;base64":
            raise Refused(400, error(f"image_url: {head}"))
        from PIL import Image  # a server that sees none starts sooner

        Image.open(io.BytesIO(base64.b64decode(data, validate=True))).load()
        images += 1
    return " ".join(texts), images


def _said(words: list[str], body: dict[str, Any], is_chat: bool) -> dict[str, Any]:
    text = " ".join(words)
    wanted = body.get("logprobs")
    if is_chat:
        said: dict[str, Any] = {"message": {"role": "assistant", "content": text}, "logprobs": None}
        if wanted is True:
            tops = [{"token": "x", "logprob": -2.0, "bytes": [120]}] * body["top_logprobs"]
            told = {"logprob": -0.5, "top_logprobs": tops}
            content = [{"token": w, "bytes": list(w.encode()), **told} for w in words]
            said["logprobs"] = {"content": content}
        return said
    said = {"text": text, "logprobs": None}
    if type(wanted) is int:
        said["logprobs"] = {
            "tokens": words,
            "token_logprobs": [-0.5 for _ in words],
            "top_logprobs": [{w: -0.5, "x": -2.0} for w in words],
            "text_offset": list(range(len(words))),
        }
    return said


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--latency-s", type=float, default=0.0)
    parser.add_argument("--loads-s", type=float, default=0.0, help="it answers 503 so long")
    parser.add_argument("--dies-of", metavar="WORD", help="a prompt that holds it ends it")
    parser.add_argument("--hangs-once", type=Path, metavar="FILE", help="if FILE is not there yet")
    parser.add_argument("--leaks-mb", type=int, default=0, help="with each prompt")
    parser.add_argument("--prints-mb", type=int, default=0, help="before it serves")
    args = parser.parse_args()
    leaked: list[bytes] = []
    for _ in range(args.prints_mb):
        print(("x" * 1023 + "\n") * 1024, end="")
    hangs = args.hangs_once is not None and not args.hangs_once.exists()
    if hangs:
        args.hangs_once.touch()

    def before(text: str, body: dict[str, Any]) -> None:
        leaked.append(b"x" * (args.leaks_mb * 2**20))
        if args.dies_of in text.split():
            os._exit(3)
        if hangs and server.answered.total() >= 10:
            time.sleep(3600)

    ready_at = time.monotonic() + args.loads_s
    server = ChatServer(before, port=args.port, latency_s=args.latency_s, ready_at=ready_at)
    print(f"serving at {server.url}", flush=True)
    signal.pause()


if __name__ == "__main__":
    main()
