"""``batchkit.generate``: a column of answers for a table, for example in a notebook."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any

import orjson

from batchkit.config.loading import make_job, names_in, prompt_columns
from batchkit.config.tables import JobConfig
from batchkit.errors import BatchkitError, JobError
from batchkit.execution.processor import ProductionBatchProcessor
from batchkit.execution.start import OnChange
from batchkit.sources.input import from_python
from batchkit.storage.identity import identity

_BY_SIGNAL = 128  # exit codes from here on


def generate(
    rows: Any,
    *,
    prompt: str | None = None,
    model: str | None = None,
    system: str | None = None,
    images: str | Sequence[str] | None = None,
    max_tokens: int | None = None,
    temperature: float | None = None,
    name: str | None = None,
    fresh: bool = False,
    on_change: OnChange = "fail",
    quiet: bool = False,
    **tables: Any,
) -> Any:
    """Return the model's answer to each row: a pandas Series for a DataFrame, with its index, otherwise a list.

    ::

        df = df.assign(mood=batchkit.generate(df, prompt="Mood of: {{ review }}", model="Qwen/Qwen3-8B"))

    The answer is a text, or None for a row that failed; a warning then names the run folder, which has the reasons.

    By default, the run's name is made from the rows and from all settings that decide the answers. So the same call
    resumes its run, or returns the answers that are there; another prompt or other rows begin another run, and the
    earlier one is kept. Columns that the prompt does not use make no difference.

    Args:
        rows: A list or a table, as for ``ProductionBatchProcessor.process``; no iterator.
        prompt: Template of the prompt. Without it, the rows are the prompts.
        model: Name on the Hugging Face hub, or a folder.
        system: Template of the system prompt.
        images: Template of the path of an image, or a list of them.
        max_tokens: Maximum number of tokens of an answer; default 256.
        temperature: Sampling temperature; default 0, which is greedy.
        name: Name of the run folder below ``output/``. Changed rows or settings then raise ChangedError.
        fresh: As for ``ProductionBatchProcessor``, like ``on_change`` and ``quiet``.
        **tables: Tables of the job file: ``engine={"options": {"max_model_len": 4096}}``.

    Raises:
        BatchkitError: the run stopped, also by a budget; every finished row is on disk.
        KeyboardInterrupt: the run was interrupted. The same call resumes it.
    """
    keys = {
        "engine.model": model,
        "prompt.user": prompt,
        "prompt.system": system,
        "prompt.images": [images] if isinstance(images, str) else images and list(images),
        "sampling.max_tokens": max_tokens,
        "sampling.temperature": temperature,
        "name": name,
    }
    given = {key: value for key, value in keys.items() if value is not None}
    job = make_job({"name": "generate", **deepcopy(tables)}, "generate()", given=given)
    if not job.generates:
        raise JobError(
            f'generate() returns texts, but task = "{job.task}" gives none; use ProductionBatchProcessor'
        )
    if job.input.cross:
        raise JobError(
            "generate() returns one answer per row, but input.cross makes several rows of one"
        )
    rows = _with_used_columns(rows, job)
    if name is None:
        job = job.with_keys(name=f"generate-{_digest(rows, job)}")
    summary = ProductionBatchProcessor(job, fresh=fresh, on_change=on_change, quiet=quiet).process(
        rows
    )
    if summary.exit >= _BY_SIGNAL:
        raise KeyboardInterrupt
    if summary.stopped_by is not None:
        n_done = summary.ok + summary.failed
        raise BatchkitError(
            f"stopped by {summary.stopped_by} after {n_done:,} of {summary.total:,} rows; the same call resumes"
        )
    texts: list[str | None] = [None] * summary.total
    for record in summary.records():
        if record["status"] == "ok":
            texts[record["index"]] = record["text"]
    if missing := summary.total - summary.ok:
        warnings.warn(
            f"{missing:,} of {summary.total:,} rows have no answer, and are None;"
            f" the reasons are in batchkit.Run({summary.folder!r})",
            stacklevel=2,
        )
    if summary.source is None or summary.source.labels is None:
        return texts
    import pandas as pd

    return pd.Series(texts, index=summary.source.labels, dtype=object)


def _with_used_columns(rows: Any, job: JobConfig) -> Any:
    """Return a DataFrame with only the columns that the job uses; return other rows unchanged. A notebook adds the
    answers to the DataFrame as a column, and the same call must then still be the same run."""
    is_frame = hasattr(rows, "iloc") and hasattr(rows, "columns")
    has_prompt = bool(job.prompt.user or job.prompt.user_file or job.steps)
    used = {"id", *prompt_columns(job), *_names_in(job.model_dump())}
    if not is_frame or not has_prompt or "row" in used:
        return rows
    return rows[[column for column in rows.columns if column in used]]


def _names_in(value: Any) -> Iterator[str]:
    """Yield the texts in the job's tables that may be the name of a column, and the names in their templates."""
    if isinstance(value, str):
        yield value
        yield from names_in(value) if "{" in value else ()
    elif isinstance(value, Mapping | list | tuple):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from _names_in(part)


def _digest(rows: Any, job: JobConfig) -> str:
    files = from_python(rows, job.input).files
    if files is None:
        raise JobError(
            f"generate(): found {type(rows).__name__}, which can be read only once; pass a list or a table"
        )
    decides = identity(job)
    content = orjson.dumps(
        [files[0].sha256, decides.job, decides.files], option=orjson.OPT_SORT_KEYS
    )
    return hashlib.sha256(content).hexdigest()[:10]
