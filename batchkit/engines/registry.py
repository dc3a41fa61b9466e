"""Engines, by the name in ``engine.kind``. Each is imported on use."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from batchkit.config.tables import JobConfig
from batchkit.engines.base import Engine, Preflight
from batchkit.engines.process.launcher import Launcher
from batchkit.errors import JobError

ENGINES = {
    "vllm": "batchkit.engines.vllm",
    "transformers": "batchkit.engines.transformers",
    "dry-run": "batchkit.engines.dry_run",
    "openai-server": "batchkit.engines.openai.engine",
}
# Where the job does not set it; an engine without a model in it says so itself. vLLM's least.
MAX_NUM_SEQS = {"vllm": 256, "transformers": 8}
LIGHT = ("dry-run", "openai-server")  # no model in them that could take the run's process along
_PACKAGES = {"vllm": ("vllm",), "transformers": ("torch", "transformers")}


def open_preflight(job: JobConfig) -> Preflight:
    """What the job's engine can say about a request without loading the model.

    Raises:
        JobError: the engine's options or sampling parameters can't be right.
    """
    with _importing(job):
        preflight: Preflight = _module(job).open_preflight(job)
    return preflight


def open_engine(job: JobConfig, launcher: Launcher | None = None) -> Engine:
    """The job's engine, its model loaded: in a process of its own, unless ``engine.in_process``.

    With a ``launcher`` that has been used before, the process need not import its libraries.

    Raises:
        JobError: the engine's options or sampling parameters can't be right.
        EngineError: the model can't be loaded.
    """
    if job.engine.in_process or job.engine.kind in LIGHT:
        return load_engine(job)
    from batchkit.engines.process.engine import ProcessEngine

    _require_packages(job)
    return ProcessEngine(job, launcher)


def load_engine(job: JobConfig) -> Engine:
    """As ``open_engine``, always in this process."""
    with _importing(job):
        engine: Engine = _module(job).open_engine(job)
    return engine


def sampling_names(kind: str) -> Collection[str] | None:
    """What ``[sampling]`` may hold for an engine of ``kind``; None where it does not say."""
    names: Collection[str] | None = getattr(import_module(ENGINES[kind]), "SAMPLING", None)
    return names


def preload_engine(kind: str) -> None:
    """Import what an engine of ``kind`` needs, without touching a GPU."""
    import_module(ENGINES[kind]).preload()


def require(packages: Sequence[str], *, user: str, extra: str) -> None:
    """See that ``packages``, which ``user`` needs and ``batchkit[extra]`` brings, are installed.

    Costs little: nothing is imported.

    Raises:
        JobError: one is missing.
    """
    missing = [name for name in packages if not _is_installed(name)]
    if missing:
        are = "is" if len(missing) == 1 else "are"
        raise JobError(
            f"{user}: {' and '.join(missing)} {are} not installed in this Python: pip install"
            f" 'batchkit[{extra}]', or `make setup` in batchkit's folder"
        )


def _is_installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except (ImportError, ValueError):  # ValueError: it was put together by hand
        return False


def _require_packages(job: JobConfig) -> None:
    kind = job.engine.kind
    require(_PACKAGES.get(kind, ()), user=f'engine.kind = "{kind}"', extra=kind)


@contextmanager
def _importing(job: JobConfig) -> Iterator[None]:
    """
    Raises:
        JobError: a package that the job's engine needs is missing, or can't be imported.
    """
    _require_packages(job)
    try:
        yield
    except ImportError as error:
        raise JobError(
            f'engine.kind = "{job.engine.kind}": can\'t be imported:'
            f" {' '.join(str(error).split())}; `batchkit doctor` says what to install"
        ) from error


def _module(job: JobConfig) -> Any:
    return import_module(ENGINES[job.engine.kind])
