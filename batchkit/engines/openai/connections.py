"""The HTTP connections to one server."""

from __future__ import annotations

import asyncio
import resource
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, NamedTuple

from batchkit.engines.openai.rate_limiter import NoAnswer, Why
from batchkit.errors import EngineError, JobError, RowTimeoutError

if TYPE_CHECKING:
    import httpx

CONNECT_S = 10.0
_OTHER_FILES = 256  # files that logs, media, pipes to children and libraries may open
_MOST_ERROR_BYTES = 1 << 20  # of an error response; 1,000 characters are shown
# Ask for uncompressed answers: a compressed one may expand to gigabytes.
_HEADERS = {"Connection": "close", "Accept-Encoding": "identity"}


class Content(NamedTuple):
    """The body of a request and its content type."""

    data: bytes
    type: str = "application/json"


class Response(NamedTuple):
    """An HTTP response. ``is_whole`` is False if ``content`` is only the beginning of a body that was too large."""

    status: int
    headers: Mapping[str, str]
    content: bytes
    is_whole: bool


def allow_connections(count: int) -> None:
    """Raise this process's limit of open files so that ``count`` connections fit.

    Raises:
        JobError: The system's hard limit is lower.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = count + _OTHER_FILES
    if hard != resource.RLIM_INFINITY and hard < needed:
        fits = hard - _OTHER_FILES
        remedy = f"set this key to {fits:,} or less, or raise the limit"
        if fits < 1:
            remedy = f"raise the limit: even one request needs {_OTHER_FILES + 1:,}"
        raise JobError(
            f"engine.options.max_num_seqs: {count:,} concurrent requests need {needed:,} open files, but this machine"
            f" allows {hard:,} per process (ulimit -Hn); {remedy}"
        )
    if soft != resource.RLIM_INFINITY and soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


class Connections:
    """HTTP clients that open a new connection for each request, and read at most ``max_bytes`` of an answer.

    Connections are not reused, because HTTP/1.1 has no id that ties an answer to its request. If a server or proxy once
    answered twice, late, or with too many bytes, every later row on that connection would get the answer of the row
    before it. ``benchmarks/LOG.md`` shows what new connections cost.

    Use it from one event loop only. Raises EngineError if the environment's proxy or certificates can't be used.
    """

    def __init__(self, headers: Mapping[str, str], *, trust_env: bool, max_bytes: int) -> None:
        import httpx

        self._headers, self._trust_env = {**headers, **_HEADERS}, trust_env
        self._max_bytes = max_bytes
        self._idle: list[httpx.AsyncClient] = []
        try:
            self._certificates = httpx.create_ssl_context()
            self._idle.append(self._new())
        except (ValueError, ImportError, OSError) as error:
            raise EngineError(
                f"the proxy or the certificates set in the environment can't be used: {error}"
            ) from error

    async def close(self) -> None:
        """Close the clients; no request may be in flight."""
        for client in self._idle:
            await client.aclose()

    async def exchange(
        self, method: str, url: str, content: Content | None, timeout_s: float
    ) -> Response:
        """Send a request and return the response.

        Raises:
            RowTimeoutError: The response did not arrive in time.
            NoAnswer: There was no response, or it was compressed.
        """
        import httpx

        data, content_type = content or Content(b"")
        try:
            async with (
                self._client() as client,
                asyncio.timeout(timeout_s),
                client.stream(
                    method, url, content=data or None, headers={"Content-Type": content_type}
                ) as response,
            ):
                return await self._read(response)
        except TimeoutError:
            raise RowTimeoutError(
                f"no answer for {timeout_s:.0f} s (run.row_timeout_s = {timeout_s:g}); raise this limit if answers may take longer"
            ) from None
        except (httpx.ConnectError, httpx.ConnectTimeout, httpx.ProxyError) as error:
            raise NoAnswer(_text_of(error), Why.DOWN) from error
        except httpx.HTTPError as error:
            raise NoAnswer(f"the connection broke: {_text_of(error)}") from error

    async def _read(self, response: httpx.Response) -> Response:
        most = self._max_bytes if response.status_code < 300 else _MOST_ERROR_BYTES
        coding = response.headers.get("content-encoding", "identity")
        if coding.strip().lower() != "identity":
            raise NoAnswer(
                f"{response.url}: the answer is compressed (Content-Encoding {coding!r}), which is not accepted;"
                " turn off compression in the server or its proxy"
            )
        received = bytearray()
        async for chunk in response.aiter_raw():
            received += chunk[: most + 1 - len(received)]
            if len(received) > most:
                break
        is_whole = len(received) <= most
        return Response(response.status_code, response.headers, bytes(received[:most]), is_whole)

    @asynccontextmanager
    async def _client(self) -> AsyncIterator[httpx.AsyncClient]:
        """Yield a client for one request. After a failure the client is discarded.

        A failed client might make its next request wait, because httpcore may still count the failed connection.
        """
        client = self._idle.pop() if self._idle else self._new()
        try:
            yield client
        except BaseException:
            await client.aclose()
            raise
        self._idle.append(client)

    def _new(self) -> httpx.AsyncClient:
        """Create a client that is used for one request at a time.

        A client with many connections would scan all its connections for each request. With 64 connections this took
        seven times as long as all other code here.
        """
        import httpx

        return httpx.AsyncClient(
            headers=self._headers,
            verify=self._certificates,
            trust_env=self._trust_env,
            timeout=httpx.Timeout(None, connect=CONNECT_S),
            limits=httpx.Limits(max_connections=1, max_keepalive_connections=0),
        )


def _text_of(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
