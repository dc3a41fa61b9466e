"""What the page says of a run as a whole."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from batchkit.commands.forecast_file import read_forecast
from batchkit.commands.view.charts import spreads
from batchkit.commands.view.detail import in_words
from batchkit.commands.view.rows import failures, template_in
from batchkit.config.cross import variants
from batchkit.config.masking import masked_text
from batchkit.config.numbers import percent
from batchkit.config.regular_file import read_bytes
from batchkit.config.tables import JobConfig
from batchkit.config.terminal import cut_in_the_middle
from batchkit.errors import InputError
from batchkit.runs.index import Index, Snapshot
from batchkit.runs.listing import Look
from batchkit.runs.reach import Reach
from batchkit.runs.scores import table_of_index
from batchkit.scoring.metrics import OUT_OF_TEN, ScoreTable, head
from batchkit.storage.job_toml import job_of_run
from batchkit.storage.manifest import Manifest, read_manifest
from batchkit.storage.runfolder import JOB
from batchkit.storage.steps import totals_by_step

_MOST_GROUPS = 1_000
_FORECAST = ("at", "left", "seconds", "prompt_tokens", "completion_tokens", "gpu_hours", "price")
_MOST_JOB_CHARACTERS, _MOST_CHARACTERS = 60_000, 2_000


class Figures(NamedTuple):
    """What takes time to compute from all rows."""

    table: ScoreTable
    spreads: list[dict[str, Any]]


def figures_of(snapshot: Snapshot, group_by: str | None) -> Figures:
    return Figures(table_of_index(snapshot, group_by), spreads(snapshot))


def overview(look: Look, index: Index, snapshot: Snapshot, figures: Figures) -> dict[str, Any]:
    """What is shown of a run at one moment."""
    job, table = job_of_run(index.folder), figures.table
    forecast = read_forecast(index.folder, job)
    return {
        **look.summary(),
        **look.to_json(),
        "failures": failures(index, snapshot),
        "groups": [*table.groups][:_MOST_GROUPS],
        "group_by": index.group_by,
        "values": [variant.name for variant in variants(job.input.cross)],
        "scorers": [
            {"name": name, "head": head(name), "scale": 1 if name in OUT_OF_TEN else 100}
            for name in table.names
        ],
        "scores": table.to_json(),
        "spreads": figures.spreads,
        "notes": [*_notes(look, snapshot, table, is_on=job.scoring.is_on)],
        "problem": index.problem and masked_text(index.problem),
        "indexed": snapshot.share,
        "forecast": forecast and {name: forecast.get(name) for name in _FORECAST},
    }


def about(folder: Path, reach: Reach) -> dict[str, Any]:
    """Where the answers come from: names and values, the prompt, the job file, and the generations of each step."""
    manifest, job = read_manifest(folder), job_of_run(folder)
    toml = read_bytes(folder / JOB).decode(errors="replace")
    return {
        "origin": [
            [name, cut_in_the_middle(value, _MOST_CHARACTERS)]
            for name, value in _origin(manifest, job)
            if value
        ],
        "prompt": [
            [name, cut_in_the_middle(text, _MOST_CHARACTERS)] for name, text in _prompt(job, reach)
        ],
        "job_toml": cut_in_the_middle(toml, _MOST_JOB_CHARACTERS),
        "steps": {name or "(no name)": of._asdict() for name, of in totals_by_step(folder).items()},
    }


def _prompt(job: JobConfig, reach: Reach) -> Iterator[tuple[str, str]]:
    """What the prompt of each step is made of; of a file its text, if a reader may open it."""
    for place, of_step in job.of_each_step():
        for table, given in (("prompt", of_step.prompt), ("pair", of_step.pair)):
            for name, value in given.model_dump(exclude_defaults=True).items():
                is_lines = isinstance(value, list) and all(isinstance(one, str) for one in value)
                yield f"{place}{table}.{name}", "\n".join(value) if is_lines else in_words(value)
                if name in ("system_file", "user_file"):
                    with suppress(InputError, OSError, ValueError):
                        yield value, template_in(value, f"prompt.{name}", reach)


def _notes(look: Look, snapshot: Snapshot, table: ScoreTable, *, is_on: bool) -> Iterator[str]:
    """What a reader of the scores needs to know."""
    rows, overall = snapshot.newest, table.overall
    n_cut, n_shortened = (int(snapshot.entries[n][rows].sum()) for n in ("is_cut", "is_shortened"))
    if look.status.pending:
        yield f"{look.status.pending:,} rows have not been run yet: the scores are not final."
    if look.manifest.scoring is None:
        yield "The rows are scored in more than one way: `batchkit score` scores all of them again."
    if n_cut:
        share = percent(n_cut, len(rows))
        yield f"{n_cut:,} answers ({share}) ended at max_tokens, before the model was done."
    if n_shortened:
        yield f"{n_shortened:,} prompts were cut in the middle to fit the model."
    if not is_on:
        yield "Nothing is scored: the job has no [scoring]."
    elif len(rows) and not overall.scored:
        yield "No answer has a score: each one failed, or the scorers found nothing in it."
    for reason, count in overall.unscored_because.items():
        yield f"Unscored, {count:,} rows: {reason}"


def _origin(manifest: Manifest, job: JobConfig) -> Iterator[tuple[str, str]]:
    """Names and values; an empty value is left out."""
    starts, model = manifest.starts, manifest.model
    versions = (starts[-1].versions if starts else None) or {}
    files = [file.path for file in manifest.input]
    more = f" and {len(files) - 3} more" if len(files) > 3 else ""
    restarts = sum(start.engine_restarts for start in starts)
    overrides = [text for start in starts for text in start.overrides]
    settings = ", ".join(f"{name} {value}" for name, value in job.params().items())
    scoring = [*map(head, job.scoring.scorers), f"prediction: {job.scoring.extract}"]
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
    yield "Overrides", ", ".join(dict.fromkeys(overrides))
