"""What the prediction is: one function an extractor, from the answer's text to the prediction.

Each gives None where the text holds nothing of its kind. Adding one: a function here, a line in
``EXTRACTORS``, and its name in ``config.Extract``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from json import JSONDecodeError, JSONDecoder
from typing import Any

from batchkit.config import ScoringTable
from batchkit.scoring.reward import parse_reward
from batchkit.scoring.values import numbers_in

Extractor = Callable[[str, ScoringTable], str | None]

_OPENED = re.compile(r"[{\[]")
_MARKERS = ("[Final Answer]:", "Final Answer:")
_FENCED = re.compile(r"```[ \t]*+\w*+[ \t]*+\r?\n(.*?)```", re.DOTALL)
_MOST_IN_VAIN = 10_000_000  # characters; a text of nothing but brackets would take hours
_DEAR = 10_000  # what nesting as deep as Python goes counts


def final_answer(text: str, table: ScoringTable) -> str | None:
    """What follows the last ``[Final Answer]:``, else the last ``Final Answer:``; case counts."""
    for marker in _MARKERS:
        if marker in text:
            return text.rpartition(marker)[2].strip()
    return None


def last_number(text: str, table: ScoringTable) -> str | None:
    """The last number, without thousands separators."""
    found = numbers_in(text)
    return f"{found[-1]:.15g}" if found else None


def reward(text: str, table: ScoringTable) -> str | None:
    """The score from 0 to 10 that the text gives."""
    found = parse_reward(text, table.default_reward)
    return None if found is None else f"{found:g}"


def regex(text: str, table: ScoringTable) -> str | None:
    """The last match of ``pattern``: its first group, if it has one."""
    *_, last = [None, *re.finditer(table.pattern or "", text)]
    if last is None:
        return None
    found: str | None = last[1] if last.re.groups else last[0]
    return None if found is None else found.strip()


def json_value(text: str, table: ScoringTable) -> str | None:
    """The value at ``key`` of the last JSON object or list that has it; what is no text, as JSON."""
    found = None
    for value in _json_in(text):
        at_key = _at(value, table.key)
        found = at_key if at_key is not None else found
    if found is not None and not isinstance(found, str):
        found = _as_json(found)
    return None if found is None else found.encode("utf-8", "replace").decode()


def code(text: str, table: ScoringTable) -> str | None:
    """The last fenced block; without a fence, what stands from the first ``import`` on."""
    if blocks := _FENCED.findall(text):
        return str(blocks[-1]).strip()
    start = re.search(r"^(import|from) \w", text, re.MULTILINE)
    return text[start.start() :].strip() if start else None


def _json_in(text: str) -> Iterator[Any]:
    decoder, position, in_vain = JSONDecoder(), 0, 0
    while in_vain < _MOST_IN_VAIN and (start := _OPENED.search(text, position)) is not None:
        try:
            value, position = decoder.raw_decode(text, start.start())
            yield value
        except (ValueError, RecursionError) as error:  # a number may have too many digits, too
            position = start.end()
            read_to = error.pos if isinstance(error, JSONDecodeError) else position + _DEAR
            in_vain += read_to - start.start()


def _as_json(value: Any) -> str | None:
    """Not by orjson: what a model wrote may be any number, and nested deeper than it goes."""
    try:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    except RecursionError:
        return None


def _at(value: Any, key: str | None) -> Any:
    for part in (key or "").split(".") if key else ():
        if isinstance(value, Mapping):
            value = value.get(part)
        elif isinstance(value, list) and part.isdigit() and int(part) < len(value):
            value = value[int(part)]
        else:
            return None
    return value


EXTRACTORS: dict[str, Extractor] = {
    "text": lambda text, table: text.strip(),
    "final-answer": final_answer,
    "number": last_number,
    "regex": regex,
    "json": json_value,
    "code": code,
    "reward": reward,
}
