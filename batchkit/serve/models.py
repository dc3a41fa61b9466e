"""The models of a server: one is loaded at a time."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePath

from batchkit.config.tables import JobConfig
from batchkit.errors import JobError


@dataclass(frozen=True)
class Model:
    """``job``: the engine, and how its rows are run; its input and its name are those of each batch."""

    job: JobConfig

    @property
    def name(self) -> str:
        return str(self.job.engine.model or self.job.engine.kind)

    @property
    def names(self) -> list[str]:
        """Those by which lines may ask for the model, and its adapters."""
        short = PurePath(self.name).name if Path(self.name).is_absolute() else self.name
        return list(dict.fromkeys([self.name, short, *self.job.engine.loras]))

    @property
    def gpus(self) -> int:
        """Those of the engine; a server elsewhere has its own."""
        return 0 if self.job.engine.base_url is not None else self.job.engine_gpus


def by_name(models: Iterable[Model]) -> dict[str, Model]:
    """Raises JobError if two have the same name."""
    found: dict[str, Model] = {}
    for model in models:
        if taken := found.keys() & model.names:
            raise JobError(
                f"two models are called {min(taken)}: lines could not say which one they mean"
            )
        found |= dict.fromkeys(model.names, model)
    return found
