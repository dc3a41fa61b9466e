"""Decompresses an HTTP response's body while it is received, up to a limit.

httpx decompresses a whole chunk at once, and nested codings: 64 kB can become gigabytes.
"""

from __future__ import annotations

import zlib
from collections.abc import AsyncIterator, Callable
from typing import NamedTuple

ACCEPT_ENCODING = "gzip"
_GZIP = 16 + zlib.MAX_WBITS
_GZIP_NAMES = (ACCEPT_ENCODING, "x-gzip")  # RFC 9110, 8.4.1.3


class Body(NamedTuple):
    """``content`` has at most ``max_bytes``; ``is_whole`` is False if there were more."""

    content: bytes
    is_whole: bool


class CodingError(Exception):
    """The body is not in the coding that its header names, or that coding was not requested."""


async def read_body(chunks: AsyncIterator[bytes], coding: str, max_bytes: int) -> Body:
    """The body in ``chunks``, as received, whose Content-Encoding is ``coding``.

    Raises:
        CodingError: it can't be decompressed.
    """
    received = bytearray()
    unpack = _unpacker(coding.strip().lower())
    async for chunk in chunks:
        received += unpack(chunk, max_bytes + 1 - len(received))
        if len(received) > max_bytes:
            return Body(bytes(received[:max_bytes]), is_whole=False)
    unpack(b"", 0)
    return Body(bytes(received), is_whole=True)


def _unpacker(coding: str) -> Callable[[bytes, int], bytes]:
    """A function of a chunk and the most bytes to return (an uncompressed chunk may exceed this).

    An empty chunk is the end. gzip data may have several members in a row (RFC 1952, 2.2).
    """
    if coding in ("", "identity"):
        return lambda chunk, most: chunk
    if coding not in _GZIP_NAMES:
        raise CodingError(f"Content-Encoding is {coding!r}, expected {ACCEPT_ENCODING} or none")
    stream, is_between = zlib.decompressobj(_GZIP), True

    def unpack(chunk: bytes, most: int) -> bytes:
        nonlocal stream, is_between
        if not chunk and not is_between:
            raise CodingError("the gzip data end in the middle")
        unpacked = b""
        while chunk and len(unpacked) < most:
            try:
                unpacked += stream.decompress(chunk, most - len(unpacked))
            except zlib.error as error:
                raise CodingError(str(error)) from error
            chunk, is_between = stream.unused_data, stream.eof
            if is_between:
                stream = zlib.decompressobj(_GZIP)
        return unpacked

    return unpack
