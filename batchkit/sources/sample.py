"""Random samples of the input's rows, for ``run.sample`` and ``plan``."""

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
    """Return ``source`` limited to a random sample of ``size`` rows, each with all values of ``input.cross``.

    The same ``seed`` gives the same rows, and a larger sample contains a smaller one. ``settled``: counts of the rows
    that have records. These rows count in the ``size`` of the result, even outside the sample.

    Raises:
        InputError: as ``read_rows``.
    """
    indexes = indexes_of(source, table)
    chosen = IndexSet(drawn(indexes, table, size, seed=seed))
    return only(source, chosen, of=len(indexes), settled=settled)


def only(source: Input, chosen: IndexSet, *, of: int, settled: Totals) -> Input:
    """Return ``source`` limited to the ``chosen`` rows. ``of``: number of rows of the whole ``source``. ``settled``: as
    for ``sampled``."""
    in_all = len(chosen | settled.completed | settled.failed_rows)
    return source._replace(
        read=lambda skip: source.read(lambda index: index not in chosen or skip(index)),
        size=lambda: in_all,
        sample_of=of,
    )


def indexes_of(source: Input, table: InputTable) -> Sequence[int]:
    """Return the indexes of the rows to choose from. Rows are read only if some are filtered out."""
    if table.is_filtered:
        return array("L", (row.index for row in source.read(lambda index: False)))
    return range(source.size() or 0)


def drawn(indexes: Sequence[int], table: InputTable, size: int, *, seed: int) -> Iterator[int]:
    """Yield the indexes of a random sample of ``size`` input rows, each with all values of ``input.cross``."""
    n = len(variants(table.cross))
    rows = indexes if n == 1 else [*dict.fromkeys(index // n for index in indexes)]
    for row in in_random_order(rows, seed=seed, most=size):
        yield from range(row * n, row * n + n)


def in_random_order(indexes: Sequence[int], *, seed: int, most: int | None = None) -> Iterator[int]:
    """Yield ``indexes`` in a random order, which depends on ``seed`` and on their number. ``most``: stop after this
    many."""
    n = len(indexes)
    places = _draw(n, n if most is None else most, Random(seed))
    return (indexes[place] for place in places)


def check_countable(source: Input) -> None:
    """Raise JobError if the rows can be read only once."""
    if source.files is None:
        raise JobError(
            "run.sample: rows from an iterator can't be counted before they are read, so a random sample is"
            " impossible. Give a list, a table or a file, or leave run.sample out"
        )


def _draw(n: int, size: int, random: Random) -> Iterator[int]:
    """Yield the first ``size`` of 0 … n-1 in random order (Fisher-Yates shuffle; only moved numbers are in memory)."""
    moved: dict[int, int] = {}
    for place in range(min(size, n)):
        other = random.randrange(place, n)
        yield moved.get(other, other)
        moved[other] = moved.get(place, place)
