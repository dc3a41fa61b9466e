"""Checks before a request is processed: its host name, its API key, and the size of its body."""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from batchkit.serve.keys import Key, hashed
from batchkit.serve.problem import ApiProblem

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

_OPEN = ("/health",)  # needs no key
_PAGES = ("/run/", "/compare", "/assets/", "/api/")  # pages of ``batchkit view``
_MOST_JSON_BYTES = 1 << 20
_FORM_BYTES = 1 << 20  # for the form fields sent with a file


def is_page(path: str) -> bool:
    return path == "/" or path.startswith(_PAGES)


class Guard:
    """ASGI middleware that passes only permitted requests to ``app``, with the key's name in
    ``scope["state"]["owner"]``.

    ``keys``: the result of ``read_keys``; None if the server needs no key. Without keys, the request's host must be
    this machine. Otherwise a web page could point its own host name at this address (DNS rebinding). With keys this
    check is not needed, because the page has no key.
    """

    def __init__(
        self,
        app: ASGIApp,
        keys: Mapping[str, Key] | None,
        refusal_of: Callable[[str], str],
        max_file_bytes: int,
    ) -> None:
        self._app, self._keys, self._refusal_of = app, keys, refusal_of
        self._max_file_bytes = max_file_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        from starlette.responses import JSONResponse

        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {name.lower(): value.decode("latin-1") for name, value in scope["headers"]}
        try:
            scope.setdefault("state", {})["owner"] = self._owner(scope["path"], headers)
            receive = self._bounded(headers, receive)
        except ApiProblem as problem:
            asks = {"www-authenticate": 'Basic realm="batchkit"'} if is_page(scope["path"]) else {}
            response = JSONResponse(problem.to_json(), problem.status, asks)
            await response(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _owner(self, path: str, headers: Mapping[bytes, str]) -> str:
        if self._keys is None:
            if refusal := self._refusal_of(headers.get(b"host", "")):
                raise ApiProblem(403, refusal)
            return ""
        if path in _OPEN:
            return ""
        kind, _, key = headers.get(b"authorization", "").partition(" ")
        if kind.lower() == "basic" and is_page(path):
            # Browsers send it also with forms of other sites, so only the pages accept this kind.
            key = _password(key)
        elif kind.lower() != "bearer":
            key = ""
        if not key:
            raise ApiProblem(
                401, "You didn't provide an API key: send 'Authorization: Bearer KEY'."
            )
        if (known := self._keys.get(hashed(key.strip()))) is None:
            raise ApiProblem(401, "Incorrect API key provided.", code="invalid_api_key")
        return known.name

    def _bounded(self, headers: Mapping[bytes, str], receive: Receive) -> Receive:
        """Return ``receive`` with a limit on the size of the body: the file limit for a form, 1 MiB for other
        bodies."""
        is_form = headers.get(b"content-type", "").lower().startswith("multipart/form-data")
        most = self._max_file_bytes + _FORM_BYTES if is_form else _MOST_JSON_BYTES
        said = headers.get(b"content-length", "0")
        if not said.isdecimal() or int(said) > most:
            raise _too_large(most)
        n_bytes = 0

        async def bounded() -> Message:
            nonlocal n_bytes
            message = await receive()
            n_bytes += len(message.get("body", b""))
            if n_bytes > most:
                raise _too_large(most)
            return message

        return bounded


def _password(given: str) -> str:
    try:
        return base64.b64decode(given).decode().partition(":")[2]
    except ValueError:
        return ""


def _too_large(most: int) -> ApiProblem:
    return ApiProblem(413, f"the body is larger than {most:,} bytes", code="request_too_large")
