"""Search for the files of the input: a single file, a glob pattern or a folder, local or at a URL."""

from __future__ import annotations

import glob
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path, PurePath
from typing import Any, NamedTuple

from batchkit.config.regular_file import exists, is_dir
from batchkit.config.suggest import did_you_mean
from batchkit.config.tables import InputTable
from batchkit.errors import InputError
from batchkit.sources.files import is_folder, name_of, remote_error
from batchkit.sources.formats import ROWS_ARE_FILES, format_with, load_format, suffix_of
from batchkit.sources.hub_dataset import is_whole_dataset, one_split

_NAMES = {"files": "image", "clips": "clip", "pdf": "PDF"}
_List = Callable[[str], Iterable[dict[str, Any]]]
_DIGITS = re.compile(r"([0-9]+)")
_CACHE = re.compile(r"\b(?:(?:simple|file|block)cache|cached)::")  # fsspec's caching protocols


class Listing(NamedTuple):
    """The input's files in order. ``left_out``: a text about other files that were found and not used; "" if there are
    none."""

    files: list[str]
    left_out: str = ""


class _Matches(NamedTuple):
    files: list[str]
    folders: list[str]


def listing(table: InputTable) -> Listing:
    """Return the paths and URLs that ``input.path`` names.

    Matches of a glob pattern are sorted. If each file, or each page, is a row, the order is natural (``page-2`` before
    ``page-10``). With ``input.format = "auto"``, a folder or pattern that contains images, clips or PDFs gives only
    these.

    Raises:
        InputError: ``input.path`` is not set, no file matches it, or it is ambiguous.
    """
    if table.path is None:
        raise InputError("input.path is not set; give the file with the rows")
    path = table.path.removeprefix("file://").removeprefix("local://")
    if table.is_run and (find := load_format("run").find) is not None:
        return Listing(*find(table))
    if cache := _CACHE.search(path):
        raise InputError(
            f"{path}: {cache[0]} may keep an old copy of a file; remove {cache[0]} from input.path"
        )
    if is_whole_dataset(path) and table.format in ("auto", "parquet"):
        return Listing(one_split(path, _remote(f"{path.rstrip('/')}/**/*.parquet", False).files))
    is_in_folder = _is_folder(path, table)
    found = _remote(path, is_in_folder) if "://" in path else _local(path, is_in_folder)
    kind = _kind(path, table, found.files, is_in_folder)
    if kind is not None:
        return _chosen(path, table, kind, found, is_in_folder)
    if is_in_folder:
        raise is_folder(path)
    # Spark writes tables as folders; their rows would be missing.
    if found.folders and PurePath(path).suffix:
        raise is_folder(found.folders[0])
    if not found.files:
        raise InputError(f"{path}: no file matches; check input.path{_neighbour(path)}")
    return Listing(found.files)


def input_files(table: InputTable) -> list[str]:
    """Return the files of ``listing``."""
    return listing(table).files


def _is_folder(path: str, table: InputTable) -> bool:
    if "://" not in path:
        return Path(path).is_dir()
    by_file = table.format in ROWS_ARE_FILES and not suffix_of(path)
    return not _is_remote_glob(path) and (path.endswith("/") or by_file)


def _kind(path: str, table: InputTable, files: Sequence[str], is_in_folder: bool) -> str | None:
    """Return the format of the files if each file, or each page, is a row; None if a file contains many rows."""
    if table.format != "auto":
        return table.format if table.format in ROWS_ARE_FILES else None
    kinds = Counter(format_with(suffix_of(file)) for file in files)
    tables = kinds.keys() - {*ROWS_ARE_FILES, ""}
    match several := [kind for kind in ROWS_ARE_FILES if kind in kinds]:
        case []:
            return None
        case [kind] if is_in_folder or not tables:
            return kind
        case [kind]:
            other = next(file for file in files if format_with(suffix_of(file)) in tables)
            raise InputError(
                f"{path}: matches {_NAMES[kind]}s and also {other}, which contains rows; make the pattern match"
                " only one kind"
            )
    raise InputError(
        f"{path}: has {' and '.join(f'{_NAMES[kind]}s' for kind in several)}; choose one kind by its"
        ' suffix, or set input.format = "pdf" (one row per page) or "files" (one row per file)'
    )


def _chosen(
    path: str, table: InputTable, kind: str, found: _Matches, is_in_folder: bool
) -> Listing:
    """Return the found files whose suffix is one of the format ``kind``.

    If ``input.format`` names this format, return all found files, whatever their suffix. Only ``input.format = "pdf"``
    with a folder still selects files by their suffix.
    """
    are_named = kind == table.format and not (kind == "pdf" and is_in_folder)
    files = [file for file in found.files if are_named or format_with(suffix_of(file)) == kind]
    files.sort(key=_natural)
    chosen = {*files}
    others = Counter(
        suffix_of(file) or "without a suffix" for file in found.files if file not in chosen
    )
    if found.folders and "**" not in path:  # a pattern with ** has searched the folders
        others["folder" if len(found.folders) == 1 else "folders"] = len(found.folders)
    rest = ", ".join(f"{n:,} {what}" for what, n in others.most_common())
    if not files:
        what = f"; it has {rest}" if rest else _neighbour(path)
        raise InputError(f"{path}: no file matches; check input.path and input.format{what}")
    wanted = ("file" if are_named else _NAMES[kind]) + "s" * (len(files) != 1)
    return Listing(files, rest and f"{path}: {len(files):,} {wanted}; left out: {rest}")


def _natural(path: str) -> tuple[list[str | int], str]:
    """Return a sort key that puts ``page-2`` before ``page-10``."""
    pieces = _DIGITS.split(str(PurePath(path).with_suffix("")))
    return [int(piece) if n % 2 else piece for n, piece in enumerate(pieces)], path


def _local(path: str, is_in_folder: bool) -> _Matches:
    if not is_in_folder and Path(path).exists():
        return _Matches([path], [])
    pattern = f"{glob.escape(path.rstrip('/'))}/*" if is_in_folder else path
    found = _matches(_listed, pattern) if is_dir(_fixed(pattern) or ".") else {}
    for name in found:
        if (shown := os.fsencode(name).decode(errors="backslashreplace")) != name:
            raise InputError(
                f"{shown}: its name is not UTF-8, so it can't be stored in a record; rename the file"
            )
    matches = _Matches(
        sorted(name for name in found if not is_dir(name)), sorted(filter(is_dir, found))
    )
    if not is_in_folder:
        _check_different(matches.files)
    return matches


def _listed(folder: str) -> list[dict[str, Any]]:
    """Return the entries of a local folder, as fsspec's ``ls`` does. A broken link counts as a folder, so listing it
    fails."""
    try:
        os.lstat(f"{folder or '.'}/.")  # fails for a folder that can be listed but not searched
        paths = [*map(str, Path(folder).iterdir())]
    except OSError as error:
        raise InputError(
            f"{folder.rstrip('/')}: can't be listed: {error.strerror}; make it readable, or change input.path"
        ) from error
    return [
        {"name": it, "type": "file" if exists(it) and not is_dir(it) else "directory"}
        for it in paths
    ]


def _check_different(files: Iterable[str]) -> None:
    """Raise InputError if a file is found twice through links; a folder ``latest`` is often such a link."""
    known: dict[str, str] = {}
    for path in files:
        other = known.setdefault(os.path.realpath(path), path)
        if other != path:
            raise InputError(
                f"{other} and {path}: are the same file, so its rows would be answered twice; change"
                " input.path to match one name, or remove the link"
            )


def _is_remote_glob(path: str) -> bool:
    name = name_of(path)  # "?" begins a URL's query, which may have any character
    return "*" in name or "[" in name


def _remote(path: str, is_in_folder: bool) -> _Matches:
    if is_in_folder:
        path = f"{path.rstrip('/')}/*"
    if not _is_remote_glob(path):
        return _Matches([path], [])
    from fsspec.core import url_to_fs

    try:
        filesystem, pattern = url_to_fs(path)
        ls = partial(filesystem.ls, detail=True)
        found = _matches(ls, pattern.replace("?", "[?]"))
    except Exception as error:  # each filesystem raises its vendor's own types
        raise remote_error(path, error) from error
    matches = _Matches([], [])
    for match in sorted(found):
        kind = matches.folders if found[match].get("type") == "directory" else matches.files
        kind.append(path.replace(name_of(path), _spelled(match, pattern, name_of(path))))
    return matches


def _spelled(match: str, pattern: str, glob_url: str) -> str:
    """Return the URL of ``match`` with the scheme and host of ``glob_url``, because a store may list names without a
    host, or with another scheme."""
    ours, theirs = _fixed(glob_url), _fixed(pattern)
    return ours + match.removeprefix(theirs) if match.startswith(theirs) else match


def _fixed(pattern: str) -> str:
    """Return the folder that contains all matches: ``pattern`` up to the last slash before its first special
    character."""
    before = re.split(r"[*?\[]", pattern, maxsplit=1)[0]
    return before[: before.rfind("/") + 1]


def _matches(ls: _List, pattern: str) -> dict[str, dict[str, Any]]:
    """Return the entries that match a glob pattern, by name; hidden names are skipped.

    Unlike ``glob``, this raises an error for a folder that can't be listed, because its rows would be missing.

    ``ls``: lists a folder.
    """
    root = _fixed(pattern)
    try:
        listed = ls(root)
    except FileNotFoundError:
        return {}
    parts = pattern.removeprefix(root).split("/")
    return {info["name"]: info for info in _matching(ls, listed, parts)}


def _matching(
    ls: _List, listed: Iterable[dict[str, Any]], parts: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """Yield the entries in ``listed``, and in folders among them, that match the remaining ``parts`` of a pattern."""
    head, *rest = parts
    listed = [*listed]
    if head == "**" and rest:
        yield from _matching(ls, listed, rest)
    for info in listed:
        name = info["name"].rstrip("/").rpartition("/")[2]
        is_folder = info["type"] == "directory"
        if name[:1] == "." != head[:1] or not (head == "**" or fnmatchcase(name, head)):
            continue
        if not rest:
            yield info
        below = parts if head == "**" else rest
        if is_folder and below:
            yield from _matching(ls, ls(info["name"]), below)


def _neighbour(path: str) -> str:
    folder = Path(path).parent
    if "://" in path or glob.has_magic(path) or not folder.is_dir():
        return ""
    return did_you_mean(Path(path).name, (file.name for file in folder.iterdir()))
