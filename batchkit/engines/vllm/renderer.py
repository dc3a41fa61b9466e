"""Conversion of requests to vLLM's inputs: chat template, tokenizer, image processor."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

from msgspec import structs
from pydantic import ValidationError

from batchkit.config.tables import JobConfig
from batchkit.engines.base import RenderedPrompt
from batchkit.engines.request_checks import (
    cause,
    chat_template,
    check_forced_call,
    check_length,
    template_kwargs,
)
from batchkit.engines.vllm.options import sampling_params, why_not_bounded
from batchkit.engines.vllm.parsing import AnswerParser, parsing_of
from batchkit.engines.vllm.speech import SpeechPrompts
from batchkit.errors import MediaError, PromptTooLongError, RequestError, RowError
from batchkit.types import CLIPS, Audio, Choice, Completion, Request, Usage, VideoFile

_TOO_LONG = ("input_tokens", "input_text")
# In characters; counting the tokens of a longer prompt takes seconds and much memory.
_MOST_COUNTED = 2**22
# Model types whose processors vLLM calls with truncation=True.
_CUT_OFF = ("qwen2_audio", "whisper")
_SCORED = "batchkit_scored"  # number of the prompt's last tokens that are a scored answer
_DEAD_END = (
    "sampling.structured_outputs: the grammar allows no next token; correct each rule that never ends, such as"
    " `root ::= root`"
)


class EngineInput(NamedTuple):
    """An input of vLLM's engine, in vLLM's format."""

    prompt: Any
    params: Any


class Prepared(NamedTuple):
    """A request in vLLM's format: one input, or several whose outputs form one answer.

    - ``text``: the text that the model sees; None unless the record needs the text and vLLM's outputs lack it.
    - ``parser``: parser of reasoning and tool calls; None if the job has none.
    - ``tries``: number of attempts to prepare the request.
    """

    request: Request
    inputs: Sequence[EngineInput]
    text: str | None = None
    parser: AnswerParser | None = None
    tries: int = 0


class VllmRenderer:
    """A converter of requests to vLLM's inputs: chat template, tokenizer, image processor. Use it from one thread."""

    def __init__(self, job: JobConfig, renderer: Any, vllm_config: Any) -> None:
        from vllm.renderers import ChatParams

        self._renderer = renderer
        self._vllm_config, self._model_config = vllm_config, vllm_config.model_config
        self._max_model_len: int = self._model_config.max_model_len
        self._parsing = parsing_of(job, renderer.get_tokenizer(), self._model_config)
        self._tokenization = _tokenization(job)
        self._job = job
        self._speech: SpeechPrompts | None = None
        if job.task == "transcribe":
            self._speech = SpeechPrompts(job, self._model_config, renderer.get_tokenizer())
        self._chat_params = ChatParams(
            chat_template=chat_template(job.engine.options), chat_template_kwargs={}
        )

    def render(self, request: Request) -> RenderedPrompt:
        prompt = self.prepare(request).inputs[0].prompt
        prompt = prompt.get("decoder_prompt") or prompt  # encoder-decoder models have two prompts
        tokens = prompt.get("prompt_token_ids") or ()
        text = prompt.get("prompt") or self._renderer.get_tokenizer().decode(tokens)
        return RenderedPrompt(text, len(tokens))

    def prepare(self, request: Request) -> Prepared:
        """Tokenize the request's prompt and process its images. Raises RowError if vLLM refuses the request."""
        check_forced_call(request, self._job)
        if reason := why_not_bounded(request.sampling, self._vllm_config):
            raise RequestError(reason)
        params, parser = sampling_params(request.sampling), None
        if request.speech is not None and self._speech is not None:
            self._speech.limit(params, request.speech)
        with refusing(request):
            if self._parsing is not None:
                parser = self._parsing.parser_of(request, params, self._template_kwargs(request))
            prompt = self.prompt(request)
            if request.scored is not None:
                self._append(request.scored, prompt, params)
        check_length(request, len(prompt.get("prompt_token_ids") or ()), self._max_model_len)
        return Prepared(request, [EngineInput(prompt, params)], parser=parser)

    def _append(self, answer: str, prompt: Any, params: Any) -> None:
        """Append ``answer`` to the prompt, and ask for the log-probabilities of the prompt's tokens."""
        tokens = self._renderer.get_tokenizer().encode(answer, add_special_tokens=False)
        prompt["prompt_token_ids"] = [*prompt["prompt_token_ids"], *tokens]
        params.prompt_logprobs, params.logprobs = params.logprobs, None
        params.skip_reading_prefix_cache = True
        params.extra_args = {**(params.extra_args or {}), _SCORED: len(tokens)}

    def forget(self, images: Iterable[str]) -> None:
        """Make the next request with one of these images (given by hash) send the image in full.

        vLLM's renderer sends each image only once. If the first prompt with it was refused before it reached the
        engine, later prompts would refer to an image that the engine does not have.
        """
        cache = self._renderer.mm_processor_cache
        for image in images:
            if hasattr(cache, "invalidate"):
                cache.invalidate(image)
            else:  # vLLM 0.26
                cache._cache.pop(image, None)

    def completion(
        self, prepared: Prepared, outputs: Sequence[Any], latency_s: float
    ) -> Completion:
        """Convert vLLM's output to a completion; may be called by another thread."""
        (output,) = outputs
        choices = [
            Choice(c.text, c.finish_reason, _logprobs(c.logprobs, c.token_ids))
            for c in output.outputs
        ]
        if (scored := prepared.request.scored) is not None:
            n = prepared.inputs[0].params.extra_args[_SCORED]
            logprobs = _logprobs(output.prompt_logprobs[-n:], output.prompt_token_ids[-n:])
            choices = [Choice(scored, None, logprobs)]
        usage = Usage(
            len(output.prompt_token_ids or ()),
            sum(len(c.token_ids) for c in output.outputs),
            cached_tokens=output.num_cached_tokens or None,
        )
        if self._speech is not None:
            choices = [structs.replace(c, text=self._speech.spoken_text(c.text)) for c in choices]
        done = Completion(prepared.request, choices, usage, latency_s, prompt=output.prompt)
        is_led = prepared.inputs[0].params.structured_outputs is not None
        if is_led and any(choice.finish_reason == "error" for choice in choices):
            return structs.replace(done, choices=(), error=RequestError(_DEAD_END))
        if prepared.parser is None:
            return done
        token_ids = [c.token_ids for c in output.outputs]
        return prepared.parser.parsed(done, output.prompt_token_ids or (), token_ids)

    def prompt(self, request: Request) -> Any:
        """Return vLLM's prompt for messages, a plain prompt, or speech."""
        if request.speech is None:
            self._check_heard(request)
        return counted(lambda more: self._prompt(request, more))

    def _prompt(self, request: Request, more: Mapping[str, Any]) -> Any:
        from vllm.renderers.inputs.preprocess import parse_model_prompt

        if request.messages is None:
            given = {"prompt": request.prompt, **_data_of(request)}
            if request.speech is not None and self._speech is not None:
                given = self._speech.prompt(request)
            parsed = parse_model_prompt(self._model_config, given)
            tokenization = self.tokenizing(self._renderer.default_cmpl_tok_params, more)
            return self._renderer.render_cmpl([parsed], tokenization)[0]
        tokenization = self.tokenizing(
            self._renderer.default_chat_tok_params.with_kwargs(add_special_tokens=False), more
        )
        conversation = [_as_vllm_has_it(message) for message in request.messages]
        params = self._params_of_chat(request)
        if not (clips := _data_of(request)):
            _, prompts = self._renderer.render_chat([conversation], params, tokenization)
            return prompts[0]
        # vLLM's messages accept clips only as files: it inserts their placeholders, and the data is added here.
        _, prompt = self._renderer.render_messages(conversation, params)
        prompt["multi_modal_data"].update(clips["multi_modal_data"])
        prompt.pop("multi_modal_uuids", None)
        return self._renderer.render_cmpl([prompt], tokenization)[0]

    def _check_heard(self, request: Request) -> None:
        """Check that no sound of the request is too long, because vLLM would silently drop the end of a long sound.
        Raises MediaError if a sound is too long."""
        sounds = [clip for clip in request.all_clips if isinstance(clip, Audio)]
        if not sounds or self._model_config.hf_config.model_type not in _CUT_OFF:
            return
        from vllm.transformers_utils.processor import cached_processor_from_config

        processor = cached_processor_from_config(self._model_config)
        heard_s = processor.feature_extractor.chunk_length
        for sound in sounds:
            if len(sound.samples) > heard_s * sound.sample_rate:
                raise MediaError(
                    f"{sound.in_words}: the model reads only the first {heard_s} s; cut the recording"
                    " into parts, one row each"
                )

    def _params_of_chat(self, request: Request) -> Any:
        tools = _tools_of(request)
        params = replace(
            self._chat_params,
            chat_template_kwargs={
                "tools": tools,
                "tokenize": False,
                **self._template_kwargs(request),
            },
        )
        if tools is None or not hasattr(params, "tool_choice"):  # vLLM 0.26
            return params
        return replace(params, tool_choice=request.tool_choice or "auto")

    def _template_kwargs(self, request: Request) -> dict[str, Any]:
        return {
            "add_generation_prompt": self._job.generates,
            "continue_final_message": False,
            **template_kwargs(self._job, request),
        }

    def tokenizing(self, tokenization: Any, more: Mapping[str, Any]) -> Any:
        changed = {**self._tokenization, **more}
        return replace(tokenization, **changed) if changed else tokenization


def _tokenization(job: JobConfig) -> dict[str, Any]:
    """Return the fields of vLLM's ``TokenizeParams`` that the job changes, with their new values."""
    changed: dict[str, Any] = {}
    if job.retry.on_too_long != "fail":
        # vLLM stops counting at its limit, but truncation needs the full count.
        changed["max_total_tokens"] = None
    if job.task == "token_classify":
        changed["return_token_offsets"] = True
    return changed


def counted(render: Callable[[Mapping[str, Any]], Any]) -> Any:
    """Return ``render({})``. If vLLM stopped counting tokens at its limit, call ``render`` again without a limit.

    The error of the row then has the full token count.

    ``render``: called with changes to vLLM's ``TokenizeParams``.
    """
    from vllm.exceptions import VLLMValidationError

    try:
        return render({})
    except VLLMValidationError as error:
        is_huge = error.parameter == "input_text" and error.value > _MOST_COUNTED
        if error.parameter not in _TOO_LONG or is_huge:
            raise
    return render({"max_total_tokens": None})


@contextmanager
def refusing(request: Request) -> Iterator[None]:
    """Convert exceptions that vLLM raises for ``request`` in the ``with`` block to row errors."""
    from vllm.exceptions import VLLMValidationError

    try:
        yield
    except RowError:
        raise
    except VLLMValidationError as error:
        raise refusal(error) from error
    except Exception as error:
        # The model's own processor runs here and may raise any exception for an unusual image.
        kind = MediaError if request.media_bytes else RequestError
        raise kind(cause(error)) from error


def _tools_of(request: Request) -> list[Any] | None:
    """Return the tools in the form in which vLLM's server passes them to the chat template. Raises RequestError if a
    tool is invalid."""
    if request.tools is None:
        return None
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionToolsParam

    found = []
    for n, tool in enumerate(request.tools):
        try:
            found.append(ChatCompletionToolsParam.model_validate(tool).model_dump())
        except ValidationError as error:
            (first, *_) = error.errors(include_url=False)
            place = "".join(f".{part}" for part in first["loc"])
            raise RequestError(f"tools[{n}]{place}: {first['msg']}") from error
    return found


def _data_of(request: Request) -> dict[str, Any]:
    """Return the request's sound and video under vLLM's names, or {} if it has none."""
    found: dict[str, list[Any]] = {}
    for clip in request.all_clips:
        if isinstance(clip, Audio):
            found.setdefault("audio", []).append((clip.samples, clip.sample_rate))
            continue
        if isinstance(clip, VideoFile):
            raise RequestError(
                "the vLLM engine reads a video's frames, but this job also sends videos to a server, as files: use one"
                " kind of engine for all rows with videos"
            )
        metadata = {
            "fps": clip.fps,
            "duration": clip.duration_s,
            "total_num_frames": clip.total_frames,
            "frames_indices": list(clip.indexes),
            "video_backend": "pyav",
            "do_sample_frames": False,
        }
        found.setdefault("video", []).append((clip.frames, metadata))
    return {"multi_modal_data": found} if found else {}


def _as_vllm_has_it(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message as vLLM's server would pass it on: placeholders for clips, and vLLM's name for earlier
    reasoning."""
    found = dict(message)
    if isinstance(content := found.get("content"), list):
        found["content"] = [
            _placeholder(part) if part["type"] in CLIPS else part for part in content
        ]
    reasoning = found.pop("reasoning_content", None)
    if reasoning is not None and found.get("reasoning") is None:
        found["reasoning"] = reasoning
    return found


def _placeholder(part: Mapping[str, Any]) -> dict[str, Any]:
    """Return a placeholder for a clip: its part of the message without the data. vLLM allows this for parts with a
    uuid."""
    return {"type": f"{part['type']}_url", f"{part['type']}_url": None, "uuid": "clip"}


def refusal(error: Any) -> RowError:
    kind = PromptTooLongError if error.parameter in _TOO_LONG else RequestError
    return kind(str(error))


def _logprobs(logprobs: Any, token_ids: Sequence[int]) -> list[dict[str, Any]] | None:
    """Return vLLM's log probabilities in OpenAI's format: each token's text, logprob and alternatives, most likely
    first."""
    if logprobs is None:
        return None
    content = []
    for token_id, alternatives in zip(token_ids, logprobs, strict=True):
        chosen = alternatives[token_id]
        top = sorted(alternatives.values(), key=lambda found: found.rank)
        content.append(
            {
                "token": chosen.decoded_token,
                "logprob": chosen.logprob,
                "top_logprobs": [{"token": t.decoded_token, "logprob": t.logprob} for t in top],
            }
        )
    return content
