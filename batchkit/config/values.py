"""Checks for all values of a job, because batchkit must be able to write each value to a file and compare it."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from math import isfinite
from typing import Any

import orjson

MAX_DEPTH = 100  # levels of nested tables and lists; the TOML and JSON writers fail at about 250
_MAX_COMMAND = 16_384  # characters; shlex needs seconds for a million characters
_BITS = 64  # the limit of TOML's integers, and of the JSON writer
# Tables in which the user chooses the keys. TOML has no null, so a key whose value is None is left out of the file.
# For other keys None means the default, so nothing changes; in these tables the key would be lost.
_FREE_FORM = (
    ("vars",),
    ("input", "where"),
    ("prompt", "chat_template_kwargs"),
    ("prompt", "tools"),
)
_SURROGATE = re.compile("[\ud800-\udfff]")
_OPTIONS = (("sampling",), ("pooling",), ("engine", "options"))


def check_values(table: Mapping[str, Any]) -> None:
    """Check that every value in ``table`` can be written to a job file.

    Raises:
        ValueError: A value can't be written; the message names its key and the problem.
    """
    waiting: list[tuple[tuple[Any, ...], Any]] = [((), table)]
    while waiting:
        path, value = waiting.pop()
        if (problem := _problem(path, value)) is not None:
            key = ".".join(map(str, path[:6])) + "…" * (len(path) > 6)
            raise ValueError(f"{key}: {problem}")
        if isinstance(value, Mapping):
            waiting += [((*path, key), part) for key, part in value.items()]
        elif isinstance(value, list | tuple):
            waiting += [((*path, number), part) for number, part in enumerate(value)]


def from_json(value: Any) -> Any:
    """Return the value of the JSON text ``value``, or None if the JSON is invalid. A ``value`` that is not a text is
    returned unchanged."""
    try:
        return orjson.loads(value) if isinstance(value, str) else value
    except orjson.JSONDecodeError:
        return None


def split_command(command: str) -> list[str]:
    """Split ``command`` into words like a shell.

    Raises:
        ValueError: A quotation is not closed, or the command is too long.
    """
    if len(command) > _MAX_COMMAND:
        raise ValueError(
            f"found {len(command):,} characters, at most {_MAX_COMMAND:,}; put the command into a script"
        )
    return shlex.split(command)


def reason_of(error: Exception) -> str:
    """Return why a parser failed with ``error``, in words that a user understands."""
    if isinstance(error, RecursionError | MemoryError):
        return "nested too deeply"
    if isinstance(error, ValueError) and "integer string conversion" in str(error):
        return f"found a number of thousands of digits; whole numbers have {_BITS} bits at most"
    return str(error)


def _problem(path: tuple[Any, ...], value: Any) -> str | None:
    if len(path) > MAX_DEPTH:
        return f"nested more than {MAX_DEPTH} deep"
    if isinstance(value, int) and not -(2 ** (_BITS - 1)) <= value < 2**_BITS:
        bits = value.bit_length() + (value < 0)
        return f"found a number of {bits} bits; whole numbers have {_BITS} at most"
    if isinstance(value, float) and not isfinite(value) and _below(path, _FREE_FORM + _OPTIONS):
        return f"found {value}, expected a finite number or a text"
    if value is None and _must_be_kept(path):
        return "found None, which a job file can't hold; leave the key out, or write a text"
    if isinstance(value, str) and _SURROGATE.search(value):
        return "found text that is not valid UTF-8"
    return None


def _must_be_kept(path: tuple[Any, ...]) -> bool:
    in_list = bool(path) and isinstance(path[-1], int)
    return in_list or _below(path, _FREE_FORM) or _below(path[:-1], _OPTIONS)


def _below(path: tuple[Any, ...], tables: tuple[tuple[str, ...], ...]) -> bool:
    return any(len(path) > len(table) and path[: len(table)] == table for table in tables)
