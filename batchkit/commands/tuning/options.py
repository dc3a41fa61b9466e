"""The options that trials change: choosing the next one to try, adding it to a job, and writing the best to the job
file.

A name without a dot is an engine option (``engine.options``). A name with a dot is a key of the job file.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tomlkit
from tomlkit.exceptions import TOMLKitError

from batchkit.config.tables import JobConfig
from batchkit.config.variants import variant_name
from batchkit.engines.memory import visible_gpus
from batchkit.errors import JobError
from batchkit.storage.files import write_atomically

_TABLE, SIZE = "engine.options", "max_num_seqs"
KEY = f"{_TABLE}.{SIZE}"


def with_options(job: JobConfig, options: Mapping[str, Any]) -> JobConfig:
    """Return the job with these options added, and without ``workers.count`` unless ``options`` set it. The job gets
    the name of a variant with these options, for example ``max_num_seqs-64``.

    The engine of the returned job does not reduce its batch when memory runs out, because a trial measures one fixed
    size.
    """
    of_tables: dict[str, dict[str, Any]] = {"run": {}, "workers": {"count": None}}
    for name, value in options.items():
        table, _, key = name.rpartition(".")
        if table:
            of_tables[table][key] = value
    of_engine = job.engine.options | {n: value for n, value in options.items() if "." not in n}
    if job.engine.kind == "transformers":
        of_engine["shrink_on_oom"] = False
    return job.with_keys(name=variant_name(options), engine={"options": of_engine}, **of_tables)


def most_of(job: JobConfig, rows: int) -> tuple[int, str]:
    """Return the largest batch size that a trial with ``rows`` rows can fill, and what limits it."""
    window = job.run.max_in_flight
    if window != "auto" and window < rows:
        return (
            window,
            f"run.max_in_flight = {window} limits the requests in the engine; remove this key",
        )
    return rows, f"there are {rows:,} rows"


def patch(options: Mapping[str, Any]) -> str:
    """Return the options as lines of TOML, to copy into a job file."""
    tables = dict[str, dict[str, Any]]()
    for name, value in options.items():
        table, _, key = _key(name).rpartition(".")
        tables.setdefault(table, {})[key] = value
    return "\n".join(f"[{table}]\n{tomlkit.dumps(keys)}" for table, keys in tables.items()).rstrip()


def _key(name: str) -> str:
    return name if "." in name else f"{_TABLE}.{name}"


def check_patch(path: Path) -> None:
    """Raise JobError if ``write_patch`` can't change the job file. Called before the trials, which take long."""
    _edited(path, {SIZE: 1})
    if not os.access(path.resolve().parent, os.W_OK):
        raise JobError(
            f"{path}: can't be changed: no permission to write in its folder; leave --write out"
        )


def write_patch(path: Path, options: Mapping[str, Any]) -> None:
    """Set ``options`` in the job file at ``path``, in one step. Other keys, comments and formatting stay unchanged.

    Raises:
        JobError: The file can't be read or written, or these keys can't be changed alone.
    """
    changed = _edited(path, options)
    path = path.resolve()  # keep a symbolic link
    try:
        mode = path.stat().st_mode
        write_atomically(path, changed)
        path.chmod(mode)
    except OSError as error:
        raise _not_changed(path, error, options) from error


def _edited(path: Path, options: Mapping[str, Any]) -> bytes:
    try:
        text = path.read_bytes().decode("utf-8-sig")
        document: Any = tomlkit.parse(text)
        wanted = tomllib.loads(text)
        for name, value in options.items():
            _set(document, name, value, tomlkit.table)
            _set(wanted, name, value, dict)
        changed = tomlkit.dumps(document)
        if tomllib.loads(changed) != wanted:  # tomlkit can't edit every form of a table
            keys = ", ".join(map(_key, options))
            raise TOMLKitError(f"{keys} can't be set without changing other keys")
    except (OSError, ValueError, TOMLKitError) as error:
        raise _not_changed(path, error, options) from error
    return changed.encode()


def _set(table: Any, name: str, value: Any, new: Callable[[], Any]) -> None:
    *parts, key = _key(name).split(".")
    for part in parts:
        if part not in table:
            table[part] = new()
        table = table[part]
    table[key] = value


def _not_changed(path: Path, error: Exception, options: Mapping[str, Any]) -> JobError:
    return JobError(f"{path}: can't be changed: {error}; set this yourself:\n{patch(options)}")


_ONLY_FOR: Mapping[str, str] = {
    "run.render_threads": "rendering",
    "run.look_ahead": "prefill",
    "mm_processor_cache_gb": "preprocessing",
    "gpu_memory_utilization": "kv-cache",
    "kv_cache_memory_bytes": "kv-cache",
    "kv_offloading_size": "kv-cache",
    "block_size": "kv-cache",
    "max_cudagraph_capture_size": "decode",
    "performance_mode": "decode",
    "long_prefill_token_threshold": "prefill",
}
"""Options that are tried only if they help against the bottleneck of the fastest options so far."""
_OF_RUN = ("render_threads", "look_ahead")
_MOST_PER_GPU = 4  # engines that share a GPU
_GPUS = ("workers.count", "tensor_parallel_size", "workers.per_gpu")
_FIRST_FOR: Mapping[str, str] = {
    "max_num_batched_tokens": "prefill",
    "enable_prefix_caching": "prefill",
    "enable_chunked_prefill": "prefill",
    "async_scheduling": "decode",
    "enforce_eager": "decode",
    "speculative_config": "decode",
}


@dataclass(frozen=True, slots=True)
class OptionChoice:
    """An option that ``tune`` tries.

    - ``walk``: the current value of a number, which the search multiplies and divides; None for other options.
    - ``most``: the largest value. The search then only doubles the number.
    - ``others``: a list of settings to try instead. None in it resets an option to the job's value.
    - ``helps``: the bottleneck that the option addresses (``Bottleneck.resource``).
    - ``is_only``: True if the option is tried only at this bottleneck.
    """

    name: str
    walk: int | None = None
    most: int | None = None
    others: list[dict[str, Any]] = field(default_factory=list)
    helps: str = ""
    is_only: bool = False

    @property
    def is_first(self) -> bool:
        """True if the option must be tried before the number of concurrent requests, because more requests would hide
        its gain."""
        return self.is_only and self.helps in ("rendering", "preprocessing", "kv-cache")


def choices(job: JobConfig, options: Mapping[str, Any]) -> list[OptionChoice]:
    """Return the options to try: how GPUs are used, the engine's ``options``, and batchkit's own options."""
    found = (_choice(name, value) for name, value in options.items())
    ours = (_choice(f"run.{name}", getattr(job.run, name)) for name in _OF_RUN)
    return [*_of_gpus(job), *found, *ours]


def next_of(left: list[OptionChoice], waits_for: str) -> OptionChoice | None:
    """Remove the next option to try from ``left`` and return it; None if no option helps.

    The order is: use of the GPUs (which decides how many requests fit), concurrency, then the others.

    ``waits_for``: the bottleneck of the fastest options so far.
    """
    may = [choice for choice in left if not choice.is_only or choice.helps == waits_for]
    if not may:
        return None
    found = min(
        may,
        key=lambda c: (c.name not in _GPUS, not c.is_first, c.name != SIZE, c.helps != waits_for),
    )
    left.remove(found)
    return found


def _choice(name: str, value: Any) -> OptionChoice:
    is_only = name in _ONLY_FOR
    helps = (_ONLY_FOR if is_only else _FIRST_FOR).get(name, "")
    if isinstance(value, int) and not isinstance(value, bool):
        return OptionChoice(name, walk=value, helps=helps, is_only=is_only)
    values = {bool: [not value], list: value}.get(type(value), [])
    return OptionChoice(
        name, others=[{name: other} for other in values], helps=helps, is_only=is_only
    )


def _of_gpus(job: JobConfig) -> Iterator[OptionChoice]:
    """Yield ways to use the GPUs: several engines on each GPU, one engine on each, or one on a group of 2, 4, … GPUs that
    share the model."""
    n_gpus = visible_gpus() if job.engine.kind == "vllm" else 0
    across = job.engine.options.get("tensor_parallel_size", 1)
    across *= job.engine.options.get("pipeline_parallel_size", 1)
    if n_gpus and across == 1 and job.workers.per_gpu is None and not job.engine.in_process:
        yield OptionChoice("workers.per_gpu", walk=1, most=_MOST_PER_GPU, helps="decode")
    if job.workers.count is None and n_gpus // across > 1:
        yield OptionChoice("workers.count", others=[{"workers.count": n_gpus // across}])
    if across > 1 or job.workers.count is not None:
        return
    groups = [2**n for n in range(1, 8) if 2**n <= n_gpus]
    others = [
        {"tensor_parallel_size": n, "workers.count": n_gpus // n if n_gpus > n else None}
        for n in groups
    ]
    if others:
        yield OptionChoice("tensor_parallel_size", others=others)
