"""The tables ``[engine]``, ``[engine.server]`` and ``[sampling]``."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    PositiveInt,
    field_validator,
    model_validator,
)

from batchkit.config.seams import EngineKind
from batchkit.config.server_command import check_command
from batchkit.config.tables.base import Free, Identity, PositiveSeconds, Table
from batchkit.config.tables.parameters import Layers

DEMO_MODEL = "batchkit-demo"
DEMO_MODELS = {DEMO_MODEL: "demo_model", f"{DEMO_MODEL}-speech": "demo_speech"}
"""The models that come with the package, and their folders in it."""
_TEMPLATE = r"^\s*\{\{.*\}\}\s*$"
Template = Annotated[str, Field(pattern=_TEMPLATE)]
# Rejects common forms of API keys, such as hf_…
_VARIABLE = re.compile(r"(?!hf_|gsk_|[a-z]+_\w{20})[A-Za-z_]\w*")


class ServerTable(Table):
    """With `openai-server`: a server that starts and ends with the run, instead of `engine.base_url`.

    The table may be empty if `engine.model` is a `.gguf` file. batchkit then starts `llama-server` for
    `engine.options.max_num_seqs` requests of `max_model_len` tokens each, with `OMP_NUM_THREADS` threads (by default
    the number of cores).
    """

    command: Identity[Annotated[str, AfterValidator(check_command)] | None] = None
    """Command that starts the server, for example `llama-server -m model.gguf -c 32768 -np 8 --port {port}` (8
    concurrent requests share that context: 4096 tokens each). `{port}` becomes a free port, `{host}` becomes
    127.0.0.1. batchkit runs it without a shell. The server gets the run's environment; put keys there. A key in the
    command is refused."""
    health: Free[str] = Field("/health", pattern="^/")
    """Path for the health check. The server is ready once it lists its models and this path returns a status below
    500."""
    start_timeout_s: Free[PositiveSeconds] = 600.0
    """Maximum time until the server is ready, in seconds. After this time, the run stops and prints the server's last
    output."""


class EngineTable(Table):
    """The model and the engine that runs it."""

    kind: Identity[EngineKind] = "vllm"
    """Engine to use. `vllm` is the default. `transformers` runs the model without vLLM, in static batches, and is
    slower. `openai-server` sends each row to a server with OpenAI's API. `dry-run` answers immediately, without a
    model."""
    model: Identity[str] = ""
    """Folder, name on the Hugging Face hub, or one of the two tiny models that come with batchkit
    (docs/demo-model.md): `batchkit-demo` reads small tables, `batchkit-demo-speech` recognizes digits. With
    `openai-server`: the model's name on the server, or a `.gguf` file for `[engine.server]`."""
    base_url: Free[str | None] = None
    """With `openai-server`: URL of the API of a running server, for example `http://localhost:8000/v1`."""
    server: ServerTable | None = None
    """A server that the run starts, instead of `base_url`: the table `[engine.server]`."""
    api_key_env: Free[str] = Field("OPENAI_API_KEY", min_length=1)
    """With `openai-server`: name of the environment variable that holds the API key, if the server needs one."""
    max_answer_bytes: Free[PositiveInt] = 32 * 2**20
    """With `openai-server`: maximum size of a response, in bytes after decompression. A row with a larger response
    fails with `server` and is not retried. Text of 100,000 tokens needs less than 1 MB; with 20 logprobs per token
    about 100 MB."""
    options: Identity[dict[str, Any]] = Field({})
    """Options of the engine. With `vllm`, any option of `vllm.LLM`; vLLM's own classes check them. With `transformers`:
    `max_num_seqs` (rows per batch, default 8; halved when memory runs out), `shrink_on_oom` (with `false`, the engine
    is restarted when memory runs out, and the batch is not halved), `dtype`, `device_map`, `attn_implementation`,
    `max_model_len`, `revision`, `trust_remote_code`, `chat_template`, `mm_processor_kwargs`. With `openai-server`:
    `max_num_seqs` (concurrent requests, default 32), `give_up_s` (seconds that the server may be unreachable before the
    run stops, default 300), `max_model_len` (tokens of prompt and answer together, if the server does not report it),
    `extra_body` (fields to add to or replace in each request body) and `drop` (fields to leave out of it)."""
    reasoning_parser: Identity[str | None] = None
    """Name of vLLM's parser for the model's reasoning, as in `vllm serve --reasoning-parser`, for example `qwen3`. The
    record then holds the reasoning as `reasoning` and the answer alone as `text`. `transformers` needs vLLM installed
    for it. With `openai-server`, the server parses its answers itself."""
    tool_call_parser: Identity[str | None] = None
    """Name of vLLM's parser for tool calls, as in `vllm serve --tool-call-parser`, for example `hermes`. The record
    then holds the calls as `tool_calls`, in OpenAI's format."""
    layers: Identity[Layers] = Field({})
    """Engine layers of installed packages, for example `["known-answers"]`: code between batchkit's retries and the
    engine, which may change, repeat or answer requests (docs/plugins.md). The first one is the highest. A table gives
    the parameters of a layer: `{ NAME = { PARAMETER = VALUE } }`."""
    in_process: Free[bool] = False
    """Run the engine inside batchkit's own process, for debugging. A crash of the engine then ends the run."""
    lora: Identity[str | None] = None
    """Folder of a LoRA adapter that is used for every row. batchkit then sets `enable_lora`. `transformers` needs the
    package peft for it."""
    loras: Identity[dict[str, Annotated[str, Field(min_length=1)]]] = Field({})
    """LoRA adapters by name, for example `legal = "adapters/legal"` in `[engine.loras]`. Each adapter is a folder or a
    name on the hub. `prompt.lora` selects one per row. Only with `vllm`. `max_loras`, `max_lora_rank` and
    `max_cpu_loras` are derived from the adapters unless `engine.options` sets them."""

    @property
    def model_source(self) -> str:
        """The folder or hub name that the engine loads: ``model``, or the folder of a demo model in this package."""
        if (folder := DEMO_MODELS.get(self.model)) is not None:
            return str(Path(__file__).parents[2] / folder)
        return self.model

    @field_validator("api_key_env")
    @classmethod
    def _names_a_variable(cls, name: str) -> str:
        if _VARIABLE.fullmatch(name) is None:  # the message omits the value: it may be a key
            raise ValueError(
                "expected the name of an environment variable, not the key itself: put the key into the variable"
                " OPENAI_API_KEY, and leave api_key_env out"
            )
        return name

    @model_validator(mode="after")
    def _has_its_own_keys(self) -> EngineTable:
        if self.kind in ("vllm", "transformers", "openai-server") and not self.model:
            raise ValueError(
                f"model is missing: give a folder, a name on the Hugging Face hub, or {DEMO_MODEL}"
            )
        is_server = self.kind == "openai-server"
        for key in ("base_url", "server"):
            if not is_server and getattr(self, key) is not None:
                raise ValueError(f'{key} is for kind = "openai-server", but kind is "{self.kind}"')
        if is_server and self.base_url is None and self.server is None:
            raise ValueError(
                "base_url is missing: set it, for example to http://localhost:8000/v1, or add [engine.server]"
            )
        if self.base_url is not None and self.server is not None:
            raise ValueError("base_url and [engine.server] are both given; keep one")
        knows_command = self.server is None or self.server.command or self.model.endswith(".gguf")
        if not knows_command:
            raise ValueError(
                "server.command is missing; give the command that starts the server (only a .gguf model needs none)"
            )
        if unusable := [name for name in self.loras if not name or name != name.strip()]:
            raise ValueError(
                f"loras: {unusable[0]!r} is not a valid adapter name; use a name that is not empty and has no space"
                " at its beginning or end"
            )
        if self.loras and self.kind != "vllm":
            remedy = (
                "leave it out, and set prompt.lora to the adapter's name on the server"
                if is_server
                else 'set kind = "vllm", or lora for one adapter'
            )
            raise ValueError(f'loras: is for kind = "vllm", but kind is "{self.kind}": {remedy}')
        if self.loras and self.lora is not None:
            raise ValueError("lora applies to all rows, but loras to single rows: keep one")
        if is_server and self.lora is not None:
            raise ValueError(
                "lora: the server loads the adapter; leave lora out, and set model to the adapter's name on the server"
            )
        for key in ("reasoning_parser", "tool_call_parser"):
            if is_server and getattr(self, key) is not None:
                option = key.replace("_", "-")
                raise ValueError(
                    f"{key}: leave it out, and start the server with --{option} instead"
                )
        if self.base_url is not None and not _is_base_url(self.base_url):
            raise ValueError(
                "base_url: expected http(s)://host[:port]/path without a query or a password; if it contained the API"
                " key, put the key into the environment variable that api_key_env names"
            )
        return self


class SamplingTable(Table):
    """Sampling parameters. Any parameter of `vllm.SamplingParams` may be used. A number may come from a column:
    `temperature = "{{ t }}"`. `structured_outputs = { json = "schema.json" }` reads a JSON schema from that file.

    `transformers` supports the parameters that choose tokens and end a text, and refuses all other parameters.
    """

    model_config = ConfigDict(frozen=True, extra="allow", strict=True)

    temperature: Identity[
        Annotated[float, BeforeValidator(lambda v: float(v) if type(v) is int else v), Field(ge=0)]
        | Template
    ] = 0.0
    """Sampling temperature. 0 means greedy decoding."""
    max_tokens: Identity[PositiveInt | Template] = 256
    """Maximum number of generated tokens per answer, not counting the prompt."""
    sampling_column: Identity[str | None] = None
    """Name of a field with the row's own sampling parameters. They override the keys here, except where they are
    null."""

    def params(self) -> dict[str, Any]:
        """Return the arguments for ``vllm.SamplingParams``, without parameters that come from a column."""
        given = self.model_dump(exclude={"sampling_column"})
        return {name: value for name, value in given.items() if not _is_template(value)}

    def example(self) -> dict[str, Any]:
        """Return ``params`` with 1 for each parameter that comes from a column, so that all names can be checked."""
        return {**self.params(), **dict.fromkeys(self.templates, 1)}

    @property
    def templates(self) -> dict[str, str]:
        """Templates of the parameters that come from a column, keyed by parameter name."""
        given = self.model_dump(exclude={"sampling_column"})
        return {name: value for name, value in given.items() if _is_template(value)}


def _is_template(value: Any) -> bool:
    return isinstance(value, str) and re.search(_TEMPLATE, value) is not None


def _is_base_url(url: str) -> bool:
    try:
        parts = urlsplit(url)
        parts.port  # noqa: B018  (raises if it is not a number)
    except ValueError:
        return False
    is_plain = not (parts.query or parts.fragment or parts.username or parts.password)
    return parts.scheme in ("http", "https") and bool(parts.hostname) and is_plain
