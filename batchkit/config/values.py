"""Checks for every value of a job, whatever its key: it must be writable and comparable."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from math import isfinite
from typing import Any

MAX_DEPTH = 100  # nested tables and lists; the writers fail at about 250
_BITS = 64  # the limit of TOML's integers, and of the JSON writer
# Tables that take any key, at least in a part of them. TOML lacks null: a key without a value is left
# out, which is the same only for an option.
_FREE_FORM = (
    ("vars",),
    ("input", "where"),
    ("prompt", "chat_template_kwargs"),
    ("prompt", "tools"),
)
_OPTIONS = (("sampling",), ("pooling",), ("engine", "options"))
_BRACKET = re.compile(r"[\[\]{}]")
_LONG_NUMBER = re.compile(r"\d[\d_]{4000,}")  # Python reads up to 4300 digits
_KEY = re.compile(r"^[ \t]*([\w.\"' -]+?)[ \t]*=", re.MULTILINE)
_TABLE = re.compile(r"^[ \t]*\[+([^\[\]\n]+)\]+[ \t]*(?:#.*)?$", re.MULTILINE)


def check_values(table: Mapping[str, Any]) -> None:
    """Refuse values that can't be written to a file.

    Raises:
        ValueError: names the key, and what is wrong with its value.
    """
    for path, value in _walk(table):
        if len(path) > MAX_DEPTH:
            raise ValueError(f"{_dotted(path)}: nested more than {MAX_DEPTH} deep")
        if isinstance(value, int) and not -(2 ** (_BITS - 1)) <= value < 2**_BITS:
            raise ValueError(
                f"{_dotted(path)}: found a number of {value.bit_length() + (value < 0)} bits; whole numbers have"
                f" {_BITS} at most"
            )
        if isinstance(value, float) and not isfinite(value) and _below(path, _FREE_FORM + _OPTIONS):
            is_text = _below(path, _FREE_FORM)
            remedy = f'write it as a text: "{value}"' if is_text else "expected a finite number"
            raise ValueError(f"{_dotted(path)}: found {value}; {remedy}")
        if value is None and _must_be_kept(path):
            in_tools = _below(path, (("prompt", "tools"),))
            remedy = "give tools as a JSON file" if in_tools else 'write it as a text: "None"'
            raise ValueError(
                f"{_dotted(path)}: found None, which a job file can't hold; leave it out, or {remedy}"
            )
        if isinstance(value, str) and not _is_unicode(value):
            raise ValueError(f"{_dotted(path)}: found text that is no valid UTF-8")


def place_in(text: str, error: Exception) -> str:
    """The line and key of the value in a TOML file at which Python's reader failed."""
    position = _too_deep(text) if isinstance(error, RecursionError) else _too_long(text)
    before = text[: position + 1]
    keys = [found[-1][1] for pattern in (_TABLE, _KEY) if (found := [*pattern.finditer(before)])]
    return f"line {before.count(chr(10)) + 1} ({'.'.join(keys)})"


def reason_of(error: Exception) -> str:
    """Why a reader of nested text failed, for people."""
    if isinstance(error, RecursionError | MemoryError):
        return "nested too deeply"
    if isinstance(error, ValueError) and "integer string conversion" in str(error):
        return f"found a number of thousands of digits; whole numbers have {_BITS} bits at most"
    return str(error)


def _walk(table: Mapping[str, Any]) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Every value below ``table`` with its path; the caller stops at one that is too deep."""
    waiting: list[tuple[tuple[Any, ...], Any]] = [((), table)]
    while waiting:
        path, value = waiting.pop()
        yield path, value
        if isinstance(value, Mapping):
            waiting += [((*path, key), part) for key, part in value.items()]
        elif isinstance(value, list | tuple):
            waiting += [((*path, number), part) for number, part in enumerate(value)]


def _must_be_kept(path: tuple[Any, ...]) -> bool:
    in_list = bool(path) and isinstance(path[-1], int)
    return in_list or _below(path, _FREE_FORM) or _below(path[:-1], _OPTIONS)


def _below(path: tuple[Any, ...], tables: tuple[tuple[str, ...], ...]) -> bool:
    return any(len(path) > len(table) and path[: len(table)] == table for table in tables)


def _dotted(path: tuple[Any, ...]) -> str:
    shown = ".".join(map(str, path[:6]))
    return shown if len(path) <= 6 else f"{shown}…"


def _is_unicode(text: str) -> bool:
    try:
        return text.isascii() or bool(text.encode())
    except UnicodeEncodeError:
        return False


def _too_deep(text: str) -> int:
    depth = 0
    for bracket in _BRACKET.finditer(text):
        depth += 1 if bracket[0] in "[{" else -1
        if depth > MAX_DEPTH:
            return bracket.start()
    return 0


def _too_long(text: str) -> int:
    found = _LONG_NUMBER.search(text)
    return found.start() if found else 0
