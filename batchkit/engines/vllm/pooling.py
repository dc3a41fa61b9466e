"""The requests and outputs of vLLM's pooling tasks: vectors, classes and scores.

vLLM's own IO processors build the prompts and compute the scores, as in ``LLM.embed``, ``classify`` and ``score``. A
pair needs several prompts: one per document, and for some models one for the query.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from batchkit.config.tables import OF_TOKENS, JobConfig, TaskName
from batchkit.engines.base import RenderedPrompt
from batchkit.engines.entities import entities_in, tags_of
from batchkit.engines.request_checks import chat_template, check_length
from batchkit.engines.vllm.options import pooling_params, task_by_config
from batchkit.engines.vllm.renderer import EngineInput, Prepared, VllmRenderer, counted, refusing
from batchkit.errors import JobError, RequestError, RowError, WrongTaskError
from batchkit.rendering.body import task_of
from batchkit.types import Completion, Content, Pair, Pooled, Request, Usage


class _Processor(NamedTuple):
    """vLLM's IO processor of a task, and vLLM's name for the task."""

    task: TaskName
    vllm_task: str
    processor: Any


class PoolingRenderer:
    """A renderer for tasks that do not generate text. It has the interface of ``VllmRenderer``.

    ``processors``: vLLM's IO processors for the job's task, and for other tasks of the model, which batch lines may
    use.
    """

    def __init__(
        self, job: JobConfig, renderer: Any, vllm_config: Any, processors: Mapping[str, Any]
    ) -> None:
        model_config = vllm_config.model_config
        self._prompts = VllmRenderer(job, renderer, vllm_config)
        self._tokenizer = renderer.get_tokenizer()
        self._processors = _processors_by_task(job, processors)
        self._model = f"{job.engine.model} ({', '.join(model_config.architectures)})"
        self._max_model_len: int = model_config.max_model_len
        self._chat_template = chat_template(job.engine.options)
        self._keeps_prompt = job.output.prompt
        config = model_config.hf_config
        self._labels: Mapping[int, str] = getattr(config, "id2label", None) or {}
        self._tags = tags_of(self._labels, getattr(config, "num_labels", 0))
        self._task = job.task
        if job.task == "token_classify":
            self._special_tokens = _special_tokens(job, self._tokenizer)

    def render(self, request: Request) -> RenderedPrompt:
        inputs = self.prepare(request).inputs
        tokens = sum(len(_tokens(given.prompt)) for given in inputs)
        return RenderedPrompt(self._text(inputs), tokens)

    def prepare(self, request: Request) -> Prepared:
        """Tokenize the request's prompts and process their images. The result has one input per prompt. Raises RowError
        if vLLM refuses the request."""
        is_pair = request.pair is not None
        of_request = self._processor_of(request)
        params = pooling_params(request.sampling, of_request.vllm_task, of_pair=is_pair)
        if is_pair and request.chat_template_kwargs:
            extra = {"chat_template_kwargs": dict(request.chat_template_kwargs)}
            params.extra_kwargs = {**(params.extra_kwargs or {}), **extra}
        if request.messages is not None:
            with refusing(request):
                inputs = [EngineInput(self._prompts.prompt(request), params)]
            self._check_length(request, inputs[0])
        else:
            with refusing(request):
                parts = self._parts(request, of_request, params)
            inputs = [
                self._input(request, of_request, parts, number) for number in range(len(parts))
            ]
        text = self._text(inputs) if self._keeps_prompt else None
        return Prepared(request, inputs, text=text)

    def forget(self, images: Iterable[str]) -> None:
        """Make the next request with one of these images (given by hash) send the image in full, like
        ``VllmRenderer.forget``."""
        self._prompts.forget(images)

    def completion(
        self, prepared: Prepared, outputs: Sequence[Any], latency_s: float
    ) -> Completion:
        """Convert vLLM's ``outputs``, one per input, to a completion."""
        request = prepared.request
        usage = Usage(sum(len(output.prompt_token_ids or ()) for output in outputs), 0)
        if errors := [output.error for output in outputs if output.error is not None]:
            error = RequestError(f"vLLM: {errors[0].message}")
            return Completion(request, usage=usage, latency_s=latency_s, error=error)
        try:
            pooled = self._pooled(self._processor_of(request), prepared, outputs)
        except RequestError as error:
            return Completion(request, usage=usage, latency_s=latency_s, error=error)
        return Completion(request, (), usage, latency_s, prompt=prepared.text, pooled=pooled)

    def _processor_of(self, request: Request) -> _Processor:
        """Return the IO processor for the request's task. Raises WrongTaskError if the model does not support the
        task."""
        task = task_of(request.endpoint, self._task)
        if (found := self._processors.get(task)) is not None:
            return found
        raise WrongTaskError(
            f'url: /{request.endpoint} is for task = "{task}", but the engine, {self._model} with task ='
            f' "{self._task}", serves only {" and ".join(self._processors)}: put such lines into a separate job'
            " with a suitable model"
        )

    def _parts(self, request: Request, of_request: _Processor, params: Any) -> list[Any]:
        """Split a request into parts, as vLLM's IO processor does. One prompt is rendered from each part."""
        from vllm.entrypoints.pooling import typing as contexts

        common: dict[str, Any] = {
            "pooling_task": of_request.vllm_task,
            "pooling_params": params,
            "tokenization_kwargs": None,
            "lora_request": None,  # the engine sets it for each input
            "priorities": None,
        }
        context: Any
        if (pair := request.pair) is None:
            context = contexts.OfflineEncodeInputsContext(prompts=[request.prompt], **common)
        else:
            query, documents = _score_input(pair.query), [*map(_score_input, pair.documents)]
            context = contexts.OfflineScoringInputsContext(
                scoring_data=of_request.processor.valid_inputs(query, documents),
                chat_template=self._chat_template,
                **common,
            )
        make, _ = of_request.processor.get_request_factory_offline(context)
        return list(make())

    def _input(
        self, request: Request, of_request: _Processor, parts: Sequence[Any], number: int
    ) -> EngineInput:
        part = parts[number]
        tokenization = part["tok_params"]

        def render(more: Mapping[str, Any]) -> Any:
            part["tok_params"] = self._prompts.tokenizing(tokenization, more)
            return of_request.processor.render(part)

        try:
            with refusing(request):
                rendered = counted(render)
            given = EngineInput(rendered["prompts"], rendered["params"])
            self._check_length(request, given)
        except RowError as error:
            if request.pair is not None and request.pair.is_list:
                error.args = (f"{_part_name(request.pair, len(parts), number)}: {error}",)
            raise
        return given

    def _check_length(self, request: Request, given: EngineInput) -> None:
        tokens = len(_tokens(given.prompt))
        if not tokens:
            raise RequestError("the text is empty; fill the row's fields, or correct the template")
        check_length(request, tokens, self._max_model_len, generates=False)

    def _text(self, inputs: Sequence[EngineInput]) -> str:
        """Return the text that the model sees, one line per input."""
        prompts = [given.prompt for given in inputs]
        return "\n".join(
            prompt.get("prompt") or self._tokenizer.decode(_tokens(prompt)) for prompt in prompts
        )

    def _pooled(self, of_request: _Processor, prepared: Prepared, outputs: Sequence[Any]) -> Pooled:
        from vllm.entrypoints.pooling.typing import OfflineOutputsContext
        from vllm.outputs import ScoringRequestOutput

        context = OfflineOutputsContext(outputs=list(outputs), n_queries=1)
        processed = of_request.processor.post_process_offline(context)
        if of_request.task == "score":
            scores = [ScoringRequestOutput.from_base(output).outputs.score for output in processed]
            return Pooled(scores=scores)
        (output,) = processed
        found = output.outputs.data.float().cpu()
        if of_request.task == "embed":
            return Pooled(vector=found.numpy().astype("<f4").tobytes())
        if of_request.task in OF_TOKENS:
            return self._of_tokens(prepared.inputs[0].prompt, found.numpy())
        likeliest = int(found.argmax())
        label = self._labels.get(likeliest, f"LABEL_{likeliest}")
        return Pooled(probabilities=found.tolist(), label=label)

    def _of_tokens(self, prompt: Mapping[str, Any], matrix: Any) -> Pooled:
        """Return the vectors of the prompt's tokens; for ``token_classify`` also the named entities.

        ``entities`` is None if the prompt has images, or if ``matrix`` does not have one row per token and one column
        per label (some reward models).
        """
        if not len(matrix):
            raise RequestError(
                f'task = "{self._task}": the model returned no result for any token of this prompt; check that the prompt is'
                " not empty"
            )
        entities, offsets = None, prompt.get("prompt_token_offsets") or ()
        if self._task == "token_classify" and matrix.shape == (len(offsets), len(self._tags)):
            places = [
                None if token in self._special_tokens else place
                for token, place in zip(_tokens(prompt), offsets, strict=True)
            ]
            entities = entities_in(prompt.get("prompt", ""), places, matrix, self._tags)
        vector = matrix.astype("<f4").tobytes()
        return Pooled(vector=vector, tokens=len(matrix), entities=entities)


def processors_without_model(job: JobConfig, renderer: Any, vllm_config: Any) -> dict[str, Any]:
    """Return vLLM's IO processors for the job's task. The model need not be loaded."""
    from vllm.entrypoints.pooling.factories import init_pooling_io_processors
    from vllm.renderers.chat_utils import ChatTemplateConfig

    task = task_by_config(vllm_config.model_config)
    processors: dict[str, Any] = init_pooling_io_processors(
        supported_tasks=(task if job.task == "score" else job.task,),
        vllm_config=vllm_config,
        renderer=renderer,
        chat_template_config=ChatTemplateConfig(chat_template=chat_template(job.engine.options)),
    )
    return processors


def _processors_by_task(
    job: JobConfig, processors: Mapping[str, Any]
) -> dict[TaskName, _Processor]:
    """Return the IO processors by task. Raises JobError if there is none for the job's task."""
    from vllm.tasks import SCORE_TYPE_MAP

    names: dict[str, TaskName] = {"embed": "embed", "token_embed": "token_embed"}
    names |= {"classify": "classify", "token_classify": "token_classify"}
    names |= dict.fromkeys(SCORE_TYPE_MAP.values(), "score")
    found = {
        task: _Processor(task, getattr(processor, "pooling_task", task), processor)
        for name, processor in processors.items()
        if (task := names.get(name)) is not None
    }
    if job.task not in found:
        raise JobError(
            f'task = "{job.task}": vLLM does not support this task for {job.engine.model}, only'
            f" {', '.join(processors) or 'generation'}"
        )
    return found


def _special_tokens(job: JobConfig, tokenizer: Any) -> frozenset[int]:
    """Return the ids of all special tokens, except the token for unknown words, which represents a part of the text.

    Raises:
        JobError: The tokenizer is not a fast one; only fast tokenizers report token positions.
    """
    if not getattr(tokenizer, "is_fast", False):
        raise JobError(
            f'task = "token_classify": the tokenizer of {job.engine.model} ({type(tokenizer).__name__}) does not report'
            " token positions; use a model with a fast tokenizer"
        )
    added = tokenizer.added_tokens_decoder.items()
    special = {number for number, token in added if token.special}
    return frozenset(special - {tokenizer.unk_token_id})


def _score_input(content: Content) -> Any:
    return content if isinstance(content, str) else {"content": list(content)}


def _part_name(pair: Pair, parts: int, number: int) -> str:
    """Return a name for the part of ``pair`` that the input with this ``number`` was made from, for a message.

    ``parts``: the total number of inputs.
    """
    if parts == len(pair.documents):
        return f"document {number}"
    return f"document {number - 1}" if number else "query"


def _tokens(prompt: Mapping[str, Any]) -> Sequence[int]:
    return prompt.get("prompt_token_ids") or ()
