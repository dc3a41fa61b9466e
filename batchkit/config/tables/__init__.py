"""The job file: its tables and their defaults.

Every default lives here, once. ``docs/job-file.md`` is generated from these classes.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)

from batchkit.config.server_command import check_command
from batchkit.config.shard import Shard, parse_shard
from batchkit.config.values import check_values, reason_of

Format = Literal["auto", "jsonl", "json", "csv", "parquet", "openai-batch", "prompts"]
Extract = Literal["text", "regex", "json", "number", "final-answer", "code", "reward"]
ScorerName = Literal[
    "f1", "em", "rouge-l", "sacrebleu", "numeric", "choice", "chart", "judge", "reward"
]
EngineKind = Literal["vllm", "transformers", "openai-server", "dry-run"]


class Table(BaseModel):
    """One table of the job file: frozen, unknown keys refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class InputTable(Table):
    """Where the rows come from."""

    path: str | None = Field(
        None,
        description="File, glob, or fsspec URL (`s3://`, `hf://`); relative paths are looked up"
        " beside the job file, then in the working directory. May use `{{ name }}` from `[vars]`. A"
        " URL's signature or password is used and not written down: to go on from the run folder"
        " alone, give it again with `--set input.path=…`.",
    )
    format: Format = Field("auto", description="`auto` goes by the file's name.")
    records: str | None = Field(
        None, description="JSON only: the key (dotted) under which the list of rows stands."
    )
    id: str | None = Field(
        None,
        description="The field that names a row; left out, its index in the input. A row that lacks it"
        " fails, and is named `no-id:` and its index. Rows that need no id are named so too where they"
        " are read together with OpenAI batch files.",
    )
    where: dict[str, Any] = Field(
        {}, description="Keep only rows whose field equals the value, or is in the list."
    )
    limit: PositiveInt | None = Field(
        None, description="Only the first rows, counted after `where`."
    )
    shard: str | None = Field(
        None,
        description="Only this share of those rows, as `0/4` to `3/4`: told by a hash of the row's"
        " id (of its index, where `id` is left out). `run --shard` sets it, and the run folder's name"
        " with it.",
    )

    @field_validator("shard")
    @classmethod
    def _names_a_shard(cls, text: str | None) -> str | None:
        return None if text is None else str(parse_shard(text))


class PromptTable(Table):
    """How a row becomes a prompt. Templates are Jinja2; an unknown name fails the row."""

    system: str | None = Field(None, description="System message.")
    system_file: str | None = Field(None, description="… or a file that holds it.")
    user: str | None = Field(None, description="User message.")
    user_file: str | None = Field(None, description="… or a file that holds it.")
    images: list[str] = Field(
        [],
        description="One template per image: a path under `media.root`, a data: URI, an http(s)"
        " URL, or `{{ column }}` alone for a column of bytes (or a list of images).",
    )
    captions: list[str] = Field([], description="A text before each image, one per image.")
    texts: dict[str, str] = Field(
        {},
        description="Text files, by the name that the templates know them by: one path template"
        " each, under `media.root`. A file that is missing fails its row.",
    )
    order: Literal["images-first", "text-first"] = Field(
        "images-first", description="What stands first in the user message."
    )
    chat: bool = Field(
        True, description="`false` sends `user` as it is, without the model's chat template."
    )
    chat_template_kwargs: dict[str, Any] = Field(
        {}, description="Names for the model's chat template, as `enable_thinking = false`."
    )

    @model_validator(mode="after")
    def _coherent(self) -> PromptTable:
        for name in ("system", "user"):
            if getattr(self, name) is not None and getattr(self, f"{name}_file") is not None:
                raise ValueError(f"{name} and {name}_file are both given; keep one")
        if self.captions and len(self.captions) != len(self.images):
            raise ValueError(
                f"{len(self.captions)} captions for {len(self.images)} images;"
                " give one per image or none"
            )
        if not self.chat and (self.system or self.system_file or self.images):
            raise ValueError("chat = false sends plain text: leave out system and images")
        return self


class MediaTable(Table):
    """What may be opened as an image, and how large it may be."""

    root: str = Field(
        ".",
        description="Folder, or fsspec URL (`s3://bucket/images`, `gs://`, `hf://`), that images and"
        " texts are looked up in; what lies outside is refused, a folder's symbolic links resolved."
        " A store's keys and passwords stand in the environment.",
    )
    allow_urls: list[str] = Field(
        [],
        description="Hosts that images may be fetched from, as `host` (ports 80 and 443) or"
        " `host:port`. A name must resolve to public addresses; an address written out is allowed"
        " as it stands.",
    )
    max_bytes: PositiveInt = Field(64 * 2**20, description="Largest file or download.")
    max_pixels: PositiveInt = Field(
        1605632, description="Larger images are downscaled to it, their aspect kept."
    )
    min_pixels: NonNegativeInt = Field(0, description="Smaller images are upscaled to it.")
    factor: PositiveInt | None = Field(
        None,
        description="Both sides become multiples of it, by the rule of Qwen-VL's own `smart_resize`:"
        " 32 for Qwen3-VL, 28 for Qwen2-VL and Qwen2.5-VL. Then the model sees the very size that"
        " its processor would have made of the whole image.",
    )
    max_decode_bytes: PositiveInt = Field(
        2**30, description="An image that would need more memory while decoding is refused."
    )
    max_memory_bytes: PositiveInt = Field(
        2**30,
        description="Decoded pixels held at a time, from opening an image to its row's record.",
    )

    @model_validator(mode="after")
    def _ordered(self) -> MediaTable:
        if self.min_pixels > self.max_pixels:
            raise ValueError(f"min_pixels {self.min_pixels} is over max_pixels {self.max_pixels}")
        return self


class ServerTable(Table):
    """With `openai-server`, instead of `engine.base_url`: a server that starts and ends with the run.

    The table may be empty where `engine.model` is a `.gguf` file: then it is `llama-server` with room
    for `engine.options.max_num_seqs` requests of `max_model_len` tokens each, and as many threads as
    `OMP_NUM_THREADS` says, or as there are cores.
    """

    command: str | None = Field(
        None,
        description="What starts it, as `llama-server -m model.gguf -c 32768 -np 8 --port {port}` (8"
        " requests at a time share that context: 4096 tokens each); no shell reads it. `{port}` becomes"
        " a port that is free, `{host}` 127.0.0.1. The server has the run's environment: keys stand"
        " there, and one in the command is refused.",
    )
    health: str = Field(
        "/health",
        pattern="^/",
        description="The path that answers once it is ready; a server that has none is asked for its"
        " models.",
    )
    start_timeout_s: PositiveFloat = Field(
        600.0,
        description="Seconds until it must be ready; then the run stops, with its last words.",
    )

    @field_validator("command")
    @classmethod
    def _can_be_started(cls, command: str | None) -> str | None:
        if command is not None:
            check_command(command)
        return command


class EngineTable(Table):
    """The model, and what runs it."""

    kind: EngineKind = Field(
        "vllm",
        description="`transformers` runs the model without vLLM, in static batches: slower;"
        " `openai-server` sends every row to a server that speaks OpenAI's API; `dry-run` answers at"
        " once without a model.",
    )
    model: str = Field(
        "",
        description="A folder, or a name on the Hugging Face hub; with `openai-server`, the name"
        " that the server knows it by, or a `.gguf` file for `[engine.server]`.",
    )
    base_url: str | None = Field(
        None,
        description="With `openai-server`: where the API of one that runs already begins, as"
        " `http://localhost:8000/v1`.",
    )
    server: ServerTable | None = Field(
        None, description="… or the table `[engine.server]`: one that the run starts."
    )
    api_key_env: str = Field(
        "OPENAI_API_KEY",
        min_length=1,
        description="With `openai-server`: the name of the environment variable that holds its key,"
        " if it wants one.",
    )
    max_answer_bytes: PositiveInt = Field(
        32 * 2**20,
        description="With `openai-server`: how many bytes of an answer are read, unpacked if it comes"
        " compressed. A row whose answer has more fails with `server`, and is not asked again. Text"
        " of 100,000 tokens has less than 1 MB, with 20 logprobs for each token some 100 MB.",
    )
    options: dict[str, Any] = Field(
        {},
        description="Given to `vllm.LLM` as they are; vLLM's own classes check them first. With"
        " `transformers`: `max_num_seqs`, rows in a batch (8), halved while memory runs out;"
        " `shrink_on_oom = false` restarts the engine instead; `dtype`, `device_map`,"
        " `attn_implementation`, `max_model_len`, `revision`, `trust_remote_code`, `chat_template`,"
        " `mm_processor_kwargs`. With"
        " `openai-server`: `max_num_seqs`, requests at a time (32); `give_up_s`, how long the server"
        " may be away before the run stops (300); `max_model_len`, tokens that prompt and answer of a"
        " request may have together, where the server does not tell; `extra_body`, fields laid over"
        " each request's body; `drop`, names left out of it.",
    )
    in_process: bool = Field(
        False, description="For debugging: no process of its own; a crash takes the run with it."
    )
    lora: str | None = Field(
        None,
        description="Folder of a LoRA adapter, used for every row (sets `enable_lora`; with"
        " `transformers` it needs peft).",
    )

    @property
    def is_gguf(self) -> bool:
        """True if the model is a file for llama.cpp."""
        return self.model.endswith(".gguf")

    @model_validator(mode="after")
    def _has_model(self) -> EngineTable:
        if self.kind != "dry-run" and not self.model:
            raise ValueError("model is missing: give a folder or a name on the hub")
        return self

    @model_validator(mode="after")
    def _has_its_own_keys(self) -> EngineTable:
        is_server = self.kind == "openai-server"
        if not is_server and self.base_url is not None:
            raise ValueError(f'base_url is for kind = "openai-server"; kind is "{self.kind}"')
        if not is_server and self.server is not None:
            raise ValueError(f'server is for kind = "openai-server"; kind is "{self.kind}"')
        if is_server and self.base_url is None and self.server is None:
            raise ValueError(
                "base_url is missing: where its API begins, as http://localhost:8000/v1; or let the"
                " run start a server, with a table [engine.server]"
            )
        if self.base_url is not None and self.server is not None:
            raise ValueError(
                "base_url and [engine.server] are both given: a server that runs already has a"
                " base_url, one that the run starts is told its port; keep one"
            )
        if self.server is not None and self.server.command is None and not self.is_gguf:
            raise ValueError(
                "server.command is missing: what starts it, as llama-server -m model.gguf --port"
                " {port}; only for a model that is a .gguf file batchkit knows a command itself"
            )
        if is_server and self.lora is not None:
            raise ValueError("lora: the server loads it; give the name it has there as model")
        if self.base_url is not None and not _is_base_url(self.base_url):
            raise ValueError(
                "base_url: expected http(s)://host[:port]/path and nothing more; a key or password"
                " stands in the environment (api_key_env), not here"
            )
        return self


class SamplingTable(Table):
    """Given to `vllm.SamplingParams` as they are: any of its names may stand here.

    `transformers` knows those that choose and end tokens, and refuses the others.
    """

    model_config = ConfigDict(frozen=True, extra="allow", strict=True)

    temperature: Annotated[float, BeforeValidator(lambda v: float(v) if type(v) is int else v)] = (
        Field(0.0, ge=0, description="0 is greedy.")
    )
    max_tokens: PositiveInt = Field(256, description="Per choice, the prompt not counted.")
    sampling_column: str | None = Field(
        None, description="A field that holds a row's own parameters, laid over these."
    )

    def params(self) -> dict[str, Any]:
        """The names and values for ``vllm.SamplingParams``."""
        return self.model_dump(exclude={"sampling_column"})


class RunTable(Table):
    """How the run behaves."""

    max_in_flight: Literal["auto"] | PositiveInt = Field(
        "auto", description="Requests handed to the engine at a time; `auto` adapts."
    )
    render_threads: int = Field(
        4,
        ge=1,
        le=256,
        description="Threads that render prompts and decode images ahead of the engine.",
    )
    look_ahead: NonNegativeInt = Field(
        1024,
        description="Rows read ahead, so that those that share an image or their beginning are in"
        " flight together, and at the end of the input those with the largest `max_tokens` come"
        " first; 0 keeps the input's order.",
    )
    checkpoint_interval_s: PositiveFloat = Field(
        5.0, description="Seconds between checkpoints (fsync, then the checkpoint)."
    )
    fail_on_error: bool | NonNegativeInt | Annotated[float, Field(ge=0, lt=1)] = Field(
        False,
        description="Stop the run: `true` at the first failed row, a fraction below 1 when that"
        " share of the settled rows failed (from 20 rows on), a count when more than that many.",
    )
    row_timeout_s: PositiveFloat = Field(
        600.0,
        description="A running row that gets no token for this long, or whose prompt is not prepared"
        " within it, is aborted with `timeout`, and tried again as `retry.attempts` says; one whose"
        " template is not filled in within it fails with `timeout` at once.",
    )
    stall_timeout_s: PositiveFloat = Field(
        600.0,
        description="An engine that ends no step for this long is restarted, its stacks logged; not"
        " with `engine.in_process`, which leaves nobody to watch.",
    )
    max_engine_restarts: PositiveInt = Field(
        16, description="Stop when the engine died more often without one answer in between."
    )
    max_host_gb: PositiveFloat | None = Field(
        None,
        description="The engine's process, or the server that the run started, is restarted between"
        " rows when it grows past this.",
    )
    workers: PositiveInt | None = Field(
        None,
        description="So many engines on Ray, each with its own GPUs; left out, one engine and no Ray.",
    )
    ray_address: str | None = Field(
        None,
        description="The cluster that they run on, as `ray.init` takes it; left out, `RAY_ADDRESS`, or"
        " else Ray is started on this machine for the run.",
    )
    worker_gpus: NonNegativeFloat | None = Field(
        None,
        description="GPUs of one worker, a fraction to share one; left out, `tensor_parallel_size` ×"
        " `pipeline_parallel_size`, or none where the cluster has none.",
    )
    worker_cpus: PositiveFloat | None = Field(
        None,
        description="Cores of one worker, and its OpenMP threads; left out, 1 beside a GPU, else its"
        " share of all cores.",
    )
    seed: int = Field(0, description="The engine's seed.")


class RetryTable(Table):
    """What is tried again within a run."""

    attempts: PositiveInt = Field(
        2, description="Tries of one row, the first counted, for errors worth repeating."
    )
    temperatures: list[Annotated[float, Field(ge=0)]] | None = Field(
        None, description="Temperature by attempt; the last one serves for all further ones."
    )
    backoff_s: NonNegativeFloat = Field(
        0.0, description="Seconds before the second try, twice as long before each further one."
    )
    on_too_long: Literal["fail", "truncate-middle"] = Field(
        "fail",
        description="What a prompt that does not fit does: `fail` its row, or `truncate-middle`: cut"
        " the row's longest text in the middle until prompt and answer fit; the record says by how"
        " many tokens (`truncated_tokens`).",
    )
    reask: NonNegativeInt = Field(
        0,
        description="How often a row is asked again whose answer holds nothing that"
        " `scoring.extract` finds; the last answer counts, whatever it holds.",
    )
    reask_note: str = Field(
        "",
        description="Template: what is added to the prompt then. A row for which it comes out empty"
        " is not asked again.",
    )

    @model_validator(mode="after")
    def _says_what_to_add(self) -> RetryTable:
        if self.reask and not self.reask_note.strip():
            raise ValueError("reask needs a reask_note: what is added to the prompt then")
        return self


class OutputTable(Table):
    """What is written, and where."""

    dir: str = Field("output", description="The run folder is `<dir>/<name>`.")
    keep: list[str] = Field(
        [],
        description="Fields of the row copied into its record, beside those that `[scoring]` reads.",
    )
    prompt: bool = Field(False, description="Also store the rendered prompt in each record.")


class JudgeTable(Table):
    """A second model that scores the answers, for the scorer `judge`.

    Its templates see the row's fields, and `prediction`, `reference` and `text` besides.
    """

    engine: EngineTable
    sampling: SamplingTable = SamplingTable()
    prompt: PromptTable = PromptTable()
    max_score: PositiveFloat = Field(100.0, description="The best score that it can give.")


class ScoringRule(Table):
    """Rows that are scored otherwise: what stands here counts before `[scoring]` itself."""

    where: dict[str, Any] = Field(
        {}, description="Which rows: as `input.where`. The first rule that fits a row is its rule."
    )
    extract: Extract | None = Field(None, description="As `scoring.extract`.")
    pattern: str | None = Field(None, description="As `scoring.pattern`.")
    key: str | None = Field(None, description="As `scoring.key`.")
    choices: list[str] | None = Field(None, description="As `scoring.choices`.")
    reference: str | None = Field(None, description="As `scoring.reference`.")
    scorers: list[ScorerName] | None = Field(None, description="As `scoring.scorers`.")
    tolerance: NonNegativeFloat | None = Field(None, description="As `scoring.tolerance`.")


class ScoringTable(Table):
    """How answers are scored: as rows finish, and again by `batchkit score`."""

    extract: Extract = Field(
        "text",
        description="What the prediction is: the whole `text`, the first group of a `regex`, a `json`"
        " value, the last `number`, what follows `[Final Answer]:`, the last block of `code`, or a"
        " `reward` from 0 to 10.",
    )
    pattern: str | None = Field(
        None, description="For `regex`: the last match counts, its first group if it has one."
    )
    key: str | None = Field(None, description="For `json`: the key (dotted) of the value.")
    choices: list[str] = Field([], description="For `choice`: the answers to choose from.")
    reference: str | None = Field(None, description="The field that holds the right answer.")
    reference_run: str | None = Field(
        None, description="A run whose predictions, by id, are the right answers instead."
    )
    scorers: list[ScorerName] = Field(
        [], description="What is computed of prediction and reference; docs/scoring.md."
    )
    group_by: str | None = Field(None, description="The field by whose values the table is cut.")
    mode: Literal["official", "fixed"] = Field(
        "official",
        description="`official` equals RealHiTBench's own code to the digit; `fixed` corrects its quirks:"
        " docs/scoring.md lists them.",
    )
    tolerance: NonNegativeFloat = Field(
        0.01, description="For `numeric`: how far off, as a share of the reference."
    )
    default_reward: float | None = Field(
        None, description="The score of an answer without a number; left out, it is unscored."
    )
    allow_code: bool = Field(
        False, description="For `chart`: run the code that the model wrote, in a sandbox."
    )
    table: str | None = Field(
        None,
        description="For `chart`: template of the path, under `media.root`, of the row's table. It is"
        " opened after the check: nobody else may be able to write below `media.root`.",
    )
    chart_type: str = Field(
        "{{ SubQType }}",
        description="For `chart`: template; its first word is LineChart, BarChart, ScatterChart or"
        " PieChart.",
    )
    judge: JudgeTable | None = Field(None, description="For `judge`: the model that judges.")
    rules: list[ScoringRule] = Field([], description="Rows that are scored otherwise.")

    @property
    def parts(self) -> list[ScoringTable | ScoringRule]:
        """The table itself, then its rules in the order of the file."""
        return [self, *self.rules]

    @property
    def is_on(self) -> bool:
        """True if anything has to be extracted from the answers."""
        return bool(self.scorers or self.rules) or self.extract != "text"

    @model_validator(mode="after")
    def _coherent(self) -> ScoringTable:
        parts = self.parts
        used = {name for part in parts for name in part.scorers or ()}
        laid = [(part.extract or self.extract, part.pattern or self.pattern) for part in parts]
        if any(extract == "regex" and pattern is None for extract, pattern in laid):
            raise ValueError('extract = "regex" needs a pattern, here or in each rule that has it')
        for place, part in enumerate(parts):
            if part.pattern is not None:
                key = f"rules.{place - 1}.pattern" if place else "pattern"
                _check_pattern(key, part.pattern)
        if "choice" in used and not any(part.choices for part in parts):
            raise ValueError("the scorer choice needs choices")
        return self


class JobConfig(Table):
    """A whole job. From Python: ``JobConfig(engine={"model": "…"})``."""

    name: str = Field(
        "batch",
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$",
        description="Names the run folder: letters, digits, `.`, `_`, `-`.",
    )
    input: InputTable = InputTable()
    vars: dict[str, Any] = Field({}, description="Free names for the templates.")
    prompt: PromptTable = PromptTable()
    media: MediaTable = MediaTable()
    engine: EngineTable
    sampling: SamplingTable = SamplingTable()
    run: RunTable = RunTable()
    retry: RetryTable = RetryTable()
    output: OutputTable = OutputTable()
    scoring: ScoringTable = ScoringTable()

    @property
    def folder(self) -> Path:
        """The run folder."""
        return Path(self.output.dir) / self.name

    def of_shard(self, shard: Shard) -> JobConfig:
        """The job of one shard, with its own run folder: ``<name>.shard-<number>-of-<of>``."""
        return self.model_copy(
            update={
                "name": f"{self.name}.shard-{shard.number}-of-{shard.of}",
                "input": self.input.model_copy(update={"shard": str(shard)}),
            }
        )

    @model_validator(mode="before")
    @classmethod
    def _can_be_written_down(cls, tables: Any) -> Any:
        if isinstance(tables, dict):
            check_values(tables)
        return tables

    @model_validator(mode="after")
    def _looks_for_what_it_asks_for(self) -> JobConfig:
        extracts = {self.scoring.extract, *(rule.extract for rule in self.scoring.rules)}
        if self.retry.reask and extracts <= {"text", None}:
            raise ValueError(
                'retry.reask: no answer lacks what scoring.extract = "text" looks for; say what to'
                ' look for, as extract = "final-answer"'
            )
        return self


def _check_pattern(key: str, pattern: str) -> None:
    try:
        re.compile(pattern)
    except (re.error, RecursionError, MemoryError, OverflowError, ValueError) as error:
        shown = repr(pattern if len(pattern) <= 80 else f"{pattern[:77]}…")
        raise ValueError(f"{key} {shown} is no regular expression: {reason_of(error)}") from None


def _is_base_url(url: str) -> bool:
    try:
        parts = urlsplit(url)
        parts.port  # noqa: B018  (raises if it is not a number)
    except ValueError:
        return False
    is_plain = not (parts.query or parts.fragment or parts.username or parts.password)
    return parts.scheme in ("http", "https") and bool(parts.hostname) and is_plain
