"""Side effects of a job besides running the model: it may run commands, import code, and send keys and exports to other
hosts."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable, Iterator
from typing import NamedTuple
from urllib.parse import urlsplit

from batchkit.config.export_target import target_of
from batchkit.config.masking import masked_text
from batchkit.config.tables import EngineTable, JobConfig
from batchkit.config.terminal import shortened

ON_END, REMOTE_CODE, EXPORT = "run.on_end", "trust_remote_code", "output.export"
OPTIONAL = {ON_END: "runs", EXPORT: "writes"}
"""Keys whose side effect a command can leave out, and the verb that describes the side effect."""


class Doing(NamedTuple):
    """A side effect of a job. ``keys``: the job's keys that cause the side effect; messages name the first one.
    ``what``: the text for the user, for example ``runs: COMMAND``."""

    keys: tuple[str, ...]
    what: str

    @property
    def line(self) -> str:
        """The text that a command prints before the side effect happens, with secrets masked."""
        return shortened(masked_text(self.what), 300)

    @property
    def host(self) -> str | None:
        """The host that receives an API key; None for other side effects."""
        return self.what.rpartition(" ")[2] if self.what.startswith("sends ") else None


def doings(job: JobConfig, of: tuple[str, ...] = ("",)) -> list[Doing]:
    """Return the job's side effects whose first key starts with one of the texts in ``of`` (by default all)."""
    return [doing for doing in _doings(job) if doing.keys[0].startswith(of)]


def lines_of(due: Iterable[Doing]) -> list[str]:
    """Return the lines to print before the side effects in ``due`` happen, without duplicates. Code that comes with a
    model (``trust_remote_code``) is left out, because it is reported when the model is loaded."""
    said = (doing.line for doing in due if not doing.keys[0].endswith(REMOTE_CODE))
    return list(dict.fromkeys(said))


def hosts_of(job: JobConfig) -> dict[str, str]:
    """Return the host of each engine with a ``base_url``, keyed by the engine's table (``engine`` or
    ``engines.NAME``)."""
    return {key: _host(engine) for key, engine in _engines(job) if engine.base_url is not None}


def _doings(job: JobConfig) -> Iterator[Doing]:
    if job.rollout is not None and not job.rollout.function.startswith("python "):
        yield Doing(("rollout.function",), f"imports: {job.rollout.function}")
    for key, engine in _engines(job):
        if engine.options.get(REMOTE_CODE):
            keys = f"{key}.options.{REMOTE_CODE}", f"{key}.model"
            yield Doing(keys, f"runs: Python code that comes with {engine.model}")
        if engine.server is not None:
            command = engine.server.command or f"llama-server -m {shlex.quote(engine.model)} …"
            of = "server.command" if engine.server.command else "model"
            yield Doing((f"{key}.{of}",), f"runs: {command}")
        if engine.base_url is not None and os.environ.get(engine.api_key_env, "").strip():
            keys = f"{key}.base_url", f"{key}.api_key_env"
            yield Doing(keys, f"sends ${engine.api_key_env} to {_host(engine)}")
    for target in [] if job.is_trial else map(target_of, job.output.export):
        if target.is_remote:
            yield Doing((EXPORT,), f"writes exports to {target}")
    if (command_ := job.run.on_end) is not None:
        text = command_ if isinstance(command_, str) else shlex.join(command_)
        yield Doing((ON_END,), f"runs: {text}")


def _engines(job: JobConfig) -> Iterator[tuple[str, EngineTable]]:
    for name in job.engine_names:
        yield f"engines.{name}" if name else "engine", job.with_engine(name).engine


def _host(engine: EngineTable) -> str:
    return urlsplit(engine.base_url or "").hostname or ""
