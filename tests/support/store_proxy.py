"""An HTTP proxy in front of an object store, whose faults a test sets while it runs.

    with moto_server(folder) as server, store_proxy(server.url) as proxy:
        os.environ.update(server.environment(proxy.url))
        lost = Rule("drop_reply", times=1, only=puts)
        proxy.rules = [Rule("delay", seconds=0.1), lost]

The proxy forwards the Host header as it is: the client signed the proxy's address, and servers check the signature with
the header that they receive.
"""

from __future__ import annotations

import html
import http.client
import random
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit

REFUSALS = {  # answered without the server: status, code
    "slow_down": (503, "SlowDown"),  # any number of them is a storm
    "expired": (403, "ExpiredToken"),
    "bad_token": (400, "ExpiredToken"),  # the status of Amazon's S3 for an expired token
}
FAULTS = (
    *REFUSALS,
    "delay",  # wait a random time up to `seconds`, then forward
    "drop_request",  # close the connection; forward nothing
    "drop_reply",  # forward, then close the connection
    "late",  # close the connection, then forward after a random time up to `seconds`
    "duplicate",  # forward twice; the client gets the second reply
    "unconditional",  # forward without If-None-Match, like a server that does not know it
    "hold",  # wait until `passes` later requests were answered or `seconds` are over, then forward
    "old_listing",  # answer a listing as it was `seconds` ago, or if that is 0, when the rule was made
)
_HOP_BY_HOP = {"connection", "content-length", "keep-alive", "transfer-encoding"}


class Request(NamedTuple):
    """``target``: path and query as the client sent them."""

    method: str
    target: str
    headers: Sequence[tuple[str, str]]
    body: bytes

    @property
    def path(self) -> str:
        """The path without its escapes: /bucket/key, or /account/container/key."""
        return unquote(urlsplit(self.target).path)

    @property
    def is_listing(self) -> bool:
        query = parse_qs(urlsplit(self.target).query)
        return self.method == "GET" and ("list-type" in query or query.get("comp") == ["list"])


class Reply(NamedTuple):
    status: int
    reason: str
    headers: Sequence[tuple[str, str]]
    body: bytes


class Traffic(NamedTuple):
    """Requests of clients by method, with listings as LIST, and bytes of the bodies that clients sent (in) and
    received (out)."""

    requests: Counter[str]
    bytes_in: int
    bytes_out: int


def puts(request: Request) -> bool:
    return request.method == "PUT"


@dataclass(eq=False)
class Rule:
    """A fault for some requests. The proxy counts ``fired``, the requests that had the fault."""

    fault: str  # one of FAULTS
    seconds: float = 0.0
    passes: int = 1  # for "hold"
    probability: float = 1.0
    times: int | None = None  # no more requests than these
    only: Callable[[Request], bool] = lambda _: True
    fired: int = 0
    made_s: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        assert self.fault in FAULTS, self.fault


class StoreProxy:
    """A proxy for the server at ``upstream``. ``rules`` may be assigned at any time; they apply to requests that
    arrive later."""

    def __init__(self, upstream: str, seed: int = 0) -> None:
        self.rules: Sequence[Rule] = ()
        self.url = ""
        self._upstream = urlsplit(upstream).netloc
        self._random = random.Random(seed)
        self._closed = threading.Event()
        # One thread for each connection, and for each late request: they share what follows, under this condition.
        self._changed = threading.Condition()
        self._traffic = Traffic(Counter(), 0, 0)
        self._n_answered = 0
        self._n_waiting = 0
        self._first_put: dict[str, float] = {}  # by path

    def traffic(self) -> Traffic:
        """Return the traffic since the start."""
        with self._changed:
            return self._traffic._replace(requests=self._traffic.requests.copy())

    def n_waiting(self) -> int:
        """Return the number of requests that are late or held."""
        with self._changed:
            return self._n_waiting

    def answer(self, request: Request) -> Reply | None:
        """Return the reply for the client, or None to close its connection without one."""
        self._count("LIST" if request.is_listing else request.method, len(request.body), 0)
        reply = self._reply(request, self._draw(request))
        self._count("", 0, len(reply.body) if reply else 0)
        return reply

    def close(self) -> None:
        """Forward the requests that wait, and let no other wait."""
        self._closed.set()
        with self._changed:
            self._changed.notify_all()

    def _count(self, method: str, bytes_in: int, bytes_out: int) -> None:
        with self._changed:
            requests, all_in, all_out = self._traffic
            if method:
                requests[method] += 1
            self._traffic = Traffic(requests, all_in + bytes_in, all_out + bytes_out)

    def _draw(self, request: Request) -> dict[str, Rule]:
        """Return the rules that apply to ``request``, by their fault."""
        drawn = {}
        for rule in self.rules:
            if rule.only(request) and (rule.fault != "old_listing" or request.is_listing):
                with self._changed:
                    if rule.fired != rule.times and self._random.random() < rule.probability:
                        rule.fired += 1
                        drawn[rule.fault] = rule
        return drawn

    def _reply(self, request: Request, drawn: dict[str, Rule]) -> Reply | None:
        if delay := drawn.get("delay"):
            self._closed.wait(self._random.uniform(0, delay.seconds))
        for fault, (status, code) in REFUSALS.items():
            if fault in drawn:
                return _refusal(status, code)
        if "drop_request" in drawn:
            return None
        if late := drawn.get("late"):
            threading.Thread(target=self._forward_late, args=(request, late), daemon=True).start()
            return None
        if "unconditional" in drawn:
            kept = [pair for pair in request.headers if pair[0].lower() != "if-none-match"]
            request = request._replace(headers=kept)
        if hold := drawn.get("hold"):
            self._hold(hold)
        reply = self._forward(request)
        if "duplicate" in drawn:
            reply = self._forward(request)
        if "drop_reply" in drawn or reply is None:
            return None
        if old := drawn.get("old_listing"):
            return reply._replace(body=self._old_listing(request, reply.body, old))
        return reply

    def _forward(self, request: Request) -> Reply | None:
        """Return the server's reply, or None if the server is gone. Each call opens a new connection: a request that
        fails on an old connection would have to be sent again, which might be a duplicate."""
        connection = http.client.HTTPConnection(self._upstream, timeout=60)
        try:
            connection.putrequest(
                request.method, request.target, skip_host=True, skip_accept_encoding=True
            )
            for name, value in request.headers:
                connection.putheader(name, value)
            connection.endheaders(request.body)
            got = connection.getresponse()
            reply = Reply(got.status, got.reason, got.getheaders(), got.read())
        except (OSError, http.client.HTTPException):
            return None
        finally:
            connection.close()
        with self._changed:
            self._n_answered += 1
            if request.method == "PUT" and reply.status < 300:
                self._first_put.setdefault(request.path, time.monotonic())
            self._changed.notify_all()
        return reply

    def _forward_late(self, request: Request, rule: Rule) -> None:
        with self._waiting():
            self._closed.wait(self._random.uniform(0, rule.seconds))
            self._forward(request)

    def _hold(self, rule: Rule) -> None:
        with self._waiting(), self._changed:
            enough = self._n_answered + rule.passes
            self._changed.wait_for(
                lambda: self._closed.is_set() or self._n_answered >= enough, rule.seconds or None
            )

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        with self._changed:
            self._n_waiting += 1
        try:
            yield
        finally:
            with self._changed:
                self._n_waiting -= 1

    def _old_listing(self, request: Request, body: bytes, rule: Rule) -> bytes:
        """Return the listing ``body`` without newer objects, and without common prefixes of newer objects only.
        Deleted objects are not listed again."""
        as_of_s = time.monotonic() - rule.seconds if rule.seconds else rule.made_s
        with self._changed:
            first_put = dict(self._first_put)
        folder = request.path.rstrip("/") + "/"

        def kept(found: re.Match[str]) -> str:
            name = re.search(r"<(Key|Name|Prefix)>(.*?)</\1>", found[0], re.DOTALL)
            assert name, found[0]
            path = folder + html.unescape(name[2])
            if path.endswith("/"):
                times = [time_s for put, time_s in first_put.items() if put.startswith(path)]
            else:
                times = [first_put[path]] if path in first_put else []
            return "" if times and min(times) > as_of_s else found[0]

        entry = r"<(Contents|CommonPrefixes|Blob|BlobPrefix)>.*?</\1>"
        return re.sub(entry, kept, body.decode(), flags=re.DOTALL).encode()


@contextmanager
def store_proxy(upstream: str, seed: int = 0) -> Iterator[StoreProxy]:
    """Run a proxy for the server at ``upstream``. ``seed``: for the random draws."""
    proxy = StoreProxy(upstream, seed)
    handler = type("Handler", (_Handler,), {"proxy": proxy})
    with _Server(("127.0.0.1", 0), handler) as server:
        proxy.url = f"http://127.0.0.1:{server.server_port}"
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        try:
            yield proxy
        finally:
            proxy.close()
            server.shutdown()


class _Server(ThreadingHTTPServer):
    request_queue_size = 128  # connections that wait to be accepted

    def handle_error(self, *where: Any) -> None:
        """Print an error, unless the client has closed its connection."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(*where)


class _Handler(BaseHTTPRequestHandler):
    proxy: StoreProxy
    protocol_version = "HTTP/1.1"  # connections stay open
    disable_nagle_algorithm = True

    def _answer(self) -> None:
        assert "Transfer-Encoding" not in self.headers, "the proxy reads no chunked body"
        size = int(self.headers.get("Content-Length", 0))
        body = self.rfile.read(size)
        reply = None
        if len(body) == size:  # the client is still there
            headers = [pair for pair in self.headers.items() if pair[0].lower() != "connection"]
            reply = self.proxy.answer(Request(self.command, self.path, headers, body))
        if reply is None:
            self.close_connection = True
            return
        has_length = self.command == "HEAD" or reply.status in (204, 304)
        hop_by_hop = _HOP_BY_HOP - ({"content-length"} if has_length else set())
        headers = [pair for pair in reply.headers if pair[0].lower() not in hop_by_hop]
        if not has_length:
            headers.append(("Content-Length", str(len(reply.body))))
        lines = [f"HTTP/1.1 {reply.status} {reply.reason}", *(f"{k}: {v}" for k, v in headers)]
        self.wfile.write("\r\n".join((*lines, "", "")).encode("latin-1") + reply.body)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _answer

    def log_message(self, *args: Any) -> None: ...


def _refusal(status: int, code: str) -> Reply:
    body = f'<?xml version="1.0" encoding="UTF-8"?>\n<Error><Code>{code}</Code></Error>'.encode()
    headers = [("Content-Type", "application/xml"), ("x-ms-error-code", code)]
    return Reply(status, code, headers, body)
