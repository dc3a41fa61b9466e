"""Comparison of runs with a baseline: which scores changed, and whether the change could be chance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from batchkit.config.tables.input import variants
from batchkit.errors import JobError
from batchkit.runs.answers import AnswerComparison
from batchkit.runs.comparison import Comparison, Delta, Flip, origin
from batchkit.runs.inputs import InputRows
from batchkit.runs.paired import PairedScores, Pairing, Side, answers_beside, deltas, flips, paired
from batchkit.runs.rates import Rates
from batchkit.runs.reach import Reach
from batchkit.scoring import kept_fields
from batchkit.scoring.metrics import ScoreTable
from batchkit.sources.input import input_changes
from batchkit.storage.checkpoint import check_log
from batchkit.storage.identity import differences
from batchkit.storage.job_toml import job_of_run
from batchkit.storage.manifest import Manifest, read_manifest
from batchkit.storage.starts import current_manifest, read_history

TIE = 0.01  # a smaller gap in log-probability is a tie; bfloat16 needs more, for example 0.25
_SHOWN_DIFFERENCES = 12
# Keys that decide which rows a file has.
_NUMBERING = ("input.format", "input.records", "input.cross")


def compare(folders: Sequence[Path], *, tie: float = TIE) -> Comparison:
    """Compare every run with the first one, row by row by id. A single run is passed to ``compare_values``.

    A difference is the mean over the rows that both runs have scored. Its interval is the percentile interval of the
    paired bootstrap: rows are drawn with replacement, with both scores of a row together (Efron & Tibshirani, An
    Introduction to the Bootstrap, 1993, ch. 13; for scores of text: Koehn, Statistical Significance Tests for Machine
    Translation Evaluation, EMNLP 2004). The interval covers the choice of rows, not the effect of another seed of the
    model.

    Rows use the groups of the baseline, also in runs that did not keep the group field. Rows that share an id are
    matched by index, or by their order if the runs have not read the same input.

    ``tie``: two answers are a tie if, at their first difference, the log-probabilities of the two tokens are closer
    than this. Greedy decoding of equally likely tokens depends on the order of additions.

    Raises:
        JobError: Only one run is given, and it has no ``input.cross`` or no scores.
        StoreError: A folder is not a run folder, or its log is damaged.
    """
    if len(folders) == 1 and (found := compare_values(folders[0])):
        return found
    if len(folders) < 2:
        raise JobError(
            "a comparison needs two runs or more, or one run with input.cross and scores"
        )
    manifests = []
    for folder in folders:
        manifests.append(current_manifest(folder))  # raises if the folder is not a run
        check_log(folder)
    names = _names(folders)
    group_by = job_of_run(folders[0]).scoring.group_by
    baseline = Side.of(folders[0], group_by)
    others = {}
    for name, folder, manifest in zip(names[1:], folders[1:], manifests[1:], strict=True):
        by_place, side = have_same_input(manifests[0], manifest), Side.of(folder, group_by)
        pairs = paired(baseline.snapshot, side.snapshot, by_place=by_place)
        if group_by is not None and group_by not in kept_fields(job_of_run(folder)):
            side = side.grouped_as(baseline, pairs)
        others[name] = side, pairs
    return replace(
        _compared(names[0], baseline, others, tie),
        rates={name: Rates.of(folder) for name, folder in zip(names, folders, strict=True)},
        warnings=_warnings(folders, names, manifests, group_by),
        origins={
            name: origin(manifest, read_history(folder).starts)
            for name, folder, manifest in zip(names, folders, manifests, strict=True)
        },
    )


def compare_values(folder: Path) -> Comparison | None:
    """Compare each value of ``input.cross`` in one run with the first value, over the same input rows.

    Return None if the run has only one value, or no scores. Rows are grouped by ``scoring.group_by``, unless that
    field is part of ``input.cross``.
    """
    job, manifest = job_of_run(folder), read_manifest(folder)
    found, group_by = variants(job.input.cross), job.scoring.group_by
    if len(found) < 2:
        return None
    check_log(folder)
    whole = Side.of(folder, None if group_by in job.input.cross else group_by)
    if not whole.snapshot.scorers:
        return None
    names = [variant.name for variant in found]
    baseline, *sides = (whole.of_value(number, len(found)) for number in range(len(found)))
    others = {
        name: (side, paired(baseline.snapshot, side.snapshot, by_place=True))
        for name, side in zip(names[1:], sides, strict=True)
    }
    compared = _compared(names[0], baseline, others, TIE)
    of_first = f"/{found[0].label}"
    return replace(
        compared,
        flips=[replace(flip, id=flip.id.removesuffix(of_first)) for flip in compared.flips],
        origins={folder.name: origin(manifest, read_history(folder).starts)},
    )


def _compared(
    name: str, baseline: Side, others: Mapping[str, tuple[Side, Pairing]], tie: float
) -> Comparison:
    differences: list[Delta] = []
    flipped: list[Flip] = []
    answers: dict[str, AnswerComparison] = {}
    reach = Reach.of(baseline.index.folder)
    for run, (side, pairs) in others.items():
        found = [
            PairedScores(run, scorer, baseline, side, pairs)
            for scorer in baseline.table.names
            if scorer in side.snapshot.scorers
        ]
        differences += [delta for of_scorer in found for delta in deltas(of_scorer)]
        flipped += flips(found, reach.job, InputRows(reach.job, reach=reach))
        answers[run] = answers_beside(baseline, side, pairs, tie)
    n_rows = len(baseline.snapshot.newest)
    n_paired = {run: len(pairs.before) for run, (_, pairs) in others.items()}
    return Comparison(
        runs=[name, *others],
        tables=[baseline.table, *(side.table for side, _ in others.values())],
        deltas=differences,
        flips=flipped,
        only_in_baseline={run: n_rows - n for run, n in n_paired.items()},
        only_in_run={run: len(others[run][0].snapshot.newest) - n for run, n in n_paired.items()},
        warnings=[],
        origins={},
        answers=answers,
    )


def have_same_input(a: Manifest, b: Manifest) -> bool:
    """Return whether a row has the same index in both runs, so that the index can pair them. False if unknown."""
    return (
        bool(a.input)
        and not input_changes(a.input, b.input)
        and all(a.identity.get(key) == b.identity.get(key) for key in _NUMBERING)
    )


def _names(folders: Sequence[Path]) -> list[str]:
    """Return the folders' names. If names are equal, add as much of the path as needed to distinguish them."""
    paths = [folder.resolve() for folder in folders]
    for depth in range(1, max(len(path.parts) for path in paths) + 1):
        names = ["/".join(path.parts[-depth:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    # The same run was given twice.
    return [f"{path.name} ({n})" for n, path in enumerate(paths, start=1)]


def _warnings(
    folders: Sequence[Path],
    names: Sequence[str],
    manifests: Sequence[Manifest],
    group_by: str | None,
) -> list[str]:
    """Return a warning for each difference between the runs in settings that affect answers or scores."""
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
            found.append(f"{name}: its rows are grouped by {group_by}, like those of {names[0]}")
    return found


def _files(manifest: Manifest) -> list[str]:
    return [file.sha256 for file in manifest.input]


class RunScores(NamedTuple):
    """The result of ``batchkit score``.

    ``comparison`` is None if the run has fewer than two values of ``input.cross`` or no scores. ``exit_code`` is 3 if
    a judge gave no score.
    """

    table: ScoreTable
    comparison: Comparison | None
    exit_code: int = 0

    @classmethod
    def of(cls, table: ScoreTable, folder: Path) -> RunScores:
        return cls(table, compare_values(folder))

    def to_json(self) -> dict[str, Any]:
        values = {} if self.comparison is None else {"values": self.comparison.to_json()}
        return {**self.table.to_json(), **values}

    def to_text(self) -> str:
        parts = [self.table.to_text()]
        if self.comparison is not None:
            parts.append(self.comparison.to_text())
        return "\n\n".join(parts)
