"""The ``[engine.options]`` of this engine."""

from __future__ import annotations

from typing import Any

from pydantic import Field, PositiveInt

from batchkit.config.tables import JobConfig, Table
from batchkit.engines.openai import api
from batchkit.engines.openai.pooling import ENDPOINTS
from batchkit.engines.request_checks import problems_with
from batchkit.errors import JobError, RequestError

_NOT_EXTRA = api.PAIR | {
    *("model", "messages", "prompt", "input", "stream", "stream_options"),
    *("embed_dtype", "endianness"),  # a vector would be read as other numbers
}


class Options(Table):
    max_num_seqs: PositiveInt = 32  # requests at a time
    give_up_s: float = Field(300.0, ge=0)
    max_model_len: PositiveInt | None = None  # a request's context, if the server reports none
    extra_body: dict[str, Any] = Field({})  # fields that override every request's body
    drop: list[str] = Field([])  # names left out of it


def options_of(job: JobConfig) -> Options:
    """The job's options. Also checks its sampling.

    Raises:
        JobError: lists everything that is wrong.
    """
    given = job.engine.options
    problems = problems_with("engine.options", Options, given, job.engine.kind)
    extra = given.get("extra_body")
    problems += [
        f"engine.options.extra_body.{name}: set by batchkit; leave it out"
        for name in (extra if isinstance(extra, dict) else ())
        if name in _NOT_EXTRA
    ]
    try:
        ENDPOINTS[job.task].check_names(job.params())
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
