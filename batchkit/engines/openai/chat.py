"""The endpoints of OpenAI's API for text: ``/chat/completions``, and ``/completions`` for a plain prompt."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from batchkit.config.suggest import did_you_mean
from batchkit.config.tables import JobConfig
from batchkit.config.values import from_json
from batchkit.engines.openai.api import ShapeError, encoded, in_words
from batchkit.engines.openai.connections import Content
from batchkit.errors import RequestError
from batchkit.storage.schema import choice_of, possible
from batchkit.types import BROKEN_OFF, Choice, Completion, Request, Usage

T = TypeVar("T")

# Names of vllm.SamplingParams that the API accepts: OpenAI's own, and additions of `vllm serve`.
SAMPLING = (
    *("max_tokens", "temperature", "top_p", "n", "stop", "seed"),
    *("presence_penalty", "frequency_penalty", "logit_bias", "logprobs", "reasoning_effort"),
    *("top_k", "min_p", "repetition_penalty", "repetition_detection", "min_tokens"),
    *("stop_token_ids", "ignore_eos", "bad_words", "allowed_token_ids", "logprob_token_ids"),
    *("include_stop_str_in_output", "skip_special_tokens", "spaces_between_special_tokens"),
    *("structured_outputs", "thinking_token_budget", "truncate_prompt_tokens"),
)


class Endpoint:
    """An endpoint of the API: builds the requests of one task and reads the answers. It does not touch the network.

    - ``table``: the job's table with the parameters (``sampling`` or ``pooling``).
    - ``parameters``: names in this table that the API accepts.
    """

    task = "generate"
    table = "pooling"
    path = "/chat/completions"
    parameters: Sequence[str] = ()

    def __init__(self, job: JobConfig, drop: Sequence[str]) -> None:
        self._model, self._drop = job.engine.model, drop
        self._chat_template_kwargs = job.prompt.chat_template_kwargs
        self._selects = job.select.by is not None
        self.seen: dict[str, Any] = {}
        """Properties of the model that the answers so far have shown, by name."""

    @classmethod
    def check_names(cls, params: Mapping[str, Any]) -> None:
        """Check that the API has all parameters in ``params``, because a server would silently ignore an unknown one.
        Raises RequestError if the API lacks a parameter; the message names the parameter."""
        for name in params:
            if name == "prompt_logprobs":
                raise RequestError(
                    "sampling.prompt_logprobs: batchkit can't store these; remove this parameter"
                )
            if name not in cls.parameters:
                hint = did_you_mean(name, cls.parameters) or f"; it has {', '.join(cls.parameters)}"
                raise RequestError(
                    f'{cls.table}.{name}: not a parameter of the API for task = "{cls.task}"{hint};'
                    " put a server's own parameters into engine.options.extra_body"
                )

    def body_of(self, request: Request) -> dict[str, Any]:
        """Return the request in the API's format. Images are still PIL images; ``api.encoded`` converts them. Raises
        RequestError if the API lacks a parameter of the request."""
        self.check_names(request.sampling)
        given = {name: value for name, value in request.sampling.items() if value is not None}
        parameters = self.parameters_of(request, given)
        body = {"model": request.lora or self._model, **self.input_of(request), **parameters}
        if request.prompt is None:
            kwargs = {**self._chat_template_kwargs, **request.chat_template_kwargs}
            if request.chat_template_kwargs.get("reasoning_effort") is not None:
                body["reasoning_effort"] = kwargs.pop("reasoning_effort")
            if kwargs:
                body["chat_template_kwargs"] = kwargs
        return {name: value for name, value in body.items() if name not in self._drop}

    def encoded(self, body: Mapping[str, Any]) -> Content:
        """Encode the body that ``body_of`` returned. Another thread may call this. Raises RowError if a value can't be
        encoded."""
        return Content(encoded(body))

    def url(self, base_url: str, request: Request) -> str:
        """Return the address for ``request``."""
        return base_url + self.path

    def input_of(self, request: Request) -> dict[str, Any]:
        """Return the part of the body that the model reads."""
        raise NotImplementedError

    def parameters_of(self, request: Request, given: dict[str, Any]) -> dict[str, Any]:
        """Return the request's parameters ``given`` in the API's format."""
        return given

    def completion_of(self, request: Request, answer: Any, latency_s: float, n: int) -> Completion:
        """Convert the server's answer to a completion.

        ``n``: number of choices that were requested; 0 if unknown.

        Raises:
            ShapeError: The answer is not in the API's format, or is incomplete.
            RowError: The answer is in the API's format but can't be used.
        """
        raise NotImplementedError


class _ContentPart(msgspec.Struct):
    type: str = ""
    text: str = ""


class _ChatMessage(msgspec.Struct):
    content: str | list[_ContentPart] | None = None  # some servers return parts
    reasoning: Any = None
    reasoning_content: Any = None  # DeepSeek's name, which other servers use, too
    tool_calls: Any = None


class _Choice(msgspec.Struct):
    index: int | None = None
    message: _ChatMessage | None = None
    text: str | None = None
    finish_reason: Any = None
    logprobs: Any = None
    error: Any = None

    @property
    def reason(self) -> Any:
        """The reason why the choice ended.

        SGLang's internal reason is an object ``{"type": "abort", …}``, which a proxy may pass on. A router sets
        ``error`` instead.
        """
        reason = "error" if self.error else self.finish_reason
        return reason.get("type") if isinstance(reason, Mapping) else reason

    @property
    def failure(self) -> str | None:
        """A message if the choice is incomplete, otherwise None."""
        if not self.error and self.reason not in BROKEN_OFF:
            return None
        return f"finish_reason is {self.reason}" + (f": {in_words(self.error)}" * bool(self.error))

    def read(self) -> Choice:
        message = self.message or _ChatMessage(self.text)
        text = message.content or ""
        if isinstance(text, list):
            text = "".join(part.text for part in text if part.type == "text")
        thought = message.reasoning or message.reasoning_content
        return choice_of(text, self.reason, self.logprobs, thought, message.tool_calls)


class _ChatAnswer(msgspec.Struct):
    choices: list[_Choice]
    usage: Any = None
    error: Any = None

    def ordered(self, n: int) -> list[_Choice]:
        """Return the choices in order. There must be ``n`` choices (0: any number). One choice is also accepted,
        because some servers ignore ``n``."""
        places = [choice.index for choice in self.choices]
        if not any(place is not None for place in places):
            places = [*range(len(places))]
        found = dict(zip(places, self.choices, strict=True))
        if n in (0, len(places)) and found.keys() == {*range(len(places))}:
            return [found[place] for place in range(len(places))]
        if len(places) == 1 and (n <= 1 or places == [0]):
            return self.choices
        raise ShapeError(
            f"the answer has choices with the indexes {places[:10]}, but {n} were requested"
        )


class Chat(Endpoint):
    """``/chat/completions``, and ``/completions`` for a plain prompt."""

    table, parameters = "sampling", SAMPLING

    def url(self, base_url: str, request: Request) -> str:
        return base_url + ("/completions" if request.messages is None else self.path)

    def input_of(self, request: Request) -> dict[str, Any]:
        if request.messages is None:
            return {"prompt": request.prompt}
        tools = {
            "tools": request.tools,
            "tool_choice": request.tool_choice,
            "parallel_tool_calls": request.parallel_tool_calls,
        }
        used = {name: value for name, value in tools.items() if value is not None}
        return {"messages": request.messages, **(used if request.tools is not None else {})}

    def parameters_of(self, request: Request, given: dict[str, Any]) -> dict[str, Any]:
        for name, value in given.items():
            # JSON has no such number: the body would have null, and the server would use its default.
            if isinstance(value, float) and not math.isfinite(value):
                raise RequestError(f"sampling.{name}: is {value}, expected a finite number")
        if (response_format := json_form(given.get("structured_outputs"))) is not None:
            del given["structured_outputs"]
            given["response_format"] = response_format
        if request.messages is not None and "logprobs" in given:
            # For chat, logprobs is a switch and top_logprobs the count.
            given |= {"logprobs": True, "top_logprobs": given["logprobs"]}
        return given

    def completion_of(self, request: Request, answer: Any, latency_s: float, n: int) -> Completion:
        found = as_shape(answer, _ChatAnswer)
        choices = found.ordered(n)
        failures = [failure for choice in choices if (failure := choice.failure) is not None]
        if self._selects and len(failures) < len(choices):
            failures = []
        if failures:
            raise ShapeError(f"the answer is incomplete: {'; '.join(failures)}")
        if not choices:
            raise ShapeError("the answer has no choices")
        read = [choice.read() for choice in choices]
        return Completion(request, read, usage_in(found.usage), latency_s)


def as_shape(answer: Any, shape: type[T]) -> T:
    """Convert ``answer`` to the type ``shape``. Raises ShapeError if this is impossible, or the answer contains an
    error."""
    try:
        found = msgspec.convert(answer, shape)
    except (msgspec.ValidationError, OverflowError) as error:
        raise ShapeError(f"the answer is not in OpenAI's format: {error}") from None
    if fault := getattr(found, "error", None):
        raise ShapeError(f"the answer contains an error: {in_words(fault)}")
    return found


def usage_in(
    counts: Any, sent: str = "prompt_tokens", answered: str = "completion_tokens"
) -> Usage | None:
    """Return the token counts as Usage; None if the count of the prompt tokens or of the completion tokens is missing.

    ``sent`` and ``answered``: names of the prompt tokens and the completion tokens in ``counts``.
    """
    if not isinstance(counts, Mapping):
        return None
    reasoning, cached = (
        details.get(name) if isinstance(details := counts.get(f"{of}_details"), Mapping) else None
        for of, name in ((answered, "reasoning_tokens"), (sent, "cached_tokens"))
    )
    return possible(
        Usage(counts.get(sent, -1), counts.get(answered, -1), reasoning, cached or None)
    )


def json_form(wanted: Any) -> dict[str, Any] | None:
    """Return vLLM's ``structured_outputs`` as OpenAI's ``response_format``, which all servers support; None if
    impossible."""
    if not isinstance(wanted, Mapping) or len(wanted) != 1:
        return None
    if wanted.get("json_object") is True:
        return {"type": "json_object"}
    if not isinstance(schema := from_json(wanted.get("json")), Mapping):
        return None  # vLLM reports the schema's error
    return {
        "type": "json_schema",
        "json_schema": {"name": "answer", "schema": schema, "strict": True},
    }
