"""What the ledger has of a row's generations, matched with what the row asks for now."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import orjson
from PIL.Image import Image

from batchkit.errors import ReplayError
from batchkit.types import Request, Task

_OPTIONS = orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY


def request_hash(request: Request, engine: str = "") -> str:
    """16 hex digits that are the same for requests that ask the same of the same engine."""
    asked = [
        request.messages,
        request.prompt,
        dict(request.sampling),
        request.tools,
        request.tool_choice,
        request.parallel_tool_calls,
        dict(request.chat_template_kwargs),
        engine,
    ]
    line = orjson.dumps(asked, option=_OPTIONS, default=_hashable)
    return hashlib.blake2b(line, digest_size=8).hexdigest()


def _hashable(value: Any) -> Any:
    if isinstance(value, Image):
        return [
            value.mode,
            *value.size,
            hashlib.blake2b(value.tobytes(), digest_size=8).hexdigest(),
        ]
    return repr(value)


class Replay:
    """The recorded generations of one row, each of which answers one request.

    A request is found by what it asks, so calls that run side by side may come in another order than
    before; of equal ones, the one with its number comes first. A row that is tried again gets only
    answers, and may ask for something else; so may any row if not ``strict``.
    """

    def __init__(self, task: Task, *, strict: bool) -> None:
        is_first = task.attempt == 1
        known = [line for line in task.known if is_first or line["status"] == "ok"]
        self._left = dict(enumerate(known))
        self._strict = strict and is_first

    def find(self, step: str, number: int, hash_now: str) -> Recorded | None:
        """The recorded generation for this request; None if it was not made yet.

        Raises:
            ReplayError: the ledger has another request at that place.
        """
        same = [
            place
            for place, line in self._left.items()
            if line["request_hash"] == hash_now and line["step"] == step
        ]
        if same:
            place = next((n for n in same if self._left[n]["call"] == number), same[0])
            return Recorded(place, self._left.pop(place))
        if self._strict and any(
            line["step"] == step and line["call"] == number for line in self._left.values()
        ):
            where = f"call {number}" + f" of step {step!r}" * bool(step)
            raise ReplayError(
                f"{where} asks for something else than before this row was interrupted, so its function"
                " does not always ask the same; let it depend on the row and on answers only (a seed"
                ' for random numbers, no clock), or set output.replay = "fresh"'
            )
        return None


class Recorded(NamedTuple):
    """A line of the ledger, and its place among those of its row."""

    place: int
    line: Mapping[str, Any]
