"""The dictionary page of a Parquet column chunk, which pyarrow reads but doesn't expose.

The header is a Thrift struct in the compact protocol; its fields are those of ``PageHeader`` in
https://github.com/apache/parquet-format/blob/master/src/main/thrift/parquet.thrift
"""

from __future__ import annotations

from struct import Struct
from typing import IO, Any, NamedTuple

import pyarrow as pa

MAX_HEADER_BYTES = 256  # a dictionary page's is about 20
TRUE, FALSE, BYTE, INTEGERS, STRUCT = 1, 2, 3, (4, 5, 6), 12
TYPE, DECODED_BYTES, STORED_BYTES = 1, 2, 3
DICTIONARY_PAGE = 2


class DictionaryPage(NamedTuple):
    """Where a dictionary's values are, and their size; each is a length of 4 bytes and a text."""

    start: int
    stored_bytes: int
    decoded_bytes: int
    compression: str


def dictionary_page(file: IO[bytes], chunk: Any) -> DictionaryPage | None:
    """None if the chunk does not begin with a dictionary, or its header can't be read.

    Like Arrow's reader, this uses the first page: the footer may not mention the dictionary.
    """
    start = chunk.data_page_offset
    if chunk.has_dictionary_page and 0 < chunk.dictionary_page_offset < start:
        start = chunk.dictionary_page_offset
    file.seek(start)
    try:
        fields, n_bytes = _struct(file.read(MAX_HEADER_BYTES), 0)
    except (IndexError, ValueError):
        return None
    if fields.get(TYPE) != DICTIONARY_PAGE:
        return None
    stored, decoded = fields.get(STORED_BYTES, 0), fields.get(DECODED_BYTES, 0)
    return DictionaryPage(start + n_bytes, stored, decoded, chunk.compression)


def longest_value(file: IO[bytes], page: DictionaryPage) -> int:
    """Bytes of the longest value; the page's decoded size if it can't be read."""
    file.seek(page.start)
    values = file.read(page.stored_bytes)
    if page.compression != "UNCOMPRESSED":
        codec = page.compression.lower().replace("lz4", "lz4_raw")
        try:
            values = pa.decompress(values, page.decoded_bytes, codec)
        except (ValueError, OSError, pa.ArrowException):
            return page.decoded_bytes
    length_at = Struct("<I").unpack_from
    at = longest = 0
    last = len(values) - 4
    while at + longest < last:  # the rest may hold a longer one
        (length,) = length_at(values, at)
        at += 4 + length
        if length > longest:
            longest = length
    return min(longest, page.decoded_bytes)


def _struct(data: bytes, at: int) -> tuple[dict[int, int], int]:
    """The integers of the struct at ``at``, and where it ends. Only a page's first fields are
    needed, so a list or a text is an error."""
    fields, number = dict[int, int](), 0
    while head := data[at]:
        number, kind, at = number + (head >> 4), head & 15, at + 1
        if kind in INTEGERS:
            fields[number], at = _integer(data, at)
        elif kind == STRUCT:
            _, at = _struct(data, at)
        elif kind == BYTE:
            at += 1
        elif kind not in (TRUE, FALSE):
            raise ValueError(kind)
    return fields, at + 1


def _integer(data: bytes, at: int) -> tuple[int, int]:
    """A zigzag number in groups of 7 bits, the lowest first."""
    number = shift = 0
    while data[at] & 128:
        number |= (data[at] & 127) << shift
        at, shift = at + 1, shift + 7
    number |= data[at] << shift
    return number >> 1 ^ -(number & 1), at + 1
