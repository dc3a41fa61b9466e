"""The ``generate`` command: answers prompts from the command line in a new run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from batchkit.config.loading import make_job
from batchkit.config.tables import InputTable
from batchkit.errors import JobError
from batchkit.execution.run import start_run
from batchkit.execution.start import StartOptions
from batchkit.execution.stop import StopRequest
from batchkit.execution.summary import RunSummary
from batchkit.sources import read_rows
from batchkit.sources.input import from_python
from batchkit.storage.lines import answers_in_words


def prompts_of(texts: Sequence[str], file: Path | None) -> list[str]:
    """Return ``texts`` and the non-blank lines of ``file``.

    Raises:
        JobError: The file can't be read, or there is no prompt.
    """
    prompts = [*texts]
    for row in read_rows(InputTable(path=str(file), format="prompts")) if file else ():
        if row.error is not None:
            raise JobError(str(row.error))
        prompts.append(row.fields["prompt"])
    if not prompts:
        raise JobError('no prompt: give prompts as arguments ("…" "…"), or --prompts-file FILE')
    return prompts


def generate(model: str, prompts: Sequence[str], overrides: Sequence[str] = ()) -> RunSummary:
    """Answer ``prompts`` with ``model`` in a new run named ``generate``. Raises the same exceptions as
    ``start_run``."""
    job = make_job({"name": "generate", "engine": {"model": model}}, "generate", overrides)
    with StopRequest().installed() as stop:
        source = from_python(list(prompts), job.input)
        options = StartOptions(fresh=True, command="generate")
        return start_run(job, source, options, stop=stop).checked()


def in_words(prompt: str, record: Mapping[str, Any]) -> str:
    """Return a prompt and its record's answer or error as text to print."""
    error = record["error"]
    reply = answers_in_words(record)[0] if error is None else f"({error['message']})"
    return f"> {prompt}\n{reply}\n"
