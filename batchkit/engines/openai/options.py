"""The ``[engine.options]`` of the OpenAI engine, and the vLLM parameters that llama.cpp's server does not support."""

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
    # These change the number format, so vectors would be decoded wrongly.
    *("embed_dtype", "endianness"),
}
# Parameters that llama.cpp's server silently ignores, with its own name for some of them. The entry
# "structured_outputs" is not for JSON output, which is sent as response_format; llama.cpp's server supports that.
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


class ServerOptions(Table):
    max_num_seqs: PositiveInt = 32  # concurrent requests
    give_up_s: Seconds = 300.0  # the run stops if no row is answered for this long
    max_model_len: PositiveInt | None = None  # tokens per request, if the server reports none
    extra_body: dict[str, Any] = Field({})  # fields that override each request's body
    drop: list[str] = Field([])  # fields to leave out of each body


def options_of(job: JobConfig) -> ServerOptions:
    """Return the job's engine options, and check its sampling parameters. Raises JobError with a list of all
    problems."""
    given = job.engine.options
    problems = problems_with("engine.options", ServerOptions, given, job.engine.kind)
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
            " max_num_seqs requests of max_model_len tokens each, prompt and answer together"
        )
    if server is not None and server.command is None and job.task == "classify":
        problems.append(
            'task = "classify": llama-server, which runs a .gguf file, has no classification; set'
            " engine.server.command to a server that has /classify, for example"
            " vllm serve MODEL --runner pooling --port {port}"
        )
    if problems:
        raise JobError("\n".join(problems))
    return ServerOptions(**given)


def check_for_llama_cpp(task: str, body: Mapping[str, Any]) -> None:
    """Raise RequestError if llama.cpp's server would silently ignore a parameter in ``body``; the message names the
    first."""
    for name in _LLAMA_CPP_LACKS.keys() & body.keys():
        own = None if task == "score" else _LLAMA_CPP_LACKS[name]
        hint = f", or set the server's own engine.options.extra_body.{own}" if own else ""
        raise RequestError(
            f"{ENDPOINTS[task].table}.{name}: llama.cpp's server would ignore this parameter;"
            f" leave it out{hint}"
        )
