"""The ``[engine.options]`` of this engine, and what llama.cpp's server lacks of vLLM's parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field, PositiveInt

from batchkit.config.tables import JobConfig, Seconds, Table
from batchkit.engines.openai.pooling import ENDPOINTS
from batchkit.engines.request_checks import problems_with
from batchkit.errors import JobError, RequestError

_NOT_EXTRA = {
    *("model", "messages", "prompt", "input", "stream", "stream_options"),
    *("query", "queries", "documents"),
    *("embed_dtype", "endianness"),  # a vector would be read as other numbers
}
# What llama.cpp's server ignores, as fields that it doesn't know, with its own name for some of them.
# Structured outputs are other than JSON here, which is sent as response_format.
_LLAMA_CPP_LACKS = {
    "repetition_penalty": "repeat_penalty",
    "structured_outputs": "grammar",
    "use_activation": "embd_normalize",
    **dict.fromkeys(["repetition_detection", "min_tokens", "stop_token_ids", "bad_words"]),
    **dict.fromkeys(["allowed_token_ids", "logprob_token_ids", "include_stop_str_in_output"]),
    **dict.fromkeys(["skip_special_tokens", "spaces_between_special_tokens", "padding"]),
    **dict.fromkeys(["truncate_prompt_tokens", "truncation_side", "add_special_tokens"]),
    **dict.fromkeys(["mm_processor_kwargs", "instruction"]),
    **dict.fromkeys(["max_tokens_per_query", "max_tokens_per_doc"]),
}


class Options(Table):
    max_num_seqs: PositiveInt = 32  # requests at a time
    give_up_s: Seconds = 300.0
    max_model_len: PositiveInt | None = None  # a request's context, if the server reports none
    extra_body: dict[str, Any] = Field({})  # fields that override every request's body
    drop: list[str] = Field([])  # names left out of it


def options_of(job: JobConfig) -> Options:
    """The job's options. Also checks its sampling. Raises JobError, which lists everything that is wrong."""
    given = job.engine.options
    problems = problems_with("engine.options", Options, given, job.engine.kind)
    extra = given.get("extra_body")
    problems += [
        f"engine.options.extra_body.{name}: set by batchkit; leave it out"
        for name in (extra if isinstance(extra, dict) else ())
        if name in _NOT_EXTRA
    ]
    try:
        of_templates = job.sampling.templates if job.generates else {}
        ENDPOINTS[job.task].check_names({**job.params(), **of_templates})
    except RequestError as error:
        problems.append(str(error))
    server = job.engine.server
    if server is not None and server.command is None and "max_model_len" not in given:
        problems.append(
            "engine.options.max_model_len is missing: llama-server is started with room for"
            " max_num_seqs requests of so many tokens each, prompt and answer together"
        )
    if server is not None and server.command is None and job.task == "classify":
        problems.append(
            'task = "classify": llama-server, which runs a .gguf file, has no classes; give the'
            " command of a server that has /classify, such as vllm serve MODEL --runner pooling"
            " --port {port}, as engine.server.command"
        )
    if problems:
        raise JobError("\n".join(problems))
    return Options(**given)


def check_for_llama_cpp(task: str, body: Mapping[str, Any]) -> None:
    """Raises RequestError, naming the parameter that the server would ignore."""
    for name in _LLAMA_CPP_LACKS.keys() & body.keys():
        own = None if task == "score" else _LLAMA_CPP_LACKS[name]
        hint = f", or use its own engine.options.extra_body.{own}" if own else ""
        raise RequestError(
            f"{ENDPOINTS[task].table}.{name}: llama.cpp's server lacks it, and would answer without"
            f" it; leave it out{hint}"
        )
