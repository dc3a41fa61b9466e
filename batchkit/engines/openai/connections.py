"""The connections to one server, and how a request is sent on them."""

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
_OTHER_FILES = 256  # logs, media, pipes to children, libraries
_MOST_ERROR_BYTES = 1 << 20  # of an error, of which 1,000 characters are shown
# An answer comes as it is: what is packed may unpack to gigabytes.
_HEADERS = {"Connection": "close", "Accept-Encoding": "identity"}


class Content(NamedTuple):
    """What is sent, and its type."""

    data: bytes
    type: str = "application/json"


class Response(NamedTuple):
    """``is_whole`` is False if ``content`` is only the beginning."""

    status: int
    headers: Mapping[str, str]
    content: bytes
    is_whole: bool


def allow_connections(count: int) -> None:
    """Raise this process's limit of open files so far that it can have so many connections at once.

    Raises:
        JobError: the administrator allows fewer.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = count + _OTHER_FILES
    if hard != resource.RLIM_INFINITY and hard < needed:
        fits = hard - _OTHER_FILES
        remedy = f"set it to {fits:,} or less, or raise that limit"
        if fits < 1:
            remedy = f"raise that limit: even one request needs {_OTHER_FILES + 1:,}"
        raise JobError(
            f"engine.options.max_num_seqs: {count:,} requests at once need {needed:,} open files, and this machine"
            f" allows a process {hard:,} (ulimit -Hn); {remedy}"
        )
    if soft != resource.RLIM_INFINITY and soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


class Connections:
    """Gives every request a connection of its own. An answer's first ``max_bytes`` are read.

    HTTP/1.1 has no id that ties an answer to its request. If a server or a proxy answers a request
    twice, late, or with more bytes than it announced, every later row on that connection would get the
    answer of the row before it. ``benchmarks/LOG.md`` has what new connections cost.

    Once created, belongs to one event loop. Raises EngineError if the environment's proxy or
    certificates can't be used.
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
                f"the proxy or the certificates that the environment names can't be used: {error}"
            ) from error

    async def close(self) -> None:
        """Close the clients; no request may be in flight."""
        for client in self._idle:
            await client.aclose()

    async def exchange(
        self, method: str, url: str, content: Content | None, timeout_s: float
    ) -> Response:
        """
        Raises:
            RowTimeoutError: the response did not arrive in time.
            NoAnswer: there is no response, or one that is packed.
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
                f"no answer for {timeout_s:.0f} s (run.row_timeout_s = {timeout_s:g})"
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
                f"{response.url}: Content-Encoding is {coding!r}, which was not asked for"
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
            headers=self._headers,
            verify=self._certificates,
            trust_env=self._trust_env,
            timeout=httpx.Timeout(None, connect=CONNECT_S),
            limits=httpx.Limits(max_connections=1, max_keepalive_connections=0),
        )


def _text_of(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
