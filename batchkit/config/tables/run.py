"""``[run]``, ``[retry]`` and ``[output]``."""

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

from batchkit.config.seams import ExportName
from batchkit.config.tables.base import Free, Identity, PositiveSeconds, Seconds, Table
from batchkit.config.upload import check_address
from batchkit.config.values import split_command
from batchkit.types import Usage

_HOUR_S = 3600.0
_SHELL = re.compile(r"[<>|&;]+")
_InAndOut = Annotated[list[NonNegativeFloat], Field(min_length=2, max_length=2)]


class RunTable(Table):
    """How the run behaves."""

    max_in_flight: Free[Literal["auto"] | PositiveInt] = "auto"
    """Requests handed to the engine at a time; `auto` adapts."""
    render_threads: Free[int] = Field(4, ge=1, le=256)
    """Threads that render prompts and decode images ahead of the engine."""
    look_ahead: Free[NonNegativeInt] = 1024
    """Rows read ahead, so that those that share an image or their beginning are in flight together,
    and at the end of the input those with the largest `max_tokens` come first; 0 keeps the input's
    order."""
    checkpoint_interval_s: Free[PositiveSeconds] = 5.0
    """Seconds between checkpoints (fsync, then the checkpoint)."""
    fail_on_error: Free[bool | NonNegativeInt | Annotated[float, Field(ge=0, lt=1)]] = False
    """Stop the run: `true` at the first failed row, a fraction below 1 when that share of the
    settled rows failed (from 20 rows on), a count when more than that many."""
    check_rows: Free[NonNegativeInt] = 20
    """Stop if the first so many rows fail, or all of a few, for the same reason, before the model is loaded if they
    can't be rendered; or if they lack a field that the job names. 0 never does, nor does a run that has an answer."""
    row_timeout_s: Free[PositiveSeconds] = 600.0
    """A running row that gets no token for this long, or whose prompt is not prepared within it, is
    aborted with `timeout`, and tried again as `retry.attempts` says; one whose template is not
    filled in within it fails with `timeout` at once."""
    stall_timeout_s: Free[PositiveSeconds] = 600.0
    """An engine that completes no step for this long is restarted, and its stacks are logged; not
    with `engine.in_process`, where no other process can watch it."""
    max_engine_restarts: Free[NonNegativeInt] = 16
    """Stop if the engine died more often than this without one answer in between. With 0, its first
    death stops the run; no smaller settings are tried."""
    max_host_gb: Free[PositiveFloat | None] = None
    """The engine's process, or the server that the run started, is restarted between rows when it
    grows past this."""
    workers: Free[PositiveInt | None] = None
    """The number of engines on Ray, each with its own GPUs; by default one engine and no Ray."""
    ray_address: Free[str | None] = None
    """The cluster that they run on, as `ray.init` takes it; by default `RAY_ADDRESS`, or else Ray
    is started on this machine for the run."""
    worker_gpus: Free[NonNegativeFloat | None] = None
    """GPUs of one worker, a fraction to share one; by default `tensor_parallel_size` ×
    `pipeline_parallel_size`, or none if the cluster has none. Without `workers`, too: if they are
    as many as all `[engines]` ask for, these are loaded together (docs/engines.md)."""
    worker_cpus: Free[PositiveFloat | None] = None
    """Cores of one worker, and its OpenMP threads; by default 1 with a GPU, else its share of all
    cores."""
    seed: Identity[int] = 0
    """The engine's seed, and that of `run.sample`."""
    sample: Free[PositiveInt | None] = None
    """Run only so many rows, drawn at random from those of the input; a start without it runs the
    rest, and one with a larger number adds to them."""
    max_seconds: Free[PositiveFloat | None] = None
    """Budget of each start, loading included: then no new row begins, and rows in flight get 10
    seconds more. The run ends with exit code 1, and the same command continues it."""
    max_completion_tokens: Free[PositiveInt | None] = None
    """Budget of the run, over all its starts: at so many tokens of answers no new row begins; rows
    in flight, which are paid for, are finished. Exit code 1; a larger budget continues the run."""
    max_price: Free[PositiveFloat | None] = None
    """Budget of the run, over all its starts, in the currency of the prices below; it ends like
    `max_completion_tokens`."""
    price_per_gpu_hour: Free[PositiveFloat | None] = None
    """What an hour of one GPU costs, loading included; the run pays for `tensor_parallel_size` ×
    `pipeline_parallel_size` × `data_parallel_size` of them, or `run.worker_gpus`, times
    `run.workers`."""
    price_per_million_tokens: Free[_InAndOut | None] = None
    """What a million tokens of prompts and of answers cost: `[0.15, 0.60]`."""

    metrics_port: Free[int | None] = Field(None, ge=1, le=65535)
    """Prometheus finds the run's metrics at `http://127.0.0.1:PORT/metrics`; needs the extra
    `metrics`."""

    on_end: Free[str | list[str] | None] = None
    """A command that is run when a run has ended or was stopped, with the run's last line of JSON
    on its stdin, for at most a minute; no shell reads it: `notify-send batchkit`, or `["sh", "-c",
    "…"]`."""

    @field_validator("on_end")
    @classmethod
    def _is_a_command(cls, command: str | list[str] | None) -> str | list[str] | None:
        if command is not None:
            words_of(command)
        return command

    def price_of(self, tokens: Usage, gpu_seconds: float) -> float | None:
        """What ``tokens`` and the seconds of GPUs cost; None if the job has no price."""
        if self.price_per_gpu_hour is None and self.price_per_million_tokens is None:
            return None
        of_prompts, of_answers = self.price_per_million_tokens or (0.0, 0.0)
        millions = tokens.prompt_tokens * of_prompts + tokens.completion_tokens * of_answers
        return millions / 1e6 + gpu_seconds / _HOUR_S * (self.price_per_gpu_hour or 0.0)

    def of_part(self, **update: None) -> RunTable:
        """For a run that is a part of this one, with an engine of its own: the judge's, for example.
        ``update``: further keys to leave out."""
        ours = (
            "sample",
            "max_price",
            "price_per_gpu_hour",
            "price_per_million_tokens",
            "metrics_port",
            "on_end",
        )
        return self.model_copy(update={"fail_on_error": False, **dict.fromkeys(ours), **update})

    @model_validator(mode="after")
    def _has_a_price(self) -> RunTable:
        prices = self.price_per_gpu_hour, self.price_per_million_tokens
        if self.max_price is not None and not any(prices):
            raise ValueError(
                "max_price needs a price: price_per_gpu_hour, or price_per_million_tokens ="
                " [of prompts, of answers]"
            )
        return self


class RetryTable(Table):
    """What is tried again within a run."""

    attempts: Free[PositiveInt] = 2
    """Tries of one row, including the first, for errors that may not recur."""
    temperatures: Identity[list[Annotated[float, Field(ge=0)]] | None] = None
    """Temperature by attempt; the last one applies to all further ones."""
    backoff_s: Free[Seconds] = 0.0
    """Seconds before the second try, twice as long before each further one."""
    on_too_long: Identity[Literal["fail", "truncate-middle"]] = "fail"
    """What a prompt that does not fit does: `fail` its row, or `truncate-middle`: cut the row's
    longest text in the middle until prompt and answer fit; the record says by how many tokens
    (`truncated_tokens`)."""
    reask: Identity[NonNegativeInt] = 0
    """How often a row is asked again if its answer has nothing that `scoring.extract` finds, or is
    not what `output.parse` asks for; the last answer counts, whatever it is."""
    reask_note: Identity[str] = ""
    """Template: what is added to the prompt then. A row for which it is empty is not asked
    again."""

    @model_validator(mode="after")
    def _says_what_to_add(self) -> RetryTable:
        if self.reask and not self.reask_note.strip():
            raise ValueError("reask needs a reask_note: what is added to the prompt then")
        return self


class OutputTable(Table):
    """What is written, and where."""

    dir: Free[str] = "output"
    """The run folder is `<dir>/<name>`."""
    keep: Free[list[str] | Literal["*"]] = "*"
    """The columns of the input that exports have: `"*"` for all of them, or some, which are also copied into each
    record, beside those that `[scoring]` reads."""
    prompt: Identity[bool] = False
    """Also store the rendered prompt in each record; with a server and `dry-run` there is none."""
    parse: Identity[Literal["json"] | None] = None
    """`json`: each answer has to be JSON, or have one fenced block of it, and to fit the schema of
    `sampling.structured_outputs` if there is one. Its value is `parsed` in the record, and its keys
    are columns of Parquet and CSV. Any other answer is the failure `invalid_output`."""
    choices: Identity[bool | None] = None
    """Whether a record has all `n` answers of its row; by default, unless `[select]` picks one."""
    replay: Free[Literal["strict", "fresh"]] = "strict"
    """What happens to a row whose function asks for something else than before it was interrupted:
    it fails with `rollout`, or has the new answer."""
    vector_dtype: Identity[Literal["float32", "float16"]] = "float32"
    """For `task = "embed"`, `"token_embed"` and `"token_classify"`: the type that vectors are stored with."""
    export: Free[list[ExportName]] = Field([])
    """Formats that `batchkit run` and `retry-failed` write into the run folder once all rows are done, as `batchkit export`
    names them."""
    upload: Free[Annotated[str, AfterValidator(check_address)] | None] = None
    """Where these are sent then, each with one PUT: a web address, usually a signed one. `${NAME}` in it is that environment
    variable, `{name}` the file's name, which must be there if several files are sent."""


def words_of(command: str | Sequence[str]) -> list[str]:
    """The words of ``command``, separated as a shell would.

    Raises:
        ValueError: a quotation has no end, the command is too long, there is no word, or a word is an operator
            of a shell.
    """
    words = split_command(command) if isinstance(command, str) else [*command]
    if not words or not words[0]:
        raise ValueError("names no command")
    if isinstance(command, str) and (operator := next(filter(_SHELL.fullmatch, words), None)):
        raise ValueError(
            f"no shell reads the command, so {operator!r} would be an argument of {words[0]}; write"
            f' ["sh", "-c", "…"] in the job file, or sh -c \'…\' after --notify'
        )
    return words
