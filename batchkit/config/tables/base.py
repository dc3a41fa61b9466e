"""What every table of the job file has in common."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Table(BaseModel):
    """One table of the job file: frozen, unknown keys refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)
