"""Compares runs with the first one: what changed, and whether it could be chance."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from batchkit.commands.compare.bootstrap import bootstrap_interval
from batchkit.errors import JobError
from batchkit.scoring.metrics import (
    ALL,
    OUT_OF_TEN,
    ScoreTable,
    group_name,
    head,
    markdown,
    tabulate,
)
from batchkit.sources.join import with_group
from batchkit.storage.checkpoint import check_log
from batchkit.storage.identity import differences
from batchkit.storage.job_toml import job_of_run
from batchkit.storage.manifest import Manifest, read_manifest
from batchkit.storage.score_store import read_scored

if TYPE_CHECKING:
    from numpy.typing import NDArray

GRADED_STEP = 0.5  # of 1: how far a graded score must move for its row to count as flipped
_REWARD_STEP = 2.0  # of 10
_SHOWN_FLIPS = 10
_SHOWN_DIFFERENCES = 12


@dataclass(frozen=True, slots=True)
class Delta:
    """One run against the baseline, one group, one scorer; over the ``n`` rows both have scored.

    ``delta`` and its 95 % interval ``low`` … ``high`` are in percent points (reward: points of 10).
    ``better`` and ``worse`` count the rows that flipped. ``group`` is None over all rows.
    """

    run: str
    group: str | None
    scorer: str
    n: int
    delta: float
    low: float
    high: float
    better: int
    worse: int

    @property
    def is_clear(self) -> bool:
        """True if the interval excludes 0."""
        return self.low > 0 or self.high < 0


@dataclass(frozen=True, slots=True)
class Flip:
    """A row whose score changed: from 0 to 1 or back; a graded one by ``GRADED_STEP`` or more."""

    run: str
    scorer: str
    id: str
    group: str
    before: float
    after: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """``runs``: their names, the baseline first; ``tables``: their score tables, in that order.

    ``only_in_baseline`` and ``only_in_run`` count rows by id, per further run.
    """

    runs: list[str]
    tables: list[ScoreTable]
    deltas: list[Delta]
    flips: list[Flip]
    only_in_baseline: dict[str, int]
    only_in_run: dict[str, int]
    warnings: list[str]
    resamples: int

    def to_json(self) -> dict[str, Any]:
        return {
            "runs": self.runs,
            "tables": {
                name: table.to_json() for name, table in zip(self.runs, self.tables, strict=True)
            },
            "deltas": [asdict(delta) for delta in self.deltas],
            "flips": [asdict(flip) for flip in self.flips],
            "only_in_baseline": self.only_in_baseline,
            "only_in_run": self.only_in_run,
            "warnings": self.warnings,
            "resamples": self.resamples,
        }

    def to_text(self) -> str:
        """Markdown: warnings, one table per run against the baseline, and the rows that flipped."""
        parts = [f"- {warning}" for warning in self.warnings]
        parts += [""] * bool(parts)
        for run in self.runs[1:]:
            parts += [f"## {run} against {self.runs[0]}", "", self._table(run)]
            parts += ["", self.counts(run), *self._flips(run), ""]
        parts.append(self.method)
        return "\n".join(parts)

    @property
    def method(self) -> str:
        """What the numbers mean, shown below a table."""
        return (
            "Means are over each run's own scored rows; n and Δ over the rows scored in both. 95 %:"
            f" paired bootstrap, {self.resamples:,} resamples; * leaves 0 out. Better and worse:"
            f" rows that went from 0 to 1 or back; graded scores by {GRADED_STEP * 100:g} points or"
            f" more (reward: {_REWARD_STEP:g})."
        )

    def mean(self, run: str, group: str | None, scorer: str) -> str:
        """The mean as shown in a table; ``–`` if there is none."""
        table = self.tables[self.runs.index(run)]
        found = table.overall if group is None else table.groups.get(group)
        mean = None if found is None else found.mean(scorer)
        return "–" if mean is None else f"{mean:.2f}"

    def counts(self, run: str) -> str:
        """The number of rows that only one of the two has."""
        return (
            f"Rows only in {self.runs[0]}: {self.only_in_baseline[run]:,}; only in {run}:"
            f" {self.only_in_run[run]:,}."
        )

    def _table(self, run: str) -> str:
        heads = ["", "score", "n", self.runs[0], run, "Δ", "95 %", "better", "worse"]
        rows = []
        for delta in self.deltas:
            if delta.run != run:
                continue
            mark = " *" if delta.is_clear else ""
            rows.append(
                [
                    ALL if delta.group is None else delta.group,
                    head(delta.scorer),
                    str(delta.n),
                    self.mean(self.runs[0], delta.group, delta.scorer),
                    self.mean(run, delta.group, delta.scorer),
                    f"{delta.delta:+.2f}{mark}",
                    f"{delta.low:+.2f} … {delta.high:+.2f}",
                    str(delta.better),
                    str(delta.worse),
                ]
            )
        return markdown(heads, rows) if rows else "No row is scored in both."

    def _flips(self, run: str) -> Iterator[str]:
        """The first ids of the rows that flipped, by scorer."""
        flips = [flip for flip in self.flips if flip.run == run]
        for scorer in dict.fromkeys(flip.scorer for flip in flips):
            for way, sign in (("better", 1), ("worse", -1)):
                ids = [
                    flip.id
                    for flip in flips
                    if flip.scorer == scorer and (flip.after - flip.before) * sign > 0
                ]
                if ids:
                    more = f" … ({len(ids):,} in all)" if len(ids) > _SHOWN_FLIPS else ""
                    yield f"{head(scorer)} {way}: {', '.join(ids[:_SHOWN_FLIPS])}{more}"


def compare(folders: Sequence[Path], *, resamples: int = 1000, seed: int = 0) -> Comparison:
    """Compare every run with the first one, row by row, by the rows' ids.

    A difference is the mean over the rows that both runs have scored; its interval is the
    percentile interval of the paired bootstrap: rows are drawn with replacement, both of a row's
    scores together (Efron & Tibshirani, An Introduction to the Bootstrap, 1993, ch. 13; for scores
    of text: Koehn, Statistical Significance Tests for Machine Translation Evaluation, EMNLP 2004).
    It shows how much the choice of rows matters, not the effect of another seed of the model.

    Rows are grouped as in the baseline. Rows that share an id are matched in order.

    Raises:
        JobError: fewer than two runs.
        StoreError: one is not a run folder, or its log is damaged.
    """
    if len(folders) < 2:
        raise JobError("a comparison needs two runs or more")
    for folder in folders:
        read_manifest(folder)  # raises if it is not a run
        check_log(folder)
    names = _names(folders)
    group_by = job_of_run(folders[0]).scoring.group_by
    sides = [_read(folder, group_by) for folder in folders]
    baseline = sides[0]
    deltas: list[Delta] = []
    flips: list[Flip] = []
    only_in_baseline, only_in_run = {}, {}
    for name, side in zip(names[1:], sides[1:], strict=True):
        pairs = _pairs(baseline, side)
        only_in_baseline[name] = len(baseline.places) - len(pairs.before)
        only_in_run[name] = len(side.places) - len(pairs.before)
        for scorer in _both(baseline, side):
            found = _Found(name, scorer, baseline, side, pairs)
            deltas += _deltas(found, resamples, seed)
            flips += _flips(found)
    return Comparison(
        runs=names,
        tables=[side.table for side in sides],
        deltas=deltas,
        flips=flips,
        only_in_baseline=only_in_baseline,
        only_in_run=only_in_run,
        warnings=_warnings(folders, names, group_by),
        resamples=resamples,
    )


@dataclass
class _Side:
    """One run's scores. ``places``: the row's place by its id and how often that came before."""

    table: ScoreTable
    places: dict[tuple[str, int], int]
    groups: list[str]
    scores: dict[str, NDArray[np.float64]]  # nan: not scored


class _Pairs(NamedTuple):
    """Places of the same rows in both runs."""

    before: NDArray[np.int64]
    after: NDArray[np.int64]


class _Found(NamedTuple):
    """One scorer of one run against the baseline."""

    run: str
    scorer: str
    baseline: _Side
    side: _Side
    pairs: _Pairs

    @property
    def scores(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        before = self.baseline.scores[self.scorer][self.pairs.before]
        return before, self.side.scores[self.scorer][self.pairs.after]

    @property
    def scale(self) -> float:
        return 1.0 if self.scorer in OUT_OF_TEN else 100.0

    def flipped(self) -> NDArray[np.int8]:
        """1 better, -1 worse, 0 neither; for each pair."""
        before, after = self.scores
        change = np.nan_to_num(after - before)
        is_binary = all(np.isin(found[~np.isnan(found)], (0, 1)).all() for found in (before, after))
        graded = _REWARD_STEP if self.scorer in OUT_OF_TEN else GRADED_STEP
        step = 1.0 if is_binary and self.scorer not in OUT_OF_TEN else graded
        return (np.sign(change) * (np.abs(change) >= step - 1e-9)).astype(np.int8)


@dataclass
class _Columns:
    """Fills ``_Side`` as the records pass."""

    group_by: str | None
    seen: Counter[str] = field(default_factory=Counter)
    places: dict[tuple[str, int], int] = field(default_factory=dict)
    groups: list[str] = field(default_factory=list)
    scores: dict[str, array[float]] = field(default_factory=dict)

    def watch(self, records: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        for record in records:
            self._add(record)
            yield record

    def _add(self, record: Mapping[str, Any]) -> None:
        row_id, place = str(record["id"]), len(self.groups)
        self.places[row_id, self.seen[row_id]] = place
        self.seen[row_id] += 1
        value = (record.get("fields") or {}).get(self.group_by) if self.group_by else None
        self.groups.append(group_name(value))
        if record["status"] != "ok":
            return
        for name, score in (record.get("scores") or {}).items():
            column = self.scores.setdefault(name, array("d"))
            column.extend([np.nan] * (place - len(column)))
            column.append(np.nan if score is None else score)


def _read(folder: Path, group_by: str | None) -> _Side:
    job = job_of_run(folder)
    scoring = job.scoring.model_copy(update={"group_by": group_by})
    records = with_group(read_scored(folder), job.model_copy(update={"scoring": scoring}))
    columns = _Columns(group_by)
    table = tabulate(columns.watch(records), group_by)
    n = len(columns.groups)
    scores = {
        name: np.pad(np.array(found), (0, n - len(found)), constant_values=np.nan)
        for name, found in columns.scores.items()
    }
    return _Side(table, columns.places, columns.groups, scores)


def _pairs(baseline: _Side, side: _Side) -> _Pairs:
    found = [
        (place, other)
        for key, place in baseline.places.items()
        if (other := side.places.get(key)) is not None
    ]
    pairs = np.array(found, dtype=np.int64).reshape(-1, 2)
    return _Pairs(pairs[:, 0], pairs[:, 1])


def _both(baseline: _Side, side: _Side) -> list[str]:
    """Scorers of both runs, in the order of the table."""
    return [name for name in baseline.table.names if name in side.scores]


def _deltas(found: _Found, resamples: int, seed: int) -> Iterator[Delta]:
    """By group, then over all rows. Each has its own random numbers: another group or scorer does
    not change the intervals of the others."""
    before, after = found.scores
    scored = ~np.isnan(before) & ~np.isnan(after)
    flipped = found.flipped()
    groups = np.array(found.baseline.groups, dtype=object)[found.pairs.before]
    masks: list[tuple[str | None, NDArray[np.bool_]]] = [
        (name, scored & (groups == name)) for name in found.baseline.table.groups
    ]
    for name, chosen in [*masks, (None, scored)]:
        if not chosen.any():
            continue
        change = (after - before)[chosen]
        rng = np.random.default_rng([seed, *(name or "").encode(), *found.scorer.encode()])
        low, high = bootstrap_interval(change, resamples=resamples, rng=rng)
        yield Delta(
            run=found.run,
            group=name,
            scorer=found.scorer,
            n=int(chosen.sum()),
            delta=float(change.mean()) * found.scale,
            low=low * found.scale,
            high=high * found.scale,
            better=int((flipped[chosen] > 0).sum()),
            worse=int((flipped[chosen] < 0).sum()),
        )


def _flips(found: _Found) -> Iterator[Flip]:
    before, after = found.scores
    ids = [row_id for row_id, _ in found.baseline.places]
    for place in np.flatnonzero(found.flipped()).tolist():
        row = int(found.pairs.before[place])
        yield Flip(
            run=found.run,
            scorer=found.scorer,
            id=ids[row],
            group=found.baseline.groups[row],
            before=float(before[place]),
            after=float(after[place]),
        )


def _names(folders: Sequence[Path]) -> list[str]:
    """The folders' names; if two are equal, with as much of the path as distinguishes them."""
    paths = [folder.resolve() for folder in folders]
    for depth in range(1, max(len(path.parts) for path in paths) + 1):
        names = ["/".join(path.parts[-depth:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    return [f"{path.name} ({n})" for n, path in enumerate(paths, start=1)]  # one run, given twice


def _warnings(folders: Sequence[Path], names: Sequence[str], group_by: str | None) -> list[str]:
    """Differences between the runs in settings that decide their answers."""
    manifests = [read_manifest(folder) for folder in folders]
    found = []
    for name, folder, manifest in zip(names[1:], folders[1:], manifests[1:], strict=True):
        lines = differences(manifests[0].identity, manifest.identity)
        if _files(manifest) != _files(manifests[0]):
            lines.insert(0, "input: the files are not the same")
        found += [f"{name}: {line}" for line in lines[:_SHOWN_DIFFERENCES]]
        if len(lines) > _SHOWN_DIFFERENCES:
            found.append(f"{name}: {len(lines) - _SHOWN_DIFFERENCES} more differences")
        scoring, then = job_of_run(folder).scoring, job_of_run(folders[0]).scoring
        if scoring.model_dump() != then.model_dump():
            before = then.model_dump()
            changed = [key for key, value in scoring.model_dump().items() if value != before[key]]
            found.append(f"{name}: scored differently: {', '.join(changed)}")
        if group_by is not None and scoring.group_by != group_by:
            found.append(f"{name}: grouped by {group_by} here, as {names[0]} is")
    return found


def _files(manifest: Manifest) -> list[str]:
    return [file.sha256 for file in manifest.input]
