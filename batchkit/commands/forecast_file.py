"""``forecast.json`` in the run folder: the forecast that ``run`` prints and later compares with the result."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from batchkit.config.masking import masked
from batchkit.config.numbers import duration, number, short_count
from batchkit.config.tables import JobConfig
from batchkit.errors import StoreError
from batchkit.runs.status import counts_of
from batchkit.storage.forecast_json import forecast_in
from batchkit.storage.identity import hash_of
from batchkit.storage.manifest import read_manifest
from batchkit.storage.starts import read_history

if TYPE_CHECKING:
    from batchkit.execution.summary import RunSummary


def hash_of_job(job: JobConfig) -> str:
    """Return a hash of all settings that a forecast depends on: rows, prompts, engine and speed. Prices don't change
    the hash."""
    tables = job.model_dump(mode="json", exclude={"name", "run", "budget", "output", "scoring"})
    run = job.run.model_dump(include={"sample", "seed", "max_in_flight"})
    return hash_of([masked(tables), run])


def read_forecast(folder: Path, job: JobConfig) -> dict[str, Any] | None:
    """Return the forecast of the run in ``folder``, or None if the folder has no forecast of this run and job."""
    found = forecast_in(folder)
    try:
        is_current = found["run"] == read_manifest(folder).created_at
        return found if is_current and found["of"] == hash_of_job(job) else None
    except (KeyError, TypeError, StoreError):
        return None


def announced(job: JobConfig) -> str | None:
    """Return the forecast for the remaining rows as text, to print when a run starts. Return None if there is no
    forecast or no row is left."""
    found = read_forecast(job.folder, job)
    if found is None:
        return None
    counts = counts_of(job.folder)
    left = found["rows"] - counts.totals.ok - counts.totals.failed
    if left <= 0:
        return None
    share = left / max(left, found["left"])
    time = {name: found["load_seconds"] + share * s for name, s in found["seconds"].items()}
    text = f"forecast for the {left:,} remaining rows: {shown(time, duration)}, loading included"
    if found["price"] is not None:
        text += f"; price of the whole run: {shown(found['price'], number)}"
    return text


def turned_out(job: JobConfig, summary: RunSummary) -> str | None:
    """Return the actual time, tokens and price of a finished run next to the forecast, as text. Return None if there is
    no forecast, or rows are left."""
    found = read_forecast(job.folder, job)
    if found is None:
        return None
    counts = counts_of(job.folder)
    if not found["left"] or counts.totals.ok + counts.totals.failed < found["rows"]:
        return None
    seconds = [start.seconds for start in read_history(job.folder).starts[found["starts"] :]]
    tokens = tokens_of(counts.tokens.completion_tokens)
    parts = [f"{tokens} completion tokens, forecast {shown(found['completion_tokens'], tokens_of)}"]
    if None not in seconds:
        time = duration(sum(filter(None, seconds)))
        parts.insert(0, f"{time}, forecast {shown(found['seconds'], duration)}")
    if summary.price is not None and found["price"] is not None:
        parts.append(f"price {number(summary.price)}, forecast {shown(found['price'], number)}")
    return f"it took {'; '.join(parts)}"


def shown(interval: Mapping[str, float], how: Callable[[float], str]) -> str:
    """Format an interval like ``12 min [10 min to 15 min]``; ``how`` formats each number."""
    low, expected, high = (how(interval[name]) for name in ("low", "expected", "high"))
    return expected if low == high else f"{expected} [{low} to {high}]"


def tokens_of(count: float) -> str:
    return short_count(round(count))
