"""The columns of an index: for each record of a log, the numbers that rows are found by."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from io import BytesIO
from math import nan
from typing import Any

import numpy as np
import orjson

from batchkit.runs.values import DAMAGE, Values, made_of

Table = np.ndarray[Any, Any]

ENTRY = np.dtype(
    [
        ("start", "<i8"),  # of the line in the log
        ("length", "<u4"),  # of the line
        ("scored_at", "<i8"),  # where its line of scores.jsonl begins; -1: it has its own scores
        ("group", "<u2"),  # a number in ``groups``
        ("kind", "u1"),  # a number in ``kinds``; 0 is an answer
        ("row", "<u4"),  # from here on as in ``Values``
        ("id", "<u8"),
        ("made", "<u4"),
        ("answer", "<u4"),
        ("letters", "<u4"),
        ("tokens", "<u4"),
        ("prompt_tokens", "<u4"),
        ("latency", "<f4"),
        ("is_ok", "?"),
        ("is_cut", "?"),
        ("is_shortened", "?"),
    ]
)
OTHERS = "(others)"
_MOST = {"kinds": 250, "groups": 10_000, "scorers": 50}
_PLAIN = 11  # of ``Values``


class Names:
    """Texts by number, in the order in which they came; those beyond ``most`` have one number."""

    def __init__(self, texts: list[str], most: int) -> None:
        self.texts = texts
        self._most = most
        self._numbers = {text: number for number, text in enumerate(texts)}

    def number(self, text: str) -> int:
        found = self._numbers.get(text)
        if found is None:
            if len(self.texts) >= self._most:
                text = OTHERS
            found = self._numbers.setdefault(text, len(self.texts))
            if found == len(self.texts):
                self.texts.append(text)
        return found


_Scored = dict[str, tuple[list[int], list[float | None]]]
"""By scorer: numbers of entries, and their scores."""


class Columns:
    """Entry n is of the n-th whole record of the log, up to byte ``end``; ``scored_end``: up to where
    the newer scores, in the scores.jsonl with ``scored_by``, were read.

    ``entries`` and ``scores`` (a column for each of ``scorers``; nan: not scored) have ``n`` lines
    that count. Lines that are there never change, but for scores. When an array is full, a larger one
    takes its place, and threads that read the old one may go on. One thread at a time may call ``add``
    and ``add_scores``.
    """

    def __init__(
        self,
        entries: Table | None = None,
        scores: Table | None = None,
        *,
        end: int = 0,
        scored_by: Sequence[int] | None = None,
        scored_end: int = 0,
        kinds: list[str] | None = None,
        groups: list[str] | None = None,
        scorers: list[str] | None = None,
    ) -> None:
        self.entries = np.empty(0, ENTRY) if entries is None else entries
        self.scores = np.empty((0, 0), np.float32) if scores is None else scores
        self.n, self.end = len(self.entries), end
        self.scored_by, self.scored_end = scored_by, scored_end
        self.kinds = Names(kinds or [""], _MOST["kinds"])
        self.groups = Names(groups or [], _MOST["groups"])
        self.scorers = Names(scorers or [], _MOST["scorers"])

    def add(self, block: bytes, read: Callable[[bytes], Values], expected: int) -> bool:
        """Read ``block``, which begins at byte ``end`` of a log with some ``expected`` bytes. A broken
        line at its end is left for the next time: the run may cut it off. False if there was none."""
        found: list[tuple[Any, ...]] = []
        scored: _Scored = {}
        start = end = self.end
        for raw in BytesIO(block):
            if not raw.endswith(b"\n"):
                break
            try:
                values = read(raw)
            except DAMAGE:
                start += len(raw)
                continue
            _collect(scored, self.n + len(found), values.scores)
            group = 0 if values.group is None else self.groups.number(values.group)
            kind = self.kinds.number(values.kind)
            found.append((start, len(raw), -1, group, kind, *values[:_PLAIN]))
            start = end = start + len(raw)
        if not found:
            return False
        n = self.n + len(found)
        self._make_room(n, n * expected // end)
        with np.errstate(over="ignore"):  # a latency may be larger than a float32
            self.entries[self.n : n] = np.array(found, ENTRY)
        self.scores[self.n : n] = nan
        self._fill(scored)
        self.n, self.end = n, end
        return True

    def add_scores(self, block: bytes, newest: Table, rows: Table) -> None:
        """Read ``block``: whole lines, from byte ``scored_end`` of scores.jsonl on. ``newest``: the
        newest entries, ``rows``: of which rows (int64, ascending).

        Raises:
            ValueError: a line is damaged.
        """
        try:
            lines = [orjson.loads(raw) for raw in BytesIO(block)]
            made = [made_of(line["input_hash"], line["finished_at"]) for line in lines]
            numbers = self._numbers_of([line["index"] for line in lines], made, newest, rows)
            starts = self.scored_end + np.cumsum([0, *map(len, BytesIO(block))])
            is_used = numbers >= 0
            self.entries["scored_at"][numbers[is_used]] = starts[:-1][is_used]
            self.scores[numbers[is_used]] = nan
            scored: _Scored = {}
            for number, line in zip(numbers.tolist(), lines, strict=True):
                if number >= 0:
                    _collect(scored, number, line["scores"])
            self._fill(scored)
        except DAMAGE as error:
            raise ValueError(f"a line after byte {self.scored_end} is damaged") from error
        self.scored_end = int(starts[-1])

    def _numbers_of(self, indexes: list[int], made: list[int], newest: Table, rows: Table) -> Table:
        """For each row its newest entry; -1 if that is not the one with ``made``, or if there is none."""
        wanted = np.array(indexes, np.int64)
        places = rows.searchsorted(wanted)
        is_known = places < len(rows)
        is_known[is_known] = rows[places[is_known]] == wanted[is_known]
        numbers = np.full(len(wanted), -1)
        numbers[is_known] = newest[places[is_known]]
        is_known[is_known] = self.entries["made"][numbers[is_known]] == np.array(made)[is_known]
        return np.where(is_known, numbers, -1)

    def _fill(self, scored: _Scored) -> None:
        with np.errstate(over="ignore"):  # a score may be larger than a float32
            for name, (numbers, scores) in scored.items():
                column = self.scorers.number(name)
                while column >= self.scores.shape[1]:
                    self.scores = np.pad(self.scores, ((0, 0), (0, 1)), constant_values=nan)
                self.scores[numbers, column] = np.array(scores, np.float32)

    def _make_room(self, n: int, expected: int) -> None:
        """Memory that nobody has written to costs nothing."""
        if n <= len(self.entries):
            return
        size = max(n + n // 4, expected + expected // 8, 1024)
        entries, scores = np.empty(size, ENTRY), np.empty((size, self.scores.shape[1]), np.float32)
        entries[: self.n], scores[: self.n] = self.entries[: self.n], self.scores[: self.n]
        self.entries, self.scores = entries, scores


def _collect(scored: _Scored, number: int, scores: Mapping[str, float | None]) -> None:
    for name, score in scores.items():
        if name not in scored:
            scored[name] = [], []
        scored[name][0].append(number)
        scored[name][1].append(score)
