"""The comparison of two runs row by row. Rows are matched by id."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import numpy as np

from batchkit.commands.view.rows import ComparedRun, Page
from batchkit.runs.index import Snapshot, Table
from batchkit.runs.paired import flipped, paired


class PairsQuery(Page):
    """A query for rows of the runs ``a`` and ``b`` side by side. ``only`` selects pairs by what changed."""

    a: str = ""
    b: str = ""
    only: Literal["changed", "fixed", "broken", "all"] = "changed"


class Pairs(NamedTuple):
    """The rows of two runs, matched. ``before`` and ``after`` have the position of each row's newest entry in the first
    and the second run's index; -1 if the run lacks the row. The order is that of the first run. ``masks``: the selected
    pairs for each value of ``PairsQuery.only``."""

    before: Table
    after: Table
    masks: Mapping[str, Table]

    def counts(self) -> dict[str, int]:
        """Return the number of pairs for each value of ``only``, and the numbers of rows that only one run has."""
        found = {name: int(mask.sum()) for name, mask in self.masks.items()}
        return {
            **found,
            "only_a": int((self.after < 0).sum()),
            "only_b": int((self.before < 0).sum()),
        }


def pairs_of(a: Snapshot, b: Snapshot, *, by_place: bool) -> Pairs:
    """Match the rows of two runs by id. Rows that share an id are matched by index if ``by_place``, otherwise in order.

    - "fixed": a failure became an answer, or a score improved as ``report`` counts it.
    - "broken": the reverse.
    - "changed": both of these, and rows with another answer or kind of failure.
    """
    before, after = paired(a, b, by_place=by_place)
    old, new = a.entries[before], b.entries[after]
    fixed, broken = (old["kind"] > 0) & (new["kind"] == 0), (old["kind"] == 0) & (new["kind"] > 0)
    for scorer in set(a.scorers) & set(b.scorers):
        columns = (
            a.scores[before, a.scorers.index(scorer)],
            b.scores[after, b.scorers.index(scorer)],
        )
        way = flipped(scorer, *columns)
        fixed, broken = fixed | (way > 0), broken | (way < 0)
    kinds = np.array([b.kinds.index(kind) if kind in b.kinds else -1 for kind in a.kinds])
    differs = (old["answer"] != new["answer"]) | (kinds[old["kind"]] != new["kind"])
    rest_a, rest_b = (
        np.setdiff1d(side.newest, of, assume_unique=True) for side, of in ((a, before), (b, after))
    )
    more = np.zeros(len(rest_a) + len(rest_b), bool)
    masks = {"changed": differs | fixed | broken, "fixed": fixed, "broken": broken}
    none_a, none_b = np.full(len(rest_b), -1), np.full(len(rest_a), -1)
    return Pairs(
        np.concatenate([before, rest_a, none_a]),
        np.concatenate([after, none_b, rest_b]),
        {name: np.concatenate([mask, more]) for name, mask in masks.items()}
        | {"all": np.ones(len(before) + len(more), bool)},
    )


def page_of(
    pairs: Pairs, query: PairsQuery, a: ComparedRun, b: ComparedRun
) -> list[dict[str, Any]]:
    """Return the requested part of the matched rows. In a pair, ``a`` or ``b`` is None if that run lacks the row."""
    places, found = np.flatnonzero(pairs.masks[query.only]), []
    for place in places[query.offset : query.offset + query.limit].tolist():
        numbers = (pairs.before[place], a), (pairs.after[place], b)
        sides = [None if number < 0 else side.row(number) for number, side in numbers]
        one = next(side for side in sides if side is not None)
        found.append({"id": one["id"], "group": one["group"], "a": sides[0], "b": sides[1]})
    return found
