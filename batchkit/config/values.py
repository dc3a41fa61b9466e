"""Checks for every value of a job, whatever its key: it must be writable and comparable."""

from __future__ import annotations

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
            raise ValueError(f"{_dotted(path)}: found {value}, expected a finite number, or a text")
        if value is None and _must_be_kept(path):
            raise ValueError(
                f"{_dotted(path)}: found None, which a job file can't hold; leave it out, or write it as a"
                ' text: "None"'
            )
        if isinstance(value, str) and not _is_unicode(value):
            raise ValueError(f"{_dotted(path)}: found text that is no valid UTF-8")


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
