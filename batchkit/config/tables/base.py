"""What every table of the job file has in common."""

from __future__ import annotations

from enum import Enum, auto
from typing import Annotated, TypeVar

from pydantic import BaseModel, ConfigDict, Field

T = TypeVar("T")


class Mark(Enum):
    """Whether a key decides a run's answers; ``storage/identity.py`` reads it."""

    IDENTITY = auto()
    FREE = auto()


Identity = Annotated[T, Mark.IDENTITY]  # a run continues only with the value that it began with
Free = Annotated[T, Mark.FREE]  # may differ from start to start of one run

LONGEST_S = 1e6  # the system's calls that wait take no more than 24 days
Seconds = Annotated[float, Field(ge=0, le=LONGEST_S)]
PositiveSeconds = Annotated[float, Field(gt=0, le=LONGEST_S)]


class Table(BaseModel):
    """One table of the job file: frozen, unknown keys refused.

    Every key is marked ``Identity`` or ``Free``, or is a table whose keys are.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)
