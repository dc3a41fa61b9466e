"""Files with one row per line: JSON objects, requests of OpenAI's batch API, or prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import msgspec

from batchkit.config.tables import InputTable
from batchkit.errors import InputError, RequestError
from batchkit.sources.files import open_input
from batchkit.sources.reader import (
    MAX_DEPTH,
    TOO_DEEP,
    Format,
    Found,
    Reader,
    Skip,
    fault,
    is_too_deep,
    shown,
)

_LOOKED_AT = 1000  # lines that ``is_batch`` reads at most
_BATCH_KEYS = {"custom_id", "body"}
_decode = msgspec.json.Decoder().decode


def reader(parse: Callable[[bytes, str, int], Found]) -> Reader:
    """Return a reader for files with one row per line. The reader yields the result of ``parse`` for each non-blank
    line.

    ``parse``: gets the line, the file's path, and the line's number from 1.
    """

    def read(path: str, table: InputTable, skip: Skip, index: int) -> Iterator[Found]:
        with open_input(path) as file:
            for number, line in enumerate(file, start=1):
                if line.isspace():
                    continue
                yield None if skip(index) else parse(line, path, number)
                index += 1

    return read


def parse_object(line: bytes, path: str, number: int) -> dict[str, Any] | RequestError:
    """Return the JSON object in ``line``. If there is none, return the error with which the row fails.

    Raises:
        InputError: the first line shows that the whole file has another format.
    """
    try:
        fields = _decode(line)
    except (msgspec.DecodeError, ValueError) as error:  # a number of more than 4,300 digits
        if number == 1 and line.strip() in (b"[", b"{", b"[{"):
            raise _is_json(path) from error
        return fault(path, number, _problem(line, error))
    except RecursionError:
        return fault(path, number, TOO_DEEP)
    may_be_deep = len(line) > MAX_DEPTH and line.count(b"[") + line.count(b"{") > MAX_DEPTH
    if may_be_deep and is_too_deep(fields):
        return fault(path, number, TOO_DEEP)
    if isinstance(fields, dict):
        return fields
    if number == 1 and isinstance(fields, list) and any(isinstance(row, dict) for row in fields):
        raise _is_json(path)
    return fault(
        path, number, f"expected a JSON object, found {shown(fields)}; fix or remove the line"
    )


def _is_json(path: str) -> InputError:
    return InputError(f'{path}: is one JSON value, not JSON lines; set input.format = "json"')


def _problem(line: bytes, error: Exception) -> str:
    try:
        text = line.decode().strip()
    except UnicodeDecodeError as bad:
        return _not_text(line, bad)
    return f"not valid JSON: {error}, in {shown(text)}; fix or remove the line"


def _not_text(line: bytes, bad: UnicodeDecodeError) -> str:
    return (
        f"not UTF-8: byte 0x{line[bad.start]:02x} at byte {bad.start + 1}; save the file as UTF-8"
    )


def is_batch(path: str) -> bool:
    """Return whether the file's first valid line is an OpenAI batch request.

    Raises:
        InputError: as ``open_input``.
    """
    with open_input(path) as file:
        for line in islice(file, _LOOKED_AT):
            try:
                request = _decode(line)
            except (msgspec.DecodeError, ValueError, RecursionError):
                continue
            if isinstance(request, dict) and (n_keys := len(request.keys() & _BATCH_KEYS)) != 1:
                return n_keys == len(_BATCH_KEYS)
    return False


def _batch_request(line: bytes, path: str, number: int) -> Found:
    """Return the fields of a batch request (``custom_id``, ``body``, and ``url`` or None), or the error of its row."""
    request = parse_object(line, path, number)
    if not isinstance(request, dict):
        return request
    custom_id, body = request.get("custom_id"), request.get("body")
    if not isinstance(custom_id, str) or not custom_id:
        return fault(path, number, f"custom_id must be a text, found {shown(custom_id)}")
    if not isinstance(body, dict):
        return fault(path, number, f"body must be an object, found {shown(body)}")
    return {"custom_id": custom_id, "body": body, "url": request.get("url")}


def _prompt(line: bytes, path: str, number: int) -> Found:
    """Return the line as the field ``prompt``. Only its line end is removed."""
    try:
        return {"prompt": line.removesuffix(b"\n").removesuffix(b"\r").decode()}
    except UnicodeDecodeError as bad:
        return fault(path, number, _not_text(line, bad))


JSONL = Format(reader(parse_object), (".jsonl", ".ndjson"))
OPENAI_BATCH = Format(reader(_batch_request), id="custom_id")
PROMPTS = Format(reader(_prompt), (".txt",))
