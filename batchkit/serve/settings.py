"""The settings of a server: its models, its folder, and its limits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath

from batchkit.config.tables import InputTable, JobConfig
from batchkit.errors import JobError
from batchkit.serve.clock import wall_s
from batchkit.serve.keys import Key, KeyLimits
from batchkit.serve.store import Object, Stored

DAY_S = 86_400


@dataclass(frozen=True)
class ServedModel:
    """A model that the server offers. ``job``: the engine and its options. A batch's run adds its own input and
    name."""

    job: JobConfig

    @property
    def name(self) -> str:
        return str(self.job.engine.model or self.job.engine.kind)

    @property
    def names(self) -> list[str]:
        """The names that request lines may use for the model and its adapters."""
        short = PurePath(self.name).name if Path(self.name).is_absolute() else self.name
        return list(dict.fromkeys([self.name, short, *self.job.engine.loras]))

    @property
    def gpus(self) -> float:
        """The number of GPUs that one engine uses; 0 for a remote server."""
        if self.job.engine.base_url is not None:
            return 0
        return self.job.engine_gpus / (self.job.workers.per_gpu or 1)


def by_name(models: Iterable[ServedModel]) -> dict[str, ServedModel]:
    """Return the models, keyed by each of their names. Raise JobError if two models share a name."""
    found: dict[str, ServedModel] = {}
    for model in models:
        if taken := found.keys() & model.names:
            raise JobError(
                f"two models have the name {min(taken)}, so request lines can't select one of them; rename one in its job file"
            )
        found |= dict.fromkeys(model.names, model)
    return found


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of ``batchkit serve``.

    - ``models``: each model under all of its names.
    - ``keys``: the keys in ``key_file``, by hash; None if the server needs no keys.
    - ``webhook``: URL that receives an event for each ended batch.
    - ``self_check``: ``self_check.rows`` of each batch.
    - ``retention_days``: number of days that files and runs are kept; 0 means forever.
    """

    models: Mapping[str, ServedModel]
    folder: Path
    host: str = "127.0.0.1"
    port: int = 8080
    key_file: Path | None = None
    keys: Mapping[str, Key] | None = None
    webhook: str | None = None
    retention_days: float = 30.0
    max_file_bytes: int = 64 * 2**30
    self_check: int = 0

    @property
    def database(self) -> Path:
        return self.folder / "serve.db"

    @property
    def files(self) -> Path:
        """The folder of stored contents; each file is named by its file id."""
        return self.folder / "files"

    @property
    def owners(self) -> list[str]:
        """The names of the API keys; [""] if the server has no keys."""
        return [""] if self.keys is None else [key.name for key in self.keys.values()]

    def limits_of(self, owner: str) -> KeyLimits:
        """Return the limits of the API key called ``owner``."""
        keys = (self.keys or {}).values()
        return next((key.limits for key in keys if key.name == owner), KeyLimits())

    def media_of(self, owner: str) -> Path:
        """Return the folder with the files that request lines of this key may open, as links named by file id."""
        return self.media / (owner or "-")  # a key can't have this name

    @property
    def media(self) -> Path:
        return self.folder / "media"

    @property
    def incoming(self) -> Path:
        """The folder of unfinished uploads. It can be removed when no server is running."""
        return self.folder / "incoming"

    @property
    def runs(self) -> Path:
        """The folder of run folders, one per batch, named by batch id."""
        return self.folder / "batches"

    def model_of(self, batch: Object) -> ServedModel:
        """Return the model of a batch. Raise JobError if this server does not offer it."""
        if (model := self.models.get(batch["model"])) is None:
            raise JobError(
                f"this server was started without the model {batch['model']}; restart it with this model"
            )
        return model

    def expiry(self, now: int | None = None) -> int | None:
        """Return the time at which a file created at ``now`` (by default the current time) expires, or None for
        never."""
        made = wall_s() if now is None else now
        return round(made + self.retention_days * DAY_S) if self.retention_days else None

    def job_of(self, stored: Stored) -> JobConfig:
        """Return the job of a batch's run: the model's job with the batch's input file, name and folder.

        The request lines may open only files uploaded with the same key, unless the model's job sets ``media.root``.

        Raises:
            JobError: This server does not offer the batch's model.
        """
        job = self.model_of(stored.doc).job
        path = self.files / stored.doc["input_file_id"]
        has_root = "root" in job.media.model_fields_set
        return job.with_keys(
            name=stored.doc["id"],
            input=InputTable(path=str(path), format="openai-batch"),
            media={} if has_root else {"root": str(self.media_of(stored.owner))},
            output={"dir": str(self.runs)},
            run={"metrics_port": None},  # several runs can't share the port
            self_check={"rows": self.self_check},
        )
