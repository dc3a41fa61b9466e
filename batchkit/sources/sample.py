"""Some rows of the input, chosen at random: ``run.sample``, and the sample of ``plan``."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from random import Random

from batchkit.config.tables import InputTable
from batchkit.config.tables.input import variants
from batchkit.errors import JobError
from batchkit.sources.input import Input
from batchkit.storage.checkpoint import Totals
from batchkit.storage.index_set import IndexSet


def sampled(source: Input, table: InputTable, size: int, *, seed: int, settled: Totals) -> Input:
    """``source``, of which only ``size`` rows are read, each with all values of ``input.cross``. The same rows for
    the same ``seed``; a larger sample has all rows of a smaller one. Rows that are ``settled`` count beside them.

    Raises:
        InputError: as ``read_rows``.
    """
    indexes = indexes_of(source, table)
    chosen = IndexSet(drawn(indexes, table, size, seed=seed))
    return only(source, chosen, of=len(indexes), settled=settled)


def only(source: Input, chosen: IndexSet, *, of: int, settled: Totals) -> Input:
    """``source``, of whose ``of`` rows only those ``chosen`` are read; ``settled`` as above."""
    in_all = len(chosen | settled.completed | settled.failed_rows)
    return source._replace(
        read=lambda skip: source.read(lambda index: index not in chosen or skip(index)),
        size=lambda: in_all,
        sample_of=of,
    )


def indexes_of(source: Input, table: InputTable) -> Sequence[int]:
    """Those of the rows to choose from; all rows are read only if some are filtered out."""
    if table.is_filtered:
        return array("L", (row.index for row in source.read(lambda index: False)))
    return range(source.size() or 0)


def drawn(indexes: Sequence[int], table: InputTable, size: int, *, seed: int) -> Iterator[int]:
    """Those of ``sampled``, in random order."""
    n = len(variants(table.cross))
    rows = indexes if n == 1 else [*dict.fromkeys(index // n for index in indexes)]
    for row in in_random_order(rows, seed=seed, most=size):
        yield from range(row * n, row * n + n)


def in_random_order(indexes: Sequence[int], *, seed: int, most: int | None = None) -> Iterator[int]:
    """The first ``most`` of ``indexes`` in an order that depends on ``seed`` and on their number."""
    n = len(indexes)
    places = _draw(n, n if most is None else most, Random(seed))
    return (indexes[place] for place in places)


def check_countable(source: Input) -> None:
    """Raises JobError if the rows can be read only once."""
    if source.files is None:
        raise JobError(
            "run.sample: rows that come from an iterator can't be counted before they are read, so none can"
            " be chosen at random. Give a list, a table or a file, or leave run.sample out"
        )


def _draw(n: int, size: int, random: Random) -> Iterator[int]:
    """The first ``size`` of 0 … n-1 in random order: Fisher and Yates' shuffle, of which only the
    numbers that have moved are in memory."""
    moved: dict[int, int] = {}
    for place in range(min(size, n)):
        other = random.randrange(place, n)
        yield moved.get(other, other)
        moved[other] = moved.get(place, place)
