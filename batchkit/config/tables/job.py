"""A whole job."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import (
    Field,
    ModelWrapValidatorHandler,
    ValidationError,
    ValidationInfo,
    model_validator,
)

from batchkit.config.answer_schema import check_schema, schema_in
from batchkit.config.shard import Shard
from batchkit.config.tables.base import Free, Identity, Table
from batchkit.config.tables.engine import EngineTable, SamplingTable
from batchkit.config.tables.input import InputTable
from batchkit.config.tables.prompt import MediaTable, PromptTable
from batchkit.config.tables.run import OutputTable, RetryTable, RunTable
from batchkit.config.tables.scoring import ScoringTable
from batchkit.config.tables.steps import RolloutTable, SelectTable, StepTable, misfits_of_steps
from batchkit.config.tables.task import PairTable, PoolingTable, TaskName, misfits
from batchkit.config.tool_definitions import why_not_forced
from batchkit.config.values import check_values
from batchkit.errors import JobError


class JobConfig(Table):
    """A whole job, with the tables and keys of a job file (``docs/job-file.md`` describes them all).

    From Python, a table is a dict::

        JobConfig(
            name="reviews",
            engine={"model": "Qwen/Qwen3-8B", "options": {"max_model_len": 8192}},
            prompt={"user": "Is this positive or negative? {{ review }}"},
            sampling={"temperature": 0.0, "max_tokens": 8},
        )

    Attributes:
        name: Names the run folder, which is ``<output.dir>/<name>``.
        task: What the model does with a row: ``generate`` (the default), ``embed``, ``classify`` or
            ``score``.
        input: Where the rows come from, if ``process`` gets none: ``path``, ``format``, ``where``,
            ``limit``; and ``id``, the field that names a row.
        vars: Names of your own for the templates.
        prompt: How a row becomes a prompt: the templates ``system``, ``user`` and ``images``.
        pair: What ``score`` compares: the templates ``query`` and ``documents``.
        media: Which files may be opened as images, and how large they may be.
        engine: The model, the engine that runs it (``kind``), and its ``options``: those of
            ``vllm.LLM``.
        sampling: The parameters of ``vllm.SamplingParams``.
        pooling: The parameters of ``vllm.PoolingParams``, for the other tasks.
        run: How the run behaves: ``workers``, ``seed``, ``fail_on_error``, timeouts.
        retry: What is tried again within a run: ``attempts``, ``on_too_long``, ``reask``.
        output: What is written, and where: ``dir``, and ``keep``, the fields that a record keeps.
        scoring: How answers are scored: ``extract``, ``scorers``, ``reference``.
        steps: Several generations for a row, one after another, each with its ``name`` and ``prompt``.
        rollout: … or a ``function`` that asks for them.
        select: Which of ``sampling.n`` answers is the row's.
        engines: Further models, by name, for steps that don't use ``engine``.
    """

    name: Free[str] = Field(
        "batch",
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$",
        description="Names the run folder: letters, digits, `.`, `_`, `-`.",
    )
    task: Identity[TaskName] = Field(
        "generate",
        description="What the model does with a row: `generate` text; or vLLM's pooling tasks: `embed` gives a"
        " vector, `classify` a label and the probabilities of the model's classes, `score` a number for"
        " each document of `[pair]`.",
    )
    input: InputTable = InputTable()
    vars: Identity[dict[str, Any]] = Field({}, description="Free names for the templates.")
    prompt: PromptTable = PromptTable()
    pair: PairTable = PairTable()
    media: MediaTable = MediaTable()
    engine: EngineTable
    sampling: SamplingTable = SamplingTable()
    pooling: PoolingTable = PoolingTable()
    run: RunTable = RunTable()
    retry: RetryTable = RetryTable()
    output: OutputTable = OutputTable()
    scoring: Free[ScoringTable] = ScoringTable()
    steps: Identity[list[StepTable]] = Field(
        [], description="Several generations for a row, one after another."
    )
    rollout: RolloutTable | None = Field(None, description="… or a function that asks for them.")
    select: SelectTable = SelectTable()
    engines: Identity[dict[str, EngineTable]] = Field(
        {},
        description="Further models for steps: `[engines.NAME]`, each with the keys of `[engine]`.",
    )

    @property
    def folder(self) -> Path:
        """The run folder."""
        return Path(self.output.dir) / self.name

    @property
    def gpus(self) -> float:
        """How many GPUs the run holds: those of one worker, times its workers."""
        of_engine = max(self.with_engine(name).engine_gpus for name in self.engine_names)
        of_worker = self.run.worker_gpus
        return (of_engine if of_worker is None else of_worker) * (self.run.workers or 1)

    @property
    def engine_gpus(self) -> int:
        """How many GPUs ``engine`` asks for."""
        sizes = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
        given = [self.engine.options.get(size) for size in sizes]
        return math.prod(size for size in given if isinstance(size, int))

    def params(self) -> dict[str, Any]:
        """The parameters of a request, by the names of ``vllm.SamplingParams``, or of
        ``vllm.PoolingParams`` if the task is not ``generate``."""
        return self.sampling.params() if self.task == "generate" else self.pooling.params()

    @property
    def has_several(self) -> bool:
        """True if a row may have several generations."""
        return bool(self.steps) or self.rollout is not None

    @property
    def parsing(self) -> set[str]:
        """The steps whose answers have to be JSON; "" if those of a job without steps have to."""
        of_steps = {step.name for step in self.steps if step.parse is not None}
        return of_steps if self.output.parse is None else {*of_steps, ""}

    @property
    def keeps_choices(self) -> bool:
        """True if a record has all ``n`` answers of its row."""
        return self.select.by is None if self.output.choices is None else self.output.choices

    @property
    def engine_names(self) -> list[str]:
        """The engines that a row's generations may ask, in the order of the steps: names of
        ``engines``, and "" for ``engine``."""
        if self.rollout is not None:
            return ["", *self.engines]
        return list(dict.fromkeys(step.engine for step in self.steps)) or [""]

    def with_engine(self, name: str) -> JobConfig:
        """The job with that one of ``engines`` as its ``engine``; "" is ``engine`` itself."""
        return self.model_copy(update={"engine": self.engines[name]}) if name else self

    def of_step(self, step: StepTable) -> JobConfig:
        """A job whose rows have one generation: that of ``step``."""
        given = {name: getattr(step.sampling, name) for name in step.sampling.model_fields_set}
        kwargs = {**self.prompt.chat_template_kwargs, **step.prompt.chat_template_kwargs}
        prompt = step.prompt.model_copy(update={"chat_template_kwargs": kwargs})
        return self.model_copy(
            update={
                "steps": [],
                "select": SelectTable(),
                "prompt": prompt,
                "sampling": self.sampling.model_copy(update=given),
                "engine": self.with_engine(step.engine).engine,
                "output": self.output.model_copy(update={"parse": step.parse}),
                "scoring": step.scoring,
            }
        )

    def of_each_step(self) -> Iterator[tuple[str, JobConfig]]:
        """What precedes the keys of each step in names (``steps.draft.``), and ``of_step``; without
        steps the job itself, whose keys nothing precedes."""
        for step in self.steps:
            yield f"steps.{step.name}.", self.of_step(step)
        if not self.steps:
            yield "", self

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
    def _names_files_below_root(self) -> JobConfig:
        object.__setattr__(self, "input", self.input.below(self.media.root))  # it is frozen
        return self

    @model_validator(mode="after")
    def _sends_texts_as_they_are(self) -> JobConfig:
        """As ``vllm.LLM.embed`` does; its server applies the chat template to images."""
        chat_is_meant = "chat" in self.prompt.model_fields_set or self.prompt.images
        if self.task != "generate" and not chat_is_meant:
            prompt = self.prompt.model_copy(update={"chat": False})
            object.__setattr__(self, "prompt", prompt)  # it is frozen
        return self

    @model_validator(mode="after")
    def _fits_its_task(self) -> JobConfig:
        if found := [*misfits(self)]:
            raise ValueError("\n".join(found))
        return self

    @model_validator(mode="after")
    def _fits_its_steps(self) -> JobConfig:
        if found := [*misfits_of_steps(self)]:
            raise ValueError("\n".join(found))
        return self

    @model_validator(mode="after")
    def _can_force_calls(self) -> JobConfig:
        for place, job in self.of_each_step():
            engine, choice = job.engine, job.prompt.tool_choice
            if reason := why_not_forced(choice, engine.kind, engine.tool_call_parser):
                raise ValueError(f"{place}prompt.tool_choice: {reason}")
        return self

    @model_validator(mode="after")
    def _looks_for_what_it_asks_for(self) -> JobConfig:
        jobs = [job for _, job in self.of_each_step()]
        extracts = {part.extract for job in jobs for part in job.scoring.parts}
        parses = any(job.output.parse is not None for job in jobs)
        if self.retry.reask and extracts <= {"text", None} and not parses:
            found, parse = (
                ("extract", "parse") if self.steps else ("scoring.extract", "output.parse")
            )
            of_step = " in one of [[steps]]" if self.steps else ""
            raise ValueError(
                f'retry.reask: no answer lacks what {found} = "text" looks for; say what to look for,'
                f' as extract = "final-answer"{of_step}, or set {parse}'
            )
        return self

    @model_validator(mode="after")
    def _knows_its_gpus(self) -> JobConfig:
        engines = {"engine": self.engine} | {f"engines.{n}": of for n, of in self.engines.items()}
        for name, engine in engines.items():
            if self.run.price_per_gpu_hour is not None and engine.base_url is not None:
                raise ValueError(
                    f"run.price_per_gpu_hour: how many GPUs are behind {name}.base_url is not known;"
                    " give run.price_per_million_tokens"
                )
        return self

    @model_validator(mode="after")
    def _can_check_answers(self) -> JobConfig:
        for place, job in self.of_each_step():
            if job.output.parse is not None:
                check_schema(schema_in(job.sampling.params()), place)
        return self

    @model_validator(mode="wrap")
    @classmethod
    def _with_problems_in_plain_words(
        cls, tables: Any, handler: ModelWrapValidatorHandler[JobConfig], info: ValidationInfo
    ) -> JobConfig:
        """Raises JobError with one line per problem: key, what was found, what was expected.

        It is the last one here, since it only sees the problems that those before it find.
        """
        try:
            return handler(tables)
        except ValidationError as error:
            from batchkit.config.problems import problems_in  # it knows all tables

            found = problems_in(error.errors(include_url=False), tables)
            problems = [line for problem in found for line in problem.splitlines()]
            count = f"{len(problems)} problem" + ("s" if len(problems) > 1 else "")
            lines = "\n".join(f"  {problem}" for problem in problems)
            origin = (info.context or {}).get("origin", "JobConfig")
            raise JobError(f"{origin}: {count}\n{lines}") from None
