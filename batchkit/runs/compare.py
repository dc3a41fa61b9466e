"""Compares runs with the first one: what changed, and whether it could be chance."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from batchkit.errors import JobError
from batchkit.runs.comparison import Comparison, Delta, Flip, origin
from batchkit.runs.inputs import with_group
from batchkit.runs.pairs import Pairing, RowKeys, flipped, have_same_input, paired
from batchkit.runs.values import hash_of
from batchkit.scoring.metrics import OUT_OF_TEN, ScoreTable, group_name, tabulate
from batchkit.storage.checkpoint import check_log
from batchkit.storage.identity import differences
from batchkit.storage.job_toml import job_of_run
from batchkit.storage.manifest import Manifest, read_manifest
from batchkit.storage.score_store import read_scored

if TYPE_CHECKING:
    from numpy.typing import NDArray

_SHOWN_DIFFERENCES = 12
_MOST_VALUES = 20_000  # up to so many distinct differences the draws are exact
_DRAWS = 20_000_000  # at a time


def compare(folders: Sequence[Path], *, resamples: int = 1000, seed: int = 0) -> Comparison:
    """Compare every run with the first one, row by row, by the rows' ids.

    A difference is the mean over the rows that both runs have scored; its interval is the
    percentile interval of the paired bootstrap: rows are drawn with replacement, both of a row's
    scores together (Efron & Tibshirani, An Introduction to the Bootstrap, 1993, ch. 13; for scores
    of text: Koehn, Statistical Significance Tests for Machine Translation Evaluation, EMNLP 2004).
    It shows how much the choice of rows matters, not the effect of another seed of the model.

    Rows are grouped as in the baseline. Rows that share an id are matched by their places in the
    input, or in order, if the runs have not read the same one.

    Raises:
        JobError: fewer than two runs.
        StoreError: one is not a run folder, or its log is damaged.
    """
    if len(folders) < 2:
        raise JobError("a comparison needs two runs or more")
    manifests = []
    for folder in folders:
        manifests.append(read_manifest(folder))  # raises if it is not a run
        check_log(folder)
    names = _names(folders)
    group_by = job_of_run(folders[0]).scoring.group_by
    sides = [_read(folder, group_by) for folder in folders]
    baseline = sides[0]
    deltas: list[Delta] = []
    flips: list[Flip] = []
    only_in_baseline, only_in_run = {}, {}
    for name, side, manifest in zip(names[1:], sides[1:], manifests[1:], strict=True):
        by_place = have_same_input(manifests[0], manifest)
        pairs = paired(baseline.keys, side.keys, by_place=by_place)
        only_in_baseline[name] = len(baseline.ids) - len(pairs.before)
        only_in_run[name] = len(side.ids) - len(pairs.before)
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
        origins=dict(zip(names, map(origin, manifests), strict=True)),
    )


class _Side(NamedTuple):
    """One run's scores, by the place of a row."""

    table: ScoreTable
    keys: RowKeys
    ids: list[str]
    groups: NDArray[np.object_]
    scores: dict[str, NDArray[np.float64]]  # nan: not scored


class _Found(NamedTuple):
    """One scorer of one run against the baseline."""

    run: str
    scorer: str
    baseline: _Side
    side: _Side
    pairs: Pairing

    @property
    def scores(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        before = self.baseline.scores[self.scorer][self.pairs.before]
        return before, self.side.scores[self.scorer][self.pairs.after]

    @property
    def scale(self) -> float:
        return 1.0 if self.scorer in OUT_OF_TEN else 100.0

    def flipped(self) -> NDArray[np.int8]:
        return flipped(self.scorer, *self.scores)


def _read(folder: Path, group_by: str | None) -> _Side:
    job = job_of_run(folder)
    scoring = job.scoring.model_copy(update={"group_by": group_by})
    rows, ids, groups = array("q"), list[str](), list[str]()
    scores: dict[str, array[float]] = {}

    def watched() -> Iterator[dict[str, Any]]:
        for record in with_group(read_scored(folder), job.model_copy(update={"scoring": scoring})):
            value = (record.get("fields") or {}).get(group_by) if group_by else None
            groups.append(sys.intern(group_name(value)))
            of_row = (record.get("scores") or {}) if record["status"] == "ok" else {}
            for name, score in of_row.items():
                column = scores.setdefault(name, array("d"))
                column.extend([np.nan] * (len(rows) - len(column)))
                column.append(np.nan if score is None else score)
            rows.append(record["index"])
            ids.append(record["id"])
            yield record

    table = tabulate(watched(), group_by)
    n = len(rows)
    columns = {
        name: np.pad(np.array(found), (0, n - len(found)), constant_values=np.nan)
        for name, found in scores.items()
    }
    hashes = np.fromiter(map(hash_of, ids), np.uint64, n)
    keys = RowKeys(hashes, np.array(rows, np.int64))
    return _Side(table, keys, ids, np.array(groups, dtype=object), columns)


def _both(baseline: _Side, side: _Side) -> list[str]:
    """Scorers of both runs, in the order of the table."""
    return [name for name in baseline.table.names if name in side.scores]


def _deltas(found: _Found, resamples: int, seed: int) -> Iterator[Delta]:
    """By group, then over all rows. Each has its own random numbers: another group or scorer does
    not change the intervals of the others."""
    before, after = found.scores
    scored = ~np.isnan(before) & ~np.isnan(after)
    flipped = found.flipped()
    groups = found.baseline.groups[found.pairs.before]
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


def bootstrap_interval(
    differences: NDArray[np.float64], *, resamples: int, rng: np.random.Generator
) -> tuple[float, float]:
    """The 2.5th and 97.5th percentile of the mean over rows drawn with replacement.

    Rows with the same difference are drawn together, as a multinomial: the same distribution,
    without a table of rows × resamples. Beyond 20,000 distinct differences they are rounded to
    0.0001.
    """
    values, counts = np.unique(differences, return_counts=True)
    if len(values) > _MOST_VALUES:
        values, counts = np.unique(np.round(differences, 4), return_counts=True)
    n, means = len(differences), []
    shares = counts / n
    step = max(1, _DRAWS // len(values))
    for start in range(0, resamples, step):
        drawn = rng.multinomial(n, shares, size=min(step, resamples - start))
        means.append(drawn @ values / n)
    low, high = np.percentile(np.concatenate(means), (2.5, 97.5))
    return float(low), float(high)


def _flips(found: _Found) -> Iterator[Flip]:
    before, after = found.scores
    for place in np.flatnonzero(found.flipped()).tolist():
        row = int(found.pairs.before[place])
        yield Flip(
            run=found.run,
            scorer=found.scorer,
            id=found.baseline.ids[row],
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
