"""The connections to one server, and how a request travels on them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from batchkit.engines.openai.body import ACCEPT_ENCODING, CodingError, read_body
from batchkit.engines.openai.wire import Network, Wire
from batchkit.errors import EngineError, RowTimeoutError

if TYPE_CHECKING:
    import httpx

CONNECT_S = 10.0
# Shorter than the servers': uvicorn, say, hangs up after 5 s, and a request may cross with that.
_KEEP_ALIVE_S = 3.0
_CLOSE = {"Connection": "close"}


class TurnedAway(Exception):
    """The server is busy, or ``is_down``: it did not take the request in."""

    def __init__(self, told: str, *, is_down: bool, retry_after_s: float | None = None) -> None:
        super().__init__(told)
        self.is_down = is_down
        self.retry_after_s = retry_after_s


class ServerFault(Exception):
    """The server failed over the request; ``weight`` says how much of that is the request's doing."""

    def __init__(self, told: str, weight: float = 1.0) -> None:
        super().__init__(told)
        self.weight = weight


class Response(NamedTuple):
    """``is_whole`` is False if ``content`` is only the beginning. ``is_repeated``: the connection's
    last response but this one had the same content."""

    status: int
    headers: Mapping[str, str]
    content: bytes
    is_whole: bool
    is_repeated: bool


class Connections:
    """As many as there are requests at a time; each is used again for later ones.

    Once one of them brings more than it was asked for, no answer on it can be told from a late or
    repeated one. From then on each request gets a new connection, and ``event`` is called once.

    Belongs to one event loop, once it is made.

    Raises:
        EngineError: what the environment says of proxy or certificates can't be used.
    """

    def __init__(
        self, headers: Mapping[str, str], *, trust_env: bool, event: Callable[[str], None]
    ) -> None:
        import httpx

        self._headers, self._trust_env, self._event = headers, trust_env, event
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
        """Hang up; nothing is on its way any more."""
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
        """``max_bytes``: how much of the content is read, by the status.

        Raises:
            RowTimeoutError: the response was not there in time.
            TurnedAway, ServerFault: there is none.
        """
        import httpx

        is_single = self._is_distrusted
        connection = self._idle.pop() if self._idle else self._new()
        try:
            async with (
                asyncio.timeout(timeout_s),
                connection.stream(
                    method, url, content=content, headers=_CLOSE if is_single else None
                ) as response,
            ):
                coding = response.headers.get("content-encoding", "")
                most = max_bytes(response.status_code)
                received, is_whole = await read_body(response.aiter_raw(), coding, most)
                wire = response.extensions["network_stream"]
                if is_whole:
                    self._see_that_all_is_read(wire)
                is_repeated = wire.is_repeated(received)
                return Response(
                    response.status_code, response.headers, received, is_whole, is_repeated
                )
        except TimeoutError:
            raise RowTimeoutError(
                f"no answer for {timeout_s:.0f} s (run.row_timeout_s = {timeout_s:g})"
            ) from None
        except (httpx.ConnectError, httpx.ConnectTimeout, httpx.ProxyError) as error:
            raise TurnedAway(_told(error), is_down=True) from error
        except httpx.HTTPError as error:
            # Half: it may as well be the server that went away.
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
        """An answer came that nobody had asked for."""
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
        """With a pool of one connection. A large pool looks through all that it holds whenever one is
        taken or given back: with 64 that was seven times the work of everything else here."""
        import httpx

        made: Any = httpx.AsyncClient(
            headers={**self._headers, "Accept-Encoding": ACCEPT_ENCODING},
            verify=self._certificates,
            trust_env=self._trust_env,
            timeout=httpx.Timeout(None, connect=CONNECT_S),
            limits=httpx.Limits(max_connections=1, keepalive_expiry=_KEEP_ALIVE_S),
        )
        # httpx has no public way to hand httpcore its ``network_backend``. Where this does nothing,
        # ``_see_that_all_is_read`` fails, and no answer is taken unchecked.
        for transport in (made._transport, *made._mounts.values()):
            if transport is not None:
                transport._pool._network_backend = self._network
        connection: httpx.AsyncClient = made
        return connection


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
