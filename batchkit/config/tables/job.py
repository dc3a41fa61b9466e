"""A whole job."""

from __future__ import annotations

from typing import Any

from pydantic import (
    ModelWrapValidatorHandler,
    PrivateAttr,
    ValidationError,
    ValidationInfo,
    model_validator,
)

from batchkit.config.problems import problems_in
from batchkit.config.tables.fields import JobFields
from batchkit.config.tables.misfits import misfits
from batchkit.config.values import check_values
from batchkit.errors import JobError


class JobConfig(JobFields):
    """A whole job, with the tables and keys of a job file (``docs/job-file.md`` describes them all).

    From Python, a table is a dict::

        JobConfig(
            name="reviews",
            engine={"model": "Qwen/Qwen3-8B", "options": {"max_model_len": 8192}},
            prompt={"user": "Is this positive or negative? {{ review }}"},
            sampling={"temperature": 0.0, "max_tokens": 8},
        )
    """

    _made_in: str = PrivateAttr("")

    @property
    def made_in(self) -> str:
        """The path of the job file that it was read from; of a job that was not read from one, the working
        directory; empty if it was read from a run folder."""
        return self._made_in

    def as_made_in(self, place: str) -> JobConfig:
        job = self.model_copy()
        job._made_in = place
        return job

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
    def _fits_together(self) -> JobConfig:
        if found := misfits(self):
            raise ValueError("\n".join(found))
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
            found = problems_in(error, cls, tables)
            problems = [line for problem in found for line in problem.splitlines()]
            count = f"{len(problems)} problem" + ("s" if len(problems) > 1 else "")
            lines = "\n".join(f"  {problem}" for problem in problems)
            origin = (info.context or {}).get("origin", "JobConfig")
            raise JobError(f"{origin}: {count}\n{lines}") from None
