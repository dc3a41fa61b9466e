"""What the page says of a run as a whole."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from batchkit.commands.forecast_file import read_forecast
from batchkit.commands.view.rows import failures
from batchkit.commands.view.runs import Look
from batchkit.commands.view.spread import spreads
from batchkit.config.masking import masked_text
from batchkit.config.numbers import percent
from batchkit.config.tables import JobConfig
from batchkit.config.terminal import cut_in_the_middle
from batchkit.runs.columns import Table
from batchkit.runs.index import Index, Snapshot
from batchkit.scoring.metrics import OUT_OF_TEN, Group, ScoreTable, head, in_order
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
    return Figures(_tabulated(snapshot, group_by), spreads(snapshot))


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


def about(folder: Path) -> dict[str, Any]:
    """Where the answers come from: names and values, the job file, and the generations of each step."""
    manifest, job = read_manifest(folder), job_of_run(folder)
    toml = (folder / JOB).read_text(encoding="utf-8", errors="replace")
    return {
        "origin": [
            [name, cut_in_the_middle(value, _MOST_CHARACTERS)]
            for name, value in _origin(manifest, job)
            if value
        ],
        "job_toml": cut_in_the_middle(toml, _MOST_JOB_CHARACTERS),
        "steps": {name or "(no name)": of._asdict() for name, of in totals_by_step(folder).items()},
    }


def _tabulated(snapshot: Snapshot, group_by: str | None) -> ScoreTable:
    """The table of scores, from the index."""
    rows, scores = snapshot.entries[snapshot.newest], snapshot.scores[snapshot.newest]
    groups: dict[str, Group] = {}
    if group_by is not None:
        order = np.argsort(rows["group"], kind="stable")
        bounds = np.searchsorted(rows["group"][order], np.arange(len(snapshot.groups) + 1))
        for number, name in enumerate(snapshot.groups):
            places = order[bounds[number] : bounds[number + 1]]
            if len(places):
                groups[name] = _group(rows[places], scores[places], snapshot.scorers)
    overall = _group(rows, scores, snapshot.scorers)
    return ScoreTable(dict(sorted(groups.items())), overall, in_order(snapshot.scorers))


def _group(rows: Table, scores: Table, scorers: Sequence[str]) -> Group:
    is_ok, has_score = rows["is_ok"], ~np.isnan(scores)
    is_scored = is_ok & has_score.any(axis=1)
    found = Group(int(is_scored.sum()), int((is_ok & ~is_scored).sum()), int((~is_ok).sum()))
    for column, name in enumerate(scorers):
        values = scores[is_ok & has_score[:, column], column].astype(np.float64)
        scaled = values if name in OUT_OF_TEN else values * 100
        found.scores[name] = array("d", scaled.tobytes())
    return found


def _notes(look: Look, snapshot: Snapshot, table: ScoreTable, *, is_on: bool) -> Iterator[str]:
    """What a reader of the scores needs to know."""
    rows, overall = snapshot.entries[snapshot.newest], table.overall
    n_cut, n_shortened = int(rows["is_cut"].sum()), int(rows["is_shortened"].sum())
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
    yield "Model", f"{model.name}{f' at {model.revision}' if model.revision else ''}"
    yield "Engine", job.engine.kind
    yield "Versions", ", ".join(f"{name} {version}" for name, version in versions.items())
    yield "Input", ", ".join(files[:3]) + more
    settings = ", ".join(f"{name} {value}" for name, value in job.params().items())
    yield "Sampling" if job.task == "generate" else "Pooling", settings
    yield "Steps", " → ".join(step.name for step in job.steps)
    yield "Rollout", "" if job.rollout is None else job.rollout.function
    chosen_by = [job.select.by, job.select.scorer or job.select.step]
    yield "Selection", " ".join(filter(None, chosen_by))
    yield "Seed", str(manifest.seed)
    yield "Host", ", ".join(dict.fromkeys(str(start.host) for start in starts))
    yield "Starts", f"{len(starts)}, {restarts} engine restarts" if starts else ""
    yield "Overrides", ", ".join(dict.fromkeys(overrides))
    yield "Scoring", _scoring(job)


def _scoring(job: JobConfig) -> str:
    scoring = job.scoring
    if not scoring.is_on:
        return ""
    parts = [", ".join(map(head, scoring.scorers)), f"prediction: {scoring.extract}"]
    if scoring.reference:
        parts.append(f"reference: {scoring.reference}")
    if scoring.reference_run:
        parts.append(f"reference run: {scoring.reference_run}")
    if scoring.rules:
        parts.append(f"{len(scoring.rules)} rules of its own for some rows")
    return "; ".join([*(part for part in parts if part), f"mode: {scoring.mode}"])
