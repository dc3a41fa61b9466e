"""How deeply values may be nested: the code that later walks over a row recurses once per level."""

from __future__ import annotations

import copy
import re
from collections import UserDict, deque
from collections.abc import Mapping
from typing import Any, Protocol

MAX_DEPTH = 200
TOO_DEEP = f"nested more than {MAX_DEPTH} levels deep; flatten it"

_FLAT = {str, int, float, bool, type(None), bytes}  # most values; none of them is nested
_COPIED = (dict, list, set, bytearray, deque, UserDict)
_KEPT_LEVELS = MAX_DEPTH + 50  # of a file: input.records may be some levels down
_TOKENS = re.compile(rb'\\.|\\\Z|["\[\]{}]', re.DOTALL)
_OPEN, _CLOSE = b"[{", b"]}"
_OTHERS = bytes(set(range(256)) - {*_OPEN, *_CLOSE, *b'"'})
_AS_LISTS = bytes.maketrans(b"{}", b"[]")


class TooDeepError(Exception):
    """A value is nested more than MAX_DEPTH levels deep."""


def is_too_deep(value: Any, levels: int = MAX_DEPTH) -> bool:
    """Whether lists and mappings are nested more than ``levels`` deep, or contain themselves."""
    level = [value]
    for _ in range(levels + 1):
        level = [part for part in level if isinstance(part, dict | list | tuple | Mapping)]
        if not level:
            return False
        level = list({id(inner): inner for part in level for inner in _inside(part)}.values())
    return True


def _inside(part: Any) -> Any:
    return part.values() if isinstance(part, Mapping) else part


def copied(value: Any, levels: int = MAX_DEPTH) -> Any:
    """A copy of ``value``'s dicts and lists; of subclasses, only the outermost level is copied.

    Raises:
        TooDeepError: they are nested more than ``levels`` deep.
    """
    kind = type(value)
    if kind in _FLAT:
        return value
    if kind is dict or kind is list or kind is tuple:
        if not levels:
            raise TooDeepError
        inside = levels - 1
        if kind is dict:
            return {
                key: part if type(part) in _FLAT else copied(part, inside)
                for key, part in value.items()
            }
        parts = [part if type(part) in _FLAT else copied(part, inside) for part in value]
        return parts if kind is list else tuple(parts)
    if is_too_deep(value, levels):
        raise TooDeepError
    return copy.copy(value) if isinstance(value, _COPIED) else value


class _Bytes(Protocol):
    def read(self, size: int = -1, /) -> bytes: ...


class ShallowJson:
    """A JSON file without its deepest levels: lists and objects there are returned empty.

    A stream parser keeps the path to every level, so its memory grows with the square of the depth.
    Only levels deeper than MAX_DEPTH are left out; ``is_deep`` is true once any level was that
    deep. Within one long text, each block is twice as long as the one before: the parser starts the
    text again at each block.
    """

    def __init__(self, file: _Bytes) -> None:
        self.is_deep = False
        self._file = file
        self._depth = 0
        self._in_string = self._is_escaped = False
        self._growth = 1

    def read(self, size: int = -1) -> bytes:
        while block := self._file.read(max(-1, size * self._growth)):
            if kept := self._block(block):
                return kept
        return b""

    def _block(self, block: bytes) -> bytes:
        """``block`` unchanged if a quick check shows that it can't be too deep."""
        text = block[self._is_escaped :].replace(rb"\\", b"").replace(rb"\"", b"")
        marks = text.translate(_AS_LISTS, _OTHERS)
        within_text = self._in_string and b'"' not in marks
        self._growth = 2 * self._growth if within_text else 1
        parts = marks.replace(b'""', b"").split(b'"')  # most texts hold no bracket
        brackets = b"".join(parts[self._in_string :: 2])
        n_open, most = brackets.count(b"["), self._depth
        change = 2 * n_open - len(brackets)
        while n_open and most <= MAX_DEPTH:  # each pass removes the innermost level
            brackets, before = brackets.replace(b"[]", b""), n_open
            n_open = brackets.count(b"[")
            most += 1
            if n_open == before:
                most += n_open
                break
        if most > MAX_DEPTH:
            return self._cut(block)
        self._depth += change
        self._in_string ^= len(parts) % 2 == 0
        self._is_escaped = text.endswith(b"\\")
        return block

    def _cut(self, block: bytes) -> bytes:
        """``block`` without what is too deep, byte for byte elsewhere."""
        kept = b""
        start: int | None = 0 if self._depth <= _KEPT_LEVELS else None
        begin, self._is_escaped = int(self._is_escaped), False
        for match in _TOKENS.finditer(block, begin):
            token = match[0]
            if token == b"\\":
                self._is_escaped = True
            elif token == b'"':
                self._in_string = not self._in_string
            elif self._in_string or len(token) > 1:
                continue
            elif token in _OPEN:
                self._depth += 1
                self.is_deep |= self._depth > MAX_DEPTH
                if start is not None and self._depth > _KEPT_LEVELS:
                    kept += block[start : match.end()]
                    start = None
            else:
                if self._depth == _KEPT_LEVELS + 1:
                    start = match.start()
                self._depth -= 1
        return kept if start is None else kept + block[start:]
