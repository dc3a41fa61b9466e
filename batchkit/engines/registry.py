"""Functions that open engines by the name in ``engine.kind``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from batchkit.config.installation import how_to_install
from batchkit.config.seams import ENGINES
from batchkit.config.speed_options import SPEED_OPTIONS
from batchkit.config.tables import JobConfig
from batchkit.engines.base import Engine, Preflight
from batchkit.engines.outstanding import CheckedEngine
from batchkit.engines.process.launcher import Launcher
from batchkit.errors import JobError


def open_preflight(job: JobConfig) -> Preflight:
    """Return an object that renders and checks the job's requests without loading the model. Raises JobError if engine
    options or sampling parameters are invalid."""
    with _importing(job):
        preflight: Preflight = ENGINES.load(job.engine.kind).open_preflight(job)
    return preflight


def open_engine(job: JobConfig, launcher: Launcher | None = None) -> Engine:
    """Open the job's engine and load its model, in a child process unless ``engine.in_process`` is set.

    ``launcher``: starts the child process. A launcher that was used before has already imported the engine's libraries.

    Raises:
        JobError: Engine options or sampling parameters are invalid.
        EngineError: The model can't be loaded.
    """
    if job.engine.in_process or not holds_model(job.engine.kind):
        return load_engine(job, None if launcher is None else launcher.log)
    from batchkit.engines.process.engine import ProcessEngine

    _require_packages(job)
    return ProcessEngine(job, launcher)


def load_engine(job: JobConfig, log: Path | None = None) -> Engine:
    """Open the engine in this process, even if it holds a model.

    ``log``: file for the output of a server that the engine starts.
    """
    own = () if job.engine.server is None else (log,)
    with _importing(job):
        engine: Engine = ENGINES.load(job.engine.kind).open_engine(job, *own)
    is_built_in = job.engine.kind in ENGINES.built_in
    return engine if is_built_in else CheckedEngine(engine, job.engine.kind)


def for_share_of_gpu(job: JobConfig, engines: int) -> JobConfig:
    """Return ``job`` with the options of one of ``engines`` engines that share a GPU. Raises JobError if engines of this
    kind can't share one."""
    if engines == 1:
        return job
    found = getattr(ENGINES.load(job.engine.kind), "options_for_share", None)
    if found is None:
        raise JobError(
            f'workers.per_gpu: engine.kind = "{job.engine.kind}" can\'t share a GPU; remove workers.per_gpu'
        )
    options = found(job.engine.options, engines)
    return job.with_keys(engine={"options": options})


def max_num_seqs_of(kind: str) -> int | None:
    """Return the default number of rows that an engine of ``kind`` runs at the same time, or None if only the opened
    engine knows this number."""
    most: int | None = getattr(ENGINES.load(kind), "MAX_NUM_SEQS", None)
    return most


def speed_options(job: JobConfig) -> Mapping[str, Any]:
    """Return the ``SPEED_OPTIONS`` that ``tune`` may try for the job, by name.

    Each value is either the value in use, which ``tune`` raises and lowers, or a list of other values to try.

    Raises:
        JobError: The job can't be run.
    """
    kind = job.engine.kind
    with _importing(job):
        if (found := getattr(ENGINES.load(kind), "speed_options", None)) is not None:
            return {name: v for name, v in found(job).items() if name in SPEED_OPTIONS}
    size = job.engine.options.get("max_num_seqs", max_num_seqs_of(kind) or 1)
    return {"max_num_seqs": size}


def changing_options(job: JobConfig) -> Mapping[str, Any]:
    """Return options that may make the job faster but change its answers, with values to try. Raises JobError if the
    job can't be run."""
    with _importing(job):
        found = getattr(ENGINES.load(job.engine.kind), "changing_options", None)
        known: Mapping[str, Any] = {} if found is None else found(job)
        return known


WORKS_WITHOUT = (
    'Or try the job without a model (--set engine.kind=dry-run), or use a server (engine.kind = "openai-server").'
    " For a machine without a GPU, `make setup` in a checkout installs vLLM's CPU build"
)
"""Alternatives if an engine's packages are not installed."""


def holds_model(kind: str) -> bool:
    """Return True if an engine of ``kind`` holds a model, which could crash the process it runs in."""
    return hasattr(ENGINES.load(kind), "preload")


def preload_engine(kind: str) -> None:
    """Import the packages that an engine of ``kind`` needs, without using a GPU. Do nothing for engines without a
    model."""
    if holds_model(kind):
        ENGINES.load(kind).preload()


def require(packages: Sequence[str], *, user: str, extra: str) -> None:
    """Check that ``packages`` are installed, without importing them. Raises JobError if a package is not installed.

    - ``user``: the setting or command that needs the packages, for the message.
    - ``extra``: batchkit's pip extra that installs the packages.
    """
    missing = [name for name in packages if not _is_installed(name)]
    if missing:
        are = "is" if len(missing) == 1 else "are"
        raise JobError(
            f"{user}: {' and '.join(missing)} {are} not installed in this Python:"
            f" {how_to_install(extra)}"
        )


def _is_installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except (ImportError, ValueError):  # ValueError: a module without a spec
        return False


def _require_packages(job: JobConfig) -> None:
    kind = job.engine.kind
    packages: Sequence[str] = getattr(ENGINES.load(kind), "REQUIRES", ())
    try:
        require(packages, user=f'engine.kind = "{kind}"', extra=kind)
    except JobError as error:
        raise JobError(f"{error}\n{WORKS_WITHOUT}") from None


@contextmanager
def _importing(job: JobConfig) -> Iterator[None]:
    """Raise JobError if a package that the job's engine needs is missing, or can't be imported inside the block."""
    _require_packages(job)
    try:
        yield
    except ImportError as error:
        raise JobError(
            f'engine.kind = "{job.engine.kind}": can\'t be imported:'
            f" {' '.join(str(error).split())}; `batchkit doctor` says what to install"
        ) from error
