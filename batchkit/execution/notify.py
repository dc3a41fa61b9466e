"""``run.on_end``: a command that is run when a run has ended or was stopped."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from batchkit.config.tables import JobConfig
from batchkit.config.tables.run import words_of
from batchkit.errors import Interrupted
from batchkit.execution.summary import RunSummary

TIMEOUT_S = 60.0
_STDERR = 2


@contextmanager
def notifying(job: JobConfig, say: Callable[[str], None]) -> Iterator[Callable[[RunSummary], None]]:
    """Run ``run.on_end`` when the block ends, however it does, with the newest summary that the
    function was given. A run that could not begin has none, and says so itself; one that a signal stops
    before there is one has its name, folder and exit code."""
    newest: dict[str, Any] = {}
    try:
        yield lambda summary: newest.update(summary.to_json())
    except Interrupted as stop:
        newest = {"name": job.name, "folder": str(job.folder), **newest, "exit": 128 + stop.signum}
        raise
    finally:
        if newest and job.run.on_end is not None:
            notify(job.run.on_end, newest, say)


def notify(
    command: str | Sequence[str],
    summary: Mapping[str, Any],
    say: Callable[[str], None],
    *,
    timeout_s: float = TIMEOUT_S,
) -> None:
    """Run ``command`` with ``summary`` as a line of JSON on its stdin. What it prints goes to stderr,
    since stdout is for results. ``say`` gets how it failed, if it does."""
    words = words_of(command)
    try:
        done = subprocess.run(
            words, input=json.dumps(summary) + "\n", stdout=_STDERR, text=True, timeout=timeout_s
        )
    except subprocess.TimeoutExpired:
        say(f"run.on_end: {words[0]} was ended after {timeout_s:g} s")
    except (OSError, ValueError) as error:  # ValueError: a NUL in a word
        say(f"run.on_end: can't run {words[0]}: {getattr(error, 'strerror', None) or error}")
    else:
        if done.returncode:
            say(f"run.on_end: {words[0]} ended with exit code {done.returncode}")
