"""The rows that a report holds: which, and what of each, within the page's limits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any, NamedTuple

import numpy as np

from batchkit.commands.report.pictures import Picture, Pictures
from batchkit.commands.view.detail import RowReader
from batchkit.config.masking import masked_text
from batchkit.config.tables import JobConfig
from batchkit.config.terminal import cut_in_the_middle
from batchkit.errors import BatchkitError
from batchkit.runs.columns import Table
from batchkit.runs.index import Index, Snapshot
from batchkit.runs.inputs import with_group
from batchkit.scoring import Scoring, kept_fields
from batchkit.storage.newest import Generations
from batchkit.storage.score_store import references_of

MAX_ROWS = 20_000
MAX_FAILED = 5_000
_SEED = 0
_MAX_TEXT_BYTES = 14 * 2**20  # of all records; if there is more, long texts are cut in the middle
_MAX_FIELD_BYTES = 7 * 2**20
_TEXT_LIMITS = (40_000, 16_000, 8_000, 4_000, 2_000, 1_000, 500)
_PROMPT_SHARE = 4  # times the space of a field
_MOST_GENERATIONS, _LEAST_GENERATIONS, _FEW_CHARACTERS = 20, 3, 500
_LEFT_OUT = (
    "fields",
    "prompt",
    "steps",
    "logprobs",
)  # of a record: they are beside it, or too large


class Shown(NamedTuple):
    """What the page shows of the rows; ``notes`` say what it does not show, and why."""

    rows: list[dict[str, Any]]
    pictures: list[dict[str, Any]]
    notes: list[str]


class Limits(NamedTuple):
    """Characters of each text of a record, of each field, and of all generations of a function's row."""

    text: int
    field: int
    generations: float


def read_rows(index: Index, snapshot: Snapshot, job: JobConfig, *, images: bool) -> Shown:
    """Reads the records again, and the input along with them if it still exists."""
    entries = snapshot.entries[_chosen(snapshot)]
    limits = _limits(entries)
    scoring, problem = _scoring(job)
    reader = RowReader(job, entries["row"].tolist(), scoring)
    records = with_group(map(index.record, entries), job)
    with Pictures(job.media) as pictures, closing(Generations(index.folder)) as generations:

        def picture(_: int, source: Any) -> int | None:
            return pictures.add(source) if images else None

        rows = [
            _cut_to(limits, reader.read([record], generations.of(record["index"]), picture))
            for record in records
        ]
        found = pictures.finish()
    notes = [
        *_sample_notes(snapshot, entries),
        *_cut_notes(entries, limits),
        *problem,
        *_input_notes(job, reader.inputs.problem),
        *_picture_notes(found),
    ]
    return Shown(rows, [one.to_json() for one in found], notes)


def _chosen(snapshot: Snapshot) -> Table:
    """Numbers of the entries: of all rows, or of failed ones first, then of a seeded sample of the
    others; in the order of the input."""
    newest = snapshot.newest
    if len(newest) <= MAX_ROWS:
        return newest
    rng = np.random.default_rng(_SEED)
    has_failed = snapshot.entries["kind"][newest] > 0
    failed = _sample(rng, np.flatnonzero(has_failed), MAX_FAILED)
    others = _sample(rng, np.flatnonzero(~has_failed), MAX_ROWS - len(failed))
    found: Table = newest[np.sort(np.concatenate([failed, others]))]
    return found


def _sample(rng: np.random.Generator, places: Table, size: int) -> Table:
    return places if len(places) <= size else rng.choice(places, size, replace=False)


def _limits(entries: Table) -> Limits:
    """The largest with which the rows fit into the page."""
    lengths, n = entries["length"], len(entries)
    fitting = (n for n in _TEXT_LIMITS if np.minimum(lengths, n).sum() <= _MAX_TEXT_BYTES)
    field = min(2_000, max(120, _MAX_FIELD_BYTES / n / 4))
    return Limits(next(fitting, _TEXT_LIMITS[-1]), int(field), _MAX_TEXT_BYTES / n)


def _cut_to(limits: Limits, row: dict[str, Any]) -> dict[str, Any]:
    """A row as ``RowReader`` makes it, without what the page does not need."""
    record, prompt = row["record"], row["prompt"]
    images = [number for number in prompt["images"] if number is not None]
    answers = row["answers"] if row["answers"] != [record.get("text")] else None
    return {
        **row,
        "record": _cut({k: v for k, v in record.items() if k not in _LEFT_OUT}, limits.text),
        "answers": _cut(answers, limits.text),
        "reference": _cut(row["reference"], limits.text),
        "fields": _cut(row["fields"], limits.field),
        "prompt": {**_cut(prompt, limits.field * _PROMPT_SHARE), "images": images},
        "steps": _steps(limits, row["steps"], is_fixed=record.get("steps") is not None),
    }


def _steps(
    limits: Limits, steps: Sequence[Mapping[str, Any]], *, is_fixed: bool
) -> list[dict[str, Any]]:
    """All of ``[[steps]]``; of a function's generations the first, and how many more there are."""
    room, most = float(limits.text), len(steps)
    if not is_fixed:
        room = limits.generations
        fitting = max(_LEAST_GENERATIONS, room / _FEW_CHARACTERS)
        most = int(min(_MOST_GENERATIONS, fitting, len(steps)))
    limit = int(min(limits.text, room / max(1, most)))
    more = len(steps) - most
    return [*(_cut(step, limit) for step in steps[:most]), *([{"more": more}] if more else [])]


def _cut(value: Any, limit: int) -> Any:
    """``value`` with long texts cut in the middle, and without what is null."""
    if isinstance(value, str):
        return cut_in_the_middle(value, limit)
    if isinstance(value, Mapping):
        return {key: _cut(part, limit) for key, part in value.items() if part is not None}
    return [_cut(part, limit) for part in value] if isinstance(value, list) else value


def _scoring(job: JobConfig) -> tuple[Scoring | None, list[str]]:
    """What finds the rows' references, and a note if there is nothing."""
    if not job.scoring.is_on:
        return None, []
    try:
        return Scoring(job.scoring, references_of(job)), []
    except BatchkitError as error:
        return None, [f"References are not shown: {error}"]


def _sample_notes(snapshot: Snapshot, entries: Table) -> Iterator[str]:
    n_rows, n_failed = len(snapshot.newest), int((entries["kind"] > 0).sum())
    if len(entries) < n_rows:
        total = int((snapshot.entries["kind"][snapshot.newest] > 0).sum())
        failed = f"all {total:,}" if n_failed == total else f"{n_failed:,} of {total:,}"
        yield (
            f"The list below holds {len(entries):,} of {n_rows:,} rows: {failed} failed ones and a"
            " random sample of the others. Table and charts are over all rows."
        )


def _cut_notes(entries: Table, limits: Limits) -> Iterator[str]:
    if (entries["letters"] > limits.text).any():
        yield f"Answers longer than {limits.text:,} characters are cut in the middle."


def _input_notes(job: JobConfig, problem: str | None) -> Iterator[str]:
    if problem:
        left = "only the kept fields are shown" if kept_fields(job) else "no fields are shown"
        yield f"Where the input can't be read as it was, {left}: {masked_text(problem)}"


def _picture_notes(pictures: Sequence[Picture]) -> Iterator[str]:
    missing = [picture for picture in pictures if picture.problem]
    if missing:
        n = f"{len(missing):,} of {len(pictures):,}"
        yield f"{n} images are not shown. The first: {cut_in_the_middle(missing[0].problem, 500)}"
