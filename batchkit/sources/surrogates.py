"""Halves of surrogate pairs in JSON, for example of an emoji that was cut. yajl, which ``ijson`` uses,
reads each as a question mark."""

from __future__ import annotations

import re
from typing import Any

import orjson

HALF = (
    "a text has half of a surrogate pair (an emoji that was cut, for example \\ud83d); correct it, or"
    " remove the row"
)
_MARK = "\ufdd0\ufdd1"  # which no text has: Unicode keeps these two for uses within a program
# The last is a backslash before a letter u, which may look like half of a pair.
_MAYBE = re.compile(
    rb"\\u[dD][89abAB]..(?!\\u[dD][c-fC-F])|(?<!\\u[dD][89abAB]..)\\u[dD][c-fC-F]|\\\\u[dD]",
    re.DOTALL,
)
_ESCAPE = re.compile(
    rb"\\(?:u[dD][89abAB]..\\u[dD][c-fC-F]..|(u[dD][89a-fA-F][\da-fA-F]{2})|.)", re.DOTALL
)
_UNFINISHED = re.compile(
    rb"\\(?:u[\da-fA-F]{0,3}|u[dD][89abAB][\da-fA-F]{2}(?:\\(?:u[\da-fA-F]{0,3})?)?)?\Z"
)
_PAIR_BYTES = 12


class MarkedHalves:
    """The JSON of ``file``, in which a mark takes the place of each half."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self._has_any = False

    def read(self, size: int = -1) -> bytes:
        block: bytes = self._file.read(size)
        while _UNFINISHED.search(block[-_PAIR_BYTES:]) and (more := self._file.read(size)):
            block += more
        if (rb"\ud" in block or rb"\uD" in block) and _MAYBE.search(block):
            self._has_any = True
            return _ESCAPE.sub(lambda found: rb"\ufdd0\ufdd1" if found[1] else found[0], block)
        return block

    def are_in(self, value: Any) -> bool:
        """Whether ``value``, read from here, had a half in one of its texts."""
        return self._has_any and _MARK in orjson.dumps(value).decode()
