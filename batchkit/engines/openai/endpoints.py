"""The endpoint of a server that answers a job's task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from batchkit.config.tables import JobConfig
from batchkit.engines.openai import api, pooling
from batchkit.types import Completion, Request


class Endpoint(Protocol):
    """Writes the requests of one task, and reads the answers. Nothing in it touches the network."""

    def url(self, base_url: str, request: Request) -> str:
        """Where ``request`` is sent."""

    def body_of(self, request: Request) -> dict[str, Any]:
        """The request in the API's terms; its images are still PIL's (``api.encoded`` converts them).

        Raises:
            RequestError: a parameter that the API does not have.
        """

    def completion_of(self, request: Request, answer: Any, latency_s: float, n: int) -> Completion:
        """The server's answer; ``n`` choices were asked for (0: not known).

        Raises:
            ShapeError: it is not in the API's format.
            RowError: it is, but can't be used.
        """

    def failure_in(self, answer: Mapping[str, Any]) -> str | None:
        """What went wrong, if a completion's answer reports that it is incomplete."""

    def moved(self, url: str, status: int) -> bool:
        """True if the server answered ``url`` with ``status``, so that another endpoint is used from
        now on."""

    @property
    def hint(self) -> str:
        """Which servers have the endpoint."""

    @property
    def seen(self) -> Mapping[str, Any]:
        """What the answers so far have shown of the model."""


class Chat:
    """``/chat/completions``, and ``/completions`` for a plain prompt."""

    def __init__(self, job: JobConfig, drop: Sequence[str]) -> None:
        self._model, self._drop = job.engine.model, drop
        self._chat_template_kwargs = job.prompt.chat_template_kwargs
        self._selects = job.select.by is not None

    def url(self, base_url: str, request: Request) -> str:
        return base_url + api.path_of(request)

    def body_of(self, request: Request) -> dict[str, Any]:
        return api.body_of(
            request,
            model=self._model,
            chat_template_kwargs=self._chat_template_kwargs,
            drop=self._drop,
        )

    def completion_of(self, request: Request, answer: Any, latency_s: float, n: int) -> Completion:
        completion = api.completion_of(request, answer, latency_s, n)
        if completion is None:
            raise api.ShapeError("the answer is not in OpenAI's format")
        return completion

    def failure_in(self, answer: Mapping[str, Any]) -> str | None:
        return api.failure_in(answer, one_will_do=self._selects)

    def moved(self, url: str, status: int) -> bool:
        return False

    hint = ""
    seen: Mapping[str, Any] = {}


def endpoint_of(job: JobConfig, drop: Sequence[str]) -> Endpoint:
    """The endpoint for the job's task; names in ``drop`` are left out of each body."""
    if job.task == "generate":
        return Chat(job, drop)
    return pooling.ENDPOINTS[job.task](job, drop)


def check_names(job: JobConfig, params: Mapping[str, Any]) -> None:
    """Refuse parameters that the API of the job's task does not have.

    Raises:
        RequestError: naming the parameter.
    """
    if job.task == "generate":
        api.check_names(params)
    else:
        pooling.check_names(job.task, params)
