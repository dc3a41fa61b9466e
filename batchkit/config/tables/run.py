"""The tables ``[run]``, ``[self_check]``, ``[workers]``, ``[budget]``, ``[retry]`` and ``[output]``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import (
    AfterValidator,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)

from batchkit.config.export_target import check_target
from batchkit.config.tables.base import Free, Identity, PositiveSeconds, Seconds, Table
from batchkit.config.values import split_command
from batchkit.types import Usage

_HOUR_S = 3600.0
_SHELL = re.compile(r"[<>|&;]+")
_InAndOut = Annotated[list[NonNegativeFloat], Field(min_length=2, max_length=2)]


class RunTable(Table):
    """How the run works: concurrency, timeouts and checks."""

    max_in_flight: Free[Literal["auto"] | PositiveInt] = "auto"
    """Maximum number of requests submitted to the engine at a time. `auto` adapts it to the engine."""
    render_threads: Free[int] = Field(4, ge=1, le=256)
    """Number of threads that render prompts and decode images ahead of the engine."""
    order: Free[Literal["auto", "input", "window", "global"]] = "auto"
    """The order in which rows run; results stay in the order of the input. `window`: within `look_ahead` rows, rows that
    share an image, a prefix or an adapter run together, and at the end of the input, the rows with the longest expected
    answers run first. `global`: the same over the whole input, which is read twice. `input`: the order of the input.
    `auto`: `global` if the input is small, or if its first rows show that it is worth it; otherwise `window`
    (docs/planning.md)."""
    look_ahead: Free[PositiveInt] = 1024
    """Number of rows that are read ahead and reordered with `order = "window"`."""
    deduplicate: Free[bool] = True
    """Compute equal requests once. The other rows get the same answer, without `usage` and with `duplicate_of`, the
    index of the row that was computed. Requests are equal if prompt, media, parameters and adapter are. It applies to
    greedy decoding, to requests with a seed, and to tasks without text (docs/planning.md)."""
    reuse: Free[list[str]] = Field([])
    """Folders of other runs, whose answers to equal requests are copied instead of computed, with `reused_from`. It
    applies to the same requests as `deduplicate`, if the other run had the same model and the same engine options
    (docs/planning.md)."""
    checkpoint_interval_s: Free[PositiveSeconds] = 5.0
    """Seconds between checkpoints. A checkpoint syncs the log to disk (fsync) and then updates `checkpoint.json`."""
    store_interval_s: Free[PositiveSeconds] = 10.0
    """Seconds between uploads to `output.store`. If the machine is lost, the rows of the last interval run again."""
    fail_on_error: Free[bool | NonNegativeInt | Annotated[float, Field(ge=0, lt=1)]] = False
    """When to stop the run because of failed rows. `true`: at the first failed row. An integer: when more rows than
    this have failed. A number below 1: when more than this fraction of the rows finished or in progress have failed
    (checked from 20 rows on). `false`: never."""
    check_rows: Free[NonNegativeInt] = 20
    """Number of first rows to check. The run stops if all of them fail for the same reason, or lack the same field that
    the job uses. Rows that cannot be rendered are found before the model is loaded. 0 disables the check. A run that
    already has an answer is not checked."""
    row_timeout_s: Free[PositiveSeconds] = 600.0
    """Seconds that a running row may wait for its next token, or for its prompt to be prepared. After that it is
    aborted with `timeout` and retried as `retry.attempts` allows. A row whose template takes longer fails with
    `timeout`."""
    stall_timeout_s: Free[PositiveSeconds] = 600.0
    """Seconds without a finished engine step after which the engine is restarted and its stacks are logged. It has no
    effect with `engine.in_process`, because no other process can watch the engine."""
    max_engine_restarts: Free[NonNegativeInt] = 16
    """Stop the run if the engine dies more often than this without any answer in between. 0 stops at the first death
    and tries no smaller settings."""
    max_host_gb: Free[PositiveFloat | None] = None
    """Memory limit of the engine's process (or of the server that the run started), in GB. A process that grows beyond
    the limit is restarted between rows. By default there is no limit."""
    seed: Identity[int] = 0
    """Seed of the engine and of `run.sample`."""
    sample: Free[PositiveInt | None] = None
    """Run only this number of rows, drawn at random from the input. Resuming without this key runs the remaining rows;
    resuming with a larger number adds rows."""
    metrics_port: Free[int | None] = Field(None, ge=1, le=65535)
    """Port for Prometheus metrics at `http://127.0.0.1:PORT/metrics`. Needs the extra `metrics`. By default no port is
    opened."""

    on_end: Free[str | list[str] | None] = None
    """Command to run when a run ends or is stopped, without a shell and for at most 60 seconds. Its stdin gets the
    run's final JSON line. Examples: `notify-send batchkit`, `["sh", "-c", "…"]`."""

    @field_validator("on_end")
    @classmethod
    def _is_a_command(cls, command: str | list[str] | None) -> str | list[str] | None:
        if command is not None:
            words_of(command)
        return command


class SelfCheckTable(Table):
    """Rows that are computed again alone, to find out whether the engine computes rows in a batch correctly
    (docs/self-check.md)."""

    rows: Free[NonNegativeInt | None] = None
    """Number of rows to compute again: half of them after the first few hundred answers, the others at the end. The
    default is up to 16 rows, as far as this takes at most 1 % of the run's expected time; long answers are then compared
    only at their beginning. 0 turns the check off."""
    max_different: Free[float] = Field(0.05, ge=0, le=1)
    """Stop the run if more than this fraction of the rows that were computed again have another answer, other than by a
    near tie of two tokens."""

    def is_exceeded(self, different: int, rows: int) -> bool:
        """Return whether more than ``max_different`` of the ``rows`` computed again are ``different``."""
        return different > self.max_different * rows


class WorkersTable(Table):
    """Several engines that Ray starts on GPUs of this machine or of a cluster (docs/scaling.md)."""

    count: Free[Literal["auto"] | PositiveInt | None] = None
    """Number of engines that run on Ray, each with its own GPUs. `auto`: as many as Ray has room for, while nodes join and
    leave the cluster (docs/scaling.md). By default one engine runs, without Ray."""
    min: Free[PositiveInt] = 1
    """With `count = "auto"`: rows start once this number of workers is ready. While there are fewer, the run asks Ray for
    the missing ones."""
    max: Free[PositiveInt | None] = None
    """With `count = "auto"`: maximum number of workers. The run asks Ray for all of them at once. Without it, the run asks
    for twice as many as it has."""
    ray_address: Free[str | None] = None
    """Address of the Ray cluster, as `ray.init` takes it. The default is `RAY_ADDRESS`; if that is not set either,
    batchkit starts Ray on this machine for the run."""
    gpus: Free[NonNegativeFloat | None] = None
    """GPUs per worker; a fraction shares a GPU. The default is `tensor_parallel_size` × `pipeline_parallel_size`, or 0
    if the cluster has no GPUs. It also applies without `count`: if this number covers the GPUs of all `[engines]`,
    these engines are loaded at the same time (docs/engines.md)."""
    per_gpu: Free[PositiveInt | None] = None
    """Number of engines that share each visible GPU, without Ray (docs/scaling.md). The GPU's memory is divided equally
    among them, and they compute at the same time if NVIDIA's MPS can be started. By default one engine runs."""
    cpus: Free[PositiveFloat | None] = None
    """CPU cores and OpenMP threads per worker. The default is 1 with a GPU, otherwise an equal share of all cores; with
    `count = "auto"`, the cores of the smallest node."""

    @property
    def is_auto(self) -> bool:
        """True if workers join and leave during the run."""
        return self.count == "auto"

    @property
    def least(self) -> int:
        """The number of workers that the run begins with."""
        return self.min if self.count == "auto" else self.count or 1

    @model_validator(mode="after")
    def _has_a_range(self) -> WorkersTable:
        if self.max is not None and self.max < self.min:
            raise ValueError(f"max = {self.max} is less than min = {self.min}")
        return self


class BudgetTable(Table):
    """Limits at which a run stops by itself, and the prices for `max_price`. A stopped run can be resumed."""

    max_seconds: Free[PositiveFloat | None] = None
    """Time budget of each start, in seconds, including loading. When it is used up, no new row starts, and running
    rows get 10 more seconds. The exit code is 1; the same command resumes the run."""
    max_completion_tokens: Free[PositiveInt | None] = None
    """Token budget of the run across all starts. After this number of completion tokens no new row starts; rows
    already running are finished. The exit code is 1; a larger budget resumes the run."""
    max_price: Free[PositiveFloat | None] = None
    """Price budget of the run across all starts, in the currency of the prices below. It ends the run in the same way
    as `max_completion_tokens`."""
    price_per_gpu_hour: Free[PositiveFloat | None] = None
    """Price of one GPU for one hour, including loading. The number of GPUs is `tensor_parallel_size` ×
    `pipeline_parallel_size`, or `workers.gpus`, times `workers.count`; with `"auto"`, times the number of workers at each
    moment, and `workers.min` until the first one is ready. With `workers.per_gpu`, it is the number of visible GPUs."""
    price_per_million_tokens: Free[_InAndOut | None] = None
    """Price of a million prompt tokens and of a million completion tokens, for example `[0.15, 0.60]`."""

    def price_of(self, tokens: Usage, gpu_seconds: float) -> float | None:
        """Return the price of ``tokens`` and ``gpu_seconds``, or None if the job sets no price."""
        if self.price_per_gpu_hour is None and self.price_per_million_tokens is None:
            return None
        of_prompts, of_answers = self.price_per_million_tokens or (0.0, 0.0)
        millions = tokens.prompt_tokens * of_prompts + tokens.completion_tokens * of_answers
        return millions / 1e6 + gpu_seconds / _HOUR_S * (self.price_per_gpu_hour or 0.0)

    @model_validator(mode="after")
    def _has_a_price(self) -> BudgetTable:
        prices = self.price_per_gpu_hour, self.price_per_million_tokens
        if self.max_price is not None and not any(prices):
            raise ValueError(
                "max_price needs a price: set price_per_gpu_hour, or price_per_million_tokens ="
                " [PROMPT_PRICE, COMPLETION_PRICE]"
            )
        return self


class RetryTable(Table):
    """Retries within a run."""

    attempts: Free[PositiveInt] = 2
    """Maximum number of attempts per row, including the first, for errors that may be temporary."""
    temperatures: Identity[list[Annotated[float, Field(ge=0)]] | None] = None
    """Temperature of each attempt, in order. The last value applies to all further attempts. By default all attempts
    use the row's own temperature."""
    backoff_s: Free[Seconds] = 0.0
    """Seconds before the second attempt. The delay doubles for each further attempt."""
    on_too_long: Identity[Literal["fail", "truncate-middle"]] = "fail"
    """Handling of a prompt that is too long. `fail`: the row fails. `truncate-middle`: the row's longest text is
    cut in the middle until prompt and answer fit; the record holds the number of removed tokens as
    `truncated_tokens`."""
    reask: Identity[NonNegativeInt] = 0
    """How often to ask again if `scoring.extract` finds nothing in an answer, or the answer does not satisfy
    `output.parse`. The last answer counts, unless asking again failed: then the earlier one does."""
    reask_note: Identity[str] = ""
    """Template of the text that is added to the prompt when a row is asked again. If the result is empty, the row is
    not asked again."""

    @model_validator(mode="after")
    def _says_what_to_add(self) -> RetryTable:
        if self.reask and not self.reask_note.strip():
            raise ValueError(
                "reask needs a reask_note: the text to add to the prompt when a row is asked again"
            )
        return self


class OutputTable(Table):
    """Output files."""

    dir: Free[str] = "output"
    """Folder for run folders. The run folder is `<dir>/<name>`."""
    store: Free[str | None] = None
    """Folder in an object store to which the run folder is copied while the run works: `s3://BUCKET/FOLDER`, `gs://`,
    `az://`, or a shared folder (`file:///FOLDER`). Another machine can continue the run from there
    (docs/object-stores.md). Needs the extra `store`."""
    keep: Free[list[str] | Literal["*"]] = "*"
    """Input columns to include in exports: `"*"` for all, or a list. Listed columns are also copied into each record,
    as are the columns that `[scoring]` reads."""
    prompt: Identity[bool] = False
    """Store the rendered prompt in each record. Not available with `openai-server` and `dry-run`."""
    parse: Identity[Literal["json"] | None] = None
    """`json`: each answer must be JSON, or contain one fenced JSON block, and must match the schema of
    `sampling.structured_outputs` if there is one. The record holds the value as `parsed`; its keys become columns in
    Parquet and CSV. Any other answer fails with `invalid_output`."""
    choices: Identity[bool | None] = None
    """Store all `n` answers in the row's record. The default is true, unless `[select]` picks one."""
    replay: Free[Literal["strict", "fresh"]] = "strict"
    """Handling of an interrupted row whose rollout function submits other requests than before the interruption.
    `strict`: the row fails with `rollout`. `fresh`: the new requests are run and their answers used."""
    vector_dtype: Identity[Literal["float32", "float16"]] = "float32"
    """Number format of stored vectors, for `task = "embed"`, `"token_embed"` and `"token_classify"`."""
    export: Free[list[Annotated[str, AfterValidator(check_target)]]] = Field([])
    """Exports that `run` and `retry-failed` write when all rows are done: names of formats (`"parquet"`), written into
    the run folder; files (`"answers.csv"`); addresses (`"s3://bucket/answers.parquet"`). A folder (`"answers/parts"`,
    `"s3://bucket/answers"`, `"hf://datasets/OWNER/NAME"`) gets Parquet files during the run."""
    export_every_s: Free[Seconds] = 600.0
    """Seconds between the Parquet files that a folder in `export` gets. 0: write them only at the end of the run."""


def words_of(command: str | Sequence[str]) -> list[str]:
    """Split ``command`` into words like a shell.

    Raises:
        ValueError: A quotation is not closed, the command is too long or empty, or a word is a shell operator.
    """
    words = split_command(command) if isinstance(command, str) else [*command]
    if not words or not words[0]:
        raise ValueError(
            "the command is empty; give a program with its arguments, or leave the key out"
        )
    if isinstance(command, str) and (operator := next(filter(_SHELL.fullmatch, words), None)):
        raise ValueError(
            f"no shell runs the command, so {operator!r} would be an argument of {words[0]}; write"
            f' ["sh", "-c", "…"] in the job file, or sh -c \'…\' after --notify'
        )
    return words
