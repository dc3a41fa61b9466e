"""JSON lines: one object per line."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import orjson

from batchkit.config.tables import InputTable
from batchkit.errors import InputError, RequestError
from batchkit.sources.depth import MAX_DEPTH, TOO_DEEP, is_too_deep
from batchkit.sources.lines import count_lines, read_lines
from batchkit.sources.reader import Format, Found, Skip, fault, shown

_LONG_INT = re.compile(rb"[\[:,\s]-?\d{19,}")
_SHORT = frozenset((str, int, bool, type(None)))


def read(path: str, table: InputTable, skip: Skip, index: int) -> Iterator[Found]:
    """See ``Reader``; a line that is not a JSON object fails only its row."""
    return read_lines(path, skip, index, parse_object)


def parse_object(line: bytes, path: str, number: int) -> dict[str, Any] | RequestError:
    """The object in ``line``, or what is wrong with it.

    Raises:
        InputError: the first line shows that the whole file has another format.
    """
    try:
        fields = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        if number == 1 and line.strip() in (b"[", b"{", b"[{"):
            raise _is_json(path) from error
        return fault(path, number, _problem(line, error))
    if (
        len(line) > MAX_DEPTH
        and line.count(b"[") + line.count(b"{") > MAX_DEPTH
        and is_too_deep(fields)
    ):
        return fault(path, number, TOO_DEEP)
    if isinstance(fields, dict):
        if _may_have_lost_digits(fields) and _LONG_INT.search(line):
            return dict(json.loads(line))  # which keeps them
        return fields
    if number == 1 and isinstance(fields, list) and any(isinstance(row, dict) for row in fields):
        raise _is_json(path)
    return fault(
        path, number, f"expected a JSON object, found {shown(fields)}; fix or remove the line"
    )


def _may_have_lost_digits(fields: dict[str, Any]) -> bool:
    """True if the values may include an integer beyond 64 bits: orjson makes it a float."""
    return not _SHORT.issuperset(map(type, fields.values()))


def _is_json(path: str) -> InputError:
    return InputError(f'{path}: is one JSON value, not JSON lines; set input.format = "json"')


def _problem(line: bytes, error: orjson.JSONDecodeError) -> str:
    try:
        text = line.decode().rstrip("\r\n")
    except UnicodeDecodeError as bad:
        return f"not UTF-8: byte 0x{line[bad.start]:02x} at byte {bad.start + 1}; save it as UTF-8"
    start = max(0, error.pos - 20)
    near = shown(text[start:])
    return f"not valid JSON: {error.msg} at column {error.pos + 1}, near {near}; fix or remove it"


FORMAT = Format(read, (".jsonl", ".ndjson"), count_lines)
