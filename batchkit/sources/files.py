"""Opening of input files, and errors for files that can't be opened. ``finding.py`` finds the files."""

from __future__ import annotations

import io
import lzma
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path, PurePath
from tempfile import TemporaryFile
from typing import Any

from batchkit.config.regular_file import open_regular
from batchkit.config.urls import failure, is_remote
from batchkit.errors import InputError

BLOCK_BYTES = 2**20
COMPRESSIONS = (".gz", ".zst", ".bz2", ".xz")  # decompressed on the fly, by name, as fsspec does
UTF8_BOM = b"\xef\xbb\xbf"
NOT_TEXT = {  # first bytes of files that no text format can read
    b"\xff\xfe": "is UTF-16 text; save the file as UTF-8",
    b"\xfe\xff": "is UTF-16 text; save the file as UTF-8",
    b"PAR1": 'is a Parquet file; set input.format = "parquet"',
    b"PK\x03\x04": "is a zip archive or an Excel workbook; unpack it, or name it .xlsx",
    b"\x1f\x8b": "is gzip-compressed; give its name the suffix .gz",
    b"\x28\xb5\x2f\xfd": "is zstd-compressed; give its name the suffix .zst",
    b"\xfd7zXZ\0": "is xz-compressed; give its name the suffix .xz",
    b"BZh91AY&SY": "is bzip2-compressed; give its name the suffix .bz2",
}


@contextmanager
def open_input(
    path: str, *, text: bool = True, may_be_empty: bool = False, in_order: bool = True
) -> Iterator[io.BufferedReader[Any]]:
    """Open ``path`` for reading bytes, decompressed. With ``text``, a UTF-8 byte order mark is skipped.

    ``in_order``: False if only parts of the file are read. A store is then asked for these parts alone, and nothing is
    read ahead.

    Raises:
        InputError: the file is missing, not a regular file (a pipe, a device), unreadable now or while it is being
            read, empty, or, with ``text``, in an encoding or format that is not UTF-8.
    """
    try:
        with _open(path, text=text, in_order=in_order) as file:
            if text:
                _begin_text(path, file)
            if not may_be_empty and not file.peek(1):
                raise is_empty(path)
            yield file
    except FileNotFoundError as error:
        raise is_missing(path) from error
    except IsADirectoryError as error:
        raise is_folder(path) from error
    except OSError as error:
        raise InputError(f"{path}: can't be read: {error.strerror or error}") from error


def name_of(path: str) -> str:
    """Return ``path`` without the query of a URL. Of a chained URL, return the part that names the file.

    For example, the result for ``zip://a.jsonl::s3://b/c.zip`` is ``zip://a.jsonl``.
    """
    # urlsplit is not used: it reads "memory://a.jsonl" as a host, and ends the path at a "#" in a key.
    if "://" not in path:
        return path
    parts = path.partition("?")[0].split("::")
    return next((part for part in parts if "://" in part), parts[0])


@contextmanager
def _open(path: str, *, text: bool, in_order: bool) -> Iterator[io.BufferedReader[Any]]:
    if "://" not in path and not path.endswith(COMPRESSIONS):
        with io.BufferedReader(open_regular(path), BLOCK_BYTES) as file:
            yield file
        return
    with ExitStack() as stack:
        try:
            foreign = _through_fsspec(path, stack, text=text, in_order=in_order)
        except (IsADirectoryError, InputError):  # open_input handles these
            raise
        except Exception as error:  # each filesystem raises its vendor's own types
            if isinstance(error, OSError) and "://" not in path:
                raise
            raise remote_error(path, error) from error
        yield stack.enter_context(io.BufferedReader(_Foreign(foreign), BLOCK_BYTES))


def _through_fsspec(path: str, stack: ExitStack, *, text: bool, in_order: bool) -> Any:
    """Open a URL, or a compressed local file (with a suffix in ``COMPRESSIONS``).

    fsspec is not used for local files, because it would wait for a pipe. It is not asked to decompress, because it
    would also open zip archives, and read only their first member. Parquet and other binary files are copied if they
    are not seekable.
    """
    import fsspec

    opened: Any
    if "://" not in path:
        opened = open_regular(path)
    elif in_order:
        opened = fsspec.open(path, "rb")
    else:
        filesystem, name = fsspec.core.url_to_fs(path)
        opened = filesystem.open(name, "rb", cache_type="none")
    packed = stack.enter_context(opened)
    if isinstance(packed, io.BytesIO):  # memory:// returns the same object to each caller
        packed = io.BytesIO(packed.getvalue())
    suffix = PurePath(name_of(path)).suffix.lower()
    if "://" not in path and (begins := packed.read(2)) is not None:
        packed.seek(0)
        if begins and not any(
            magic.startswith(begins) and suffix in text for magic, text in NOT_TEXT.items()
        ):
            raise InputError(
                f"{path}: the suffix {suffix} is for a compressed file, but this file is not compressed in this format; rename the file"
            )
    unpacked = _unpacked(packed, suffix) if suffix in COMPRESSIONS else packed
    if text or _can_seek(unpacked):
        return unpacked
    copy = stack.enter_context(TemporaryFile())  # noqa: SIM115 - the stack closes it
    while block := unpacked.read(BLOCK_BYTES):
        copy.write(block)
    copy.seek(0)
    return copy


def _can_seek(file: Any) -> bool:
    """Return whether ``file`` is really seekable. Some web servers send only whole files, although fsspec claims
    otherwise."""
    try:
        return bool(file.seekable()) and file.seek(0, os.SEEK_END) >= 0 == file.seek(0)
    except ValueError:
        return False


def _unpacked(packed: Any, suffix: str) -> Any:
    """Return the decompressed stream. Arrow is used where possible, because Python's bz2 treats a damaged stream as the
    end of the file."""
    if suffix == ".xz":
        return _XzStream(packed)
    import pyarrow as pa

    return pa.CompressedInputStream(packed, {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd"}[suffix])


class _XzStream:
    """The decompressed bytes of a file with one xz stream.

    ``lzma.LZMAFile`` is not used: it reads several streams, and treats one with a damaged beginning as the end of the
    file.
    """

    def __init__(self, packed: Any) -> None:
        self._packed = packed
        self._stream = lzma.LZMADecompressor()

    def seekable(self) -> bool:
        return False

    def read(self, size: int) -> bytes:
        """Return between 1 and ``size`` bytes; at the end, return no bytes.

        Raises:
            lzma.LZMAError: the stream is damaged, incomplete, or followed by other data.
        """
        while not self._stream.eof:
            block = self._packed.read(BLOCK_BYTES) if self._stream.needs_input else b""
            if self._stream.needs_input and not block:
                raise lzma.LZMAError("the xz file is cut off; copy or compress it again")
            if unpacked := self._stream.decompress(block, size):
                return unpacked
        rest = self._stream.unused_data or self._packed.read(BLOCK_BYTES)
        if rest.strip(b"\0"):  # zeros are padding (xz's file format, 2.2)
            raise lzma.LZMAError("the file has more than one xz stream; compress it again as one")
        return b""


class _Foreign(io.RawIOBase):
    """An fsspec file whose errors are all raised as OSError.

    ``io.BufferedReader`` needs a raw file, hence the base class.
    """

    def __init__(self, file: Any) -> None:
        self._file = file

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return bool(self._file.seekable())

    def readinto(self, buffer: Any) -> int:
        try:
            chunk = self._file.read(len(buffer))
        except Exception as error:  # errors of zlib, zstd, botocore, aiohttp …
            raise _one_line(error) from error
        size = getattr(self._file, "size", None)
        if not chunk and isinstance(size, int) and self.tell() < size:
            # A server may end the response early.
            raise OSError(f"the file ended at byte {self.tell():,} of {size:,}")
        buffer[: len(chunk)] = chunk
        return len(chunk)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        try:
            return int(self._file.seek(offset, whence))
        except Exception as error:
            raise _one_line(error) from error

    def tell(self) -> int:
        return int(self._file.tell())


def _begin_text(path: str, file: io.BufferedReader[Any]) -> None:
    start = file.peek(10)[:10]
    for magic, problem in NOT_TEXT.items():
        if start.startswith(magic):
            raise InputError(f"{path}: {problem}")
    if b"\0" in start:  # zero bytes are valid UTF-8, so they would get into prompts
        raise InputError(f"{path}: has zero bytes, as UTF-16 text does; save the file as UTF-8")
    if start.startswith(UTF8_BOM):
        file.read(len(UTF8_BOM))


def is_folder(path: str) -> InputError:
    first = next(
        (file.suffix for file in sorted(Path(path).glob("*.*")) if file.is_file()), ".jsonl"
    )
    return InputError(
        f"{path}: is a folder; name its files, as in {path.rstrip('/')}/*{first}, or set input.format ="
        ' "files" (a row for each file)'
    )


def is_empty(path: str) -> InputError:
    return InputError(
        f"{path}: the file is empty; write at least one row into it, or remove the file"
    )


def _one_line(error: Exception) -> OSError:
    return OSError(" ".join(f"{type(error).__name__}: {error}".split()))


def is_missing(path: str) -> InputError:
    return InputError(f"{path}: no such file; check input.path")


def remote_error(path: str, error: Exception) -> InputError:
    """Return the error for a remote file that can't be opened, for example because it or its bucket does not exist, a
    package is missing, or access is denied."""
    # For http, fsspec reports each failed request as a missing file; only the cause tells what happened.
    if isinstance(error, FileNotFoundError) and (is_remote(path) or error.__cause__ is None):
        return is_missing(path)
    return InputError(f"{path}: can't be opened: {failure(error, path)}")
