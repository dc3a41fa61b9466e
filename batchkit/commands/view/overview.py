"""The summary of a run on the web page, and the numbers of its charts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

from batchkit.commands.forecast_file import read_forecast
from batchkit.commands.view.figures import Figures
from batchkit.commands.view.rows import template_in
from batchkit.commands.view.search import in_words
from batchkit.config.masking import masked_text
from batchkit.config.numbers import percent
from batchkit.config.regular_file import read_bytes
from batchkit.config.tables import JobConfig
from batchkit.config.tables.input import variants
from batchkit.config.terminal import cut_in_the_middle
from batchkit.errors import InputError
from batchkit.runs.listing import Look
from batchkit.runs.reach import Reach
from batchkit.scoring.metrics import OUT_OF_TEN, ScoreTable, head
from batchkit.storage.job_toml import job_of_run
from batchkit.storage.manifest import read_manifest
from batchkit.storage.metrics import Metrics
from batchkit.storage.runfolder import JOB
from batchkit.storage.starts import read_history
from batchkit.storage.steps import totals_by_step

_MOST_GROUPS = 1_000
_FORECAST = ("at", "left", "seconds", "prompt_tokens", "completion_tokens", "gpu_hours", "price")
_MOST_JOB_CHARACTERS, _MOST_CHARACTERS = 60_000, 2_000


def overview(
    look: Look, figures: Figures, table: ScoreTable, *, problem: str | None, indexed: float
) -> dict[str, Any]:
    """Return the summary of a run at one moment.

    ``problem``: damage to the log. ``indexed``: the fraction of the log that ``figures`` and ``table`` cover.
    """
    folder = Path(look.status.folder)
    job = job_of_run(folder)
    forecast = read_forecast(folder, job)
    return {
        **look.summary(),
        **look.to_json(),
        "failures": figures.failures,
        "groups": [*table.groups][:_MOST_GROUPS],
        "group_by": job.scoring.group_by,
        "values": [variant.name for variant in variants(job.input.cross)],
        "scorers": [
            {"name": name, "head": head(name), "scale": 1 if name in OUT_OF_TEN else 100}
            for name in table.names
        ],
        "scores": table.to_json(),
        "spreads": figures.spreads,
        "notes": [*_notes(look, figures, table, is_on=job.scoring.is_on)],
        "problem": problem and masked_text(problem),
        "indexed": indexed,
        "forecast": forecast and {name: forecast.get(name) for name in _FORECAST},
    }


def about(folder: Path, reach: Reach) -> dict[str, Any]:
    """Return where the answers come from: a list of names and values, the prompt, the job file, and token totals of
    each step."""
    job = job_of_run(folder)
    toml = read_bytes(folder / JOB).decode(errors="replace")
    return {
        "origin": [
            [name, cut_in_the_middle(value, _MOST_CHARACTERS)]
            for name, value in _origin(folder, job)
            if value
        ],
        "prompt": [
            [name, cut_in_the_middle(text, _MOST_CHARACTERS)] for name, text in _prompt(job, reach)
        ],
        "job_toml": cut_in_the_middle(toml, _MOST_JOB_CHARACTERS),
        "steps": {name or "(no name)": of._asdict() for name, of in totals_by_step(folder).items()},
    }


def _prompt(job: JobConfig, reach: Reach) -> Iterator[tuple[str, str]]:
    """Yield the keys of each step's prompt with their texts. A prompt file is followed by its text, if it may be
    opened."""
    for place, of_step in job.of_each_step():
        for table, given in (("prompt", of_step.prompt), ("pair", of_step.pair)):
            for name, value in given.model_dump(exclude_defaults=True).items():
                is_lines = isinstance(value, list) and all(isinstance(one, str) for one in value)
                yield f"{place}{table}.{name}", "\n".join(value) if is_lines else in_words(value)
                if name in ("system_file", "user_file"):
                    with suppress(InputError, OSError, ValueError):
                        yield value, template_in(value, f"prompt.{name}", reach)


def _notes(look: Look, figures: Figures, table: ScoreTable, *, is_on: bool) -> Iterator[str]:
    """Yield notes that a reader of the scores needs."""
    overall = table.overall
    if look.status.pending:
        yield f"{look.status.pending:,} rows have not been run yet: the scores are not final."
    if look.history.scoring is None:
        yield "The rows are scored in more than one way: `batchkit score` scores all of them again."
    if figures.n_cut:
        share = percent(figures.n_cut, figures.n_rows)
        yield f"{figures.n_cut:,} answers ({share}) ended at max_tokens, before the model was done."
    if figures.n_shortened:
        yield f"{figures.n_shortened:,} prompts were cut in the middle to fit the model."
    if n_different := look.history.self_checks.different:
        yield f"{n_different:,} rows had another answer when they were computed alone (docs/self-check.md)."
    if not (is_on or table.names):
        yield "Nothing is scored: the job has no [scoring]."
    elif figures.n_rows and not overall.scored:
        yield "No answer has a score: each one failed, or the scorers found nothing in it."
    for reason, count in overall.unscored_because.items():
        yield f"Unscored, {count:,} rows: {reason}"


def _origin(folder: Path, job: JobConfig) -> Iterator[tuple[str, str]]:
    """Yield names and values that describe how the answers were made. The caller leaves out empty values."""
    history = read_history(folder)
    manifest, starts = history.added_to(read_manifest(folder)), history.starts
    model = manifest.model
    versions = (starts[-1].versions if starts else None) or {}
    files = [file.path for file in manifest.input]
    more = f" and {len(files) - 3} more" if len(files) > 3 else ""
    restarts = sum(start.engine_restarts for start in starts)
    overrides = [text for start in starts for text in start.overrides]
    settings = ", ".join(f"{name} {value}" for name, value in job.params().items())
    scoring = [*map(head, job.scoring.scorers), f"prediction: {job.scoring.extractor}"]
    yield "Model", f"{model.name}{f' at {model.revision}' if model.revision else ''}"
    yield "Engine", job.engine.kind
    yield "Versions", ", ".join(f"{name} {version}" for name, version in versions.items())
    yield "Input", ", ".join(files[:3]) + more
    yield "Sampling" if job.generates else "Pooling", settings
    yield "Steps", " → ".join(step.name for step in job.steps)
    yield "Scoring", ", ".join(scoring) if job.scoring.is_on else ""
    yield "Seed", str(manifest.seed)
    yield "Host", ", ".join(dict.fromkeys(str(start.host) for start in starts))
    yield "Starts", f"{len(starts)}, {restarts} engine restarts" if starts else ""
    yield "Self-check", history.self_checks.in_words().removeprefix("self-check: ")
    yield "Overrides", ", ".join(dict.fromkeys(overrides))


_PLAIN = (
    *("at", "seconds", "start", "rows_ok", "rows_failed", "window", "in_flight", "running"),
    *("waiting", "kv_cache_usage", "preemptions", "engine_restarts", "host_bytes"),
)
_RATES: dict[str, Callable[[Metrics], int]] = {
    "rows_per_s": lambda line: line.rows_ok + line.rows_failed,
    "prompt_tokens_per_s": lambda line: line.prompt_tokens,
    "completion_tokens_per_s": lambda line: line.completion_tokens + line.unfinished_tokens,
}


def timeline(lines: Sequence[Metrics]) -> dict[str, list[Any]]:
    """Return the metrics as columns: a list of values for each metric. A rate covers the time since the line before; it
    is null for the first line of a start."""
    found: dict[str, list[Any]] = {name: [getattr(line, name) for line in lines] for name in _PLAIN}
    for name, total in _RATES.items():
        found[name] = [None] * bool(lines)
        for before, line in pairwise(lines):
            seconds = line.seconds - before.seconds
            is_known = line.start == before.start and seconds > 0
            done = max(0, total(line) - total(before))
            # Six digits, so that the rate of a slow run is not 0.
            found[name].append(float(f"{done / seconds:.6g}") if is_known else None)
    found["accepted_tokens_per_step"] = [line.accepted_tokens_per_step for line in lines]
    found["gpu_bytes"] = [
        sum(gpu.memory_bytes for gpu in line.gpus) if line.gpus else None for line in lines
    ]
    found["gpu_utilization"] = [
        [gpu.utilization for gpu in line.gpus] if line.gpus else None for line in lines
    ]
    return found


def newest_point(lines: Sequence[Metrics]) -> dict[str, Any] | None:
    """Return the last value of each column of ``timeline``, or None if there are no lines."""
    found = timeline(lines[-2:])
    return {name: column[-1] for name, column in found.items()} if lines else None
