"""What the ledger has of a row's generations, matched with what the row asks for now."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

from PIL.Image import Image

from batchkit.config.server_command import what_decides_answers
from batchkit.config.tables import EngineTable, JobConfig
from batchkit.errors import ReplayError
from batchkit.storage.plain_json import encoded
from batchkit.types import Call, Request, Task


def request_hash(request: Request, job: JobConfig, engine: str) -> str:
    """16 hex digits that are the same for requests that ask the same of the same engine, with the same
    model: a retry may name another one."""
    messages: Any = request.messages
    if request.media_bytes:
        messages = [_with_hashes(message) for message in messages]
    asked = [
        messages,
        request.prompt,
        request.sampling,
        request.tools,
        request.tool_choice,
        request.parallel_tool_calls,
        request.chat_template_kwargs,
        engine,
        *_model(job.engines[engine] if engine else job.engine),
    ]
    return hashlib.blake2b(encoded(asked), digest_size=8).hexdigest()


def _model(engine: EngineTable) -> tuple[Any, ...]:
    command = None if engine.server is None else engine.server.command
    served = None if command is None else what_decides_answers(command)
    return engine.kind, engine.model, engine.lora, engine.options.get("revision"), served


def _with_hashes(message: Mapping[str, Any]) -> Mapping[str, Any]:
    content = message["content"]
    if content is None or isinstance(content, str):
        return message
    parts = [
        [*_hash_of(part["image_pil"]), *filter(None, [part.get("detail")])]
        if part["type"] == "image_pil"
        else part
        for part in content
    ]
    return {**message, "content": parts}


def _hash_of(image: Image) -> list[Any]:
    pixels = hashlib.blake2b(image.tobytes(), digest_size=8).hexdigest()
    return [image.mode, *image.size, pixels]


def _hash_of_equal(request_hash: str, times: int) -> str:
    """That of a request that the row has asked for ``times`` times before. So several samples for one
    prompt keep their answers, though some of them were in flight when the row was interrupted."""
    if times == 0:
        return request_hash
    return hashlib.blake2b(f"{request_hash} {times}".encode(), digest_size=8).hexdigest()


class Recorded(NamedTuple):
    """A line of the ledger, and its place among those of its row."""

    place: int
    line: Mapping[str, Any]


class Replay:
    """The recorded generations of one row, each of which answers one request.

    A request is found by what it asks, so calls that run side by side may come in another order than
    before; of equal ones each is another request (``_hash_of_equal``). A row that has asked for something
    new and left a recorded answer unused is at ``fault``. Not so one that is tried again: it gets the
    answers of ``earlier`` attempts, and no errors of them. Nor, if not ``strict``, any other, or one whose
    lines say ``replay: fresh``: they are of another function, or one of them was damaged.
    """

    def __init__(self, task: Task, *, strict: bool) -> None:
        is_fresh = any(line.get("replay") == "fresh" for line in task.known)
        self._strict = strict and task.attempt == 1 and not is_fresh
        self._left: dict[tuple[str, str], Recorded] = {}
        for place, line in enumerate(task.known):
            if line["status"] == "ok" or not line.get("earlier"):
                asked = line["step"], line["request_hash"]
                self._left.setdefault(asked, Recorded(place, line))
        self._taken = {(line["step"], line["call"]) for line in task.known}
        self._asked = Counter[tuple[str, str]]()
        self._new: Call | None = None

    def find(self, call: Call) -> tuple[Call, Recorded | None]:
        """The recorded generation for ``call``; or else None, and the call by which the ledger will know
        it: its number is the next that no other of the row has."""
        times = self._asked[call.step, call.request_hash]
        self._asked[call.step, call.request_hash] += 1
        asked = _hash_of_equal(call.request_hash, times)
        if (found := self._left.pop((call.step, asked), None)) is not None:
            return call, found
        self._new = self._new or call
        number = call.number
        while (call.step, number) in self._taken:
            number += 1
        self._taken.add((call.step, number))
        return call._replace(number=number, request_hash=asked), None

    @property
    def fault(self) -> ReplayError | None:
        """Of the row, once it has ended."""
        if self._new is None or not (self._strict and self._left):
            return None
        return ReplayError(
            f"{self._new.in_words} asks for something else than before this row was interrupted, so its"
            " function does not always ask the same; let it depend on the row and on answers only (a seed"
            ' for random numbers, no clock), or set output.replay = "fresh"'
        )
