"""The ``report`` command: writes the page of ``batchkit view`` as one file that contains its data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from batchkit.commands import Say
from batchkit.commands.view.detail import shown
from batchkit.commands.view.figures import Figures, figures_of
from batchkit.commands.view.media import Pictures
from batchkit.commands.view.overview import about, overview, timeline
from batchkit.commands.view.page import check_page, write_page
from batchkit.commands.view.rows import labels_of
from batchkit.config.masking import masked_text
from batchkit.config.tables import JobConfig
from batchkit.config.terminal import cut_in_the_middle
from batchkit.errors import BatchkitError, StoreError
from batchkit.runs.compare import RunScores
from batchkit.runs.comparison import Comparison
from batchkit.runs.index import Index, Snapshot, Table
from batchkit.runs.inputs import InputRows
from batchkit.runs.listing import look_at
from batchkit.runs.paired import Side
from batchkit.runs.reach import Reach
from batchkit.runs.scores import is_mixed, table_of
from batchkit.scoring import Scoring, kept_fields
from batchkit.storage.metrics import read_metrics
from batchkit.storage.newest_lines import Generations
from batchkit.storage.score_store import references_of

REPORT = "report.html"
MAX_ROWS = 20_000
MAX_FAILED = 5_000
_SEED = 0
_MAX_TEXT_BYTES = 14 * 2**20  # of all rows together; with more rows, each text is shorter
_LEAST_CHARACTERS, _MOST_CHARACTERS = 500, 40_000  # of each text
_FIELD_SHARE = 8  # an answer may have this many times the characters of a field
_MOST_GENERATIONS = 20  # maximum number shown for a row of [rollout]
# Keys of a record that are stored next to it, or are too large.
_LEFT_OUT = ("fields", "prompt", "steps", "logprobs")


class Report(NamedTuple):
    """The scores of a run, and the path of its page."""

    scores: RunScores
    path: Path

    def to_json(self) -> dict[str, Any]:
        return {**self.scores.to_json(), "path": str(self.path)}

    def to_text(self) -> str:
        return f"{self.scores.to_text()}\n\n{self.path}"


def report(
    folder: Path,
    path: Path | None = None,
    *,
    images: bool = True,
    media: Sequence[Path] = (),
    say: Say = lambda text: None,
) -> Report:
    """Write the page of a run to ``path``, or to ``report.html`` in its folder.

    The page is one file that loads nothing else. The model's texts are embedded as data and shown only as text. It
    has all rows up to 20,000 and a sample beyond that; tables and charts cover all rows. ``images=False`` omits
    thumbnails. ``media``: folders whose inputs and images may be read (``Reach``).

    Raises:
        InputError: The score table needs fields that the run did not keep, and the input changed.
        StoreError: The folder is not a run folder, no row has finished, the log is damaged, or the file can't be
            written.
    """
    path, look = path or folder / REPORT, look_at(folder)
    check_page(path)
    table, reach = table_of(folder, media=media), Reach.of(folder, media)
    side = Side.of(folder, None)
    figures = figures_of(side.index, side.snapshot)
    if not figures.n_rows:
        raise StoreError(f"{folder}: nothing to report: no row has finished yet")
    if is_mixed(folder):
        say(
            f"{folder}: its rows were scored with different settings; `batchkit score` scores all of them again"
        )
    rows = _read_rows(side.index, figures, _sample(side.snapshot), reach, images=images)
    scores = RunScores.of(table, folder)
    found = overview(look, figures, table, problem=None, indexed=1.0)
    notes = ["The run had not ended when this page was written."] * (look.state == "running")
    data = {
        "status": {**found, "folder": folder.name, "notes": [*notes, *found["notes"], *rows.notes]},
        "about": about(folder, reach),
        "metrics": timeline(read_metrics(folder)),
        "values": scores.comparison and scores.comparison.to_json(),
        "rows": rows.rows,
        "pictures": rows.pictures,
    }
    return Report(scores, write_page(path, look.status.name, data))


def write_comparison(comparison: Comparison, path: Path) -> Path:
    """Write ``comparison`` as one self-contained web page.

    Raises:
        StoreError: The file can't be written, or its suffix is not .html or .htm.
    """
    return write_page(path, ", ".join(comparison.runs), {"comparison": comparison.to_json()})


class _Shown(NamedTuple):
    """The rows and images of the page, and ``notes`` for its reader about what the page leaves out."""

    rows: list[dict[str, Any]]
    pictures: list[dict[str, Any]]
    notes: list[str]


def _sample(snapshot: Snapshot) -> Table:
    """Return the entries of the rows that the page lists, in input order: all of them, or the failed rows and a random
    sample of the others."""
    entries, random = snapshot.entries[snapshot.newest], np.random.default_rng(_SEED)
    failed, others = np.flatnonzero(entries["kind"]), np.flatnonzero(entries["kind"] == 0)
    n_failed = min(len(failed), max(MAX_FAILED, MAX_ROWS - len(others)))
    chosen = (
        random.permutation(failed)[:n_failed],
        random.permutation(others)[: MAX_ROWS - n_failed],
    )
    found: Table = entries[np.sort(np.concatenate(chosen))]
    return found


def _read_rows(
    index: Index, figures: Figures, chosen: Table, reach: Reach, *, images: bool
) -> _Shown:
    """Read the records of the ``chosen`` entries and, if the input still exists, render their prompts again."""
    limit = min(max(_MAX_TEXT_BYTES // len(chosen), _LEAST_CHARACTERS), _MOST_CHARACTERS)
    scoring, problem = _scoring(reach)
    inputs, labels = InputRows(reach.job, {*chosen["row"].tolist()}, reach), labels_of(reach)
    pictures, rows = Pictures(reach), []
    n_failed = n_cut = 0
    with closing(Generations(index.folder)) as generations:
        for record in map(index.record, chosen):
            prompt, steps = inputs.prompt(record), generations.of_record(record)
            numbers = [pictures.add(source) for source in prompt.sources] if images else []
            row = shown([record], steps, prompt, numbers, labels, scoring)
            n_failed += row["kind"] is not None
            n_cut += sum(map(len, row["answers"])) > limit
            row = _cut_to(limit, row)
            if images and prompt.clips:
                row["prompt"]["clips"] = [pictures.clip(*clip) for clip in prompt.clips]
            rows.append(row)
    notes = [
        *_sample_notes(figures, len(rows), n_failed),
        *([f"Answers longer than {limit:,} characters are cut in the middle."] if n_cut else []),
        *problem,
        *_input_notes(reach.job, inputs.problem),
        *_picture_notes(pictures.found),
    ]
    return _Shown(rows, pictures.found, notes)


def _cut_to(limit: int, row: dict[str, Any]) -> dict[str, Any]:
    """Return ``row`` with only the keys that the page needs, and with texts cut to ``limit`` characters."""
    record, steps = row["record"], row["steps"]
    of_field = max(120, limit // _FIELD_SHARE)
    kept = steps if record.get("steps") is not None else steps[:_MOST_GENERATIONS]
    more = len(steps) - len(kept)
    of_step = limit // max(1, len(kept))
    return {
        **row,
        "record": _cut({k: v for k, v in record.items() if k not in _LEFT_OUT}, limit),
        "answers": _cut(row["answers"], limit) if row["answers"] != [record.get("text")] else None,
        "reference": _cut(row["reference"], limit),
        "fields": _cut(row["fields"], of_field),
        "kept": [*(record.get("fields") or {})],
        "prompt": _cut(row["prompt"], 4 * of_field),
        "steps": [*(_cut(step, of_step) for step in kept), *([{"more": more}] if more else [])],
    }


def _cut(value: Any, limit: int) -> Any:
    """Return ``value`` with long texts cut in the middle and without null values."""
    if isinstance(value, str):
        return cut_in_the_middle(value, limit)
    if isinstance(value, Mapping):
        return {key: _cut(part, limit) for key, part in value.items() if part is not None}
    return [_cut(part, limit) for part in value] if isinstance(value, list) else value


def _scoring(reach: Reach) -> tuple[Scoring | None, list[str]]:
    """Return the scoring that finds each row's reference answer. If it is unavailable, return None and a note with the
    reason."""
    job = reach.job
    if not job.scoring.is_on:
        return None, []
    try:
        if job.scoring.reference_run is not None:
            reach.check("scoring.reference_run", job.scoring.reference_run)
        return Scoring(job.scoring, references_of(job)), []
    except BatchkitError as error:
        return None, [f"References are not shown: {error}"]


def _sample_notes(figures: Figures, n_listed: int, n_failed: int) -> Iterator[str]:
    if n_listed < figures.n_rows:
        total = sum(failure["count"] for failure in figures.failures)
        failed = f"all {total:,}" if n_failed == total else f"{n_failed:,} of {total:,}"
        yield (
            f"The list below holds {n_listed:,} of {figures.n_rows:,} rows: {failed} failed ones and a"
            " random sample of the others. Table and charts cover all rows."
        )


def _input_notes(job: JobConfig, problem: str | None) -> Iterator[str]:
    if problem:
        left = "only the kept fields are shown" if kept_fields(job) else "no fields are shown"
        yield f"For rows whose input can't be read or has changed, {left}: {masked_text(problem)}"


def _picture_notes(pictures: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    missing = [picture["problem"] for picture in pictures if "problem" in picture]
    if missing:
        n = f"{len(missing):,} of {len(pictures):,}"
        yield f"{n} images are not shown. The first: {cut_in_the_middle(missing[0], 500)}"
