"""Files of bz2 and xz: one packed stream, or several one after the other, as pbzip2 writes them.

``bz2.BZ2File`` and ``lzma.LZMAFile`` take a later stream whose beginning is damaged for the end of
the file: its rows, and all rows after it, would be missing without a word.
"""

from __future__ import annotations

from typing import Any

_BLOCK_BYTES = 2**14  # small: what is left of one is copied for each stream that ends in it


class PackedStreams:
    """The unpacked bytes of ``packed``; ``decompressor`` makes one for each stream."""

    def __init__(self, packed: Any, decompressor: Any) -> None:
        self._packed = packed
        self._decompressor = decompressor
        self._stream = decompressor()

    def seekable(self) -> bool:
        return False

    def read(self, size: int) -> bytes:
        """Up to ``size`` bytes, at least one; none at the end.

        Raises:
            Exception: the decompressor's own; EOFError if the last stream is incomplete.
        """
        while True:
            block = b""
            if self._stream.eof:
                if not (block := self._next_stream()):
                    return b""
                self._stream = self._decompressor()
            elif self._stream.needs_input and not (block := self._packed.read(_BLOCK_BYTES)):
                raise EOFError("the packed data ended before the end of its stream")
            unpacked: bytes = self._stream.decompress(block, size)
            if unpacked:
                return unpacked

    def _next_stream(self) -> bytes:
        """The beginning of what follows the stream; zeros are padding (xz's file format, 2.2)."""
        rest: bytes = self._stream.unused_data.lstrip(b"\0")
        while not rest and (block := self._packed.read(_BLOCK_BYTES)):
            rest = block.lstrip(b"\0")
        return rest
