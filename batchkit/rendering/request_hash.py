"""A hash of everything that decides the answer to a request, by which equal requests are found."""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable
from typing import Any

import msgspec
from msgspec.structs import replace

from batchkit.config.server_command import what_decides_answers
from batchkit.config.tables import EngineTable, JobConfig
from batchkit.sources.rowhash import content_of, hashable, is_picture
from batchkit.types import GREEDY_BELOW, Audio, Request, Video, VideoFile

_BYTES = 16


class RequestHashes:
    """Hashes of the requests of ``job``. Several threads may share it.

    A hash covers the prompt with the content of its media, the parameters, the adapter, and the engine with its model,
    because a retry may use another model. Two runs have equal answers to requests with equal hashes only if their
    engines have equal options, too (``storage/identity.py``).
    """

    def __init__(self, job: JobConfig) -> None:
        engines = {"": job.engine, **job.engines}
        self._engines = {name: _known_by(name, engine) for name, engine in engines.items()}
        self._media = _MediaDigests()
        self._encoder = msgspec.msgpack.Encoder(enc_hook=self._media.content_of)

    def hashed(self, request: Request) -> Request:
        """Return ``request`` with its ``request_hash``: 32 hex digits that are equal for equal requests."""
        engine = "" if request.call is None else request.call.engine
        asked = (
            self._engines[engine],
            *(request.messages, request.prompt, request.pair, request.clips, request.speech),
            *(request.tools, request.tool_choice, request.parallel_tool_calls),
            *(request.sampling, request.chat_template_kwargs, request.lora, request.endpoint),
        )
        try:
            content = self._encoder.encode(asked)
        except Exception:  # as for ``input_hash``
            content = self._encoder.encode(hashable(asked))
        digest = hashlib.blake2b(content, digest_size=_BYTES)
        return replace(request, request_hash=digest.hexdigest())


def is_determined(request: Request, *, generates: bool) -> bool:
    """Return whether equal requests have equal answers: if decoding is greedy or has a seed, or if the task gives no
    text (``generates`` is False)."""
    return not generates or is_greedy(request) or request.sampling.get("seed") is not None


def is_greedy(request: Request) -> bool:
    """Return whether the answer has the likeliest token at each place."""
    temperature = request.sampling.get("temperature")
    return isinstance(temperature, int | float) and temperature < GREEDY_BELOW


def _known_by(name: str, engine: EngineTable) -> bytes:
    command = None if engine.server is None else engine.server.command
    served = None if command is None else what_decides_answers(command)
    revision = engine.options.get("revision")
    parts = [name, engine.kind, engine.model, engine.lora, revision, served]
    return hashlib.blake2b(msgspec.msgpack.encode(hashable(parts)), digest_size=32).digest()


class _MediaDigests:
    """Digests of decoded media. Each object is hashed once, even if many requests share it."""

    def __init__(self) -> None:
        self._known: dict[int, bytes] = {}  # by id, because images have no hash

    def content_of(self, value: Any) -> Any:
        """Return the content of a value that has no type of msgpack."""
        if isinstance(value, Video):
            parts = [value.fps, value.duration_s, value.total_frames, [*value.indexes]]
            return ["video", parts, self._digest(value, value.frames.tobytes)]
        if isinstance(value, VideoFile):
            return ["video file", value.type, self._digest(value, lambda: value.data)]
        if isinstance(value, Audio):
            return ["sound", value.sample_rate, self._digest(value, value.samples.tobytes)]
        if is_picture(value):  # a decoded image: RGB, without orientation
            return ["image", value.mode, value.size, self._digest(value, value.tobytes)]
        return content_of(value)

    def _digest(self, value: Any, content: Callable[[], bytes]) -> bytes:
        if (known := self._known.get(id(value))) is None:
            known = hashlib.blake2b(content(), digest_size=_BYTES).digest()
            self._known[id(value)] = known
            weakref.finalize(value, self._known.pop, id(value), None).atexit = False
        return known
