"""``job.toml``: the resolved job of a run, with secrets masked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tomlkit

from batchkit.config import masking
from batchkit.config.loading import load_job, resolved_job
from batchkit.config.masking import MASK, masked
from batchkit.config.tables import EngineTable, JobConfig, Table
from batchkit.errors import JobError
from batchkit.storage.files import disk_errors, write_atomically
from batchkit.storage.identity import known_of
from batchkit.storage.runfolder import JOB


def write_job(folder: Path, job: JobConfig) -> None:
    """Write ``job.toml``: the resolved job, with secrets masked."""
    with disk_errors(folder / JOB):
        write_atomically(folder / JOB, toml_of(job).encode())


def toml_of(job: JobConfig, *, only_set: bool = False) -> str:
    """Return ``job`` as TOML with secrets masked. ``only_set``: leave out keys that have their default value."""
    table = masked(_without_none(job.model_dump(exclude_defaults=only_set)))
    return tomlkit.dumps(_sections(job, table))


def job_of_run(folder: Path, overrides: Sequence[str] = ()) -> JobConfig:
    """Return the resolved job that a run folder was made from.

    Raises:
        JobError: the folder's ``job.toml`` is missing or damaged.
    """
    path = folder / JOB
    job = load_job(path, overrides) if overrides else resolved_job(path)
    here = {"dir": str(folder.resolve().parent)}  # the folder may have been moved aside since
    return job.with_keys(name=folder.resolve().name, output=here).as_made_in("")


def without_masked(job: JobConfig) -> JobConfig:
    """Return ``job`` without the secrets that were masked in its ``job.toml``.

    Engines and templates then look for secrets in the environment. A template that uses a missing secret of ``[vars]``
    fails with an error that names it.
    """

    def plain(engine: EngineTable) -> EngineTable:
        options = masking.without_masked(engine.options, "engine.options")
        return engine.model_copy(update={"options": options})

    engines = {name: plain(engine) for name, engine in job.engines.items()}
    names = masking.without_masked(job.vars, "vars")
    return job.with_keys(engine=plain(job.engine), engines=engines, vars=names)


def with_secrets_of(job: JobConfig, source: JobConfig) -> JobConfig:
    """Return ``job``, read from a ``job.toml``, with its masked secrets replaced by those in the job file
    ``source``."""
    return JobConfig.model_validate(known_of(job.model_dump(), source.model_dump()))


def check_secrets(job: JobConfig) -> None:
    """Refuse a job whose secrets are masked, for example a job that was read from a ``job.toml``.

    Raises:
        JobError: secrets are masked; the message names their keys.
    """
    keys = [*masking.masked_keys(job.model_dump(exclude={"scoring": True}))]
    if keys:
        raise JobError(
            f"{', '.join(keys)}: a secret, which a run folder stores only as {MASK}; name the job file"
            " that has it, or give the whole value with --set"
        )


def _sections(table: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ``values`` of ``table`` for TOML. Dicts whose keys the user chooses become inline tables.

    The reason is that the order of these keys may matter, and a TOML section would move plain values before tables.
    """
    return {name: _section(getattr(table, name, None), value) for name, value in values.items()}


def _section(part: Any, value: Any) -> Any:
    if isinstance(part, Table):
        return _sections(part, value)
    if isinstance(part, dict) and any(isinstance(entry, Table) for entry in part.values()):
        return {name: _section(part[name], entry) for name, entry in value.items()}
    if isinstance(part, list) and any(isinstance(entry, Table) for entry in part):
        return [_section(*pair) for pair in zip(part, value, strict=True)]
    return tomlkit.item(value, _parent=tomlkit.inline_table())


def _without_none(value: Any) -> Any:
    """Return ``value`` without keys that are None, since TOML has no null."""
    if isinstance(value, dict):
        return {name: _without_none(part) for name, part in value.items() if part is not None}
    if isinstance(value, list):
        return [_without_none(part) for part in value]
    return value
