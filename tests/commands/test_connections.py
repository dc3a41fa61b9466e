"""What a client can make the servers of ``view`` and ``serve`` hold before its request is checked: a real server, real sockets."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest
from starlette.responses import PlainTextResponse

from batchkit.commands.view import bound, quiet_server

WHOLE = b"GET / HTTP/1.1\r\nhost: a\r\n\r\n"


@contextmanager
def connected(head_timeout_s: float) -> Iterator[socket.socket]:
    """A connection to a server that answers everything with "here"."""
    with bound("127.0.0.1", 0) as listening:
        app = PlainTextResponse("here")
        server = quiet_server(app, ends_in_s=1, head_timeout_s=head_timeout_s)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        try:
            with socket.create_connection(listening.getsockname(), timeout=60) as client:
                yield client
        finally:
            server.should_exit = True
            thread.join()


def is_closed(client: socket.socket) -> bool:
    """Read what comes until the server closes the connection."""
    with suppress(ConnectionResetError):
        while client.recv(1 << 16):
            pass
    return True


def status_of(client: socket.socket, head: bytes) -> str:
    """The status that the head is answered with, empty if the connection is reset before all was sent."""
    with suppress(ConnectionError):
        client.sendall(head)
        return client.recv(12)[9:].decode()
    return ""


@pytest.mark.parametrize(
    "head", [WHOLE, b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 99 + b"host: a\r\n\r\n"]
)
def test_an_ordinary_head_is_answered(head: bytes) -> None:
    with connected(head_timeout_s=60) as client:
        assert status_of(client, head) == "200"


@pytest.mark.parametrize(
    "head",
    [
        b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 100 + b"host: a\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: a\r\na: " + b"b" * 17_000 + b"\r\n\r\n",
        b"GET /?" + b"b" * 17_000 + b" HTTP/1.1\r\nhost: a\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: a\r\na: " + b"b" * 400_000,  # it never ends
        b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 50_000,
    ],
)
def test_a_large_head_is_refused(head: bytes) -> None:
    with connected(head_timeout_s=60) as client:
        assert status_of(client, head) in ("431", "400", "")  # 400: from h11, if it came in parts


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\nhost: a\r\n", WHOLE, WHOLE + WHOLE[:9]])
def test_a_connection_without_a_whole_head_is_closed(sent: bytes) -> None:
    with connected(head_timeout_s=0.2) as client:
        client.sendall(sent)
        assert is_closed(client)


def test_a_head_that_comes_byte_by_byte_is_not_waited_for() -> None:
    with connected(head_timeout_s=0.5) as client:
        closed = threading.Event()
        reader = threading.Thread(target=lambda: is_closed(client) and closed.set())
        reader.start()
        with suppress(OSError):
            while not closed.wait(0.01):
                client.sendall(b"a")
        reader.join()
