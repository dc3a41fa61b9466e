"""One server that speaks OpenAI's API, over HTTP: what is sent, and what each answer means."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import orjson

from batchkit.config.tables import JobConfig
from batchkit.engines.openai import api, llama_cpp, pooling
from batchkit.engines.openai.connections import (
    CONNECT_S,
    Connections,
    Response,
    ServerFault,
    TurnedAway,
)
from batchkit.engines.openai.endpoints import endpoint_of
from batchkit.errors import (
    AnswerTooLargeError,
    EngineError,
    RequestError,
    RowError,
    RowTimeoutError,
)
from batchkit.storage.plain_json import parsed
from batchkit.storage.schema import is_count
from batchkit.types import Completion, Request

START_S = 3.0
LIST_EVERY_S = 30.0
"""How often the list of models is read again while requests are sent."""
_START_PAUSE_S = 0.5
_AWAY = (408, 425, 502, 504, 529)
_BUSY = (429, 503)
_OF_THE_ROW = (400, 406, 413, 414, 415, 422, 431, 451)
_OF_THE_MOMENT = (409, 423, 424, 499)  # TGI answers 424 when its model fails
_SHORTEST_KEY = 8  # a shorter one may be a part of words that don't quote it: "token"
_MOST_ERROR_BYTES = 1 << 20  # of an error, of which 1,000 characters are shown


class Barred(EngineError):
    """The request was refused for a reason that may apply to all. If others are answered, it is the
    row's own failure, with this ``reason``."""

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


class Remote:
    """The server at ``base_url``. ``extra_body`` overrides every body, ``drop`` is left out of it.
    ``max_model_len`` applies if the server reports none. ``event`` gets what the run should report.

    Once created, belongs to one event loop.

    Raises:
        EngineError: the environment's key, proxy or certificates can't be used.
    """

    def __init__(
        self,
        job: JobConfig,
        base_url: str,
        *,
        extra_body: Mapping[str, Any],
        drop: Sequence[str],
        event: Callable[[str], None],
        max_model_len: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        engine = job.engine
        self.base_url = base_url.rstrip("/")
        self.models: list[Mapping[str, Any]] = []
        self._model, self._key_name = engine.model, engine.api_key_env
        self._endpoint = endpoint_of(job, drop)
        self._extra_body = extra_body
        self._asked_max_model_len = max_model_len
        self._timeout_s = job.run.row_timeout_s
        self._max_answer_bytes = engine.max_answer_bytes
        self._counts = job.retry.on_too_long != "fail"
        self._event = event
        self._answered_as: str | None = None
        self._known: dict[str, Any] = {}
        """What its lists of models have said about the model so far."""
        self._may_differ = False
        self._clock = clock
        self._listed_at = clock()
        self._ignores_n = False
        self._key = _key(engine.api_key_env)
        headers = {"Content-Type": "application/json", "User-Agent": "batchkit"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        may_be_far = engine.server is None  # our own server has no proxy in front of it
        self._connections = Connections(headers, trust_env=may_be_far)

    @property
    def served(self) -> Mapping[str, Any]:
        """What the server has said so far of the model: in its lists, and in its answers."""
        answers_as = {} if self._answered_as is None else {"answers_as": self._answered_as}
        return {**self._known, **answers_as, **self._endpoint.seen}

    async def close(self) -> None:
        """Close the connections; no request may be in flight."""
        await self._connections.close()

    async def is_ready(self, path: str) -> bool:
        """Whether a starting server is healthy at ``path``, if it has that, and lists its models.

        Raises:
            EngineError: as in ``reach``.
        """
        url = f"{self.base_url.removesuffix('/v1')}{path}"
        try:
            status = (await self._exchange("GET", url, None, CONNECT_S)).status
            if status < 500:
                self._learn(await self._list_models())
        except (TurnedAway, ServerFault, RowError):
            return False
        return status < 500

    async def reach(self) -> None:
        """Check that the server answers and accepts the key; it may take ``START_S`` to start.

        Raises:
            EngineError: naming the address and the remedy.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + START_S
        while True:
            try:
                self._learn(await self._list_models())
                return
            except (TurnedAway, ServerFault) as problem:
                if loop.time() + _START_PAUSE_S >= deadline:
                    raise EngineError(
                        f"{self.base_url}: no answer ({problem}); start the server, or correct"
                        " engine.base_url, then run the same command again"
                    ) from None
            await asyncio.sleep(_START_PAUSE_S)

    def body_of(self, request: Request) -> dict[str, Any]:
        """
        Raises:
            RequestError: it can't be sent to this server.
        """
        body = self._endpoint.body_of(request)
        if llama_cpp.serves(self.models):
            llama_cpp.check(body)
        return {**body, **self._extra_body}

    async def ask(self, request: Request) -> Completion:
        """Send the request once.

        Raises:
            RowError: the request's own error.
            EngineError: no request would succeed; after Barred, others may.
            TurnedAway, ServerFault: try again.
        """
        url = self._endpoint.url(self.base_url, request)
        body = self.body_of(request)
        content = await _encoded(body)
        self.doubt(LIST_EVERY_S)
        is_known = await self.serves_the_same_model()
        loop = asyncio.get_running_loop()
        began = loop.time()
        response = await self._exchange("POST", url, content, self._timeout_s)
        status = response.status
        if 200 <= status < 300:
            if not is_known:  # it has loaded its model now, so its list says all that it ever says
                await self.serves_the_same_model()
                self._may_differ = False
            n = asked if is_count(asked := body.get("n") or 1) else 0
            try:
                answer = parsed(response.content)
            except ValueError as error:
                raise ServerFault(f"{url}: the answer is no JSON: {error}") from None
            took_s = loop.time() - began
            try:
                completion = self._endpoint.completion_of(request, answer, took_s, n)
                self._check_answer(answer, completion, url, n)
                return completion
            except api.ShapeError as problem:
                in_body = api.status_in(answer)
                if in_body is None:
                    shape = response.content[:200].decode("utf-8", "replace")
                    raise ServerFault(f"{url}: {problem}: {shape}") from None
            status = in_body
            self._check(status, response.content, url, {})
        if self._endpoint.moved(url, status):
            return await self.ask(request)
        refusal = api.refusal_of(status, response.content)
        if status in pooling.LACKS and self._endpoint.hint and self._lists_its_model:
            raise Barred(
                f"{url}: answered {refusal}: the server lacks this endpoint, or its model does not"
                f" fit the task; {self._endpoint.hint}",
                str(refusal),
            )
        if refusal.is_of_the_model:
            raise Barred(await self._without_model(refusal), str(refusal))
        if refusal.is_too_long:
            raise api.too_long(await self._counted(refusal, request), self._max_model_len)
        if status in _OF_THE_ROW:
            raise RequestError(f"the server answered {refusal}")
        if status in _OF_THE_MOMENT or (status >= 500 and status != 501):
            raise ServerFault(f"the server answered {refusal}")
        raise Barred(
            f"{url}: answered {refusal}, also to a request of one word; check the server, and any proxy"
            " between it and this run, then run the same command again",
            str(refusal),
        )

    def _check_answer(
        self, answer: Mapping[str, Any], completion: Completion, url: str, n: int
    ) -> None:
        """
        Raises:
            ServerFault: the answer is incomplete.
            EngineError: another model gave it; a run never mixes two.
        """
        if failure := self._endpoint.failure_in(answer):
            raise ServerFault(f"{url}: the answer is incomplete: {failure}")
        name = answer.get("model")
        if isinstance(name, str) and name:
            self._answered_as = self._answered_as or name
            if name != self._answered_as:
                raise EngineError(
                    f"{self.base_url}: the server now answers as model {name!r}, before as"
                    f" {self._answered_as!r}; a run's answers are all of one model. Serve that one"
                    " again or name it as engine.model, then run the same command again"
                )
        if 0 < len(completion.choices) < n and not self._ignores_n:
            self._ignores_n = True
            self._event(f"{self.base_url}: answers with 1 choice instead of {n}")

    def doubt(self, after_s: float = 0.0) -> None:
        """The server may have another model now, if its list was read ``after_s`` ago or earlier."""
        if self._clock() - self._listed_at >= after_s:
            self._may_differ = True

    async def serves_the_same_model(self) -> bool:
        """Read the list of models again if the server was away, or is in doubt: many servers answer
        under any name that a request has, and only their list shows which model it is. A server that
        no longer lists its models is not checked.

        False if the list says less than it did: llama.cpp's names a model that it still loads, and
        gives its size later.

        Raises:
            EngineError: it serves another model now.
            TurnedAway, ServerFault: it is not back yet.
        """
        if not self._may_differ:
            return True
        try:
            models = await self._list_models()
        except (EngineError, RowError):
            self._may_differ, self._listed_at = False, self._clock()
            return True
        found = api.known_of(models, self._model)
        if difference := api.difference(self._known, found):
            since_s = self._clock() - self._listed_at
            raise EngineError(
                f"{self.base_url}: the server came back with another model, or changed it:"
                f" {difference}. A run's answers are all of one model, and those of the last"
                f" {since_s:.0f} s may be of either. Serve the first one again, then run the"
                " same command again, or begin a new run (--fresh)"
            )
        self._may_differ = not self._known.keys() <= found.keys()
        self._learn(models)
        return not self._may_differ

    def _learn(self, models: list[Mapping[str, Any]]) -> None:
        self.models, self._listed_at = models, self._clock()
        self._known = {**self._known, **api.known_of(models, self._model)}

    async def _counted(self, refusal: api.Refusal, request: Request) -> api.Refusal:
        """``refusal`` with the prompt's token count, if a cut needs it.

        ``vllm serve`` stops counting at its limit; its ``/tokenize`` (beside ``/v1``) counts them all.
        """
        if not self._counts or refusal.prompt_tokens is not None:
            return refusal
        url = f"{self.base_url.removesuffix('/v1')}/tokenize"
        content = await _encoded(
            {"model": self._model, "messages": request.messages}
            if request.messages is not None
            else {"model": self._model, "prompt": request.prompt or pooling.longest_of(request)}
        )
        try:
            response = await self._exchange("POST", url, content, self._timeout_s)
            count = orjson.loads(response.content)["count"] if response.status == 200 else None
        except (RowError, ServerFault, TurnedAway, EngineError, ValueError, KeyError, TypeError):
            count = None
        return refusal._replace(prompt_tokens=count if is_count(count) and count else None)

    async def _list_models(self) -> list[Mapping[str, Any]]:
        url = f"{self.base_url}/models"
        try:
            response = await self._exchange("GET", url, None, CONNECT_S)
            status, content = response.status, response.content
        except RowTimeoutError:
            raise TurnedAway(f"connected, but silent for {CONNECT_S:.0f} s", is_down=True) from None
        except AnswerTooLargeError as error:
            raise EngineError(f"{url}: no list of models: {error}") from None
        if status == 404:
            raise EngineError(
                f"{url}: not found; engine.base_url is the address without /chat/completions, and"
                " nearly always ends in /v1"
            )
        if status >= 500:
            raise TurnedAway(str(api.refusal_of(status, content)), is_down=True)
        try:
            models = orjson.loads(content)["data"]
            return [model for model in models if isinstance(model, Mapping)]
        except (orjson.JSONDecodeError, KeyError, TypeError):
            refusal = api.refusal_of(status, content)
            raise EngineError(
                f"{url}: no list of models, but {refusal}; does the server speak OpenAI's API?"
            ) from None

    async def _exchange(
        self, method: str, url: str, content: bytes | None, timeout_s: float
    ) -> Response:
        """A response that concerns only this request. Raises like ``ask``."""
        try:
            response = await self._connections.exchange(
                method, url, content, timeout_s=timeout_s, max_bytes=self._most_bytes
            )
        except (TurnedAway, ServerFault, RowTimeoutError):
            self.doubt()
            raise
        status, received = response.status, response.content
        if status < 300 and not response.is_whole:
            raise AnswerTooLargeError(
                f"the answer has more than engine.max_answer_bytes = {self._max_answer_bytes}; the"
                " rest was not read. Lower sampling.max_tokens, n or logprobs, or raise"
                " engine.max_answer_bytes"
            )
        if status != 200 and len(self._key) >= _SHORTEST_KEY:  # which some servers quote
            received = received.replace(self._key.encode(), b"***")
        self._check(status, received, url, response.headers)
        return response._replace(content=received)

    def _most_bytes(self, status: int) -> int:
        return self._max_answer_bytes if status < 300 else _MOST_ERROR_BYTES

    def _check(self, status: int, received: bytes, url: str, headers: Mapping[str, str]) -> None:
        """Raise EngineError or TurnedAway if the response concerns all requests."""
        if status < 300:
            return
        if status >= 500 or status in _AWAY:  # any may be a proxy's, whose server is away
            self.doubt()
        refusal = api.refusal_of(status, received)
        if status < 400:
            raise Barred(
                f"{url}: answered {status}, moved to {headers.get('location')}; redirects are not"
                " followed: give the new address as engine.base_url",
                str(refusal),
            )
        if status == 402 or refusal.is_out_of_money:
            unpaid = f"{url}: {refusal}; no waiting helps, the account must be paid"
            raise EngineError(unpaid) if refusal.is_out_of_money else Barred(unpaid, str(refusal))
        if status in (401, 403):
            how = "does the key in it fit the server?" if self._key else "it is not set"
            denied = (
                f"{url}: access refused ({refusal}); the key is read from the environment variable"
                f" {self._key_name} (engine.api_key_env): {how}"
            )
            raise EngineError(denied) if status == 401 else Barred(denied, str(refusal))
        if status in _BUSY or status in _AWAY:
            raise TurnedAway(
                f"the server answered {refusal}",
                is_down=status in _AWAY,
                retry_after_s=api.retry_after_s(headers.get("retry-after")),
            )

    @property
    def _lists_its_model(self) -> bool:
        return any(model.get("id") == self._model for model in self.models)

    async def _without_model(self, refusal: api.Refusal) -> str:
        try:
            self.models = await self._list_models()
        except (TurnedAway, ServerFault, EngineError):
            pass  # use its earlier list
        names = ", ".join(str(model.get("id")) for model in self.models[:20]) or "nothing"
        return (
            f"{self.base_url}: no model {self._model!r} ({refusal.message}); it serves {names}:"
            " give one of these as engine.model"
        )

    @property
    def _max_model_len(self) -> int | None:
        """As ``vllm serve`` and ``llama-server`` report it for the model, else the job's."""
        for model in self.models:
            length = api.max_model_len(model)
            if length is not None and (model.get("id") == self._model or len(self.models) == 1):
                return length
        return self._asked_max_model_len


def _key(name: str) -> str:
    """The API key in the environment variable ``name``; empty if it is not set."""
    key = os.environ.get(name, "").strip()
    if not (key.isascii() and key.isprintable()):
        raise EngineError(f"environment variable {name} (engine.api_key_env): not a valid key")
    return key


async def _encoded(body: Mapping[str, Any]) -> bytes:
    """On one of the loop's threads: making PNGs takes a while, and other requests need the loop."""
    return await asyncio.to_thread(api.encoded, body)
