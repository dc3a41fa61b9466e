"""The columns of an index: for each record of a log, the numbers that rows are found by."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from io import BytesIO
from math import nan
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np
import orjson

from batchkit.scoring.metrics import group_name
from batchkit.storage.answers import answers_in_words
from batchkit.storage.ledger import failure_kind, record_of

Table = np.ndarray[Any, Any]

ENTRY = np.dtype(
    [
        ("start", "<i8"),  # of the line in the log
        ("length", "<u4"),  # of the line
        ("row", "<u4"),
        ("id", "<u8"),  # a hash
        ("made", "<u4"),  # a hash of what a line of scores.jsonl has to agree in
        ("scored_at", "<i8"),  # where that line begins; -1: the record's own scores count
        ("answer", "<u4"),  # a hash
        ("letters", "<u4"),  # of the answer
        ("tokens", "<u4"),  # of the completion
        ("latency", "<f4"),
        ("group", "<u2"),  # a number in ``groups``
        ("kind", "u1"),  # a number in ``kinds``; 0 is an answer
        ("is_ok", "?"),
    ]
)
OTHERS = "(others)"
_MOST = {"kinds": 250, "groups": 10_000, "scorers": 50}
_DAMAGE = (ValueError, TypeError, KeyError, AttributeError, IndexError, OverflowError)


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


class _Line(NamedTuple):
    """What the columns have of a record."""

    entry: tuple[Any, ...]
    scores: Mapping[str, float]


class Columns:
    """Entry n is of the n-th whole record of the log, up to byte ``end``; ``scored_end``: up to where
    the newer scores, in the scores.jsonl with ``scored_by``, were read.

    ``entries`` and ``scores`` (a column for each of ``scorers``; nan: not scored) have ``n`` lines
    that count. Lines that are there never change, but for scores; a larger array takes the place of
    one that is full, so that whoever still reads the old one can. One thread at a time may call
    ``add`` and ``set_scores``.
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

    def add(self, block: bytes, group_by: str | None, expected: int) -> bool:
        """Read ``block``, which begins at byte ``end`` of a log with some ``expected`` bytes. A broken
        line at its end is left for the next time: the run may cut it off. False if there was none."""
        found = self._read(block, group_by, orjson.loads) or self._read(block, group_by, record_of)
        if not found:
            return False
        lines = np.array([line.entry for line in found], ENTRY)
        n, end = self.n + len(lines), int(lines[-1]["start"]) + int(lines[-1]["length"])
        self._make_room(n, n * expected // end)
        self.entries[self.n : n] = lines
        self.scores[self.n : n] = nan
        for number, line in enumerate(found, start=self.n):
            self._put_scores(number, line.scores)
        self.n, self.end = n, end
        return True

    def _read(
        self, block: bytes, group_by: str | None, parse: Callable[[bytes], Any]
    ) -> list[_Line]:
        """Its whole records. If a line is damaged, those that ``record_of`` accepts; with another
        ``parse``, none: it does not check what it parses."""
        found, start = [], self.end
        for raw in BytesIO(block):
            try:
                record = parse(raw) if raw.endswith(b"\n") else None
                if record is not None:
                    entry = self._entry(record, start, len(raw), group_by)
                    found.append(_Line(entry, numbers(record.get("scores") or {})))
            except _DAMAGE:
                if parse is not record_of:
                    return []
            start += len(raw)
        return found

    def _entry(
        self, record: dict[str, Any], start: int, length: int, group_by: str | None
    ) -> tuple[Any, ...]:
        answer = "\n".join(answers_in_words(record))
        usage = record.get("usage") or {}
        group = 0
        if group_by is not None:
            group = self.groups.number(group_name((record.get("fields") or {}).get(group_by)))
        return (
            start,
            length,
            _count(record["index"]),
            hash_of_id(record["id"]),
            made_of(record),
            -1,
            crc32(answer.encode()),
            len(answer),
            _count(usage.get("completion_tokens") or 0),
            float(record.get("latency_s") or 0),
            group,
            self.kinds.number(failure_kind(record) or ""),
            record["status"] == "ok",
        )

    def add_scores(self, block: bytes, newest: Table) -> None:
        """Read ``block``: whole lines, from byte ``scored_end`` of scores.jsonl on.

        Raises:
            ValueError: a line is damaged.
        """
        rows, start = self.entries["row"][newest], self.scored_end
        for raw in BytesIO(block):
            try:
                line = orjson.loads(raw)
                scores, row = numbers(line["scores"]), _count(line["index"])
            except _DAMAGE as error:
                raise ValueError(f"the line at byte {start} is damaged") from error
            place = rows.searchsorted(row)
            if place < len(rows) and rows[place] == row:
                number = newest[place]
                if self.entries["made"][number] == made_of(line):
                    self.entries["scored_at"][number] = start
                    self.scores[number] = nan
                    self._put_scores(number, scores)
            start += len(raw)
        self.scored_end = start

    def _put_scores(self, number: int, scores: Mapping[str, float]) -> None:
        for name, score in scores.items():
            column = self.scorers.number(name)
            if column >= self.scores.shape[1]:
                self.scores = np.pad(self.scores, ((0, 0), (0, 1)), constant_values=nan)
            self.scores[number, column] = score

    def _make_room(self, n: int, expected: int) -> None:
        """Memory that nobody has written to costs nothing."""
        if n <= len(self.entries):
            return
        size = max(n + n // 4, expected + expected // 8, 1024)
        entries, scores = np.empty(size, ENTRY), np.empty((size, self.scores.shape[1]), np.float32)
        entries[: self.n], scores[: self.n] = self.entries[: self.n], self.scores[: self.n]
        self.entries, self.scores = entries, scores


def hash_of_id(row_id: str) -> int:
    digest = blake2b(row_id.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def made_of(line: Mapping[str, Any]) -> int:
    """Equal for a record and a line of scores.jsonl that was made from it; both of one row."""
    return crc32(f"{line.get('input_hash')} {line.get('finished_at')}".encode())


def numbers(scores: Mapping[str, Any]) -> dict[str, float]:
    """Scores with nan for those that could not be computed."""
    return {name: nan if score is None else float(score) for name, score in scores.items()}


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**32:
        raise ValueError(f"{value!r} is not a count")
    return value
