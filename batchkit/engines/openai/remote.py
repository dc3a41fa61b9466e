"""HTTP requests to one server with OpenAI's API, and the interpretation of its responses."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

import orjson
from msgspec.structs import replace

from batchkit.config.tables import JobConfig
from batchkit.engines.openai import api
from batchkit.engines.openai.chat import Endpoint
from batchkit.engines.openai.connections import CONNECT_S, Connections, Content, Response
from batchkit.engines.openai.options import ServerOptions, check_for_llama_cpp
from batchkit.engines.openai.pooling import ENDPOINTS
from batchkit.engines.openai.rate_limiter import NoAnswer, Why
from batchkit.errors import (
    AnswerTooLargeError,
    EngineError,
    RequestError,
    RowError,
    RowTimeoutError,
    WrongTaskError,
)
from batchkit.rendering.body import task_of
from batchkit.rendering.messages import as_text
from batchkit.storage.plain_json import parsed
from batchkit.storage.schema import is_count
from batchkit.types import Completion, Request

START_S = 3.0
_START_PAUSE_S = 0.5
_DOWN = (408, 425, 502, 504, 529)
_BUSY = (429, 503)
_OF_THE_ROW = (400, 406, 413, 414, 415, 422, 431, 451)
_OF_THE_MOMENT = (409, 423, 424, 499)  # TGI answers 424 when its model fails
_LACKS = (404, 405, 501)
_SHORTEST_KEY = 8  # a shorter key, such as "token", may occur in ordinary text


class Remote:
    """A client for the server at ``base_url``. Use it from one event loop only.

    ``event``: called with messages that the run should report.

    Raises:
        EngineError: The environment's key, proxy or certificates can't be used.
    """

    def __init__(
        self, job: JobConfig, base_url: str, options: ServerOptions, event: Callable[[str], None]
    ) -> None:
        self.base_url = base_url.rstrip("/")
        self.models: list[Mapping[str, Any]] = []
        self._job, self._options, self._event = job, options, event
        self._model, self._timeout_s = job.engine.model, job.run.row_timeout_s
        self._endpoints = {task: made(job, options.drop) for task, made in ENDPOINTS.items()}
        self._answered_as: str | None = None
        self._known: dict[str, Any] = {}
        """What the server's lists of models have reported about the model so far."""
        self._may_differ = False
        self._listed_at = time.monotonic()
        self._ignores_n = False
        self._key = _key(job.engine.api_key_env)
        headers = {"User-Agent": "batchkit"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        # A server started by the run is never behind a proxy.
        may_be_far = job.engine.server is None
        self._connections = Connections(
            headers, trust_env=may_be_far, max_bytes=job.engine.max_answer_bytes
        )

    @property
    def served(self) -> Mapping[str, Any]:
        """The model's properties that the server has reported so far, in its lists of models and in its answers."""
        answers_as = {} if self._answered_as is None else {"answers_as": self._answered_as}
        seen = [endpoint.seen for endpoint in self._endpoints.values()]
        return {**self._known, **answers_as, **{k: v for one in seen for k, v in one.items()}}

    async def close(self) -> None:
        """Close the connections; no request may be in flight."""
        await self._connections.close()

    async def is_ready(self, path: str) -> bool:
        """Return whether a starting server lists its models, and is healthy at ``path`` if it has this path. Raises
        EngineError if no request would succeed, for example because the server refuses the key."""
        url = f"{self.base_url.removesuffix('/v1')}{path}"
        try:
            status = (await self._exchange("GET", url, None, CONNECT_S)).status
            if status < 500:
                self._learn(await self._list_models())
        except (NoAnswer, RowError):
            return False
        return status < 500

    async def reach(self) -> None:
        """Check that the server answers and accepts the key. Wait up to ``START_S`` if the server is just starting.

        Raises:
            EngineError: The server does not answer, or refuses the key; the message says what to do.
        """
        deadline = time.monotonic() + START_S
        while True:
            try:
                self._learn(await self._list_models())
                return
            except NoAnswer as problem:
                if problem.stops is not None:
                    raise EngineError(problem.stops) from None
                if time.monotonic() + _START_PAUSE_S >= deadline:
                    raise EngineError(
                        f"{self.base_url}: no answer ({problem}); start the server, or correct"
                        " engine.base_url, then run the same command again"
                    ) from None
            await asyncio.sleep(_START_PAUSE_S)

    def body_of(self, request: Request) -> dict[str, Any]:
        """Return the request's body. Raises RequestError if this server can't take the request."""
        body = self._endpoint_of(request).body_of(request)
        if any(model.get("owned_by") == "llamacpp" for model in self.models):
            check_for_llama_cpp(task_of(request.endpoint, self._job.task), body)
        return {**body, **self._options.extra_body}

    def _endpoint_of(self, request: Request) -> Endpoint:
        """Return the endpoint of the request's task. A batch line written for ``/responses`` uses this endpoint,
        too."""
        return self._endpoints[task_of(request.endpoint, self._job.task)]

    async def ask(self, request: Request) -> Completion:
        """Send the request once.

        Raises:
            RowError: The error concerns only this request.
            EngineError: No request would succeed.
            NoAnswer: Another attempt may succeed.
        """
        endpoint = self._endpoint_of(request)
        url = endpoint.url(self.base_url, request)
        body = self.body_of(request)
        content = await asyncio.to_thread(endpoint.encoded, body)  # keeps the event loop free
        await self.check_model()
        began = time.monotonic()
        response = await self._exchange("POST", url, content, self._timeout_s)
        if response.status >= 300:
            refusal = api.refusal_of(response.status, response.content)
            raise await self._refused(request, url, refusal)
        took_s = time.monotonic() - began
        n = asked if is_count(asked := body.get("n") or 1) else 0
        try:
            answer = parsed(response.content)
            completion = endpoint.completion_of(request, answer, took_s, n)
        except ValueError as problem:  # invalid JSON, or a ShapeError
            shape = api.in_words(response.content[:200].decode("utf-8", "replace"))
            raise NoAnswer(f"{url}: {problem}; the response begins: {shape}") from None
        self._check_model_of(answer.get("model"), request.lora)
        if 0 < len(completion.choices) < n and not self._ignores_n:
            self._ignores_n = True
            self._event(f"{self.base_url}: the server ignores n = {n} and returns 1 choice")
        return completion

    async def _refused(self, request: Request, url: str, refusal: api.Refusal) -> Exception:
        """Return the exception for an error response, which concerns either this request only or all similar
        requests."""
        status = refusal.status
        lists_it = any(model.get("id") == self._model for model in self.models)
        task = task_of(request.endpoint, self._job.task)
        if status in _LACKS and task != self._job.task:
            return WrongTaskError(
                f'url: /{request.endpoint} is for task = "{task}", but {url} answered {refusal}: the server, which'
                f' serves task = "{self._job.task}", lacks this endpoint, or its model does not fit;'
                " put such lines into a separate job"
            )
        if status in _LACKS and self._job.task != "generate" and lists_it:
            return _barred(
                refusal,
                f"{url}: answered {refusal}; the server lacks this endpoint, or its model does not fit the"
                " task. Start `vllm serve` with --runner pooling, or llama-server with --embedding or"
                " --reranking",
            )
        if refusal.is_of_the_model and request.lora:
            return RequestError(
                f"prompt.lora: the server has no adapter {request.lora!r}; it answered {refusal}"
            )
        if refusal.is_of_the_model:
            return _barred(refusal, await self._without_model(refusal))
        if refusal.is_too_long:
            counted = await self._counted(refusal, request)
            return api.too_long(counted, self._max_model_len)
        if status in _OF_THE_ROW:
            return RequestError(f"the server answered {refusal}")
        if status in _OF_THE_MOMENT or (status >= 500 and status != 501):
            return NoAnswer(f"the server answered {refusal}")
        return _barred(
            refusal,
            f"{url}: answered {refusal}, also to a one-word prompt; check the server, and any proxy"
            " between it and this run, then run the same command again",
        )

    def _check_model_of(self, name: Any, lora: str | None) -> None:
        """Check that the model ``name`` of an answer is the run's model. A run never mixes models or adapters. Raises
        EngineError if another model answered."""
        if lora and name != lora:
            raise EngineError(
                f"{self.base_url}: answered as model {name!r}, but the row needs {lora!r} (prompt.lora):"
                " the server does not select models by name; use vllm serve with --lora-modules"
            )
        if isinstance(name, str) and name and not lora:
            self._answered_as = self._answered_as or name
            if name != self._answered_as:
                raise EngineError(
                    f"{self.base_url}: the server now answers as model {name!r}, but earlier as"
                    f" {self._answered_as!r}; all answers of a run must come from one model. Serve"
                    f" {self._answered_as!r} again, or set engine.model to it, then run the same command again"
                )

    def recheck_models(self, after_s: float = 0.0) -> None:
        """Make the next request first read the server's list of models, if the list is at least ``after_s`` old."""
        if time.monotonic() - self._listed_at >= after_s:
            self._may_differ = True

    async def check_model(self) -> None:
        """Read the list of models again if ``recheck_models`` asked for it, and compare the model's properties.

        Many servers answer under any requested name, so only the list shows the actual model. A server that no longer
        lists its models is not checked. If the list has fewer properties than before, it is read again before the next
        request, because llama.cpp lists a model while the model is loading, and reports the model's size afterwards.

        Raises:
            EngineError: The server has another model now.
            NoAnswer: The server still does not answer.
        """
        if not self._may_differ:
            return
        try:
            models = await self._list_models()
        except (EngineError, RowError):
            self._may_differ, self._listed_at = False, time.monotonic()
            return
        found = api.known_of(models, self._model)
        changes = [
            f"{name} was {before!r}, is {found[name]!r}"
            for name, before in self._known.items()
            if found.get(name, before) != before
        ]
        if changes:
            since_s = time.monotonic() - self._listed_at
            raise EngineError(
                f"{self.base_url}: the server's model has changed:"
                f" {'; '.join(changes)}. All answers of a run must come from one model, but the answers of the last"
                f" {since_s:.0f} s may come from either model. Serve the first model again and run the same"
                " command again, or start a new run (--fresh)"
            )
        self._may_differ = not self._known.keys() <= found.keys()
        self._learn(models)

    def _learn(self, models: list[Mapping[str, Any]]) -> None:
        self.models, self._listed_at = models, time.monotonic()
        self._known = {**self._known, **api.known_of(models, self._model)}

    async def _counted(self, refusal: api.Refusal, request: Request) -> api.Refusal:
        """Return ``refusal`` with the prompt's full token count, if truncation needs it and the refusal lacks it.

        ``vllm serve`` stops counting at its limit. Its endpoint ``/tokenize`` (next to ``/v1``) counts all tokens.
        """
        if self._job.retry.on_too_long == "fail" or refusal.prompt_tokens is not None:
            return refusal
        if (pair := request.pair) is not None:  # count the query with the longest document
            longest = max(pair.documents, key=lambda document: len(str(document)), default="")
            request = replace(request, pair=pair._replace(documents=[longest]))
        chat = {"messages": request.messages}
        text = {"prompt": as_text(request)} if request.messages is None else chat
        url = f"{self.base_url.removesuffix('/v1')}/tokenize"
        try:
            body = {"model": self._model, **text}
            content = Content(await asyncio.to_thread(api.encoded, body))
            response = await self._exchange("POST", url, content, self._timeout_s)
            count = orjson.loads(response.content)["count"] if response.status == 200 else None
        except (RowError, NoAnswer, EngineError, ValueError, KeyError, TypeError):
            count = None
        return refusal._replace(prompt_tokens=count if is_count(count) and count else None)

    async def _list_models(self) -> list[Mapping[str, Any]]:
        url = f"{self.base_url}/models"
        try:
            response = await self._exchange("GET", url, None, CONNECT_S)
        except RowTimeoutError:
            raise NoAnswer(f"connected, but no response for {CONNECT_S:.0f} s", Why.DOWN) from None
        except AnswerTooLargeError as error:
            raise EngineError(f"{url}: not a list of models: {error}") from None
        if response.status == 404:
            raise EngineError(
                f"{url}: not found; engine.base_url is the address without /chat/completions, and"
                " usually ends in /v1"
            )
        refusal = api.refusal_of(response.status, response.content)
        if response.status >= 500:
            raise NoAnswer(str(refusal), Why.DOWN)
        try:
            models = orjson.loads(response.content)["data"]
            return [model for model in models if isinstance(model, Mapping)]
        except (orjson.JSONDecodeError, KeyError, TypeError):
            raise EngineError(
                f"{url}: expected a list of models, found {refusal}; give the address of a server with OpenAI's API"
            ) from None

    async def _exchange(
        self, method: str, url: str, content: Content | None, timeout_s: float
    ) -> Response:
        """Send an HTTP request and return its response. Raises EngineError or NoAnswer if there is no response or it
        concerns all requests, and RowError if the response is too large or too late."""
        try:
            response = await self._connections.exchange(method, url, content, timeout_s)
        except (NoAnswer, RowTimeoutError):
            self._may_differ = True
            raise
        if response.status < 300 and not response.is_whole:
            raise AnswerTooLargeError(
                "the answer has more than engine.max_answer_bytes ="
                f" {self._job.engine.max_answer_bytes}; the rest was not read. Lower"
                " sampling.max_tokens, n or logprobs, or raise engine.max_answer_bytes"
            )
        if response.status != 200 and len(self._key) >= _SHORTEST_KEY:  # some servers quote the key
            without = response.content.replace(self._key.encode(), b"***")
            response = response._replace(content=without)
        self._check(response, url)
        return response

    def _check(self, response: Response, url: str) -> None:
        """Raise EngineError or NoAnswer if the response concerns all requests."""
        status = response.status
        if status < 300:
            return
        # It may come from a proxy while the server is replaced.
        if status >= 500 or status in _DOWN:
            self._may_differ = True
        refusal = api.refusal_of(status, response.content)
        if status < 400:
            where = api.in_words(response.headers.get("location"))
            raise _barred(
                refusal,
                f"{url}: answered {status}, moved to {where}; redirects are not"
                " followed: give the new address as engine.base_url",
            )
        unpaid = f"{url}: {refusal}; the account has no credit: add credit, then run the same command again"
        how = "; check that the key is for this server" if self._key else ", which is not set"
        denied = (
            f"{url}: access refused ({refusal}); the key is read from the environment variable"
            f" {self._job.engine.api_key_env} (engine.api_key_env){how}"
        )
        if refusal.is_out_of_money or status == 401:
            raise EngineError(unpaid if refusal.is_out_of_money else denied)
        if status in (402, 403):
            raise _barred(refusal, unpaid if status == 402 else denied)
        if status in _BUSY or status in _DOWN:
            raise NoAnswer(
                f"the server answered {refusal}",
                Why.DOWN if status in _DOWN else Why.BUSY,
                retry_after_s=api.retry_after_s(response.headers.get("retry-after")),
            )

    async def _without_model(self, refusal: api.Refusal) -> str:
        try:
            self.models = await self._list_models()
        except (NoAnswer, EngineError):
            pass  # use the earlier list
        names = ", ".join(str(model.get("id")) for model in self.models[:20]) or "nothing"
        return (
            f"{self.base_url}: the server has no model {self._model!r} ({refusal.message}); it serves {names}:"
            " set engine.model to one of these"
        )

    @property
    def _max_model_len(self) -> int | None:
        """The context length that ``vllm serve`` or ``llama-server`` reports for the model, otherwise the job's
        setting."""
        for model in self.models:
            length = api.max_model_len(model)
            if length is not None and (model.get("id") == self._model or len(self.models) == 1):
                return length
        return self._options.max_model_len


def _barred(refusal: api.Refusal, stops: str) -> NoAnswer:
    """Return a NoAnswer for a refusal that may apply to all requests.

    If every other request is refused, too, the run stops with the message ``stops``. Otherwise only the row fails.
    """
    return NoAnswer(f"the server answered {refusal}", Why.BARRED, stops=stops)


def _key(name: str) -> str:
    """Return the API key in the environment variable ``name``, or "" if it is not set."""
    key = os.environ.get(name, "").strip()
    if not (key.isascii() and key.isprintable()):
        raise EngineError(
            f"environment variable {name} (engine.api_key_env): not a valid key; a key has only printable"
            " ASCII characters"
        )
    return key
