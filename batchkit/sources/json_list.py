"""JSON files with a list of objects, at the top or under ``input.records``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import ijson
import msgspec

from batchkit.config.tables import InputTable
from batchkit.errors import InputError, RequestError
from batchkit.sources.files import open_input
from batchkit.sources.reader import TOO_DEEP, Format, Found, Skip, is_too_deep, one_of, shown


def read(
    path: str, table: InputTable, skip: Skip, index: int, max_whole_bytes: int = 2**28
) -> Iterator[Found]:
    """Yield the rows of a JSON list (see ``Reader``). A file over ``max_whole_bytes`` is parsed as a stream, row by
    row, which is five times as slow."""
    with open_input(path) as file:
        content = file.read(max_whole_bytes + 1)
    if len(content) > max_whole_bytes:
        del content
        members = _stream(path, table.records)
    else:
        members = iter(_list(path, _parsed(path, content), table.records))
    for number, member in enumerate(members):
        yield (
            None
            if skip(index)
            else _found(f"{path} row {number} of the list (counted from 0)", member)
        )
        index += 1


def _found(place: str, member: Any) -> Found:
    if not isinstance(member, dict):
        return RequestError(f"{place}: expected a JSON object, found {shown(member)}")
    return RequestError(f"{place}: {TOO_DEEP}") if is_too_deep(member) else member


def _parsed(path: str, content: bytes) -> Any:
    try:
        return msgspec.json.decode(content)
    except (msgspec.DecodeError, ValueError) as error:
        if _is_lines(content):
            raise InputError(
                f'{path}: has one JSON object per line; set input.format = "jsonl"'
            ) from error
        raise InputError(f"{path}: broken JSON: {error}; correct the file") from error
    except RecursionError as error:
        raise InputError(f"{path}: {TOO_DEEP}") from error


def _list(path: str, value: Any, records: str | None) -> list[Any]:
    """Return the list of rows in ``value``, the parsed file: ``value`` itself, or the list at its key ``records``."""
    if records is None:
        if isinstance(value, list):
            return value
        if not isinstance(value, dict):
            raise InputError(
                f"{path}: expected a JSON list, found {shown(value)}; check input.format"
            )
        if any(isinstance(part, dict) and "0" in part for part in value.values()):
            raise InputError(
                f'{path}: is in the format that pandas writes by default; write it with df.to_json(…, orient="records")'
            )
        keys = shown(", ".join(value), 200)[1:-1]
        raise InputError(
            f"{path}: is a JSON object with the keys {keys}; set input.records to the key of the list of rows"
        )
    if isinstance(value, list):
        raise InputError(f"{path}: the whole file is the list of rows; leave input.records out")
    for key in records.split("."):
        if not isinstance(value, dict) or key not in value:
            hint = one_of(key, value if isinstance(value, dict) else ())
            raise InputError(
                f"{path}: input.records is {records!r}, but the file lacks {key!r}; {hint}"
            )
        value = value[key]
    if not isinstance(value, list):
        raise InputError(
            f"{path}: the value at input.records = {records!r} is {shown(value)}, expected a list of rows; set"
            " input.records to the key of the list"
        )
    return value


def _is_lines(content: bytes) -> bool:
    """Return whether the file is JSON Lines, which is assumed if the first line is a whole object and more lines
    follow."""
    first, _, rest = content.partition(b"\n")
    try:
        return isinstance(msgspec.json.decode(first), dict) and bool(rest.strip())
    except (msgspec.DecodeError, ValueError):
        return False


def _stream(path: str, records: str | None) -> Iterator[Any]:
    prefix = "item" if records is None else f"{records}.item"
    n_rows = 0
    try:
        with open_input(path) as file:
            for member in ijson.items(file, prefix, use_float=True):
                yield member
                n_rows += 1
    except (ijson.JSONError, UnicodeDecodeError) as error:
        problem = f"broken JSON after {n_rows} rows: {_reason(error)}; correct the file"
        raise InputError(f"{path}: {problem}") from error
    if n_rows == 0:
        where, remedy = f"at input.records = {records!r}", "check input.records"
        if records is None:
            where, remedy = "at the top level", "set input.records to the key of its list"
        raise InputError(f"{path}: has no list of rows {where}; {remedy}")


def _reason(error: Exception) -> str:
    """Return the first line of yajl's message. The other lines only show the position in the file."""
    detail = error.args[0] if error.args else error
    text = detail.decode(errors="replace") if isinstance(detail, bytes) else str(detail)
    if "integer overflow" in text:
        return "a whole number beyond 64 bits; write it as text, in quotes"
    return text.partition("\n")[0].strip()


FORMAT = Format(read, (".json",))
