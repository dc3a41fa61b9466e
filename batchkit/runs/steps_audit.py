"""The audit of ``steps.jsonl``: what ``verify`` reports of it, and what ``verify --repair`` keeps."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from batchkit.storage.index_set import IndexSet
from batchkit.storage.lines import RECORD_HEAD, generation_in
from batchkit.storage.log import read_generations
from batchkit.storage.steps import GenerationLine, fresh_line

if TYPE_CHECKING:
    import numpy as np


class StepsAudit(NamedTuple):
    """``generations``: whole lines; ``at_checkpoint`` are those that the checkpoint covers.
    ``torn_bytes``: of what is not a generation. ``rows``, ``keys``: of each line, int64 arrays; equal keys
    are the same call of the same row, which only one line may have.
    """

    generations: int
    at_checkpoint: int
    torn_bytes: int
    rows: np.ndarray[Any, Any]
    keys: np.ndarray[Any, Any]

    @property
    def is_again(self) -> np.ndarray[Any, Any]:
        """Which lines have the key of a line before."""
        import numpy as np

        _, firsts = np.unique(self.keys, return_index=True)
        again = np.ones(len(self.keys), np.bool_)
        again[firsts] = False
        return again

    def too_few(self, rows: array[int], counts: array[int]) -> dict[int, tuple[int, int]]:
        """Rows whose newest record counts more generations than there are: both numbers.

        ``rows`` and ``counts`` are of the records, in their order.
        """
        import numpy as np

        of_record = np.frombuffer(rows, np.int64)
        order = np.argsort(of_record, kind="stable")
        is_newest = np.append(np.diff(of_record[order]) != 0, True)[: len(order)]
        newest = order[is_newest]
        there, n_there = np.unique(self.rows[~self.is_again], return_counts=True)
        places = np.searchsorted(there, of_record[newest]).clip(0, max(0, len(there) - 1))
        found = np.zeros(len(newest), np.int64)
        if len(there):
            found = np.where(there[places] == of_record[newest], n_there[places], 0)
        counted = np.frombuffer(counts, np.int64)[newest]
        short = counted > found
        columns = of_record[newest][short], counted[short], found[short]
        return {
            row: (count, n)
            for row, count, n in zip(*(column.tolist() for column in columns), strict=True)
        }


def audit_steps(folder: Path, checkpoint_end: int = 0) -> StepsAudit:
    """One pass over the file of ``folder``; holds 16 bytes for each line. The checkpoint covers those
    up to the byte ``checkpoint_end``."""
    import numpy as np

    rows, keys = array("q"), array("q")
    at_checkpoint = torn_bytes = 0
    for line in read_generations(folder):
        if (found := line.record) is None:
            torn_bytes += line.end - line.offset
            continue
        rows.append(found.index)
        keys.append(hash((found.index, found.step, found.call)))
        at_checkpoint += line.end <= checkpoint_end
    n = len(rows)
    return StepsAudit(
        n, at_checkpoint, torn_bytes, np.frombuffer(rows, np.int64), np.frombuffer(keys, np.int64)
    )


def rows_again(audit: StepsAudit) -> IndexSet:
    """Rows of which a generation is recorded twice."""
    return IndexSet(audit.rows[audit.is_again].tolist())


def whole_lines(folder: Path, removed: list[bytes]) -> Iterator[GenerationLine]:
    """The generations of ``folder``; lines that are none go to ``removed``, but for the generations
    within one, for example if a newline between two was lost."""
    for line in read_generations(folder):
        if line.record is not None:
            yield GenerationLine(line.raw, line.record)
            continue
        removed.append(line.raw)
        for piece in line.raw.split(RECORD_HEAD)[1:]:
            whole = RECORD_HEAD + piece.strip() + b"\n"
            if (found := generation_in(whole)) is not None:
                yield GenerationLine(whole, found)


def each_once(
    folder: Path, audit: StepsAudit, removed: list[bytes], is_settled: Callable[[int], bool]
) -> Iterator[GenerationLine]:
    """The generations of ``folder``, whose lines are all whole; ``removed`` gets those that are there
    again. If it has some already, what is left of rows that are not settled may not be all, so these may
    ask for something else (``replay``)."""
    some_are_gone = bool(removed)
    lines = read_generations(folder)
    for line, is_again in zip(lines, audit.is_again.tolist(), strict=True):
        assert line.record is not None
        if is_again:
            removed.append(line.raw)
        elif some_are_gone and not is_settled(line.record.index):
            yield fresh_line(line.record)
        else:
            yield GenerationLine(line.raw, line.record)
