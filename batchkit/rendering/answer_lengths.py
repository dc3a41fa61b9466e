"""Expected lengths of answers, learned from finished rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from zlib import crc32

from batchkit.types import Counted, Row, RowHint

_MOST_KINDS = 4096
_PRIOR_ROWS = 4.0  # rows for which a more general kind counts
_START = 64  # characters
_LEARNED_FROM = 512  # the first rows all show how long answers are; later, each 16th
_EACH_LEARNED = 16


class AnswerLengths:
    """Mean lengths of finished answers, in tokens, by kind of row.

    A row has these kinds, from general to special: all rows; rows with a prompt of similar length; rows with the same
    ``max_tokens``; rows whose first field has the same first line. The mean of a kind is shrunk towards the mean of the
    more general kind, as if that had been seen in four rows.

    ``known``: as returned by ``known``, from an earlier start.
    """

    def __init__(self, known: Mapping[str, tuple[float, float]] = MappingProxyType({})) -> None:
        self._kinds = dict(known)
        self._begun = dict[int, Sequence[str]]()  # rows in progress whose lengths are learned

    @property
    def n_rows(self) -> float:
        """The number of rows whose lengths are known."""
        return self._kinds.get("", (0, 0.0))[0]

    @property
    def known(self) -> dict[str, tuple[float, float]]:
        """The number of rows and the sum of their lengths, by kind. Kinds with a single row are left out."""
        return {kind: found for kind, found in self._kinds.items() if found[0] > 1}

    def begin(self, row: Row, hint: Callable[[Row], RowHint]) -> None:
        """Note that ``row`` is in progress. Only one in some rows is learned from, after the first rows."""
        if row.index % _EACH_LEARNED == 0 or self.n_rows < _LEARNED_FROM:
            self._begun[row.index] = kinds_of(hint(row))

    def end(self, record: Counted) -> None:
        """Learn from the record of a row that has ended."""
        kinds = self._begun.pop(record.index, None)
        if kinds is not None and record.status == "ok" and record.usage is not None:
            self.learn(kinds, record.usage.completion_tokens)

    def learn(self, kinds: Sequence[str], length: int) -> None:
        """Take the answer of a row of these ``kinds`` into account."""
        for kind in kinds:
            n, total = self._kinds.get(kind, (0, 0.0))
            if n or len(self._kinds) < _MOST_KINDS:
                self._kinds[kind] = n + 1, total + length

    def expected(self, hint: RowHint) -> float:
        """Return the expected length; without finished rows, the longest allowed length, or 0 if it is unlimited."""
        if not self._kinds:
            return hint.max_tokens
        mean = 0.0
        for kind in kinds_of(hint):
            n, total = self._kinds.get(kind, (0, 0.0))
            prior = 0.0 if kind == "" else _PRIOR_ROWS
            if n:
                mean = (total + prior * mean) / (n + prior)
        return min(mean, hint.max_tokens) if hint.max_tokens else mean


def kinds_of(hint: RowHint) -> tuple[str, ...]:
    """Return the kinds of a row, from general to special."""
    start = hint.beginning.partition("\n")[0][:_START]
    return (
        "",
        f"size {len(hint.beginning).bit_length()}",
        f"most {hint.max_tokens}",
        f"start {crc32(start.encode('utf-8', 'replace')):08x}",
    )
