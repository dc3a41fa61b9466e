"""One server that speaks OpenAI's API, over HTTP: what is sent, and what each answer means."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import orjson

from batchkit.config import JobConfig
from batchkit.engines import openai_api as api
from batchkit.errors import EngineError, RequestError, RowTimeoutError
from batchkit.types import Completion, Request

if TYPE_CHECKING:
    import httpx

START_S = 3.0
_CONNECT_S = 10.0
_START_PAUSE_S = 0.5
# Shorter than the servers': uvicorn, say, hangs up after 5 s, and a request may cross with that.
_KEEP_ALIVE_S = 3.0
_AWAY = (408, 425, 502, 504, 529)
_BUSY = (429, 503)


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


class Remote:
    """The server at ``base_url``. ``extra_body`` is laid over every body, ``drop`` is left out of it.
    ``max_model_len`` counts where it does not tell its own.

    Belongs to one event loop, once it is made.

    Raises:
        EngineError: what the environment says of key, proxy or certificates can't be used.
    """

    def __init__(
        self,
        job: JobConfig,
        base_url: str,
        *,
        extra_body: Mapping[str, Any],
        drop: Sequence[str],
        max_model_len: int | None = None,
    ) -> None:
        import httpx

        engine = job.engine
        self.base_url = base_url.rstrip("/")
        self.models: list[Mapping[str, Any]] = []
        self._model, self._key_name = engine.model, engine.api_key_env
        self._chat_template_kwargs = job.prompt.chat_template_kwargs
        self._extra_body, self._drop = extra_body, drop
        self._asked_max_model_len = max_model_len
        self._timeout_s = job.run.row_timeout_s
        self._counts = job.retry.on_too_long != "fail"
        self._key = _key(engine.api_key_env)
        self._may_be_far = engine.server is None  # no proxy stands before a server of our own
        self._idle: list[httpx.AsyncClient] = []
        try:
            self._certificates = httpx.create_ssl_context()
            self._idle.append(self._new_connection())
        except (ValueError, ImportError, OSError) as error:
            raise EngineError(
                f"the proxy or the certificates that the environment names can't be used: {error}"
            ) from error

    async def close(self) -> None:
        """Hang up; nothing is on its way any more."""
        for connection in self._idle:
            await connection.aclose()

    def _new_connection(self) -> httpx.AsyncClient:
        """With a pool of one connection. A large pool looks through all that it holds whenever one is
        taken or given back: with 64 that was seven times the work of everything else here."""
        import httpx

        headers = {"Content-Type": "application/json", "User-Agent": "batchkit"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        return httpx.AsyncClient(
            headers=headers,
            verify=self._certificates,
            trust_env=self._may_be_far,
            timeout=httpx.Timeout(None, connect=_CONNECT_S),
            limits=httpx.Limits(max_connections=1, keepalive_expiry=_KEEP_ALIVE_S),
        )

    async def is_ready(self, path: str) -> bool:
        """Whether a server that is starting is well at ``path``, if it knows that, and lists its models.

        Raises:
            EngineError: as ``reach``.
        """
        url = f"{self.base_url.removesuffix('/v1')}{path}"
        try:
            status, _ = await self._exchange("GET", url, None, _CONNECT_S)
            if status < 500:
                self.models = await self._list_models()
        except (TurnedAway, ServerFault, RowTimeoutError):
            return False
        return status < 500

    async def reach(self) -> None:
        """See that somebody is there who lets us in; one that is not yet there gets ``START_S``.

        Raises:
            EngineError: naming the address and the remedy.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + START_S
        while True:
            try:
                self.models = await self._list_models()
                return
            except (TurnedAway, ServerFault) as problem:
                if loop.time() + _START_PAUSE_S >= deadline:
                    raise EngineError(
                        f"{self.base_url}: no answer ({problem}); start the server, or mend"
                        " engine.base_url, then run the same command again"
                    ) from None
            await asyncio.sleep(_START_PAUSE_S)

    async def ask(self, request: Request) -> Completion:
        """One try.

        Raises:
            RowError: the request's own.
            EngineError: no request fares better.
            TurnedAway, ServerFault: try again.
        """
        body = api.body_of(
            request,
            model=self._model,
            chat_template_kwargs=self._chat_template_kwargs,
            drop=self._drop,
        )
        content = await _encoded({**body, **self._extra_body})
        url = self.base_url + api.path_of(request)
        loop = asyncio.get_running_loop()
        began = loop.time()
        status, received = await self._exchange("POST", url, content, self._timeout_s)
        if status == 200:
            try:
                answer = orjson.loads(received)
            except orjson.JSONDecodeError as error:
                raise ServerFault(f"{url}: the answer is no JSON: {error}") from None
            completion = api.completion_of(request, answer, loop.time() - began)
            if completion is not None:
                return completion
            told = api.status_in(answer)
            if told is None:
                shape = received[:200].decode("utf-8", "replace")
                raise ServerFault(f"{url}: the answer has no shape of OpenAI's: {shape}")
            status = told
            self._check(status, received, url, {})
        refusal = api.refusal_of(status, received)
        if refusal.is_of_the_model:
            raise EngineError(await self._without_model(refusal))
        if refusal.is_too_long:
            raise api.too_long(await self._counted(refusal, request), self._max_model_len)
        if status < 500 or status == 501:
            raise RequestError(f"the server answered {refusal}")
        raise ServerFault(f"the server answered {refusal}")

    async def _counted(self, refusal: api.Refusal, request: Request) -> api.Refusal:
        """With the prompt's tokens, where a cut needs them.

        ``vllm serve`` stops counting at its limit; its ``/tokenize`` (beside ``/v1``) counts them all.
        """
        if not self._counts or refusal.prompt_tokens is not None:
            return refusal
        url = f"{self.base_url.removesuffix('/v1')}/tokenize"
        content = await _encoded(
            {"model": self._model, "messages": request.messages}
            if request.prompt is None
            else {"model": self._model, "prompt": request.prompt}
        )
        try:
            status, received = await self._exchange("POST", url, content, self._timeout_s)
            count = orjson.loads(received)["count"] if status == 200 else None
        except (RowTimeoutError, ServerFault, orjson.JSONDecodeError, KeyError, TypeError):
            count = None
        return refusal._replace(prompt_tokens=count if isinstance(count, int) else None)

    async def _list_models(self) -> list[Mapping[str, Any]]:
        url = f"{self.base_url}/models"
        try:
            status, content = await self._exchange("GET", url, None, _CONNECT_S)
        except RowTimeoutError:
            raise TurnedAway(
                f"connected, but silent for {_CONNECT_S:.0f} s", is_down=True
            ) from None
        if status == 404:
            raise EngineError(
                f"{url}: not found; engine.base_url is what stands before /chat/completions, and"
                " nearly always ends in /v1"
            )
        if status >= 500:
            raise TurnedAway(str(api.refusal_of(status, content)), is_down=True)
        try:
            models = orjson.loads(content)["data"]
            return [model for model in models if isinstance(model, Mapping)]
        except (orjson.JSONDecodeError, KeyError, TypeError):
            told = api.refusal_of(status, content)
            raise EngineError(
                f"{url}: no list of models, but {told}; does the server speak OpenAI's API?"
            ) from None

    async def _exchange(
        self, method: str, url: str, content: bytes | None, timeout_s: float
    ) -> tuple[int, bytes]:
        """Status and body of an answer that concerns this one request. Raises as ``ask``."""
        import httpx

        connection = self._idle.pop() if self._idle else self._new_connection()
        try:
            async with asyncio.timeout(timeout_s):
                response = await connection.request(method, url, content=content)
        except TimeoutError:
            raise RowTimeoutError(
                f"no answer for {timeout_s:.0f} s (run.row_timeout_s = {timeout_s:g})"
            ) from None
        except (httpx.ConnectError, httpx.ConnectTimeout, httpx.ProxyError) as error:
            raise TurnedAway(_told(error), is_down=True) from error
        except httpx.HTTPError as error:
            # Half: it may as well be the server that went away.
            raise ServerFault(f"the connection broke: {_told(error)}", weight=0.5) from error
        finally:
            self._idle.append(connection)
        status, received = response.status_code, response.content
        if self._key and status != 200:  # some say which key they don't like
            received = received.replace(self._key.encode(), b"***")
        self._check(status, received, url, response.headers)
        return status, received

    def _check(self, status: int, received: bytes, url: str, headers: Mapping[str, str]) -> None:
        """Raise what concerns all requests: EngineError or TurnedAway."""
        if status < 300:
            return
        refusal = api.refusal_of(status, received)
        if status < 400:
            raise EngineError(
                f"{url}: answered {status}, moved to {headers.get('location')}; redirects are not"
                " followed: give the new address as engine.base_url"
            )
        if status == 402 or refusal.is_out_of_money:
            raise EngineError(f"{url}: {refusal}; no waiting helps, the account must be paid")
        if status in (401, 403):
            how = "does the key in it fit the server?" if self._key else "it is not set"
            raise EngineError(
                f"{url}: access refused ({refusal}); the key is read from the environment variable"
                f" {self._key_name} (engine.api_key_env): {how}"
            )
        if status in _BUSY or status in _AWAY:
            raise TurnedAway(
                f"the server answered {refusal}",
                is_down=status in _AWAY,
                retry_after_s=api.retry_after_s(headers.get("retry-after")),
            )

    async def _without_model(self, refusal: api.Refusal) -> str:
        try:
            self.models = await self._list_models()
        except (TurnedAway, ServerFault, EngineError):
            pass  # what it listed at the start will do
        names = ", ".join(str(model.get("id")) for model in self.models[:20]) or "nothing"
        return (
            f"{self.base_url}: no model {self._model!r} ({refusal.message}); it serves {names}:"
            " give one of these as engine.model"
        )

    @property
    def _max_model_len(self) -> int | None:
        """As ``vllm serve`` and ``llama-server`` tell it of the model, else as the job says."""
        for model in self.models:
            told = api.max_model_len(model)
            if told is not None and (model.get("id") == self._model or len(self.models) == 1):
                return told
        return self._asked_max_model_len


def _key(name: str) -> str:
    """The API key in the environment variable ``name``; empty where there is none."""
    key = os.environ.get(name, "").strip()
    if not (key.isascii() and key.isprintable()):
        raise EngineError(f"environment variable {name} (engine.api_key_env): that is no key")
    return key


async def _encoded(body: Mapping[str, Any]) -> bytes:
    """On a thread of the loop's own: making PNGs takes a while, and the others need the loop."""
    return await asyncio.to_thread(api.encoded, body)


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
