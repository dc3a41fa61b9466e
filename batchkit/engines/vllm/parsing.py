"""vLLM's parsers of reasoning and tool calls, used as in vLLM's server.

vLLM's parser reads a ``ChatCompletionRequest``, and may change the request's sampling parameters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec.structs import replace
from pydantic import ValidationError

from batchkit.config.suggest import did_you_mean
from batchkit.config.tables import JobConfig
from batchkit.engines.request_checks import cause
from batchkit.errors import InvalidOutputError, JobError, RequestError
from batchkit.types import Choice, Completion, Request

# Generation parameters that a parser may change.
ADJUSTED = ("skip_special_tokens", "spaces_between_special_tokens", "structured_outputs")


def unknown_parsers(job: JobConfig) -> list[str]:
    """Return one line for each parser that the job names and vLLM does not have."""
    engine = job.engine
    if engine.reasoning_parser is None and engine.tool_call_parser is None:
        return []
    from vllm.reasoning import ReasoningParserManager
    from vllm.tool_parsers import ToolParserManager

    if (plugin := engine.options.get("reasoning_parser_plugin")) is not None:
        ReasoningParserManager.import_reasoning_parser(plugin)
    return [
        f"engine.{key}: vLLM has no parser {name!r}, it has {', '.join(known)}"
        f"{did_you_mean(name, known)}"
        for key, name, known in (
            ("reasoning_parser", engine.reasoning_parser, ReasoningParserManager.list_registered()),
            ("tool_call_parser", engine.tool_call_parser, ToolParserManager.list_registered()),
        )
        if name is not None and name not in known
    ]


def parsing_of(job: JobConfig, tokenizer: Any, model_config: Any = None) -> Parsing | None:
    """Return the job's parsers, or None if it names none. Raises JobError if the parsers don't fit each other or the
    model's tokenizer.

    ``model_config``: vLLM's config of the model; None with another engine.
    """
    if job.engine.reasoning_parser is None and job.engine.tool_call_parser is None:
        return None
    return Parsing(job, tokenizer, model_config)


class Parsing:
    """The job's parsers of reasoning and tool calls. Raises JobError like ``parsing_of``."""

    def __init__(self, job: JobConfig, tokenizer: Any, model_config: Any) -> None:
        from vllm.parser import ParserManager
        from vllm.utils.mistral import is_mistral_tokenizer, is_mistral_tool_parser

        if model_config is None:
            from vllm.tokenizers.hf import get_cached_tokenizer

            tokenizer = get_cached_tokenizer(tokenizer)  # each parser reads the whole vocabulary
        engine, hf_config = job.engine, getattr(model_config, "hf_config", None)
        self._tokenizer, self._model_config = tokenizer, model_config
        try:
            self._parser_cls = ParserManager.get_parser(
                tool_parser_name=engine.tool_call_parser,
                reasoning_parser_name=engine.reasoning_parser,
                enable_auto_tools=True,
                model_name=engine.model,
                is_harmony=getattr(hf_config, "model_type", None) == "gpt_oss",
                tokenizer=tokenizer,
            )
        except TypeError as error:
            message = str(error).replace("--reasoning-parser", "reasoning_parser")
            message = message.replace("--tool-call-parser", "tool_call_parser")
            raise JobError(f"engine: {message}") from error
        tool_parser_cls = self._parser_cls.tool_parser_cls
        self._always_adjusts = (
            self._parser_cls.always_adjust_request
            or self._parser_cls.reasoning_parser_cls is not None
            or (
                tool_parser_cls is not None
                and is_mistral_tool_parser(tool_parser_cls)
                and is_mistral_tokenizer(tokenizer)
                and tokenizer.supports_grammar
            )
        )

    def parser_of(
        self, request: Request, params: Any, chat_template_kwargs: Mapping[str, Any]
    ) -> AnswerParser:
        """Return a parser for the answers to ``request``, and change ``params`` as the parser needs it. Raises
        RequestError if vLLM refuses the tools, or their combination with other parameters.

        The parser may need special tokens in the text, or a grammar for calls that ``tool_choice`` requires.

        ``params``: an object with attributes of vLLM's SamplingParams (``ADJUSTED``).
        """
        chat = _chat_request(request, params)
        kwargs = dict(chat_template_kwargs)

        def make() -> Any:
            return self._parser_cls(
                self._tokenizer,
                chat.tools,
                chat_template_kwargs=kwargs,
                model_config=self._model_config,
            )

        if self._always_adjusts or chat.tool_choice != "none":
            chat = make().adjust_request(request=chat)
            for name in ADJUSTED[:-1]:
                setattr(params, name, getattr(chat, name))
            params.structured_outputs = chat.extract_structured_outputs()
        return AnswerParser(make, chat, kwargs)


class AnswerParser:
    """A parser of the answers to one request.

    ``make`` creates one of vLLM's parsers. Each of the ``n`` answers gets a new one, because parsers have state.
    """

    def __init__(self, make: Any, chat: Any, chat_template_kwargs: Mapping[str, Any]) -> None:
        self._make, self._chat = make, chat
        self._kwargs = chat_template_kwargs

    def open_grammar(self, request: Any) -> None:
        """Set where the grammar applies in an answer: after the reasoning, or at once if the prompt already ended the
        reasoning.

        ``request``: vLLM's EngineCoreRequest.
        """
        parser = self._make()
        ids = request.prompt_token_ids or []
        request.reasoning_ended = self._chat.resolve_reasoning_ended(parser, ids)
        if parser.reasoning_parser is not None:
            request.reasoning_parser_kwargs = {"chat_template_kwargs": self._kwargs}

    def parsed(
        self, done: Completion, prompt_token_ids: Sequence[int], token_ids: Sequence[Sequence[int]]
    ) -> Completion:
        """Return the completion ``done`` with reasoning and tool calls parsed. ``token_ids``: the tokens of each
        choice."""
        parsers = [self._make() for _ in done.choices]
        try:
            choices = [
                self._choice(parser, choice, prompt_token_ids, ids)
                for parser, choice, ids in zip(parsers, done.choices, token_ids, strict=True)
            ]
            reasoning_tokens = (
                sum(
                    p.count_reasoning_tokens(ids) for p, ids in zip(parsers, token_ids, strict=True)
                )
                if parsers[0].reasoning_parser is not None
                else None
            )
        except Exception as error:  # parsers may raise any exception for an unexpected answer
            message = f"vLLM's parser can't read the answer: {cause(error)}"
            return replace(done, choices=(), error=InvalidOutputError(message))
        usage = done.usage and replace(done.usage, reasoning_tokens=reasoning_tokens)
        return replace(done, choices=choices, usage=usage)

    def _choice(
        self, parser: Any, choice: Choice, prompt_token_ids: Sequence[int], ids: Sequence[int]
    ) -> Choice:
        parser.set_prompt_token_ids(prompt_token_ids)
        reasoning, text, calls = parser.parse(
            choice.text, self._chat, enable_auto_tools=True, model_output_token_ids=ids
        )
        wanted = self._chat.tool_choice
        if parser.tool_parser is None or wanted == "none":
            calls = None
        if calls and not self._chat.parallel_tool_calls:
            calls = calls[:1]
        ends_as_calls = (
            calls if wanted == "auto" else wanted == "required" and (choice.finish_reason == "stop")
        )
        return replace(
            choice,
            text=text or "",
            reasoning=reasoning or None,
            tool_calls=[_tool_call(call) for call in calls] if calls else None,
            finish_reason="tool_calls" if ends_as_calls else choice.finish_reason,
        )


def _chat_request(request: Request, params: Any) -> Any:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    given = {
        "tools": request.tools,
        "tool_choice": request.tool_choice,
        "parallel_tool_calls": request.parallel_tool_calls,
        **{name: getattr(params, name) for name in ADJUSTED},
    }
    # Of earlier messages, parsers read only the tool calls, because some parsers continue the numbering of calls.
    calls = [
        {"role": "assistant", "content": None, "tool_calls": message["tool_calls"]}
        for message in request.messages or ()
        if message.get("tool_calls")
    ]
    try:
        return ChatCompletionRequest(
            messages=calls, **{name: value for name, value in given.items() if value is not None}
        )
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise RequestError(f"{place}: {first['msg']}" if place else first["msg"]) from error


def _tool_call(call: Any) -> dict[str, Any]:
    from vllm.renderers.chat_utils import make_tool_call_id

    return {
        "id": call.id or make_tool_call_id(),
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }
