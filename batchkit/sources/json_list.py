"""One JSON file that holds a list of objects, at its top or under ``input.records``."""

from __future__ import annotations

from collections.abc import Iterator
from io import BufferedReader
from itertools import islice
from typing import Any

import ijson
import orjson

from batchkit.config.tables import InputTable
from batchkit.errors import InputError, RequestError
from batchkit.sources.depth import TOO_DEEP, ShallowJson, is_too_deep
from batchkit.sources.files import BLOCK_BYTES, open_input
from batchkit.sources.reader import Format, Found, Skip, one_of, shown
from batchkit.sources.surrogates import HALF, MarkedHalves

MAX_DIAGNOSED_EVENTS = 2_000_000  # a few seconds, to list the keys of a file without such a list


def read(path: str, table: InputTable, skip: Skip, index: int) -> Iterator[Found]:
    """See ``Reader``; the file is parsed as a stream, one member of the list at a time."""
    n_rows = 0
    with open_input(path) as file:
        start = file.peek(BLOCK_BYTES).lstrip()
        if table.records is None and start[:1] != b"[":
            raise _not_a_list(path, None, start)
        prefix = "item" if table.records is None else f"{table.records}.item"
        try:
            shallow = ShallowJson(halves := MarkedHalves(file))
            for member in ijson.items(shallow, prefix, use_float=True):
                if skip(index):
                    yield None
                elif shallow.is_deep and is_too_deep(member):
                    yield RequestError(f"{path} row {n_rows} of the list: {TOO_DEEP}")
                elif halves.are_in(member):
                    yield RequestError(f"{path} row {n_rows} of the list: {HALF}")
                elif isinstance(member, dict):
                    yield member
                else:
                    problem = f"expected a JSON object, found {shown(member)}"
                    yield RequestError(f"{path} row {n_rows} of the list: {problem}")
                index += 1
                n_rows += 1
        except (ijson.JSONError, UnicodeDecodeError) as error:
            if n_rows == 0 and _is_lines(start):
                raise _are_lines(path) from error
            problem = f"broken JSON after {n_rows} rows: {_reason(error)}"
            raise InputError(f"{path}: {problem}") from error
    if n_rows == 0 and table.records is not None:
        _check_records(path, table.records)


def _not_a_list(path: str, records: str | None, start: bytes) -> InputError:
    if start[:1] != b"{":
        found = shown(start[:40].decode(errors="replace"))
        return InputError(f"{path}: expected a JSON list, found {found}; check input.format")
    if _is_lines(start):
        return _are_lines(path)
    keys = _top_keys(path)
    return InputError(
        f"{path}: is a JSON object; set input.records to the key of its list;"
        f" keys: {shown(', '.join(keys), 200)[1:-1]}"
    )


def _is_lines(start: bytes) -> bool:
    """Whether the first line is an object by itself, and more follows."""
    first, _, rest = start.partition(b"\n")
    try:
        return isinstance(orjson.loads(first), dict) and bool(rest.strip())
    except orjson.JSONDecodeError:
        return False


def _are_lines(path: str) -> InputError:
    return InputError(f'{path}: holds a JSON object a line; set input.format = "jsonl"')


def _check_records(path: str, records: str) -> None:
    """Raises unless ``records`` is there, and is a list."""
    with open_input(path) as file:
        for prefix, event, _ in _events(file):
            if prefix == records and event != "map_key":
                if event == "start_array":
                    return
                raise InputError(f"{path}: input.records = {records!r} is not a list ({event})")
    keys = _top_keys(path)
    hint = one_of(records, keys) if keys else "the file is the list itself: leave input.records out"
    raise InputError(f"{path}: input.records = {records!r} is not there; {hint}")


def _top_keys(path: str) -> list[str]:
    with open_input(path) as file:
        try:
            events = [event for event in _events(file) if event[:2] == ("", "map_key")]
        except ijson.JSONError as error:
            raise InputError(f"{path}: broken JSON: {_reason(error)}") from error
    return list(dict.fromkeys(key for _, _, key in events))


def _events(file: BufferedReader[Any]) -> Iterator[tuple[str, str, str]]:
    return islice(ijson.parse(ShallowJson(file), use_float=True), MAX_DIAGNOSED_EVENTS)


def _reason(error: Exception) -> str:
    """The first line of yajl's message; the rest is a drawing of the position."""
    detail = error.args[0] if error.args else error
    text = detail.decode(errors="replace") if isinstance(detail, bytes) else str(detail)
    if "integer overflow" in text:
        return "a whole number beyond 64 bits; write it as text, in quotes"
    return text.partition("\n")[0].strip()


FORMAT = Format(read, (".json",))
