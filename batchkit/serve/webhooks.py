"""Webhooks: an HTTP POST for each ended batch, in OpenAI's format, signed as https://www.standardwebhooks.com
specifies."""

from __future__ import annotations

import base64
import hmac
import os
import secrets
import threading
import time

import orjson

from batchkit.commands import Say
from batchkit.errors import JobError, StoreError
from batchkit.serve.store import Object, Store

_SECRET = "BATCHKIT_WEBHOOK_SECRET"
_LOOK_S = 0.5
# Wait after each failure; after the last one the event is dropped.
_WAITS_S = (5, 30, 300, 1800, 7200, 18_000)
_TIMEOUT_S = 10.0


def ended_event(batch: str, status: str, now: float) -> Object:
    return {
        "id": f"evt_{secrets.token_hex(16)}",
        "object": "event",
        "created_at": int(now),
        "type": f"batch.{status}",
        "data": {"id": batch},
    }


def key_of(secret: str) -> bytes:
    """Return the signing key in ``secret``: the base64 text after ``whsec_``, or the whole secret if it has no such
    prefix.

    Raises ValueError if the text is not valid base64.
    """
    text = secret.removeprefix("whsec_")
    return text.encode() if text == secret else base64.b64decode(text, validate=True)


def signed(event: Object, body: bytes, key: bytes, now: float) -> dict[str, str]:
    """Return the HTTP headers for the event's request, with the signature of ``body`` at time ``now``."""
    at = int(now)
    digest = hmac.digest(key, f"{event['id']}.{at}.".encode() + body, "sha256")
    return {
        "content-type": "application/json",
        "webhook-id": event["id"],
        "webhook-timestamp": str(at),
        "webhook-signature": f"v1,{base64.b64encode(digest).decode()}",
    }


class Webhooks:
    """A thread that sends the events in the database to ``url``.

    An event is removed when the receiver has accepted it, or after the last of several retries. The same event may be
    sent twice. After a restart, the server continues with unsent events.

    Raises:
        JobError: The URL or the secret can't be used.
    """

    def __init__(self, url: str, store: Store, say: Say) -> None:
        secret = os.environ.get(_SECRET)
        if not secret:
            raise JobError(f"--webhook: set {_SECRET} in the environment; it signs the events")
        try:
            self._key = key_of(secret)
        except ValueError as error:
            raise JobError(f"{_SECRET}: the text after whsec_ must be base64: {error}") from None
        if not url.startswith(("http://", "https://")):
            raise JobError(f"--webhook: found {url!r}, expected an http:// or https:// address")
        self._url, self._store, self._say = url, store, say
        # Number of failures and time of the next attempt.
        self._failed: dict[str, tuple[int, float]] = {}
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._work, name="webhooks")
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        self._thread.join()

    def _work(self) -> None:
        while not self._closing.wait(_LOOK_S):
            try:
                for _, event in self._store.all("event"):
                    n_failures, due = self._failed.get(event["id"], (0, 0.0))
                    if due <= time.monotonic():
                        self._send(event, n_failures)
            except StoreError as error:
                self._say(f"webhooks: {error}")

    def _send(self, event: Object, n_failures: int) -> None:
        import httpx

        name, body = event["id"], orjson.dumps(event)
        try:
            # Not wall_s: receivers compare the time stamp with their own clocks.
            headers = signed(event, body, self._key, time.time())
            httpx.post(
                self._url, content=body, headers=headers, timeout=_TIMEOUT_S
            ).raise_for_status()
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            if n_failures < len(_WAITS_S):
                due = time.monotonic() + _WAITS_S[n_failures]
                self._failed[name] = n_failures + 1, due
                return
            self._say(
                f"webhooks: gave up sending {event['type']} of {event['data']['id']}: {error}"
            )
        self._store.remove(name)
        self._failed.pop(name, None)
