"""The settings of one start of a run: created once, then only read."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from batchkit.config.tables import JobConfig
from batchkit.execution.selection import Selection
from batchkit.rendering.held_media import Holders
from batchkit.rendering.renderer import AdjustSampling
from batchkit.rendering.request_hash import RequestHashes
from batchkit.rendering.steps import Renderer, renderer_of
from batchkit.rendering.templates.prompt import constant_files
from batchkit.scoring import Scoring, kept_fields, scoring_of_steps
from batchkit.storage.identity import Identity, engine_identity
from batchkit.storage.score_store import references_of

if TYPE_CHECKING:
    from batchkit.execution.rollouts.function import Function

OnChange = Literal["fail", "new", "requeue", "requeue-input"]
"""What to do if the job or the input changed. ``requeue-input``: requeue, but fail if the job changed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartOptions:
    """The options of this start that differ from a plain ``batchkit run``."""

    command: str = "python"
    quiet: bool = False  # print nothing
    fresh: bool = False  # begin a new run, and move the old folder aside
    on_change: OnChange = "fail"
    skip_from: Path | None = None  # skip rows that have an answer in this run folder
    parts: Sequence[str] = ()  # folders and addresses that get parts (``runs/parts.py``)
    # A retry: the rows to run again, if they have no answer. Maps a row's index to the number of its last
    # attempt, 0 if it has no record.
    attempts: Mapping[int, int] | None = None
    quarantined: Collection[int] = ()  # rows that killed an engine, and must run alone
    # The run folder's job, if ``overrides`` change it for this start.
    begun_with: JobConfig | None = None
    overrides: Sequence[str] = ()
    adjust_sampling: AdjustSampling | None = None
    rollout: Function | None = None  # used instead of the function that the job names
    # Runs with the same object share ``media.max_memory_bytes``.
    media_holders: Holders | None = None


@dataclass(frozen=True)
class Start:
    """One start of ``job``. Derived values are computed on first use, once in each process.

    - ``references``: reference answers by row id, if another run provides them.
    - ``identity``: the part about engines, and the files from which they and the rollout's function are loaded.
    - ``prompt_files``: hashes of the files that the prompts of all rows include. Like ``identity``, they are computed
      when the start begins.
    """

    job: JobConfig
    options: StartOptions
    references: Mapping[str, str | None] | None
    identity: Identity
    prompt_files: Mapping[str, str]

    @classmethod
    def of(cls, job: JobConfig, options: StartOptions | None = None) -> Start:
        """Return a start of ``job``.

        Raises:
            JobError: the reference run can't be read, or a template is invalid.
        """
        start = cls(
            job,
            options or StartOptions(),
            references_of(job) if job.scoring.is_on else None,
            engine_identity(job),
            constant_files(job),
        )
        _ = start.renderer  # compile the templates now, so that an invalid one raises here
        return start

    def reusing(self, folders: Sequence[Path]) -> Start:
        """Return this start with only these ``folders`` in ``run.reuse``."""
        return replace(self, job=self.job.with_keys(run={"reuse": [*map(str, folders)]}))

    def for_workers(self) -> Start:
        """Return the start in a form to pickle for workers on Ray. It contains the content of the prompts' files."""
        return replace(
            self,
            job=self.renderer.job,
            options=StartOptions(quarantined=self.options.quarantined),
            identity=self.identity.with_facts({"prompt.files": self.prompt_files}),
        )

    @property
    def is_retry(self) -> bool:
        return self.options.attempts is not None

    @cached_property
    def renderer(self) -> Renderer:
        return renderer_of(self.job, adjust_sampling=self.options.adjust_sampling)

    @cached_property
    def hashes(self) -> RequestHashes:
        return RequestHashes(self.job)

    @cached_property
    def selection(self) -> Selection:
        return Selection(self.job, self.references)

    @cached_property
    def parsing(self) -> Collection[str]:
        """The names of the steps whose answers are parsed as JSON; "" for a row with one generation."""
        return self.job.parsing

    @cached_property
    def scoring(self) -> Scoring | None:
        """The job's scoring; None if the job scores nothing."""
        return Scoring(self.job.scoring, self.references) if self.job.scoring.is_on else None

    @cached_property
    def step_scoring(self) -> Mapping[str, Scoring]:
        """Scoring for each step that defines its own, keyed by step name."""
        return scoring_of_steps(self.job)

    @cached_property
    def is_dry(self) -> bool:
        return self.job.is_dry

    @cached_property
    def kept_fields(self) -> Sequence[str]:
        """The columns of the input that records keep."""
        return tuple(kept_fields(self.job))
