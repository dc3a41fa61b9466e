"""Pairs the rows of two runs and computes score differences with intervals."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from batchkit.config.tables import JobConfig
from batchkit.runs.answers import MOST_EXAMINED, AnswerComparison, SideAnswer, difference
from batchkit.runs.comparison import GRADED_STEP, RESAMPLES, REWARD_STEP, Delta, Flip
from batchkit.runs.index import Index, Snapshot, Table
from batchkit.runs.inputs import InputRows, question_in
from batchkit.runs.scores import table_of_index
from batchkit.scoring.metrics import ERROR_RATES, OUT_OF_TEN, ScoreTable, group_name
from batchkit.storage.lines import answers_in_words

_ALL_S = 1e6  # seconds: enough to read any log to its end
_MOST_VALUES = 20_000  # up to this many distinct differences, the draws are exact
_DRAWS = 20_000_000  # maximum number of random numbers in memory at a time
# 2^64 divided by the golden ratio: a product with it spreads small numbers over 64 bits (Fibonacci hashing).
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True)
class Side:
    """One of the compared runs, or the rows of a run with one value of ``input.cross``."""

    index: Index
    snapshot: Snapshot
    group_by: str | None

    @classmethod
    def of(cls, folder: Path, group_by: str | None) -> Side:
        index = Index(folder, group_by)
        return cls(index, index.grow(_ALL_S), group_by)

    @cached_property
    def table(self) -> ScoreTable:
        return table_of_index(self.snapshot, self.group_by)

    def of_value(self, number: int, of: int) -> Side:
        """Return the rows with the value ``number`` of ``input.cross``, which has ``of`` values.

        Each row gets the index of its input row, so that ``paired`` finds the other values of that row.
        """
        snapshot = self.snapshot
        is_chosen = snapshot.entries["row"][snapshot.newest] % of == number
        entries = snapshot.entries.copy()
        entries["row"] //= of
        entries["id"] = 0
        chosen = replace(snapshot, entries=entries, newest=snapshot.newest[is_chosen])
        return replace(self, snapshot=chosen)

    def grouped_as(self, baseline: Side, pairs: Pairing) -> Side:
        """Return this run with each row in the group that the row has in the baseline. Used if this run did not keep
        the field ``group_by``.

        ``pairs``: the rows that both runs have. Rows that the baseline lacks get the same group as rows without the
        field.
        """
        theirs, entries = baseline.snapshot, self.snapshot.entries.copy()
        groups = [*dict.fromkeys([*theirs.groups, group_name(None)])]
        entries["group"] = groups.index(group_name(None))
        entries["group"][pairs.after] = theirs.entries["group"][pairs.before]
        return replace(self, snapshot=replace(self.snapshot, entries=entries, groups=groups))


class Pairing(NamedTuple):
    """The rows that two runs share: positions of their newest entries in both indexes, in the first run's order."""

    before: Table
    after: Table


def paired(a: Snapshot, b: Snapshot, *, by_place: bool) -> Pairing:
    """Pair rows by id. Rows that share an id are paired by index if ``by_place``, else by their order."""
    _, before, after = np.intersect1d(
        _unique(a, by_place), _unique(b, by_place), return_indices=True
    )
    order = np.argsort(before)
    return Pairing(a.newest[before[order]], b.newest[after[order]])


def _unique(snapshot: Snapshot, by_place: bool) -> Table:
    """Return a number for each row that is equal for the same row in both runs.

    The number combines the id with the index (``by_place``), or with the count of earlier rows that have the same id.
    """
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


class PairedScores(NamedTuple):
    """The scores that one scorer gave the paired rows, in a run and in the baseline."""

    run: str
    scorer: str
    baseline: Side
    side: Side
    pairs: Pairing

    @property
    def scores(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        a, b = self.baseline.snapshot, self.side.snapshot
        before = a.scores[self.pairs.before, a.scorers.index(self.scorer)]
        return before, b.scores[self.pairs.after, b.scorers.index(self.scorer)]

    @property
    def groups(self) -> Table:
        """The group of each pair, as an index into the baseline's ``groups``."""
        found: Table = self.baseline.snapshot.entries["group"][self.pairs.before]
        return found


def deltas(found: PairedScores) -> Iterator[Delta]:
    """Yield the Delta of each group, then of all rows.

    Each group has a separate random generator, so adding a group or scorer does not change the intervals of others.
    """
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
        rng = np.random.default_rng([0, *(name or "").encode(), *found.scorer.encode()])
        low, high = bootstrap_interval(change, resamples=RESAMPLES, rng=rng)
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
    """Return the 2.5th and 97.5th percentile of the mean over rows drawn with replacement.

    Rows with the same difference are drawn together as a multinomial. This gives the same distribution without a
    table of rows × resamples. With more than 20,000 distinct differences, they are rounded to 0.0001.
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


def flips(of_run: Sequence[PairedScores], job: JobConfig, inputs: InputRows) -> list[Flip]:
    """Return the rows of a run that flipped, by scorer and then in the baseline's order.

    Only the first 1,000 of these rows get their question, reference and answers. ``inputs``: the input rows of the
    baseline, from which the question and the reference are read.
    """
    if not of_run:
        return []
    baseline, side, pairs = of_run[0].baseline, of_run[0].side, of_run[0].pairs
    groups = baseline.snapshot.groups
    scores = {found.scorer: found.scores for found in of_run}
    ways = {name: flipped(name, *both) for name, both in scores.items()}
    found: dict[str, list[Flip]] = {name: [] for name in scores}
    for number, place in enumerate(np.flatnonzero(np.any([*ways.values()], axis=0)).tolist()):
        entry = baseline.snapshot.entries[pairs.before[place]]
        record, texts = baseline.index.record(entry), {}
        if number < MOST_EXAMINED:
            other = side.index.record(side.snapshot.entries[pairs.after[place]])
            texts = _texts(record, other, job, inputs)
        for name in scores:
            if ways[name][place]:
                before, after = (float(of[place]) for of in scores[name])
                group = groups[entry["group"]] if groups else group_name(None)
                flip = Flip(of_run[0].run, name, record["id"], group, before, after, **texts)
                found[name].append(flip)
    return [flip for of_scorer in found.values() for flip in of_scorer]


def _texts(
    before: Mapping[str, Any], after: Mapping[str, Any], job: JobConfig, inputs: InputRows
) -> dict[str, str]:
    row = inputs.row(before)
    fields = (before.get("fields") or {}) if row is None else row.fields
    reference = fields.get(job.scoring.reference or "")
    return {
        "question": question_in(fields) or "",
        "reference": "" if reference is None else str(reference),
        "answer_before": answers_in_words(before)[0],
        "answer_after": answers_in_words(after)[0],
    }


def answers_beside(baseline: Side, side: Side, pairs: Pairing, tie: float) -> AnswerComparison:
    """Compare the answers of the rows that both runs have. A difference with a gap below ``tie`` is a tie."""
    old, new = baseline.snapshot.entries[pairs.before], side.snapshot.entries[pairs.after]
    failed = old["kind"] > 0, new["kind"] > 0
    answered = ~failed[0] & ~failed[1]
    differs = answered & (old["answer"] != new["answer"])
    found = []
    for place in np.flatnonzero(differs)[:MOST_EXAMINED].tolist():
        a, b = baseline.index.record(old[place]), side.index.record(new[place])
        found.append(difference(a["index"], a["id"], SideAnswer.of(a), SideAnswer.of(b)))
    return AnswerComparison(
        equal=int((answered & ~differs).sum()),
        differ=int(differs.sum()),
        failed_before=int((failed[0] & ~failed[1]).sum()),
        failed_after=int((~failed[0] & failed[1]).sum()),
        failed_in_both=int((failed[0] & failed[1]).sum()),
        differences=sorted(filter(None, found), key=lambda one: one.rank),
        tie=tie,
    )


def flipped(scorer: str, before: Table, after: Table) -> Table:
    """Return for each row 1 (better), -1 (worse) or 0 (neither). A row with a nan score gets 0."""
    change = np.nan_to_num(after - before)
    is_binary = all(np.isin(found[~np.isnan(found)], (0, 1)).all() for found in (before, after))
    graded = REWARD_STEP if scorer in OUT_OF_TEN else GRADED_STEP
    step = 1.0 if is_binary and scorer not in OUT_OF_TEN else graded
    if scorer in ERROR_RATES:
        change = -change
    found: Table = np.sign(change) * (np.abs(change) >= step - 1e-9)
    return found
