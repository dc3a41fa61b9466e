"""The search for words in a run's rows; ``search.js`` does the same in a page that is one file.

``tests/page/searches.json`` holds cases for both.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

import numpy as np
import orjson

from batchkit.runs.index import Index, Snapshot, Table
from batchkit.storage.plain_json import encoded

_SEARCHES = 6  # cached searches
_AT_ONCE = 1_000  # lines searched per step
# ASCII that JSON writers never escape, without i and k: İ and the Kelvin sign become i and k in lower case.
_AS_WRITTEN = re.compile(r"[ !#-\[\]-hjl-~]+")


@lru_cache(_SEARCHES)
def has_words(index: Index, snapshot: Snapshot, words: str) -> Table:
    """Return a mask of the entries that have ``words`` (in lower case) in one of their texts, ignoring case."""
    # ``plain``: the longest part of the words that looks the same in the log's bytes, apart from case. Lines without
    # this part are not parsed. Spaces after a colon or at the start of a line are not part of it, because values that
    # are not text are searched with indentation, and the log has none.
    runs = (run.lstrip(": ") for run in _AS_WRITTEN.findall(words))
    plain = max(runs, key=len, default="").encode()
    found = np.zeros(len(snapshot.entries), bool)
    starts = snapshot.entries["start"].tolist()
    ends = (snapshot.entries["start"] + snapshot.entries["length"]).tolist()
    for first in range(0, len(starts), _AT_ONCE):
        numbers = range(first, min(first + _AT_ONCE, len(starts)))
        start = starts[first]
        block = index.raw(start, ends[numbers[-1]] - start)
        for number in numbers if plain in block.lower() else ():
            line = block[starts[number] - start : ends[number] - start]
            if plain in line.lower():
                found[number] = any(words in text.lower() for text in _texts(orjson.loads(line)))
    return found


def _texts(record: Mapping[str, Any]) -> Iterator[str]:
    """Yield the texts to search: the id, what the model said, the prediction, the error and the kept fields."""
    error = record.get("error") or {}
    yield str(record["id"])
    for name in ("label", "prediction"):
        yield record.get(name) or ""
    yield from (error.get("kind") or "", error.get("message") or "")
    for entity in record.get("entities") or ():
        yield from (entity["text"], entity["label"])
    for choice in record.get("choices") or [record]:
        yield from (choice.get("text") or "", choice.get("reasoning") or "")
        for call in choice.get("tool_calls") or ():
            function = call.get("function") or {}
            yield from (function.get("name") or "", function.get("arguments") or "")
    yield from map(in_words, (record.get("fields") or {}).values())


def in_words(value: Any) -> str:
    """Return a field's value as the page shows it: a text as it is, anything else as indented JSON."""
    if isinstance(value, str):
        return value
    if isinstance(value, bytes | bytearray | memoryview):
        return f"({len(value):,} bytes)"
    return orjson.dumps(orjson.loads(encoded(value)), option=orjson.OPT_INDENT_2).decode()
