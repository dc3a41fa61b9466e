"""The connections to one server, and how a request is sent on them."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, NamedTuple

from batchkit.engines.openai.rate_limiter import MOST_FAULTS, NoAnswer, Why
from batchkit.errors import EngineError, RowTimeoutError

if TYPE_CHECKING:
    import httpx

CONNECT_S = 10.0
_ACCEPT_ENCODING = "gzip"
_GZIP = 16 + zlib.MAX_WBITS


class Response(NamedTuple):
    """``is_whole`` is False if ``content`` is only the beginning."""

    status: int
    headers: Mapping[str, str]
    content: bytes
    is_whole: bool


class Connections:
    """Gives every request a connection of its own.

    HTTP/1.1 has no id that ties an answer to its request. If a server or a proxy answers a request
    twice, late, or with more bytes than it announced, the next request on that connection gets what
    was left, and every later row the answer of the row before it. On a new connection nothing can be
    left. ``benchmarks/LOG.md`` has what that costs.

    Once created, belongs to one event loop.

    Raises:
        EngineError: the environment's proxy or certificates can't be used.
    """

    def __init__(self, headers: Mapping[str, str], *, trust_env: bool) -> None:
        import httpx

        self._headers, self._trust_env = {**headers, "Connection": "close"}, trust_env
        self._idle: list[httpx.AsyncClient] = []
        try:
            self._certificates = httpx.create_ssl_context()
            self._idle.append(self._new())
        except (ValueError, ImportError, OSError) as error:
            raise EngineError(
                f"the proxy or the certificates that the environment names can't be used: {error}"
            ) from error

    async def close(self) -> None:
        """Close the clients; no request may be in flight."""
        for client in self._idle:
            await client.aclose()

    async def exchange(
        self,
        method: str,
        url: str,
        content: bytes | None,
        *,
        timeout_s: float,
        max_bytes: Callable[[int], int],
    ) -> Response:
        """``max_bytes``: how much of the content to read, given the status.

        Raises:
            RowTimeoutError: the response did not arrive in time.
            NoAnswer: there is no response.
        """
        import httpx

        try:
            async with (
                self._client() as client,
                asyncio.timeout(timeout_s),
                client.stream(method, url, content=content) as response,
            ):
                coding = response.headers.get("content-encoding", "")
                most = max_bytes(response.status_code)
                received, is_whole = await _read(response.aiter_raw(), coding, most)
                return Response(response.status_code, response.headers, received, is_whole)
        except TimeoutError:
            raise RowTimeoutError(
                f"no answer for {timeout_s:.0f} s (run.row_timeout_s = {timeout_s:g})"
            ) from None
        except (httpx.ConnectError, httpx.ConnectTimeout, httpx.ProxyError) as error:
            raise NoAnswer(_text_of(error), Why.DOWN) from error
        except httpx.HTTPError as error:
            # Twice as many tries: the server may just as well have gone away.
            broke = f"the connection broke: {_text_of(error)}"
            raise NoAnswer(broke, tries=2 * MOST_FAULTS) from error
        except _CodingError as error:
            raise NoAnswer(f"{url}: the answer can't be unpacked: {error}") from error

    @asynccontextmanager
    async def _client(self) -> AsyncIterator[httpx.AsyncClient]:
        """A client for one request. If that fails, the client is not used again: httpcore may still count
        the connection of a request that was interrupted, and the next one would wait for its end."""
        client = self._idle.pop() if self._idle else self._new()
        try:
            yield client
        except BaseException:
            await client.aclose()
            raise
        self._idle.append(client)

    def _new(self) -> httpx.AsyncClient:
        """A client for one request at a time. A client for many scans all its connections whenever
        one is taken or returned: with 64 that was seven times the work of everything else here."""
        import httpx

        return httpx.AsyncClient(
            headers={**self._headers, "Accept-Encoding": _ACCEPT_ENCODING},
            verify=self._certificates,
            trust_env=self._trust_env,
            timeout=httpx.Timeout(None, connect=CONNECT_S),
            limits=httpx.Limits(max_connections=1, max_keepalive_connections=0),
        )


def _text_of(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


class _CodingError(Exception):
    """The body is not in the coding that its header names, or that coding was not requested."""


async def _read(chunks: AsyncIterator[bytes], coding: str, max_bytes: int) -> tuple[bytes, bool]:
    """The body in ``chunks``, whose Content-Encoding is ``coding``, up to ``max_bytes``; and whether
    that is all of it. httpx decompresses a whole chunk at once, and nested codings: 64 kB can become
    gigabytes.

    Raises:
        _CodingError: it can't be decompressed.
    """
    received = bytearray()
    unpack = _unpacker(coding.strip().lower())
    async for chunk in chunks:
        received += unpack(chunk, max_bytes + 1 - len(received))
        if len(received) > max_bytes:
            return bytes(received[:max_bytes]), False
    unpack(b"", 0)
    return bytes(received), True


def _unpacker(coding: str) -> Callable[[bytes, int], bytes]:
    """A function of a chunk and the most bytes to return (an uncompressed chunk may exceed this).

    An empty chunk is the end.
    """
    if coding in ("", "identity"):
        return lambda chunk, most: chunk
    if coding != _ACCEPT_ENCODING:
        raise _CodingError(f"Content-Encoding is {coding!r}, expected {_ACCEPT_ENCODING} or none")
    stream, is_empty = zlib.decompressobj(_GZIP), True

    def unpack(chunk: bytes, most: int) -> bytes:
        nonlocal is_empty
        is_whole = stream.eof and not stream.unused_data
        if stream.eof if chunk else not (is_whole or is_empty):
            raise _CodingError("the gzip data end too soon or too late")
        is_empty = is_empty and not chunk
        try:
            return stream.decompress(chunk, max(1, most)) if chunk else b""
        except zlib.error as error:
            raise _CodingError(str(error)) from error

    return unpack
