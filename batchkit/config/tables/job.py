"""A whole job."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import Field, model_validator

from batchkit.config.shard import Shard
from batchkit.config.tables.base import Free, Identity, Table
from batchkit.config.tables.engine import EngineTable, SamplingTable
from batchkit.config.tables.input import InputTable
from batchkit.config.tables.prompt import MediaTable, PromptTable
from batchkit.config.tables.run import OutputTable, RetryTable, RunTable
from batchkit.config.tables.scoring import ScoringTable
from batchkit.config.values import check_values


class JobConfig(Table):
    """A whole job. From Python: ``JobConfig(engine={"model": "…"})``."""

    name: Free[str] = Field(
        "batch",
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$",
        description="Names the run folder: letters, digits, `.`, `_`, `-`.",
    )
    input: InputTable = InputTable()
    vars: Identity[dict[str, Any]] = Field({}, description="Free names for the templates.")
    prompt: PromptTable = PromptTable()
    media: MediaTable = MediaTable()
    engine: EngineTable
    sampling: SamplingTable = SamplingTable()
    run: RunTable = RunTable()
    retry: RetryTable = RetryTable()
    output: OutputTable = OutputTable()
    scoring: Free[ScoringTable] = ScoringTable()

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
