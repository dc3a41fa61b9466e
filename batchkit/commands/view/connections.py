"""HTTP connections of ``view`` and ``serve``: limits on the memory and time that a client can use before its request is
checked."""

from __future__ import annotations

import asyncio
from itertools import chain
from typing import Any

from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

MAX_HEAD_BYTES = 16 * 1024
MAX_HEADERS = 100


class BoundedConnection(H11Protocol):
    """A connection that is closed if no complete request head arrives within ``head_timeout_s``.

    The time counts from the start of the connection or the end of the previous response. This is a subclass because
    uvicorn has no such option: its keep-alive timer starts after the first response, and each byte stops it.
    """

    def __init__(self, *args: Any, head_timeout_s: float, **options: Any) -> None:
        super().__init__(*args, **options)
        self._head_timeout_s = head_timeout_s
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._time_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._time_head()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._time_head()

    def _time_head(self) -> None:
        """Start the timer when the connection waits for a request head, and stop it while a request is processed."""
        is_busy = self.cycle is not None and not self.cycle.response_complete
        if is_busy and self._timer is not None:
            self._timer.cancel()
            self._timer = None
        elif not is_busy and self._timer is None:
            self._timer = self.loop.call_later(self._head_timeout_s, self.transport.close)


def with_bounded_heads(app: ASGIApp) -> ASGIApp:
    """Return ``app`` behind a check that answers large request heads with 431. The check is needed because h11 limits a
    head only while it is incomplete."""

    async def checked(scope: Scope, receive: Receive, send: Send) -> None:
        headers, target = scope["headers"], (scope["raw_path"], scope["query_string"])
        n_bytes = sum(map(len, (*target, *chain.from_iterable(headers))))
        is_large = n_bytes > MAX_HEAD_BYTES or len(headers) > MAX_HEADERS
        await (refused if is_large else app)(scope, receive, send)

    limits = f"{MAX_HEADERS} headers and {MAX_HEAD_BYTES:,} bytes"
    refused = PlainTextResponse(f"The request's head is too large: at most {limits}.", 431)
    return checked
