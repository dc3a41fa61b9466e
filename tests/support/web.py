"""Small HTTP servers, whose answers a test decides."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, SimpleHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Page(BaseHTTPRequestHandler):
    """One that prints nothing."""

    def reply(self, status: int, body: bytes, **headers: str | int) -> None:
        """The body only if it was asked for. The keys of ``headers`` have _ for -."""
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *args: Any) -> None: ...


class Files(SimpleHTTPRequestHandler):
    """The files below ``directory``."""

    def log_message(self, *args: Any) -> None: ...


@contextmanager
def web_server(handler: Callable[..., BaseHTTPRequestHandler]) -> Iterator[str]:
    """Its address."""
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
