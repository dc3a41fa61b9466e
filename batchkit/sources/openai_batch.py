"""OpenAI's batch input: one ``{"custom_id", "method", "url", "body"}`` per line."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import orjson

from batchkit.config.tables import InputTable
from batchkit.sources.files import open_input
from batchkit.sources.jsonl import parse_object
from batchkit.sources.lines import count_lines, read_lines
from batchkit.sources.reader import Format, Found, Skip, fault, shown

_LOOKED_AT = 1000  # lines
_KEYS = {"custom_id", "body"}


def read(path: str, table: InputTable, skip: Skip, index: int) -> Iterator[Found]:
    """See ``Reader``; the fields are ``custom_id``, ``body`` and ``url`` (None if left out)."""
    return read_lines(path, skip, index, _parse)


def is_batch(path: str) -> bool:
    """Whether the first line that tells is a batch request: a broken one takes no id from the others.

    Raises:
        InputError: as ``open_input``.
    """
    with open_input(path) as file:
        for line in islice(file, _LOOKED_AT):
            try:
                request = orjson.loads(line)
            except orjson.JSONDecodeError:
                continue
            if isinstance(request, dict) and (n_keys := len(request.keys() & _KEYS)) != 1:
                return n_keys == len(_KEYS)
    return False


def _parse(line: bytes, path: str, number: int) -> Found:
    request = parse_object(line, path, number)
    if not isinstance(request, dict):
        return request
    custom_id, body = request.get("custom_id"), request.get("body")
    if not isinstance(custom_id, str) or not custom_id:
        return fault(path, number, f"custom_id must be a text, found {shown(custom_id)}")
    if not isinstance(body, dict):
        return fault(path, number, f"body must be an object, found {shown(body)}")
    return {"custom_id": custom_id, "body": body, "url": request.get("url")}


FORMAT = Format(read, (), count_lines, id="custom_id")
