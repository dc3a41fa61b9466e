"""The text above and below the page's tables: the run in numbers, notes for the reader, and the
origin of the answers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from batchkit.commands.report.figures import RunStats, Timeline
from batchkit.commands.report.pictures import Picture
from batchkit.commands.report.rows import clip
from batchkit.config.numbers import duration, number, percent, short_count
from batchkit.config.tables import JobConfig
from batchkit.scoring.metrics import ScoreTable, head
from batchkit.storage.manifest import Manifest
from batchkit.storage.runfolder import held_by


def facts(
    manifest: Manifest, stats: RunStats, line: Timeline | None, table: ScoreTable
) -> list[tuple[str, str, str]]:
    """The numbers at the top of the page: name, value, and the text below it."""
    total = _total(manifest)
    of = f"of {total:,}" if total is not None and total > stats.rows else "all of the input"
    failed = stats.rows - stats.ok
    found = [
        ("rows", f"{stats.rows:,}", of if total is not None else ""),
        ("answered", f"{stats.ok:,}", percent(stats.ok, stats.rows)),
        ("failed", f"{failed:,}", percent(failed, stats.rows) if failed else ""),
    ]
    if stats.generations:
        each = f"{number(stats.generations / stats.rows)} a row"
        found.insert(1, ("generations", f"{stats.generations:,}", each))
    if table.names:
        unscored = table.overall.unscored
        found.append(("unscored", f"{unscored:,}", percent(unscored, stats.rows)))
    if line is not None:
        found.append(("rows/s", number(line.mean_rows_per_s), f"in {duration(line.seconds)}"))
        for name, tokens in (
            ("tokens written", sum(stats.completion_tokens)),
            ("tokens read", sum(stats.prompt_tokens)),
        ):
            rate = f"{number(tokens / line.seconds)} a second"
            found.append((name, short_count(tokens), rate))
    return found


def notes(folder: Path, manifest: Manifest, stats: RunStats, table: ScoreTable) -> list[str]:
    """Notes that a reader of the scores needs."""
    found, total = [], _total(manifest)
    if held_by(folder):
        found.append("The run had not ended when this page was made.")
    if total is not None and total > stats.rows:
        found.append(
            f"{total - stats.rows:,} rows have not been run yet: the scores are not final."
        )
    if manifest.scoring is None:
        found.append(
            "The rows are scored in more than one way: `batchkit score` scores all of them again."
        )
    if stats.cut:
        found.append(
            f"{stats.cut:,} answers ({percent(stats.cut, stats.rows)}) ended at max_tokens, before"
            " the model was done."
        )
    if stats.shortened:
        found.append(f"{stats.shortened:,} prompts were cut in the middle to fit the model.")
    if not stats.has_scores:
        found.append("Nothing is scored: the job has no [scoring], or none that fits its answers.")
    elif not table.overall.scored:
        found.append("No answer has a score: each one failed, or the scorers found nothing in it.")
    return found


def picture_notes(pictures: Sequence[Picture]) -> list[str]:
    missing = [picture for picture in pictures if picture.problem]
    if not missing:
        return []
    name, problem = missing[0].name, missing[0].problem or ""
    first = clip(problem if problem.startswith(name) else f"{name}: {problem}", 500)
    return [f"{len(missing):,} of {len(pictures):,} images are not shown. The first: {first}"]


def _total(manifest: Manifest) -> int | None:
    total = manifest.total
    return None if total is None else total - manifest.skipped_elsewhere


def about(manifest: Manifest, job: JobConfig) -> list[tuple[str, str]]:
    """Where the answers come from, as names and values."""
    starts = manifest.starts
    versions = (starts[-1].versions if starts else None) or {}
    input_files = [file.path for file in manifest.input]
    more = f" and {len(input_files) - 3} more" if len(input_files) > 3 else ""
    restarts = sum(start.engine_restarts for start in starts)
    overrides = [text for start in starts for text in start.overrides]
    found = [
        ("Model", str(manifest.model.name)),
        ("Engine", job.engine.kind),
        ("Versions", ", ".join(f"{name} {version}" for name, version in versions.items())),
        ("Input", ", ".join(input_files[:3]) + more),
        (
            "Sampling" if job.task == "generate" else "Pooling",
            ", ".join(f"{k} {v}" for k, v in job.params().items()),
        ),
        ("Steps", " → ".join(step.name for step in job.steps)),
        ("Rollout", "" if job.rollout is None else job.rollout.function),
        ("Selection", _selection(job)),
        ("Seed", str(manifest.seed)),
        ("Host", ", ".join(dict.fromkeys(str(start.host) for start in starts))),
        ("Starts", f"{len(starts)}, {restarts} engine restarts" if starts else ""),
        ("Overrides", ", ".join(dict.fromkeys(overrides))),
        ("Scoring", _scoring(job)),
    ]
    return [(name, clip(value, 2_000)) for name, value in found if value]


def _selection(job: JobConfig) -> str:
    named = job.select.scorer or job.select.step
    return " ".join(filter(None, [job.select.by, named]))


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
