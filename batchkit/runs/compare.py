"""Compares runs with the first one: what changed, and whether it could be chance."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from batchkit.config.cross import variants
from batchkit.errors import JobError
from batchkit.runs.comparison import GRADED_STEP, REWARD_STEP, Comparison, Delta, Flip, origin
from batchkit.runs.index import Index, Snapshot, Table
from batchkit.runs.scores import table_of_index
from batchkit.scoring import kept_fields
from batchkit.scoring.metrics import OUT_OF_TEN, ScoreTable, group_name
from batchkit.sources.input import input_changes
from batchkit.storage.checkpoint import check_log
from batchkit.storage.identity import differences
from batchkit.storage.job_toml import job_of_run
from batchkit.storage.manifest import Manifest, read_manifest

if TYPE_CHECKING:
    from numpy.typing import NDArray

_ALL_S = 1e6
_SHOWN_DIFFERENCES = 12
_MOST_VALUES = 20_000  # up to so many distinct differences the draws are exact
_DRAWS = 20_000_000  # at a time
_NUMBERING = ("input.format", "input.records", "input.cross")  # keys that say which rows a file has
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def compare(folders: Sequence[Path], *, resamples: int = 1000, seed: int = 0) -> Comparison:
    """Compare every run with the first one, row by row, by the rows' ids; or the values in one run (``compare_values``).

    A difference is the mean over the rows that both runs have scored; its interval is the
    percentile interval of the paired bootstrap: rows are drawn with replacement, both of a row's
    scores together (Efron & Tibshirani, An Introduction to the Bootstrap, 1993, ch. 13; for scores
    of text: Koehn, Statistical Significance Tests for Machine Translation Evaluation, EMNLP 2004).
    It shows how much the choice of rows matters, not the effect of another seed of the model.

    Rows are grouped as in the baseline; a row of a run that did not keep the field is in the group that it has there.
    Rows that share an id are matched by their places in the
    input, or in order, if the runs have not read the same one.

    Raises:
        JobError: one run, without ``input.cross`` or scores.
        StoreError: one is not a run folder, or its log is damaged.
    """
    if len(folders) == 1 and (found := compare_values(folders[0], resamples=resamples, seed=seed)):
        return found
    if len(folders) < 2:
        raise JobError("a comparison needs two runs or more, or one with input.cross")
    manifests = []
    for folder in folders:
        manifests.append(read_manifest(folder))  # raises if it is not a run
        check_log(folder)
    names = _names(folders)
    group_by = job_of_run(folders[0]).scoring.group_by
    baseline = _Side.of(folders[0], group_by)
    others = {}
    for name, folder, manifest in zip(names[1:], folders[1:], manifests[1:], strict=True):
        by_place, side = have_same_input(manifests[0], manifest), _Side.of(folder, group_by)
        pairs = paired(baseline.snapshot, side.snapshot, by_place=by_place)
        if group_by is not None and group_by not in kept_fields(job_of_run(folder)):
            side = side.grouped_as(baseline, pairs)
        others[name] = side, pairs
    return replace(
        _compared(names[0], baseline, others, resamples, seed),
        warnings=_warnings(folders, names, manifests, group_by),
        origins=dict(zip(names, map(origin, manifests), strict=True)),
    )


def compare_values(folder: Path, *, resamples: int = 1000, seed: int = 0) -> Comparison | None:
    """As ``compare``, of the values of ``input.cross`` in one run: each with the first one, over the same rows of the
    input. None if the run has only one, or no scores.

    Rows are grouped as ``scoring.group_by`` says, unless that is one of the values.
    """
    job, manifest = job_of_run(folder), read_manifest(folder)
    found, group_by = variants(job.input.cross), job.scoring.group_by
    check_log(folder)
    whole = _Side.of(folder, None if group_by in job.input.cross else group_by)
    if len(found) < 2 or not whole.snapshot.scorers:
        return None
    names = [variant.name for variant in found]
    baseline, *sides = (whole.of_value(number, len(found)) for number in range(len(found)))
    others = {
        name: (side, paired(baseline.snapshot, side.snapshot, by_place=True))
        for name, side in zip(names[1:], sides, strict=True)
    }
    compared = _compared(names[0], baseline, others, resamples, seed)
    of_first = f"/{found[0].label}"
    return replace(
        compared,
        flips=[replace(flip, id=flip.id.removesuffix(of_first)) for flip in compared.flips],
        origins={folder.name: origin(manifest)},
    )


def _compared(
    name: str,
    baseline: _Side,
    others: Mapping[str, tuple[_Side, Pairing]],
    resamples: int,
    seed: int,
) -> Comparison:
    deltas: list[Delta] = []
    flips: list[Flip] = []
    for run, (side, pairs) in others.items():
        for scorer in baseline.table.names:
            if scorer in side.snapshot.scorers:
                found = _Found(run, scorer, baseline, side, pairs)
                deltas += _deltas(found, resamples, seed)
                flips += _flips(found)
    n_rows, n_paired = (
        len(baseline.snapshot.newest),
        {r: len(p.before) for r, (_, p) in others.items()},
    )
    return Comparison(
        runs=[name, *others],
        tables=[baseline.table, *(side.table for side, _ in others.values())],
        deltas=deltas,
        flips=flips,
        only_in_baseline={run: n_rows - n for run, n in n_paired.items()},
        only_in_run={run: len(others[run][0].snapshot.newest) - n for run, n in n_paired.items()},
        warnings=[],
        resamples=resamples,
        origins={},
    )


class Pairing(NamedTuple):
    """Numbers of the newest entries of the same rows in two runs, in the order of the first."""

    before: Table
    after: Table


def paired(a: Snapshot, b: Snapshot, *, by_place: bool) -> Pairing:
    """Rows that share an id are paired ``by_place`` in the input, or in their order."""
    _, before, after = np.intersect1d(
        _unique(a, by_place), _unique(b, by_place), return_indices=True
    )
    order = np.argsort(before)
    return Pairing(a.newest[before[order]], b.newest[after[order]])


def have_same_input(a: Manifest, b: Manifest) -> bool:
    """Whether a row has the same index in both runs; False if that is unknown."""
    return (
        bool(a.input)
        and not input_changes(a.input, b.input)
        and all(a.identity.get(key) == b.identity.get(key) for key in _NUMBERING)
    )


def flipped(scorer: str, before: Table, after: Table) -> Table:
    """1 better, -1 worse, 0 neither; for each row. nan: not scored."""
    change = np.nan_to_num(after - before)
    is_binary = all(np.isin(found[~np.isnan(found)], (0, 1)).all() for found in (before, after))
    graded = REWARD_STEP if scorer in OUT_OF_TEN else GRADED_STEP
    step = 1.0 if is_binary and scorer not in OUT_OF_TEN else graded
    found: Table = np.sign(change) * (np.abs(change) >= step - 1e-9)
    return found


def _unique(snapshot: Snapshot, by_place: bool) -> Table:
    """For each row, a number that is equal in both runs for the row with an id at the same index, or for
    the n-th row with that id."""
    rows = snapshot.entries[snapshot.newest]
    ids: Table = rows["id"]
    if by_place:
        found: Table = ids + rows["row"].astype(np.uint64) * _GOLDEN
        return found
    order = np.argsort(ids, kind="stable")
    ordered, places = ids[order], np.arange(len(ids))
    is_first = np.append(True, ordered[1:] != ordered[:-1])[: len(ids)]
    nth = places - np.maximum.accumulate(np.where(is_first, places, 0))
    unique = np.empty_like(ids)
    unique[order] = ordered + nth.astype(np.uint64) * _GOLDEN
    return unique


@dataclass(frozen=True)
class _Side:
    index: Index
    snapshot: Snapshot
    group_by: str | None

    @classmethod
    def of(cls, folder: Path, group_by: str | None) -> _Side:
        index = Index(folder, group_by)
        return cls(index, index.grow(_ALL_S), group_by)

    @cached_property
    def table(self) -> ScoreTable:
        return table_of_index(self.snapshot, self.group_by)

    def of_value(self, number: int, of: int) -> _Side:
        """The rows with one of the values of ``input.cross``, known by their place in the input."""
        snapshot = self.snapshot
        is_chosen = snapshot.entries["row"][snapshot.newest] % of == number
        entries = snapshot.entries.copy()
        entries["row"] //= of
        entries["id"] = 0
        chosen = replace(snapshot, entries=entries, newest=snapshot.newest[is_chosen])
        return replace(self, snapshot=chosen)

    def grouped_as(self, baseline: _Side, pairs: Pairing) -> _Side:
        """Rows that the baseline lacks are in no group."""
        theirs, entries = baseline.snapshot, self.snapshot.entries.copy()
        groups = [*dict.fromkeys([*theirs.groups, group_name(None)])]
        entries["group"] = groups.index(group_name(None))
        entries["group"][pairs.after] = theirs.entries["group"][pairs.before]
        return replace(self, snapshot=replace(self.snapshot, entries=entries, groups=groups))


class _Found(NamedTuple):
    """One scorer of one run against the baseline."""

    run: str
    scorer: str
    baseline: _Side
    side: _Side
    pairs: Pairing

    @property
    def scores(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        a, b = self.baseline.snapshot, self.side.snapshot
        before = a.scores[self.pairs.before, a.scorers.index(self.scorer)]
        return before, b.scores[self.pairs.after, b.scorers.index(self.scorer)]

    @property
    def groups(self) -> Table:
        """A number in the baseline's ``groups`` for each pair."""
        found: Table = self.baseline.snapshot.entries["group"][self.pairs.before]
        return found


def _deltas(found: _Found, resamples: int, seed: int) -> Iterator[Delta]:
    """By group, then over all rows. Each has its own random numbers: another group or scorer does
    not change the intervals of the others."""
    before, after = found.scores
    scored = ~np.isnan(before) & ~np.isnan(after)
    ways = flipped(found.scorer, before, after)
    scale = 1.0 if found.scorer in OUT_OF_TEN else 100.0
    names = found.baseline.snapshot.groups
    masks: list[tuple[str | None, Any]] = [
        (name, scored & (found.groups == names.index(name))) for name in found.baseline.table.groups
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
            delta=float(change.mean()) * scale,
            low=low * scale,
            high=high * scale,
            better=int((ways[chosen] > 0).sum()),
            worse=int((ways[chosen] < 0).sum()),
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
    index, snapshot = found.baseline.index, found.baseline.snapshot
    for place in np.flatnonzero(flipped(found.scorer, before, after)).tolist():
        entry = snapshot.entries[found.pairs.before[place]]
        yield Flip(
            run=found.run,
            scorer=found.scorer,
            id=index.record(entry)["id"],
            group=snapshot.groups[entry["group"]] if snapshot.groups else group_name(None),
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


def _warnings(
    folders: Sequence[Path],
    names: Sequence[str],
    manifests: Sequence[Manifest],
    group_by: str | None,
) -> list[str]:
    """Differences between the runs in settings that decide their answers."""
    found = []
    then = job_of_run(folders[0]).scoring.model_dump()
    for name, folder, manifest in zip(names[1:], folders[1:], manifests[1:], strict=True):
        lines = differences(manifests[0].identity, manifest.identity)
        if _files(manifest) != _files(manifests[0]):
            lines.insert(0, "input: the files are not the same")
        found += [f"{name}: {line}" for line in lines[:_SHOWN_DIFFERENCES]]
        if len(lines) > _SHOWN_DIFFERENCES:
            found.append(f"{name}: {len(lines) - _SHOWN_DIFFERENCES} more differences")
        scoring = job_of_run(folder).scoring
        changed = [key for key, value in scoring.model_dump().items() if value != then[key]]
        if changed:
            found.append(f"{name}: scored differently: {', '.join(changed)}")
        if group_by is not None and scoring.group_by != group_by:
            found.append(f"{name}: grouped by {group_by} here, as {names[0]} is")
    return found


def _files(manifest: Manifest) -> list[str]:
    return [file.sha256 for file in manifest.input]
