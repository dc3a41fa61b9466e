"""The messages between a run and its engine's process, and the connection that carries them.

A message is msgpack, and its type is checked on arrival. An image is sent as mode, size and pixels; sound and video are
sent as numbers.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from msgspec import Struct, msgpack
from PIL import Image

from batchkit import errors
from batchkit.config.tables import JobConfig
from batchkit.engines.base import EngineLoad
from batchkit.engines.faults import Fault
from batchkit.errors import RowError
from batchkit.types import Audio, Clip, Completion, Request, Video

_IMAGE, _AUDIO, _VIDEO = 1, 2, 3  # msgpack extension types
_OfVideo = tuple[
    tuple[int, int, int, int],
    bytearray,  # the model's processor needs a writable buffer
    tuple[float, float, int, list[int], list[float]],
]
_ROW_ERRORS = {
    name: kind
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, RowError)
}


class _Message(Struct, frozen=True, array_like=True, tag=True, forbid_unknown_fields=True):
    pass


class Open(_Message, frozen=True):
    """The first message to an engine's process: the job whose engine it should open.

    The job is pickled, because it may hold dates or tuples, which JSON and msgpack would change. No other message is
    pickled, and the run itself unpickles nothing.
    """

    pickled: bytes

    @classmethod
    def of(cls, job: JobConfig) -> Open:
        return cls(pickle.dumps(job))

    @property
    def job(self) -> JobConfig:
        job: JobConfig = pickle.loads(self.pickled)
        return job


class Submit(_Message, frozen=True):
    """A request with its number, without the row's id and fields, which stay in the run's process."""

    number: int
    request: Request


class Abort(_Message, frozen=True):
    """The numbers of requests whose answers are no longer needed."""

    numbers: Sequence[int]


class Close(_Message, frozen=True):
    """The last message of the run: close the engine and exit."""


class Ready(_Message, frozen=True):
    """The engine's first message: the model is loaded."""

    limits: Mapping[str, Any]
    versions: Mapping[str, str]
    load: EngineLoad


class Refused(_Message, frozen=True):
    """The engine's answer to an invalid job: the message of a JobError."""

    message: str


class NotStarted(_Message, frozen=True):
    """The engine's answer if it could not start: the arguments of StartFailed."""

    message: str
    fault: Fault
    limits: Mapping[str, Any]


class Turn(_Message, frozen=True):
    """The requests that were finished in one poll, by number.

    An empty Turn is sent twice a second to show that the engine is alive.
    """

    done: Sequence[tuple[int, Completion]]
    load: EngineLoad


class Died(_Message, frozen=True):
    """The last message of an engine that died. ``number``: the request that killed it, if known."""

    fault: Fault
    number: int | None


OfRun = Open | Submit | Abort | Close
OfEngine = Ready | Refused | NotStarted | Turn | Died


class Unsendable(Exception):
    """A message with a value that can't be encoded. No part of the message was sent."""


class Channel:
    """A connection that sends messages, and receives messages of the types in ``reads``.

    One thread may send while another receives. Values arrive as msgpack decodes them: a tuple becomes a list, a date
    becomes text.
    """

    def __init__(self, connection: Connection, reads: Any) -> None:
        self._connection = connection
        self._encoder = msgpack.Encoder(enc_hook=_encoded)
        self._decoder = msgpack.Decoder(reads, dec_hook=_row_error, ext_hook=_media)

    def send(self, message: Struct) -> None:
        """Send ``message``.

        Raises:
            Unsendable: A value can't be encoded; the channel can still be used.
            BlockingIOError: The other end read too little within the socket's ``SO_SNDTIMEO``.
            OSError: The other end is closed.
        """
        try:
            frame = self._encoder.encode(message)
        except Exception as error:  # encoding may run a value's own code or run out of memory
            raise Unsendable(str(error)) from error
        self._connection.send_bytes(frame)

    def poll(self, timeout_s: float) -> bool:
        """Wait up to ``timeout_s``; return whether a message, or the end of the connection, can be received."""
        return self._connection.poll(timeout_s)

    def recv(self) -> Any:
        """Receive the next message.

        Raises:
            EOFError, OSError: The other end is closed.
            msgspec.DecodeError: The message has an unexpected type.
        """
        return self._decoder.decode(self._connection.recv_bytes())

    def close(self) -> None:
        self._connection.close()


def _encoded(value: Any) -> Any:
    """Convert a value of a type that msgpack does not support; called by msgpack."""
    if isinstance(value, Image.Image):
        place = (value.mode, value.width, value.height, value.tobytes())
        return msgpack.Ext(_IMAGE, msgpack.encode(place))
    if isinstance(value, Audio):
        return msgpack.Ext(_AUDIO, msgpack.encode((value.sample_rate, value.samples.tobytes())))
    if isinstance(value, Video):
        shown = value.fps, value.duration_s, value.total_frames, value.indexes, value.times_s
        frames = value.frames.shape, value.frames.tobytes()
        return msgpack.Ext(_VIDEO, msgpack.encode((*frames, shown)))
    if isinstance(value, RowError):
        kind = next(k.__name__ for k in type(value).__mro__ if k.__name__ in _ROW_ERRORS)
        return kind, value.args, vars(value)
    if isinstance(value, Mapping):
        return dict(value)
    for plain in (str, int, float):
        if isinstance(value, plain):  # a subclass, such as numpy.str_
            return plain(value)
    raise TypeError(f"found a value of type {type(value).__name__}")


def _media(number: int, encoded: memoryview) -> Image.Image | Clip:
    if number == _AUDIO:
        rate, samples = msgpack.decode(encoded, type=tuple[int, bytearray])
        return Audio(np.frombuffer(samples, np.float32), rate)
    if number == _VIDEO:
        shape, pixels, shown = msgpack.decode(encoded, type=_OfVideo)
        return Video(np.frombuffer(pixels, np.uint8).reshape(shape), *shown)
    mode, width, height, pixels = msgpack.decode(encoded, type=tuple[str, int, int, bytes])
    return Image.frombytes(mode, (width, height), pixels)


def _row_error(_: type, encoded: Any) -> RowError:
    kind, args, attributes = encoded
    error = _ROW_ERRORS[kind](*args)
    vars(error).update(attributes)
    return error
