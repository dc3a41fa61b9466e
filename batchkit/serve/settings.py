"""What a server is started with: its models, of which one is loaded at a time, and where its things are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath

from batchkit.config.tables import InputTable, JobConfig
from batchkit.errors import JobError
from batchkit.serve.clock import wall_s
from batchkit.serve.keys import Key, Limits
from batchkit.serve.store import Object, Stored

DAY_S = 86_400


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


@dataclass(frozen=True, kw_only=True)
class Settings:
    """``models``: by each of their names. ``keys``: those of ``key_file``. ``webhook``: the URL that is told of batches
    that have ended. ``retention_days``: how long files are kept, 0 for ever."""

    models: Mapping[str, Model]
    folder: Path
    host: str = "127.0.0.1"
    port: int = 8080
    key_file: Path | None = None
    keys: Mapping[str, Key] | None = None
    webhook: str | None = None
    retention_days: float = 30.0
    max_file_bytes: int = 64 * 2**30

    @property
    def database(self) -> Path:
        return self.folder / "serve.db"

    @property
    def files(self) -> Path:
        """The contents of files, each under its id."""
        return self.folder / "files"

    @property
    def owners(self) -> list[str]:
        """The names of the keys; "" without keys."""
        return [""] if self.keys is None else [key.name for key in self.keys.values()]

    def limits_of(self, owner: str) -> Limits:
        """Those of the key of that name."""
        keys = (self.keys or {}).values()
        return next((key.limits for key in keys if key.name == owner), Limits())

    def media_of(self, owner: str) -> Path:
        """Links to the files of that key that its lines may open, each under its id."""
        return self.media / (owner or "-")  # no key is called so

    @property
    def media(self) -> Path:
        return self.folder / "media"

    @property
    def incoming(self) -> Path:
        """What is being uploaded. It may be removed when no server runs."""
        return self.folder / "incoming"

    @property
    def runs(self) -> Path:
        """A run folder for each batch, under its id."""
        return self.folder / "batches"

    def model_of(self, batch: Object) -> Model:
        """Raises JobError if this server does not have it."""
        if (model := self.models.get(batch["model"])) is None:
            raise JobError(f"this server was started without the model {batch['model']}")
        return model

    def expiry(self, now: int | None = None) -> int | None:
        """When a file made ``now`` expires."""
        made = wall_s() if now is None else now
        return round(made + self.retention_days * DAY_S) if self.retention_days else None

    def job_of(self, stored: Stored) -> JobConfig:
        """The job of the run that is the batch. Its lines open only what their key has uploaded, unless the job file
        names another folder.

        Raises:
            JobError: as ``model_of``.
        """
        job = self.model_of(stored.doc).job
        path, media = self.files / stored.doc["input_file_id"], job.media
        if "root" not in media.model_fields_set:
            media = media.model_copy(update={"root": str(self.media_of(stored.owner))})
        source = InputTable(path=str(path), format="openai-batch")
        output = job.output.model_copy(update={"dir": str(self.runs)})
        run = job.run.model_copy(update={"metrics_port": None})  # several runs can't share it
        return job.model_copy(
            update={
                "name": stored.doc["id"],
                "input": source,
                "media": media,
                "output": output,
                "run": run,
            }
        )
