"""Conversion of requests to the model's tensors: chat template, tokenizer, image processor."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

from batchkit.config.tables import JobConfig
from batchkit.engines.base import RenderedPrompt
from batchkit.engines.process.startup import explain
from batchkit.engines.request_checks import cause, check_forced_call, check_length, template_kwargs
from batchkit.engines.transformers.options import Sampling, TransformersOptions, sampling_of
from batchkit.engines.vllm.parsing import ADJUSTED, AnswerParser, parsing_of
from batchkit.errors import JobError, MediaError, RequestError, RowError
from batchkit.types import CLIPS, Request


class PreparedPrompt(NamedTuple):
    """A request as the model's inputs.

    - ``inputs``: tensors by argument name of the model's ``forward``, for a batch of one, on the CPU.
    - ``max_tokens``: the request's limit, or the number of tokens that the prompt leaves in the context if that is
      less.
    - ``parser``: parser of reasoning and tool calls; None if the job has none.
    """

    request: Request
    sampling: Sampling
    text: str
    inputs: Mapping[str, Any]
    max_tokens: int
    parser: AnswerParser | None = None

    @property
    def prompt_tokens(self) -> int:
        return int(self.inputs["input_ids"].shape[1])


class TransformersRenderer:
    """A renderer that uses the model's processor, or its tokenizer if the model takes only text. Raises JobError if the
    model's files are missing, or ``max_model_len`` is more than the model supports."""

    def __init__(self, job: JobConfig, options: TransformersOptions) -> None:
        from transformers import AutoConfig, AutoProcessor

        self._model = job.engine.model
        source = {
            "revision": options.revision or "main",
            "trust_remote_code": options.trust_remote_code,
        }
        try:
            self.config = AutoConfig.from_pretrained(job.engine.model_source, **source)
            self._processor = AutoProcessor.from_pretrained(job.engine.model_source, **source)
        except Exception as error:  # a damaged file raises what its parser raises
            raise JobError(f"engine: {explain(error, job.engine.model)}") from error
        self._takes_images = hasattr(self._processor, "image_processor")
        self.tokenizer = getattr(self._processor, "tokenizer", self._processor)
        text_config = self.config.get_text_config()
        self._vocab_size: int = text_config.vocab_size
        self.max_model_len = _max_model_len(text_config, options.max_model_len)
        own = getattr(self._processor, "chat_template", None) or self.tokenizer.chat_template
        self._parsing = parsing_of(job, self.tokenizer)
        self._job, self._chat_template = job, options.chat_template or own
        self._processor_kwargs = options.mm_processor_kwargs

    def render(self, request: Request) -> RenderedPrompt:
        prepared = self.prepare(request)
        return RenderedPrompt(prepared.text, prepared.prompt_tokens)

    def prepare(self, request: Request) -> PreparedPrompt:
        """Return the request with its prompt tokenized and its images processed. Raises RowError if the model refuses
        the request."""
        check_forced_call(request, self._job)
        sampling, parser = self._sampling(request)
        for token_id in sampling.token_ids:
            if token_id >= self._vocab_size:
                known = f"the model's vocabulary ends at {self._vocab_size - 1}"
                raise RequestError(f"sampling: token id {token_id} is not a token: {known}")
        try:
            text = self._text(request)
            inputs = self._inputs(request, text)
        except RowError:
            raise
        except Exception as error:
            # The model's own processor runs here, and may raise anything for an unusual image.
            kind = MediaError if request.media_bytes else RequestError
            raise kind(cause(error)) from error
        prompt_tokens = inputs["input_ids"].shape[1]
        if not prompt_tokens:
            raise RequestError(
                "the prompt is empty; fill the row's fields, or correct the template"
            )
        check_length(request, prompt_tokens, self.max_model_len)
        room = self.max_model_len - prompt_tokens
        max_tokens = min(room, sampling.max_tokens or room)
        return PreparedPrompt(request, sampling, text, inputs, max_tokens, parser)

    def _sampling(self, request: Request) -> tuple[Sampling, AnswerParser | None]:
        """Return the request's sampling parameters, and the parser of reasoning and tool calls (None if the job has
        none).

        The parser may change the parameters, for example to keep special tokens in the text.
        """
        sampling = sampling_of(request.sampling)
        if self._parsing is None:
            return sampling, None
        params = SimpleNamespace(**{name: getattr(sampling, name, None) for name in ADJUSTED})
        parser = self._parsing.parser_of(request, params, self._template_kwargs(request))
        changed = {"skip_special_tokens": params.skip_special_tokens}
        return sampling.model_copy(update=changed), parser

    def _text(self, request: Request) -> str:
        if request.messages is None:
            return request.prompt or ""
        conversation = [{**self._message(m), "content": self._content(m)} for m in request.messages]
        text: str = self._processor.apply_chat_template(
            conversation,
            **{
                "chat_template": self._chat_template,
                "tools": None if request.tools is None else list(request.tools),
                **self._template_kwargs(request),
                "tokenize": False,
            },
        )
        return text

    def _template_kwargs(self, request: Request) -> dict[str, Any]:
        return {"add_generation_prompt": True, **template_kwargs(self._job, request)}

    def _inputs(self, request: Request, text: str) -> Mapping[str, Any]:
        images = {"images": request.images or None, **self._processor_kwargs}
        return dict(
            self._processor(
                text=[text],
                return_tensors="pt",
                add_special_tokens=request.messages is None,  # a chat template adds them itself
                **(images if self._takes_images else {}),
            )
        )

    def _message(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return ``message`` in the form in which vLLM passes it to the chat template.

        - The role "developer" becomes "system" if the template does not know it.
        - The reasoning of an earlier answer is stored under both names that templates read.
        - Arguments of tool calls become dicts; in OpenAI's API they are JSON text.
        """
        made = dict(message)
        if made["role"] == "developer" and "developer" not in str(self._chat_template):
            made["role"] = "system"
        reasoning = made.get("reasoning") or made.get("reasoning_content")
        if reasoning is not None and made["role"] == "assistant":
            made |= {"reasoning": reasoning, "reasoning_content": reasoning}
        if made.get("tool_calls"):
            functions = [call["function"] for call in made["tool_calls"]]
            made["tool_calls"] = [
                {**call, "function": {**function, "arguments": _table_in(function)}}
                for call, function in zip(made["tool_calls"], functions, strict=True)
            ]
        return made

    def _content(self, message: Mapping[str, Any]) -> str | list[dict[str, Any]]:
        """Return the message's content as a list of parts without the images' data, as templates of models with images
        expect it.

        The result of a tool becomes one text, as in vLLM.
        """
        content = message["content"] or ""
        if clips := _types(content) & {*CLIPS}:
            raise RequestError(
                f'engine.kind "transformers" takes no {clips.pop()}; use "vllm" for this row'
            )
        is_of_tool = message["role"] == "tool" and "image_pil" not in _types(content)
        if not self._takes_images or is_of_tool:
            return self._plain(content)
        if isinstance(content, str):
            return [] if message["content"] is None else [{"type": "text", "text": content}]
        return [
            {"type": "image"} if part["type"] == "image_pil" else dict(part) for part in content
        ]

    def _plain(self, content: str | Sequence[Mapping[str, Any]]) -> str:
        """Return the text parts joined to one text, as vLLM does for a chat template that does not support parts."""
        if isinstance(content, str):
            return content
        if any(part["type"] != "text" for part in content):
            raise RequestError(f"{self._model} takes only text: its processor reads no images")
        return "\n".join(part["text"] for part in content)


def _types(content: str | Sequence[Mapping[str, Any]]) -> set[str]:
    return set() if isinstance(content, str) else {part["type"] for part in content}


def _table_in(function: Mapping[str, Any]) -> dict[str, Any]:
    try:
        found = json.loads(function.get("arguments") or "{}")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _max_model_len(text_config: Any, wanted: int | None) -> int:
    most: int | None = getattr(text_config, "max_position_embeddings", None)
    limit = most if wanted is None else wanted
    if limit is None:
        raise JobError(
            "engine.options.max_model_len is missing: set it to the longest prompt and answer together, in"
            " tokens; the model's config has no max_position_embeddings"
        )
    if most is not None and limit > most:
        found = f"engine.options.max_model_len: found {limit}"
        raise JobError(f"{found}, expected at most the model's own max_position_embeddings, {most}")
    return limit
