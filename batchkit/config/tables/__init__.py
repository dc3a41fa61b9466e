"""The job file: its tables and their defaults.

Every default lives here, once. ``docs/job-file.md`` is generated from these classes.
"""

from batchkit.config.tables.base import Seconds, Table
from batchkit.config.tables.engine import (
    DEMO_MODEL,
    DEMO_MODELS,
    EngineTable,
    SamplingTable,
    ServerTable,
)
from batchkit.config.tables.input import InputTable
from batchkit.config.tables.job import JobConfig
from batchkit.config.tables.prompt import MediaTable, PromptTable
from batchkit.config.tables.run import (
    BudgetTable,
    OutputTable,
    RetryTable,
    RunTable,
    SelfCheckTable,
    WorkersTable,
)
from batchkit.config.tables.scoring import (
    ScoringRule,
    ScoringTable,
)
from batchkit.config.tables.steps import RolloutTable, StepTable
from batchkit.config.tables.task import (
    FOR_VECTORS,
    GENERATING,
    OF_TOKENS,
    WITH_VECTORS,
    TaskName,
)

__all__ = [
    "DEMO_MODEL",
    "DEMO_MODELS",
    "FOR_VECTORS",
    "GENERATING",
    "OF_TOKENS",
    "WITH_VECTORS",
    "BudgetTable",
    "EngineTable",
    "InputTable",
    "JobConfig",
    "MediaTable",
    "OutputTable",
    "PromptTable",
    "RetryTable",
    "RolloutTable",
    "RunTable",
    "SamplingTable",
    "ScoringRule",
    "ScoringTable",
    "Seconds",
    "SelfCheckTable",
    "ServerTable",
    "StepTable",
    "Table",
    "TaskName",
    "WorkersTable",
]
