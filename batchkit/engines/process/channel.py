"""One end of the socket between a run and its engine's process.

A message is its length and msgpack. The pixels of its images are in a memfd, whose descriptor goes
with it: the kernel frees it with the last process that holds it, so that one that is killed leaves
nothing behind, and /dev/shm may be small. What arrives is checked against the types of the messages.
"""

from __future__ import annotations

import errno
import mmap
import os
import select
import socket
import struct
from collections.abc import Mapping, Sequence
from contextlib import closing
from io import FileIO
from typing import Any

from msgspec import Struct, msgpack
from PIL import Image

from batchkit import errors
from batchkit.errors import RowError

_SIZE = struct.Struct("=Q")
_IMAGE = 1  # msgpack's number of an extension
# It bounds how many descriptors can be in the socket at once: sending fails if there are more than a
# process may have open, often 1,024. The kernel doubles it, and counts 1 KiB or more a message.
_SEND_BUFFER_BYTES = 65536

_ROW_ERRORS = {
    name: kind
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, RowError)
}


class Unsendable(Exception):
    """A value of the message can't be encoded; nothing was sent."""


class Channel:
    """Sends structs; receives those of the union ``reads``. One thread may send while another receives.

    Values arrive as msgpack has them: a tuple as a list, a date as its text. An image arrives with its
    mode, size and pixels, and without Pillow's ``info``.
    """

    def __init__(self, connection: socket.socket, reads: Any) -> None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
        self._socket = connection
        self._arrivals = select.poll()
        self._arrivals.register(connection, select.POLLIN)
        self._encoder = msgpack.Encoder(enc_hook=self._encoded)
        self._decoder = msgpack.Decoder(reads, dec_hook=_row_error, ext_hook=self._image)
        self._written = _WrittenPixels()
        self._read = _ReadPixels([])

    def send(self, message: Struct) -> None:
        """
        Raises:
            Unsendable: the channel can still be used.
            BlockingIOError: the other end read too little within the socket's ``SO_SNDTIMEO``.
            OSError: the other end is closed.
        """
        frame = bytearray(_SIZE.size)
        sent = 0
        with closing(_WrittenPixels()) as self._written:
            try:
                self._encoder.encode_into(message, frame, _SIZE.size)
            except Exception as error:  # a value's own code may run, and memory may be short
                raise Unsendable(str(error)) from error
            _SIZE.pack_into(frame, 0, len(frame) - _SIZE.size)
            if fds := self._written.fds:
                sent = socket.send_fds(self._socket, [frame], fds)
        self._socket.sendall(memoryview(frame)[sent:])

    def poll(self, timeout_s: float) -> bool:
        """Whether there is something to receive, an end too; waits up to ``timeout_s`` for it."""
        return bool(self._arrivals.poll(1000 * timeout_s))

    def recv(self) -> Any:
        """The next message.

        Raises:
            EOFError, ConnectionError: the other end is closed.
            OSError: memory or descriptors are short.
            msgspec.DecodeError: it is not a message of the expected types.
        """
        header, fds, flags, _ = socket.recv_fds(
            self._socket, _SIZE.size, 1, socket.MSG_CMSG_CLOEXEC
        )
        if not header:
            raise EOFError
        with closing(_ReadPixels(fds)) as self._read:
            if flags & socket.MSG_CTRUNC:
                raise OSError(
                    errno.EMFILE, "no room for an image's descriptor: too many open files"
                )
            header += self._recv_bytes(_SIZE.size - len(header))
            return self._decoder.decode(self._recv_bytes(*_SIZE.unpack(header)))

    def close(self) -> None:
        self._socket.close()

    def _recv_bytes(self, size: int) -> bytearray:
        message = bytearray(size)
        rest = memoryview(message)
        while rest:
            read = self._socket.recv_into(rest, 0, socket.MSG_WAITALL)
            if not read:
                raise EOFError
            rest = rest[read:]
        return message

    def _encoded(self, value: Any) -> Any:
        """What msgpack has no word for, in its words."""
        if isinstance(value, Image.Image):
            return self._written.add(value)
        if isinstance(value, RowError):
            kind = next(k.__name__ for k in type(value).__mro__ if k.__name__ in _ROW_ERRORS)
            return kind, value.args, vars(value)
        if isinstance(value, Mapping):
            return dict(value)
        for plain in (str, int, float):
            if isinstance(value, plain):  # a subclass
                return plain(value)
        raise TypeError(f"found a value of type {type(value).__name__}")

    def _image(self, _: int, place: memoryview) -> Image.Image:
        return self._read.image(msgpack.decode(place, type=_Place))


class _Place(Struct, frozen=True, array_like=True):
    """Where in the memfd an image's pixels are, packed as ``Image.tobytes`` does."""

    mode: str
    width: int
    height: int
    offset: int
    size: int


class _WrittenPixels:
    """The pixels of a message's images, in a memfd if it has any."""

    def __init__(self) -> None:
        self._file: FileIO | None = None
        self._places: dict[int, msgpack.Ext] = {}  # by id(): the message holds its images

    @property
    def fds(self) -> Sequence[int]:
        return [self._file.fileno()] if self._file else []

    def add(self, image: Image.Image) -> msgpack.Ext:
        place = self._places.get(id(image))
        if place is None:
            place = self._places[id(image)] = msgpack.Ext(_IMAGE, self._write(image))
        return place

    def close(self) -> None:
        if self._file:
            self._file.close()

    def _write(self, image: Image.Image) -> bytes:
        if image.mode in ("P", "PA") or not all(image.size):
            shape = f"{image.width}×{image.height}, mode {image.mode}"
            raise ValueError(f"found an image without pixels, or with a palette: {shape}")
        if self._file is None:
            self._file = FileIO(os.memfd_create("batchkit-pixels"), "w")
        pixels, offset = image.tobytes(), self._file.tell()
        rest = memoryview(pixels)
        while rest:  # written and not mapped: where memory is short, it is an error and no signal
            rest = rest[self._file.write(rest) :]
        return msgpack.encode(_Place(image.mode, *image.size, offset, len(pixels)))


class _ReadPixels:
    """The pixels of a message's images, in the memfd that came with it if it has any."""

    def __init__(self, fds: Sequence[int]) -> None:
        self._fds = fds
        self._images: dict[int, Image.Image] = {}  # by their offset

    def image(self, place: _Place) -> Image.Image:
        """A copy, since a mapping would hold its memfd's descriptor as long as the image lives."""
        if place.offset not in self._images:
            end, size = place.offset + place.size, (place.width, place.height)
            with (
                mmap.mmap(self._fds[0], 0, prot=mmap.PROT_READ) as pixels,
                memoryview(pixels)[place.offset : end] as own,
            ):
                self._images[place.offset] = Image.frombytes(place.mode, size, own)
        return self._images[place.offset]

    def close(self) -> None:
        self._images.clear()
        for fd in self._fds:
            os.close(fd)


def _row_error(_: type, encoded: Any) -> RowError:
    kind, args, attributes = encoded
    error = _ROW_ERRORS[kind](*args)
    vars(error).update(attributes)
    return error
