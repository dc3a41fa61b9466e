"""Searching a log for words: it is read in its order, a part at a time, and what was found is kept."""

from __future__ import annotations

import re
import threading
import time
from array import array
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import orjson

from batchkit.runs.columns import Table
from batchkit.runs.index import Index, Snapshot
from batchkit.runs.values import DAMAGE
from batchkit.storage.answers import answers_in_words

_BLOCK_BYTES = 1 << 20
_AS_WRITTEN = re.compile(r"[ !#-\[\]-~]+")  # ASCII that no JSON writer has to escape


class Search:
    """The entries of ``index`` with ``words`` in the id, the answer, its reasoning, the prediction, the
    error's message or a kept field; upper and lower case are equal. Requests may share it."""

    def __init__(self, index: Index, words: str) -> None:
        self._index, self._words = index, words.lower()
        # Lines without it are not parsed. As bytes of the log, it is the same in lower case.
        plain = max(_AS_WRITTEN.findall(self._words), key=len, default="")
        self._plain = plain.encode()
        self._found = array("Q")
        self._n = 0
        self._reading = threading.Lock()

    def advance(self, snapshot: Snapshot, budget_s: float) -> tuple[Table, float]:
        """What was found in a snapshot, as a mask of its entries, after searching on for about
        ``budget_s``; and the share of the entries that was searched."""
        deadline = time.monotonic() + budget_s
        if self._reading.acquire(timeout=budget_s):
            try:
                while self._n < len(snapshot.entries) and time.monotonic() < deadline:
                    self._read_on(snapshot.entries)
            finally:
                self._reading.release()
        n = len(snapshot.entries)
        mask = np.zeros(n, bool)
        found = np.array(self._found, np.int64)
        mask[found[found < n]] = True
        return mask, min(1.0, self._n / n) if n else 1.0

    def _read_on(self, entries: Table) -> None:
        start = int(entries["start"][self._n])
        until = int(entries["start"].searchsorted(start + _BLOCK_BYTES))
        until = max(until, self._n + 1)
        end = int(entries["start"][until - 1]) + int(entries["length"][until - 1])
        block = self._index.raw(start, end - start)
        starts = (entries["start"][self._n : until] - start).tolist()
        lengths = entries["length"][self._n : until].tolist()
        for number in self._candidates(block, starts):
            line = block[starts[number] : starts[number] + lengths[number]]
            if self._is_in(line):
                self._found.append(self._n + number)
        self._n = until

    def _candidates(self, block: bytes, starts: list[int]) -> Iterator[int]:
        """Numbers of the lines that may have the words."""
        if not self._plain:
            yield from range(len(starts))
            return
        lowered, number = block.lower(), 0
        at = lowered.find(self._plain)
        while at >= 0:
            while number + 1 < len(starts) and starts[number + 1] <= at:
                number += 1
            yield number
            if number + 1 == len(starts):
                return
            at = lowered.find(self._plain, starts[number + 1])

    def _is_in(self, line: bytes) -> bool:
        try:
            return any(self._words in text.lower() for text in _texts(orjson.loads(line)))
        except DAMAGE:  # the log was changed since it was indexed
            return False


def _texts(record: Mapping[str, Any]) -> Iterator[str]:
    yield str(record.get("id"))
    yield from answers_in_words(record)
    for choice in record.get("choices") or [record]:
        yield choice.get("reasoning") or ""
    yield record.get("prediction") or ""
    yield (record.get("error") or {}).get("message") or ""
    for value in (record.get("fields") or {}).values():
        yield value if isinstance(value, str) else orjson.dumps(value).decode()
