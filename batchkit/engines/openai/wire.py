"""A connection whose surplus bytes never become the answer to a later request.

HTTP/1.1 has no id that ties an answer to its request. A server or proxy that answers a request
twice, or reports a Content-Length that is too small, leaves bytes after an answer; a parser that
gets them takes them for the answer to the next request on the connection. So ``Wire`` never reads
ahead: it returns at most the rest of the answer, and keeps what is left, so that it is noticed.
"""

from __future__ import annotations

import asyncio
import re
import ssl
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

_EYEBALLS_S = 0.25  # RFC 8305: delay before the host's next address is also tried
_MOST_BUFFERED = 1 << 18
_REMEMBERED = 256  # answers of a connection: a second copy may be many answers late

_BLANK_LINE = re.compile(rb"\n\r?\n")
_STATUS = re.compile(rb"HTTP/\d\.\d (\d)")
_LENGTH = re.compile(rb"\ncontent-length:[ \t]*(\d{1,18})[ \t]*\r?(?=\n)", re.IGNORECASE)
_CODING = re.compile(rb"\ntransfer-encoding:", re.IGNORECASE)


class Network:
    """An httpcore ``AsyncNetworkBackend`` whose streams are ``Wire``s. ``on_surplus`` is called
    whenever a connection has bytes that were not requested."""

    def __init__(self, on_surplus: Callable[[], None]) -> None:
        self._on_surplus = on_surplus

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,  # noqa: ASYNC109
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> Wire:
        """
        Raises:
            httpcore.ConnectError, httpcore.ConnectTimeout: as httpcore expects it.
        """
        import httpcore

        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(timeout):
                _, wire = await loop.create_connection(
                    lambda: Wire(self._on_surplus), host, port, happy_eyeballs_delay=_EYEBALLS_S
                )
        except TimeoutError as error:
            raise httpcore.ConnectTimeout(str(error)) from error
        except OSError as error:
            raise httpcore.ConnectError(str(error)) from error
        return wire

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class Wire(asyncio.Protocol):
    """An httpcore ``AsyncNetworkStream`` for one request after another.

    A request begins with the first ``write`` after a ``read``. ``requests`` counts them.
    """

    def __init__(self, on_surplus: Callable[[], None]) -> None:
        self._on_surplus = on_surplus
        self._received = bytearray()
        self._answer = _Answer()
        self._is_reading = True
        self._is_refused = self._is_closed = False
        self._error: Exception | None = None
        self._arrival: asyncio.Future[None] | None = None
        self._room: asyncio.Future[None] | None = None
        self._last: deque[int] = deque(maxlen=_REMEMBERED)
        self.requests = 0

    @property
    def has_surplus(self) -> bool:
        """After an answer was read to its end: whether bytes are left."""
        return bool(self._received) or self._is_refused

    def is_repeated(self, content: bytes) -> bool:
        """Whether one of the connection's last responses had the same content."""
        mark = hash(content)
        is_repeated = mark in self._last
        self._last.append(mark)
        return is_repeated

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:  # noqa: ASYNC109
        """At most the rest of the answer; empty if the server closed the connection. No timeout."""
        import httpcore

        self._is_reading = True
        while not self._received and not self._is_closed:
            self._arrival = asyncio.get_running_loop().create_future()
            await self._arrival
        if self._is_refused:
            raise httpcore.ReadError("the server had sent bytes before it was asked")
        if not self._received:
            if self._error is not None:
                raise httpcore.ReadError(str(self._error)) from self._error
            return b""
        n = self._answer.most_of(self._received, max_bytes)
        piece = bytes(self._received[:n])
        del self._received[:n]
        self._answer.has_got(piece)
        if len(self._received) < _MOST_BUFFERED:
            self._transport.resume_reading()
        return piece

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:  # noqa: ASYNC109
        """Refuses a request if bytes arrived before it: ``read`` then raises."""
        import httpcore

        if self._is_reading:
            self._is_reading, self._answer = False, _Answer()
            self.requests += 1
            if self._received:
                self._is_refused = self._is_closed = True
                self._on_surplus()
                self._transport.abort()
        if not buffer:
            return
        if self._is_closed:
            raise httpcore.WriteError("the connection is closed")
        self._transport.write(buffer)
        if self._room is not None:
            await self._room

    async def aclose(self) -> None:
        self._transport.abort()

    async def start_tls(
        self,
        ssl_context: ssl.SSLContext,
        server_hostname: str | None = None,
        timeout: float | None = None,  # noqa: ASYNC109
    ) -> Wire:
        """Another Wire, for the data inside TLS.

        Raises:
            httpcore.ConnectError, httpcore.ConnectTimeout: as httpcore expects it.
        """
        import httpcore

        inner = Wire(self._on_surplus)
        try:
            if self._received:
                raise ConnectionError("bytes before TLS began")
            async with asyncio.timeout(timeout):
                transport = await asyncio.get_running_loop().start_tls(
                    self._transport, inner, ssl_context, server_hostname=server_hostname
                )
        except (OSError, ssl.SSLError) as error:
            self._transport.abort()
            if isinstance(error, TimeoutError):
                raise httpcore.ConnectTimeout(str(error)) from error
            raise httpcore.ConnectError(str(error)) from error
        if transport is None:
            raise httpcore.ConnectError("the connection broke during the TLS handshake")
        inner.connection_made(transport)
        return inner

    def get_extra_info(self, info: str) -> Any:
        """``is_readable`` is queried while no request is in flight: True if none may follow."""
        if info == "is_readable":
            if self._received:
                self._on_surplus()
            return bool(self._received) or self._is_closed or not self._answer.is_framed
        return self._transport.get_extra_info(info)

    # asyncio.Protocol

    def connection_made(self, transport: Any) -> None:
        self._transport: asyncio.Transport = transport

    def data_received(self, data: bytes) -> None:
        self._received += data
        if len(self._received) >= _MOST_BUFFERED:
            self._transport.pause_reading()
        self._wake(self._arrival)

    def eof_received(self) -> None:
        self._is_closed = True
        self._wake(self._arrival)

    def connection_lost(self, error: Exception | None) -> None:
        self._is_closed, self._error = True, self._error or error
        self.resume_writing()
        self._wake(self._arrival)

    def pause_writing(self) -> None:
        self._room = asyncio.get_running_loop().create_future()

    def resume_writing(self) -> None:
        self._wake(self._room)
        self._room = None

    @staticmethod
    def _wake(waiting: asyncio.Future[None] | None) -> None:
        if waiting is not None and not waiting.done():
            waiting.set_result(None)


class _Answer:
    """Where the next piece of an answer must end, by RFC 9112, 6.3.

    With a Content-Length, this is known. Otherwise the head, each informational head, and a chunked
    body all end with an empty line, so each piece ends there, whether or not the line is an end.
    """

    def __init__(self) -> None:
        self._head: bytes | None = b""
        self._left: int | None = None
        self._before = b""
        self.is_framed = True
        """False if its end is unknown, so that the connection must end with it."""

    def most_of(self, received: bytearray, max_bytes: int) -> int:
        """How many bytes of ``received``, which is not empty, may be returned."""
        most = min(len(received), max_bytes)
        if self._left is not None:
            if self._left == 0:  # a reader that continues expects another length
                self.is_framed, self._left = False, None
                return most
            return min(self._left, most)
        found = _BLANK_LINE.search(self._before + received[:most])
        return found.end() - len(self._before) if found else most

    def has_got(self, piece: bytes) -> None:
        """``piece`` has been returned."""
        if self._left is not None:
            self._left -= len(piece)
            return
        text = self._before + piece
        is_end = _BLANK_LINE.search(text) is not None
        self._before = b"\n" if is_end else text[-2:]
        if self._head is not None:
            self._head += piece
            if is_end:
                self._has_head(self._head)

    def _has_head(self, head: bytes) -> None:
        status = _STATUS.search(head)
        if status is not None and status[1] == b"1":
            self._head = b""
            return
        self._head = None
        if _CODING.search(head):
            return
        lengths = set(_LENGTH.findall(head))
        if len(lengths) == 1:
            self._left = int(lengths.pop())
        else:
            self.is_framed = False
