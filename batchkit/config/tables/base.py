"""The base class and field types shared by all tables of the job file."""

from __future__ import annotations

from enum import Enum, auto
from typing import Annotated, TypeVar

from pydantic import BaseModel, ConfigDict, Field

T = TypeVar("T")


class Mark(Enum):
    """Whether a key affects the answers; ``storage/identity.py`` compares the keys that do."""

    IDENTITY = auto()
    FREE = auto()


Identity = Annotated[T, Mark.IDENTITY]  # a run can be resumed only with the same value
Free = Annotated[T, Mark.FREE]  # the value may change each time the run is resumed

LONGEST_S = 1e6  # poll() and similar system calls accept at most 24 days
Seconds = Annotated[float, Field(ge=0, le=LONGEST_S)]
PositiveSeconds = Annotated[float, Field(gt=0, le=LONGEST_S)]


class Table(BaseModel):
    """A table of the job file. It is frozen and rejects unknown keys.

    Every key is marked ``Identity`` or ``Free``, or is a nested table whose keys are marked.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)
