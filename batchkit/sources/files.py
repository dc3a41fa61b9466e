"""The files of the input: finding and opening them, and the errors of both."""

from __future__ import annotations

import bz2
import glob
import io
import lzma
import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path, PurePath
from typing import Any

from batchkit.config.regular_file import open_regular
from batchkit.config.suggest import did_you_mean
from batchkit.config.tables import InputTable
from batchkit.config.urls import failure
from batchkit.errors import InputError
from batchkit.sources.packed_streams import PackedStreams

BLOCK_BYTES = 2**20
COMPRESSIONS = (".gz", ".zst", ".bz2", ".xz")  # decompressed on the fly, by name, as fsspec does

# fsspec's own, each of which may keep its copies in a folder that outlives a start.
_CACHES = ("simplecache", "filecache", "blockcache", "cached")
_STREAMS = {".bz2": bz2.BZ2Decompressor, ".xz": lzma.LZMADecompressor}
UTF8_BOM = b"\xef\xbb\xbf"
NOT_TEXT = {  # first bytes of files that no text format can read; the longer ones first
    b"\xff\xfe\x00\x00": "is UTF-32 text; save it as UTF-8",
    b"\x00\x00\xfe\xff": "is UTF-32 text; save it as UTF-8",
    b"\xff\xfe": "is UTF-16 text; save it as UTF-8",
    b"\xfe\xff": "is UTF-16 text; save it as UTF-8",
    b"PAR1": 'is a Parquet file; set input.format = "parquet"',
    b"PK\x03\x04": "is a zip archive or an Excel workbook; unpack it, or name it .xlsx",
    b"\x1f\x8b": "is gzip-compressed; give its name the suffix .gz",
    b"\x28\xb5\x2f\xfd": "is zstd-compressed; give its name the suffix .zst",
    b"\xfd7zXZ\0": "is xz-compressed; give its name the suffix .xz",
    **{
        b"BZh%d1AY&SY" % level: "is bzip2-compressed; give its name the suffix .bz2"
        for level in range(1, 10)
    },
}


def input_files(table: InputTable) -> list[str]:
    """The paths and URLs that ``input.path`` names, a glob's matches sorted.

    Raises:
        InputError: ``input.path`` is not set, or no file matches it.
    """
    if table.path is None:
        raise InputError("input.path is not set; give the file that holds the rows")
    path = table.path.removeprefix("file://").removeprefix("local://")
    files = _remote_files(path) if "://" in path else _local_files(path)
    if not files:
        raise InputError(f"{path}: no file matches; check input.path{_neighbour(path)}")
    return files


@contextmanager
def open_input(path: str, *, text: bool = True) -> Iterator[io.BufferedReader[Any]]:
    """``path`` for reading bytes, decompressed; as text, after a UTF-8 byte order mark.

    Raises:
        InputError: missing, not a file (a pipe, a device), unreadable now or while it is being
            read, empty, or, as text, in an encoding or format that is not UTF-8.
    """
    try:
        with _open(path, text=text) as file:
            if text:
                _begin_text(path, file)
            if not file.peek(1):
                raise is_empty(path)
            yield file
    except FileNotFoundError as error:
        raise InputError(f"{path}: no such file") from error
    except IsADirectoryError as error:
        raise is_folder(path) from error
    except OSError as error:
        raise InputError(f"{path}: can't be read: {error.strerror or error}") from error


def _local_files(path: str) -> list[str]:
    if Path(path).exists():
        return [path]
    _check_listed(f"{path}/" if path.endswith("**") else path)
    files, has_suffix = [], bool(PurePath(path).suffix)
    for match in sorted({*glob.glob(path, recursive=True)}):  # **/a/** finds some files twice
        if not Path(match).is_dir():
            files.append(match)
        elif has_suffix:  # as Spark writes: its rows would be missing
            raise is_folder(match)
    _check_different(files)
    return files


def _check_listed(pattern: str) -> None:
    """Raises InputError for a folder that ``glob`` would pass over: it can't be listed or searched, or
    is a link to a disk that is not there."""
    folder, name = os.path.split(pattern)
    if not glob.has_magic(folder):
        return
    _check_listed(folder)
    for match in glob.glob(folder, recursive=True):
        try:
            os.scandir(match).close()
            with suppress(FileNotFoundError):
                os.lstat(f"{match}/{name or '.'}")
        except NotADirectoryError:
            continue
        except OSError as error:
            raise InputError(
                f"{match}: can't be listed: {error.strerror}; it may hold files of {pattern}"
            ) from error


def _check_different(files: Iterable[str]) -> None:
    """Raises InputError if links lead to one file twice, as a folder ``latest`` often does."""
    known: dict[str, str] = {}
    for path in files:
        other = known.setdefault(os.path.realpath(path), path)
        if other != path:
            raise InputError(
                f"{other} and {path}: are one file, and its rows would be answered twice; have"
                " input.path find it under one name, or remove the link"
            )


def _remote_files(path: str) -> list[str]:
    if "*" not in path and "[" not in path:  # "?" begins a URL's query
        return [path]
    from fsspec.core import url_to_fs

    try:
        filesystem, pattern = url_to_fs(path)
        url = behind_caches(filesystem).unstrip_protocol
        found = _matches(filesystem, pattern)
        return [path.replace(name_of(path), url(match)) for match in found]
    except Exception as error:  # each filesystem raises its vendor's own types
        raise remote_error(path, error) from error


def _matches(filesystem: Any, pattern: str) -> list[str]:
    """As ``filesystem.glob``, but raises why a folder can't be listed: to glob it would be empty."""
    store = behind_caches(filesystem)
    name = "_ls" if store.async_impl else "ls"
    listing, failed = getattr(store, name), list[Exception]()

    @contextmanager
    def noting() -> Iterator[None]:
        try:
            yield
        except Exception as error:
            failed.append(error)
            raise

    def listed(*args: Any, **kwargs: Any) -> Any:
        with noting():
            return listing(*args, **kwargs)

    async def listed_later(*args: Any, **kwargs: Any) -> Any:
        with noting():
            return await listing(*args, **kwargs)

    setattr(store, name, listed_later if store.async_impl else listed)
    try:
        found = sorted(filesystem.glob(pattern))
    finally:
        delattr(store, name)
    if failed and (found or not isinstance(failed[0], FileNotFoundError)):
        raise failed[0]
    return found


def behind_caches(filesystem: Any) -> Any:
    """The filesystem whose files ``simplecache::`` and the like keep copies of."""
    from fsspec.implementations.cached import CachingFileSystem

    while isinstance(filesystem, CachingFileSystem):
        filesystem = filesystem.fs
    return filesystem


def _new_copies(path: str) -> dict[str, dict[str, Any]]:
    """For the caches that ``path`` names: a copy that an earlier start left may be an old one."""
    fresh = {"cache_storage": "TMP", "skip_instance_cache": True}
    return {name: fresh for name in _CACHES if name in path.split("::")}


def name_of(path: str) -> str:
    """``path``; of a URL, without its query; of a chained one, the part that names the file:
    ``zip://a.jsonl`` in ``simplecache::zip://a.jsonl::s3://b/c.zip``."""
    # Not urlsplit: to it "memory://a.jsonl" is a host, and "#" in a key ends the path.
    if "://" not in path:
        return path
    parts = path.partition("?")[0].split("::")
    return next((part for part in parts if "://" in part), parts[0])


def _neighbour(path: str) -> str:
    folder = Path(path).parent
    if "://" in path or glob.has_magic(path) or not folder.is_dir():
        return ""
    return did_you_mean(Path(path).name, (file.name for file in folder.iterdir()))


@contextmanager
def _open(path: str, *, text: bool) -> Iterator[io.BufferedReader[Any]]:
    if "://" not in path and not path.endswith(COMPRESSIONS):
        with io.BufferedReader(open_regular(path), BLOCK_BYTES) as file:
            yield file
        return
    with ExitStack() as stack:
        try:
            foreign = stack.enter_context(_through_fsspec(path, stack, text=text))
        except (OSError, InputError):  # open_input handles these
            raise
        except Exception as error:  # each filesystem raises its vendor's own types
            raise remote_error(path, error) from error
        yield stack.enter_context(io.BufferedReader(_Foreign(foreign), BLOCK_BYTES))


def _through_fsspec(path: str, stack: ExitStack, *, text: bool) -> Any:
    """``path``, decompressed by its name; a local one is opened here: fsspec waits for a pipe.

    Only what ``COMPRESSIONS`` names: of a zip archive, fsspec reads the first member alone.
    """
    import fsspec
    import pyarrow as pa
    from fsspec.utils import infer_compression

    opened: Any = (
        fsspec.open(path, "rb", **_new_copies(path)) if "://" in path else open_regular(path)
    )
    name = name_of(path)
    suffix = PurePath(name).suffix.lower()
    packed = stack.enter_context(opened)
    if (
        suffix == ".zst"
    ):  # not through zstandard, as fsspec does: it accepts a truncated file as whole
        return pa.CompressedInputStream(packed, "zstd")
    if text and suffix in _STREAMS:  # Parquet seeks in its file
        return nullcontext(PackedStreams(packed, _STREAMS[suffix]))
    if suffix in COMPRESSIONS:
        return fsspec.compression.compr[infer_compression(name)](packed, mode="rb")
    return nullcontext(packed)


class _Foreign(io.RawIOBase):
    """An fsspec file whose errors, of any type, are raised as OSError.

    It inherits because ``io.BufferedReader`` needs a raw file beneath it.
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
        except Exception as error:  # zlib's, zstd's, botocore's, aiohttp's …
            raise OSError(f"{type(error).__name__}: {error}") from error
        buffer[: len(chunk)] = chunk
        return len(chunk)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        return int(self._file.seek(offset, whence))

    def tell(self) -> int:
        return int(self._file.tell())


def _begin_text(path: str, file: io.BufferedReader[Any]) -> None:
    start = file.peek(10)[:10]
    for magic, problem in NOT_TEXT.items():
        if start.startswith(magic):
            raise InputError(f"{path}: {problem}")
    if start.startswith(UTF8_BOM):
        file.read(len(UTF8_BOM))


def is_folder(path: str) -> InputError:
    return InputError(f"{path}: is a folder; name its files, as in {path}/*.jsonl")


def is_empty(path: str) -> InputError:
    return InputError(
        f"{path}: is empty; it must hold at least one row. Write its rows, or remove it"
    )


def remote_error(path: str, error: Exception) -> InputError:
    """The error for a filesystem that can't be set up: no package, no access, no such protocol."""
    return InputError(f"{path}: can't be opened: {failure(error, path)}")
