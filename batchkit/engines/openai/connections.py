"""The connections to one server, and how a request is sent on them."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Mapping
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple

from batchkit.engines.openai.body import ACCEPT_ENCODING, CodingError, read_body
from batchkit.engines.openai.wire import Network, Wire
from batchkit.errors import EngineError, RowTimeoutError

if TYPE_CHECKING:
    import httpx

CONNECT_S = 10.0
# Shorter than the servers': uvicorn closes after 5 s, for example, just as a request may be sent.
_KEEP_ALIVE_S = 3.0
_CLOSE = {"Connection": "close"}


class TurnedAway(Exception):
    """The server is busy, or ``is_down``: it did not accept the request."""

    def __init__(self, told: str, *, is_down: bool, retry_after_s: float | None = None) -> None:
        super().__init__(told)
        self.is_down = is_down
        self.retry_after_s = retry_after_s


class ServerFault(Exception):
    """The server failed on the request; ``weight`` is how likely the request is the cause."""

    def __init__(self, told: str, weight: float = 1.0) -> None:
        super().__init__(told)
        self.weight = weight


class Response(NamedTuple):
    """``is_whole`` is False if ``content`` is only the beginning. ``is_reused``: the connection has had
    other responses before; ``is_repeated``: one of them had the same content. ``request_id`` is the
    request's X-Request-Id."""

    status: int
    headers: Mapping[str, str]
    content: bytes
    is_whole: bool
    is_repeated: bool
    is_reused: bool
    request_id: str

    def is_to_another(self, answer_id: Any) -> bool:
        """Whether an answer with this id is to another request, as far as a server tells that.

        The ids of `vllm serve` have the X-Request-Id in them. On a new connection any is right: a cache may
        answer with what an earlier request of ours got.
        """
        ours = self.request_id.rpartition("-")[0]
        return (
            self.is_reused
            and isinstance(answer_id, str)
            and ours in answer_id
            and self.request_id not in answer_id
        )


class Connections:
    """One connection per concurrent request; each is reused for later requests.

    Once a connection delivers more than was requested, its answers can't be distinguished from late
    or repeated ones. From then on each request gets a new connection, and ``event`` is called once.

    Once created, belongs to one event loop.

    Raises:
        EngineError: the environment's proxy or certificates can't be used.
    """

    def __init__(
        self, headers: Mapping[str, str], *, trust_env: bool, event: Callable[[str], None]
    ) -> None:
        import httpx

        self._headers, self._trust_env, self._event = headers, trust_env, event
        self._ours, self._numbers = f"batchkit-{uuid.uuid4().hex}", count()
        self._network = Network(self.distrust)
        self._is_distrusted = False
        self._idle: list[httpx.AsyncClient] = []
        self._dropped: list[httpx.AsyncClient] = []
        try:
            self._certificates = httpx.create_ssl_context()
            self._idle.append(self._new())
        except (ValueError, ImportError, OSError) as error:
            raise EngineError(
                f"the proxy or the certificates that the environment names can't be used: {error}"
            ) from error

    async def close(self) -> None:
        """Close the connections; no request may be in flight."""
        for connection in (*self._idle, *self._dropped):
            await connection.aclose()

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
            TurnedAway, ServerFault: there is no response.
        """
        import httpx

        is_single = self._is_distrusted
        request_id = f"{self._ours}-{next(self._numbers):012d}"
        sent = {"X-Request-Id": request_id, **(_CLOSE if is_single else {})}
        connection = self._idle.pop() if self._idle else self._new()
        try:
            async with (
                asyncio.timeout(timeout_s),
                connection.stream(method, url, content=content, headers=sent) as response,
            ):
                coding = response.headers.get("content-encoding", "")
                most = max_bytes(response.status_code)
                received, is_whole = await read_body(response.aiter_raw(), coding, most)
                wire = response.extensions["network_stream"]
                if is_whole:
                    self._see_that_all_is_read(wire)
                return Response(
                    response.status_code,
                    response.headers,
                    received,
                    is_whole,
                    is_repeated=wire.is_repeated(received),
                    is_reused=wire.requests > 1,
                    request_id=request_id,
                )
        except TimeoutError:
            raise RowTimeoutError(
                f"no answer for {timeout_s:.0f} s (run.row_timeout_s = {timeout_s:g})"
            ) from None
        except (httpx.ConnectError, httpx.ConnectTimeout, httpx.ProxyError) as error:
            raise TurnedAway(_told(error), is_down=True) from error
        except httpx.HTTPError as error:
            # Half: the server may just as well have gone away.
            raise ServerFault(f"the connection broke: {_told(error)}", weight=0.5) from error
        except CodingError as error:
            raise ServerFault(f"{url}: the answer can't be unpacked: {error}") from error
        finally:
            if self._is_distrusted and not is_single:
                await connection.aclose()
            else:
                self._idle.append(connection)

    def _see_that_all_is_read(self, wire: Wire) -> None:
        """
        Raises:
            ServerFault: the answer may be another request's.
        """
        if not wire.has_surplus:
            return
        self.distrust()
        if wire.requests > 1:
            raise ServerFault(
                "the server sent more than one answer's bytes on a connection that was used before:"
                " the answer may be another request's",
                weight=0.5,
            )

    def distrust(self) -> None:
        """An answer arrived that was not requested: connections are no longer reused."""
        if self._is_distrusted:
            return
        self._is_distrusted = True
        self._idle, self._dropped = [], self._idle
        self._event(
            "the server, or a proxy before it, sent more than one answer to a request, and the second"
            " could be taken for that to the next one: from now on each request gets a connection of"
            " its own"
        )

    def _new(self) -> httpx.AsyncClient:
        """A client with a pool of one connection. A large pool scans all its connections whenever
        one is taken or returned: with 64 that was seven times the work of everything else here."""
        import httpx

        made: Any = httpx.AsyncClient(
            headers={**self._headers, "Accept-Encoding": ACCEPT_ENCODING},
            verify=self._certificates,
            trust_env=self._trust_env,
            timeout=httpx.Timeout(None, connect=CONNECT_S),
            limits=httpx.Limits(max_connections=1, keepalive_expiry=_KEEP_ALIVE_S),
        )
        # httpx has no public way to set httpcore's ``network_backend``. If this has no effect,
        # ``_see_that_all_is_read`` fails, and no answer is accepted unchecked.
        for transport in (made._transport, *made._mounts.values()):
            if transport is not None:
                transport._pool._network_backend = self._network
        connection: httpx.AsyncClient = made
        return connection


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
