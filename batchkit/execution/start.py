"""What one start of a run is about: values that are made once, and read by all that take part in it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from batchkit.config.tables import JobConfig
from batchkit.execution.selection import Selection
from batchkit.rendering.held_media import Holders
from batchkit.rendering.renderer import AdjustSampling
from batchkit.rendering.steps import Renderer, renderer_of
from batchkit.rendering.templates.prompt import constant_files
from batchkit.scoring import Scoring, kept_fields, scoring_of_steps
from batchkit.storage.identity import engine_identity, of_function
from batchkit.storage.score_store import references_of

if TYPE_CHECKING:
    from batchkit.execution.rollouts.function import Function

OnChange = Literal["fail", "new", "requeue"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How a start differs from a plain ``batchkit run``.

    ``attempts``: run only these rows again, except those that have an answer by now; it maps a
    row's index to the number of its last attempt, 0 if it has no record. Those ``quarantined``
    killed the engine, and are run alone. ``begun_with``: the job that the run folder was made for,
    if ``overrides`` make the start's job differ from it on purpose. ``rollout`` is used in place of the
    function that the job names. Runs of this process with the same ``media_holders`` share
    ``media.max_memory_bytes``.
    """

    command: str = "python"
    quiet: bool = False
    fresh: bool = False
    on_change: OnChange = "fail"
    skip_from: Path | None = None
    attempts: Mapping[int, int] | None = None
    quarantined: Collection[int] = ()
    begun_with: JobConfig | None = None
    overrides: Sequence[str] = ()
    adjust_sampling: AdjustSampling | None = None
    rollout: Function | None = None
    media_holders: Holders | None = None


@dataclass(frozen=True)
class Start:
    """One start of ``job``. What follows from it alone is made on first use, once in each process.

    ``references``: the right answers by id, if another run gives them. ``identity``: hashes of the
    files that the engines and the rollout's function are loaded from, and ``prompt_files`` of those
    that all prompts include, as they were when the start began.
    """

    job: JobConfig
    options: Options
    references: Mapping[str, str | None] | None
    identity: Mapping[str, Any]
    prompt_files: Mapping[str, str]

    @classmethod
    def of(cls, job: JobConfig, options: Options | None = None) -> Start:
        """
        Raises:
            JobError: the reference run can't be read, or a template can't be used.
        """
        start = cls(
            job,
            options or Options(),
            references_of(job) if job.scoring.is_on else None,
            engine_identity(job) | of_function(job),
            constant_files(job),
        )
        _ = start.renderer  # which finds the templates that can't be used
        return start

    def for_workers(self) -> Start:
        """As workers on Ray get it, pickled: they may not see the files of the prompts."""
        return replace(
            self,
            job=self.renderer.job,
            options=Options(quarantined=self.options.quarantined),
            identity={**self.identity, "prompt.files": self.prompt_files},
        )

    @property
    def is_retry(self) -> bool:
        return self.options.attempts is not None

    @cached_property
    def renderer(self) -> Renderer:
        return renderer_of(self.job, adjust_sampling=self.options.adjust_sampling)

    @cached_property
    def selection(self) -> Selection:
        return Selection(self.job, self.references)

    @cached_property
    def parsing(self) -> Collection[str]:
        """The steps whose answers are parsed as JSON; "" for a row with one generation."""
        return self.job.parsing

    @cached_property
    def scoring(self) -> Scoring | None:
        """None if the job scores nothing."""
        return Scoring(self.job.scoring, self.references) if self.job.scoring.is_on else None

    @cached_property
    def step_scoring(self) -> Mapping[str, Scoring]:
        """That of each step that has its own, by the step's name."""
        return scoring_of_steps(self.job)

    @cached_property
    def is_dry(self) -> bool:
        return self.job.is_dry

    @cached_property
    def kept_fields(self) -> Sequence[str]:
        """The columns of the input that records keep."""
        return tuple(kept_fields(self.job))
