"""``[engine]``, ``[engine.server]`` and ``[sampling]``."""

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

DEMO_MODEL = "batchkit-demo"
DEMO_MODELS = {DEMO_MODEL: "demo_model", f"{DEMO_MODEL}-speech": "demo_speech"}
"""Those that come with the package, and their folders in it."""
_TEMPLATE = r"^\s*\{\{.*\}\}\s*$"
Template = Annotated[str, Field(pattern=_TEMPLATE)]
_VARIABLE = re.compile(r"(?!hf_|gsk_|[a-z]+_\w{20})[A-Za-z_]\w*")  # and no key, as hf_… is


class ServerTable(Table):
    """With `openai-server`, instead of `engine.base_url`: a server that starts and ends with the run.

    The table may be empty if `engine.model` is a `.gguf` file: then it is `llama-server` with room
    for `engine.options.max_num_seqs` requests of `max_model_len` tokens each, and as many threads as
    `OMP_NUM_THREADS` says, or as there are cores.
    """

    command: Identity[Annotated[str, AfterValidator(check_command)] | None] = None
    """The command that starts it, for example `llama-server -m model.gguf -c 32768 -np 8 --port
    {port}` (8 requests at a time share that context: 4096 tokens each); no shell reads it. `{port}`
    becomes a free port, `{host}` 127.0.0.1. The server has the run's environment: keys belong
    there, and one in the command is refused."""
    health: Free[str] = Field("/health", pattern="^/")
    """The path that answers once it is ready; without one, the server is asked for its models."""
    start_timeout_s: Free[PositiveSeconds] = 600.0
    """Seconds until it must be ready; then the run stops and shows the server's last output."""


class EngineTable(Table):
    """The model, and the engine that runs it."""

    kind: Identity[EngineKind] = "vllm"
    """`transformers` runs the model without vLLM, in static batches: slower; `openai-server` sends
    every row to a server that speaks OpenAI's API; `dry-run` answers at once without a model."""
    model: Identity[str] = ""
    """A folder, a name on the Hugging Face hub, or one of two tiny models that come with batchkit (docs/demo-model.md):
    `batchkit-demo`, which reads small tables, and `batchkit-demo-speech`, which hears digits; with `openai-server`, the name that the
    server knows it by, or a `.gguf` file for `[engine.server]`."""
    base_url: Free[str | None] = None
    """With `openai-server`: the URL of the API of a running server, for example
    `http://localhost:8000/v1`."""
    server: ServerTable | None = None
    """… or the table `[engine.server]`: a server that the run starts."""
    api_key_env: Free[str] = Field("OPENAI_API_KEY", min_length=1)
    """With `openai-server`: the name of the environment variable that holds its key, if it requires
    one."""
    max_answer_bytes: Free[PositiveInt] = 32 * 2**20
    """With `openai-server`: how many bytes of an answer are read, after decompression if it is
    compressed. A row whose answer has more fails with `server`, and is not asked again. Text of
    100,000 tokens has less than 1 MB, with 20 logprobs for each token about 100 MB."""
    options: Identity[dict[str, Any]] = Field({})
    """Given to `vllm.LLM` as they are; vLLM's own classes check them first. With `transformers`:
    `max_num_seqs`, rows in a batch (8), halved while memory runs out; `shrink_on_oom = false`
    restarts the engine instead; `dtype`, `device_map`, `attn_implementation`, `max_model_len`,
    `revision`, `trust_remote_code`, `chat_template`, `mm_processor_kwargs`. With `openai-server`:
    `max_num_seqs`, requests in flight (32); `give_up_s`, how long the server may be away before the
    run stops (300); `max_model_len`, tokens that prompt and answer of a request may have together,
    if the server does not report it; `extra_body`, fields added to each request's body, or
    replacing its own; `drop`, names left out of it."""
    reasoning_parser: Identity[str | None] = None
    """The name of vLLM's parser for the model's reasoning, as in `vllm serve --reasoning-parser`,
    for example `qwen3`: the record has it as `reasoning`, and `text` is the answer alone.
    `transformers` needs vLLM installed for it; a server parses its answers itself."""
    tool_call_parser: Identity[str | None] = None
    """The name of vLLM's parser for the model's tool calls, as in `vllm serve --tool-call-parser`,
    for example `hermes`: the record has them as `tool_calls`, in the shape of OpenAI's API."""
    in_process: Free[bool] = False
    """For debugging: no process of its own; a crash ends the run, too."""
    lora: Identity[str | None] = None
    """Folder of a LoRA adapter, used for every row (sets `enable_lora`; with `transformers` it
    needs peft)."""
    loras: Identity[dict[str, Annotated[str, Field(min_length=1)]]] = Field({})
    """LoRA adapters by name, `[engine.loras]` `legal = "adapters/legal"`, each a folder or a name on
    the hub; `prompt.lora` says which of them a row uses. Only with `vllm`. `max_loras`,
    `max_lora_rank` and `max_cpu_loras` follow from them, unless `engine.options` has them."""

    @property
    def model_source(self) -> str:
        """What an engine opens: ``model``, or the folder of a demo model."""
        if (folder := DEMO_MODELS.get(self.model)) is not None:
            return str(Path(__file__).parents[2] / folder)
        return self.model

    @field_validator("api_key_env")
    @classmethod
    def _names_a_variable(cls, name: str) -> str:
        if _VARIABLE.fullmatch(name) is None:  # never shown: it may be the key
            raise ValueError(
                "names an environment variable, not the key: put the key into the variable OPENAI_API_KEY, and"
                " leave this out"
            )
        return name

    @model_validator(mode="after")
    def _has_its_own_keys(self) -> EngineTable:
        if self.kind in ("vllm", "transformers", "openai-server") and not self.model:
            raise ValueError(f"model is missing: give a folder, a name on the hub, or {DEMO_MODEL}")
        is_server = self.kind == "openai-server"
        for key in ("base_url", "server"):
            if not is_server and getattr(self, key) is not None:
                raise ValueError(f'{key} is for kind = "openai-server"; kind is "{self.kind}"')
        if is_server and self.base_url is None and self.server is None:
            raise ValueError(
                "base_url is missing: give http://localhost:8000/v1, for example, or [engine.server]"
            )
        if self.base_url is not None and self.server is not None:
            raise ValueError("base_url and [engine.server] are both given; keep one")
        knows_command = self.server is None or self.server.command or self.model.endswith(".gguf")
        if not knows_command:
            raise ValueError("server.command is missing; only a .gguf file as model needs none")
        if unusable := [name for name in self.loras if not name or name != name.strip()]:
            raise ValueError(
                f"loras: {unusable[0]!r} is no name; an empty one means the model alone"
            )
        if self.loras and self.kind != "vllm":
            remedy = (
                "prompt.lora is the name that the server has for it" if is_server else "use vllm"
            )
            raise ValueError(f'loras: is for kind = "vllm"; kind is "{self.kind}": {remedy}')
        if self.loras and self.lora is not None:
            raise ValueError("lora is for every row, and loras are for some: keep one")
        if is_server and self.lora is not None:
            raise ValueError("lora: the server loads it; give the name it has there as model")
        for key in ("reasoning_parser", "tool_call_parser"):
            if is_server and getattr(self, key) is not None:
                option = key.replace("_", "-")
                raise ValueError(f"{key}: leave it out, and start the server with --{option}")
        if self.base_url is not None and not _is_base_url(self.base_url):
            raise ValueError(
                "base_url: expected http(s)://host[:port]/path; a key belongs in the environment"
                " (api_key_env)"
            )
        return self


class SamplingTable(Table):
    """Given to `vllm.SamplingParams` as they are: any of its names may be used here. A number may be a
    column: `temperature = "{{ t }}"`. `structured_outputs = { json = "schema.json" }` reads a JSON schema from that file.

    `transformers` knows those that choose and end tokens, and refuses the others.
    """

    model_config = ConfigDict(frozen=True, extra="allow", strict=True)

    temperature: Identity[
        Annotated[float, BeforeValidator(lambda v: float(v) if type(v) is int else v), Field(ge=0)]
        | Template
    ] = 0.0
    """0 is greedy."""
    max_tokens: Identity[PositiveInt | Template] = 256
    """Per choice, the prompt not counted."""
    sampling_column: Identity[str | None] = None
    """A field with a row's own parameters, which override these; one that is null does not."""

    def params(self) -> dict[str, Any]:
        """The names and values for ``vllm.SamplingParams``, but those that each row has a value of its own for."""
        given = self.model_dump(exclude={"sampling_column"})
        return {name: value for name, value in given.items() if not _is_template(value)}

    def example(self) -> dict[str, Any]:
        """As ``params``, with 1 for the values of a row's own: for checks of their names."""
        return {**self.params(), **dict.fromkeys(self.templates, 1)}

    @property
    def templates(self) -> dict[str, str]:
        """Those names, with the templates of their values."""
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
