"""A checksum of a file that is only appended to; it detects and locates damage."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

SEGMENT_BYTES = 16 << 20
_BLOCK_BYTES = 1 << 20


class Span(NamedTuple):
    """Byte positions from ``start`` to ``end``, the end not included."""

    start: int
    end: int


class Checksum:
    """CRC-32 of each segment of a file (16 MiB), from its first byte to ``end``.

    CRC-32 detects every burst of up to 32 wrong bits, and misses one in 2^32 of all other changes;
    it can be continued from its own value, and reads 2 GiB/s.
    """

    def __init__(
        self, segments: Iterable[int] = (), end: int = 0, *, segment_bytes: int = SEGMENT_BYTES
    ) -> None:
        self.segments = list(segments)
        self.end = end
        self._segment_bytes = segment_bytes

    def add(self, block: bytes) -> None:
        """Continue with ``block``, the bytes from ``end`` on."""
        view = memoryview(block)
        while len(view):
            room = self._segment_bytes - self.end % self._segment_bytes
            if room == self._segment_bytes:
                self.segments.append(0)
            self.segments[-1] = zlib.crc32(view[:room], self.segments[-1])
            self.end += len(view[:room])
            view = view[room:]

    def extend(self, path: Path, end: int) -> None:
        """Continue with the file's own bytes, up to ``end``."""
        with path.open("rb") as file:
            file.seek(self.end)
            while self.end < end and (block := file.read(min(_BLOCK_BYTES, end - self.end))):
                self.add(block)

    def difference(self, path: Path) -> Span | None:
        """The first segment of the file that is not what was added; None if all of it is."""
        now = Checksum(segment_bytes=self._segment_bytes)
        for number, expected in enumerate(self.segments):
            start = number * self._segment_bytes
            end = min(start + self._segment_bytes, self.end)
            now.extend(path, end)
            if now.end < end or now.segments[number] != expected:
                return Span(start, end)
        return None
