"""The complete job: all tables of a job file."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import (
    Field,
    ModelWrapValidatorHandler,
    PrivateAttr,
    ValidationError,
    ValidationInfo,
    model_validator,
)

from batchkit.config.problems import problems_in
from batchkit.config.shard import Shard
from batchkit.config.tables.base import Free, Identity, Table
from batchkit.config.tables.engine import EngineTable, SamplingTable
from batchkit.config.tables.input import InputTable
from batchkit.config.tables.misfits import misfits, names_of_other_tools
from batchkit.config.tables.parameters import Parameters
from batchkit.config.tables.prompt import MediaTable, PromptTable
from batchkit.config.tables.run import (
    BudgetTable,
    OutputTable,
    RetryTable,
    RunTable,
    SelfCheckTable,
    WorkersTable,
)
from batchkit.config.tables.scoring import ScoringTable
from batchkit.config.tables.steps import RolloutTable, SelectTable, StepTable
from batchkit.config.tables.task import (
    GENERATING,
    WITH_VECTORS,
    PairTable,
    PoolingTable,
    SpeechTable,
    TaskName,
)
from batchkit.config.values import check_values
from batchkit.errors import JobError

_TRIAL = ".dry-run"


class JobConfig(Table):
    """A complete job with all tables and keys of a job file (see ``docs/job-file.md``).

    From Python, pass each table as a dict::

        JobConfig(
            name="reviews",
            engine={"model": "Qwen/Qwen3-8B", "options": {"max_model_len": 8192}},
            prompt={"user": "Is this positive or negative? {{ review }}"},
            sampling={"temperature": 0.0, "max_tokens": 8},
        )
    """

    if TYPE_CHECKING:  # tables are given as dicts

        def __init__(self, **tables: Any) -> None: ...

    name: Free[str] = Field("batch", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Name of the job and of its run folder."""
    task: Identity[TaskName] = "generate"
    """Task of the model for each row. `generate` writes text. `transcribe` writes the speech of a recording.
    `embed` gives one vector, `token_embed` one per prompt token. `classify` gives a label and the class
    probabilities, `token_classify` the same per prompt token, and named entities. `score` gives a number per document
    of `[pair]`. Lines of an OpenAI batch file use the task of their URL if the model supports it."""
    input: InputTable = InputTable()
    vars: Identity[dict[str, Any]] = Field({})
    """Free variables for the templates."""
    prompt: PromptTable = PromptTable()
    pair: PairTable = PairTable()
    media: MediaTable = MediaTable()
    engine: EngineTable
    sampling: SamplingTable = SamplingTable()
    pooling: PoolingTable = PoolingTable()
    speech: SpeechTable = SpeechTable()
    run: RunTable = RunTable()
    self_check: SelfCheckTable = SelfCheckTable()
    workers: WorkersTable = WorkersTable()
    budget: BudgetTable = BudgetTable()
    retry: RetryTable = RetryTable()
    output: OutputTable = OutputTable()
    scoring: Free[ScoringTable] = ScoringTable()
    steps: Identity[list[StepTable]] = Field([])
    """Several generations per row, one after another. By default a row has one generation."""
    rollout: RolloutTable | None = None
    """A Python function that submits a row's generations, instead of `[prompt]` and `[[steps]]`."""
    select: SelectTable = SelectTable()
    engines: Identity[dict[str, EngineTable]] = Field({})
    """Further models for steps: `[engines.NAME]`, each with the keys of `[engine]`."""

    _made_in: str = PrivateAttr("")

    @property
    def made_in(self) -> str:
        """Path of the job file. For a job made in Python: the working directory. For a job read from a run folder:
        ""."""
        return self._made_in

    def as_made_in(self, place: str) -> JobConfig:
        job = self.model_copy()
        job._made_in = place
        return job

    def with_keys(self, **changes: Any) -> JobConfig:
        """Return a copy with other values, which are not checked. For a table, a dict has the keys to change in it."""
        for name, value in changes.items():
            if isinstance(value, dict) and isinstance(table := getattr(self, name), Table):
                changes[name] = table.model_copy(update=value)
        return self.model_copy(update=changes)

    @property
    def is_dry(self) -> bool:
        """True if any engine of the job is ``dry-run``."""
        return any(self.with_engine(name).engine.kind == "dry-run" for name in self.engine_names)

    @property
    def is_trial(self) -> bool:
        """True if this is a ``--dry-run`` copy of a job. Each run of such a copy replaces the run folder of the
        previous one."""
        return self.is_dry and self.name.endswith(_TRIAL)

    def as_trial(self) -> JobConfig:
        """Return a copy with ``.dry-run`` added to its name. Its run folder differs, so trial records never mix with
        real answers."""
        return self.with_keys(name=f"{self.name}{_TRIAL}")

    def as_part(self, **changes: Any) -> JobConfig:
        """Return a copy for a part of this run that has its own engine, for example a trial. Budgets, the self-check, the
        random sample, the command at the end, the metrics port, the store and ``fail_on_error`` are left out, because they
        belong to the whole run. All answers are computed. ``changes``: other values, as for ``with_keys``."""
        of_whole = dict.fromkeys(("sample", "metrics_port", "on_end"))
        part = self.with_keys(
            run={**of_whole, "fail_on_error": False, "deduplicate": False, "reuse": []},
            budget=BudgetTable(),
            self_check=SelfCheckTable(rows=0),
            output={"store": None},
        )
        return part.with_keys(**changes)

    @property
    def store(self) -> str | None:
        """The address of the run in ``output.store``, or None."""
        folder = self.output.store
        return None if folder is None or self.is_trial else f"{folder.rstrip('/')}/{self.name}"

    @property
    def folder(self) -> Path:
        """The run folder."""
        return Path(self.output.dir) / self.name

    @property
    def gpus(self) -> float:
        """The number of GPUs that the run uses, or begins with: GPUs per worker times workers."""
        return self.worker_gpus * self.workers.least

    @property
    def worker_gpus(self) -> float:
        """The number of GPUs of one worker."""
        of_engine = max(self.with_engine(name).engine_gpus for name in self.engine_names)
        return of_engine if self.workers.gpus is None else self.workers.gpus

    @property
    def engine_gpus(self) -> int:
        """The number of GPUs that ``engine`` needs."""
        sizes = ("tensor_parallel_size", "pipeline_parallel_size")
        given = [self.engine.options.get(size) for size in sizes]
        return math.prod(size for size in given if isinstance(size, int))

    def params(self) -> dict[str, Any]:
        """Return the parameters of a request: the arguments for ``vllm.SamplingParams``, or for
        ``vllm.PoolingParams`` if the task is a pooling task."""
        return self.sampling.params() if self.generates else self.pooling.params()

    @property
    def generates(self) -> bool:
        """True if the answer is text."""
        return self.task in GENERATING

    @property
    def may_have_lines(self) -> bool:
        """True if the rows may be lines of an OpenAI batch file, each with its own endpoint."""
        prompt = self.prompt
        of_job = (prompt.user, prompt.user_file, prompt.system, prompt.system_file, prompt.images)
        if self.task == "transcribe":
            return not prompt.audios
        return not any(of_job) and not self.pair.is_set

    @property
    def may_have_vectors(self) -> bool:
        return self.task in WITH_VECTORS or (self.task == "score" and self.may_have_lines)

    @property
    def has_several(self) -> bool:
        """True if a row may have several generations."""
        return bool(self.steps) or self.rollout is not None or self.task == "transcribe"

    @property
    def parsing(self) -> set[str]:
        """The names of the steps whose answers must be JSON; "" stands for the answer of a job without steps."""
        of_steps = {step.name for step in self.steps if step.parse is not None}
        return of_steps if self.output.parse is None else {*of_steps, ""}

    @property
    def keeps_choices(self) -> bool:
        """True if a record holds all ``n`` answers of its row."""
        return self.select.by is None if self.output.choices is None else self.output.choices

    @property
    def engine_names(self) -> list[str]:
        """The engines that a row may use, in the order of the steps: names in ``engines``, or "" for ``engine``."""
        if self.rollout is not None:
            return ["", *self.engines]
        return list(dict.fromkeys(step.engine for step in self.steps)) or [""]

    def with_engine(self, name: str) -> JobConfig:
        """Return the job with ``engines[name]`` as its ``engine``; "" keeps ``engine``."""
        return self.with_keys(engine=self.engines[name]) if name else self

    def of_step(self, step: StepTable) -> JobConfig:
        """Return ``step`` as a separate job: one generation per row, with the step's prompt, sampling, engine, parsing
        and scoring."""
        given = {name: getattr(step.sampling, name) for name in step.sampling.model_fields_set}
        kwargs = {**self.prompt.chat_template_kwargs, **step.prompt.chat_template_kwargs}
        return self.with_keys(
            steps=[],
            select=SelectTable(),
            prompt=step.prompt.model_copy(update={"chat_template_kwargs": kwargs}),
            sampling=given,
            engine=self.with_engine(step.engine).engine,
            output={"parse": step.parse},
            scoring=step.scoring,
        )

    def of_each_step(self) -> Iterator[tuple[str, JobConfig]]:
        """Yield a pair for each step: the prefix of its keys in messages (``steps.draft.``), and its job from
        ``of_step``. For a job without steps, yield "" and the job itself. Checks use this, so that they need not treat
        jobs with and without steps differently."""
        for step in self.steps:
            yield f"steps.{step.name}.", self.of_step(step)
        if not self.steps:
            yield "", self

    def of_shard(self, shard: Shard) -> JobConfig:
        """Return the job of one shard. Its run folder is ``<name>.shard-<number>-of-<of>``."""
        name = f"{self.name}.shard-{shard.number}-of-{shard.of}"
        return self.with_keys(name=name, input={"shard": str(shard)})

    @model_validator(mode="before")
    @classmethod
    def _can_be_written_down(cls, tables: Any) -> Any:
        if isinstance(tables, dict):
            check_values(tables)
        return tables

    @model_validator(mode="after")
    def _with_defaults_of_others(self) -> JobConfig:
        """Set the defaults of ``[scoring]`` and ``[prompt]`` that depend on other tables."""
        scoring = dict[str, Any]()
        if self.scoring.group_by is None and self.input.cross:
            scoring["group_by"] = next(iter(self.input.cross))
        if self.speech.language == "en":
            scoring["scorers"] = _in_english(self.scoring.scorers)
            scoring["rules"] = [
                rule.model_copy(update={"scorers": rule.scorers and _in_english(rule.scorers)})
                for rule in self.scoring.rules
            ]
        # vllm.LLM.embed applies no chat template to text; vLLM's server applies it to images.
        chat_is_meant = "chat" in self.prompt.model_fields_set or self.prompt.has_media
        prompt = {} if self.generates or chat_is_meant else {"chat": False}
        for name, update in (("scoring", scoring), ("prompt", prompt)):
            if update:
                table = getattr(self, name).model_copy(update=update)
                object.__setattr__(self, name, table)  # it is frozen
        object.__setattr__(self, "input", self.input.below(self.media.root))
        return self

    @model_validator(mode="after")
    def _fits_together(self) -> JobConfig:
        if found := misfits(self):
            raise ValueError("\n".join(found))
        return self

    @model_validator(mode="wrap")
    @classmethod
    def _with_problems_in_plain_words(
        cls, tables: Any, handler: ModelWrapValidatorHandler[JobConfig], info: ValidationInfo
    ) -> JobConfig:
        """Raise JobError with one line per problem: key, value found, value expected.

        Keep this validator last in the class, because a wrap validator sees only problems of validators defined before
        it.
        """
        try:
            return handler(tables)
        except ValidationError as error:
            found = [*problems_in(error, cls, tables), *names_of_other_tools(tables)]
            problems = dict.fromkeys(line for problem in found for line in problem.splitlines())
            count = f"{len(problems)} problem" + ("s" if len(problems) > 1 else "")
            lines = "\n".join(f"  {problem}" for problem in problems)
            origin = (info.context or {}).get("origin", "JobConfig")
            raise JobError(f"{origin}: {count}\n{lines}") from None


def _in_english(scorers: Parameters) -> Parameters:
    """Return ``scorers``, in which error rates without a normalizer get the English one."""
    return {
        name: {**its, "normalizer": "english"} if its.get("normalizer", "") is None else its
        for name, its in scorers.items()
    }
