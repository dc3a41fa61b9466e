"""What every format has in common: its signature, its checks, and the texts of its errors."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from msgspec.structs import replace

from batchkit.config.suggest import nearest
from batchkit.config.tables import InputTable
from batchkit.config.terminal import shortened
from batchkit.errors import InputError, RequestError, RowError
from batchkit.types import Row

MAX_DEPTH = 200  # the code that later walks over a row recurses once per level
TOO_DEEP = f"nested more than {MAX_DEPTH} levels deep; flatten it"


class Broken(NamedTuple):
    """A row that can't be read; ``fields`` are what is known of it: its file's name."""

    fields: dict[str, Any]
    error: RowError


Found = dict[str, Any] | Broken | RequestError | None
"""A row as its format found it: its fields, why it can't be read, or None if it was skipped."""

Skip = Callable[[int], bool]


class Reader(Protocol):
    """Reads the files of one format."""

    def __call__(self, path: str, table: InputTable, skip: Skip, index: int) -> Iterator[Found]:
        """One value for every row of ``path``, in order, none held longer than needed.

        ``index`` is the first row's number in the whole input; ``skip`` is called with that number.

        Raises:
            InputError: from here on, the rows can't be separated.
        """


@dataclass(frozen=True)
class Format:
    """A format of files. ``id``: the field that names a row, unless the job says. ``is_table``: every
    row of a file has the same fields. ``find``: returns the files of an input that is found otherwise than by the names
    of its files, and what was left out, in words."""

    read: Reader
    suffixes: Sequence[str] = ()
    id: str | None = None
    is_table: bool = False
    find: Callable[[InputTable], tuple[list[str], str]] | None = None


def check_columns(place: str, names: Sequence[Any]) -> None:
    """Raises InputError if columns of a table have no name, or two of them the same."""
    for number, (name, n_columns) in enumerate(Counter(names).items(), start=1):
        if not isinstance(name, str) or not name.strip():
            raise InputError(
                f"{place}: column {number} of {len(names)} has no name, but {shown(name)}; name it"
                " (pandas: to_csv(index=False))"
            )
        if n_columns > 1:
            raise InputError(f"{place}: two columns are named {shown(name)}; rename one")


def is_too_deep(value: Any) -> bool:
    """Whether the lists and objects of a JSON value are nested more than MAX_DEPTH deep."""
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        level = [part for part in level if isinstance(part, dict | list)]
        if not level:
            return False
        level = [
            one for part in level for one in (part.values() if isinstance(part, dict) else part)
        ]
    return True


def fault(path: str, lines: int | str, problem: str) -> RequestError:
    """The error of one row that can't be read; ``lines`` as an editor counts them, from 1."""
    word = "line" if isinstance(lines, int) else "lines"
    return RequestError(f"{path} {word} {lines}: {problem}")


def shown(value: object, width: int = 60) -> str:
    """``value`` as its Python literal, cut to ``width`` characters."""
    if isinstance(value, (str, bytes)):
        value = value[: width + 1]
    try:
        text = repr(value)
    except Exception:  # a number of more than 4,300 digits, or the object's own code
        text = f"({type(value).__name__})"
    return shortened(text, width)


def one_of(name: str, known: Iterable[str]) -> str:
    """What ``name`` should have been: the nearest of ``known``, or all of them."""
    names = [str(key) for key in known]
    if (near := nearest(name, names)) is not None:
        return f"did you mean {near!r}?"
    return f"known: {shown(', '.join(names), 200)[1:-1]}" if names else "it has no fields"


_FALLBACK = re.compile(r"no-id:\d+(/.*)?", re.ASCII | re.DOTALL)  # with the values of input.cross


def row_of(
    index: int,
    found: Mapping[str, Any] | Broken | RequestError,
    key: str | None,
    path: str,
    *,
    others_have_ids: bool = False,
) -> Row:
    """The row that a reader ``found``; its id is in the field ``key``, or its index if None.

    A row that can't be read, or lacks its id, has ``error`` set and a fallback id that no other row
    has. A row without ``key`` gets a fallback id as well if rows of other files have ids, since one
    of these may be equal to its index.
    """
    if isinstance(found, RequestError):
        found = Broken({}, found)
    if isinstance(found, Broken):
        known = row_of(index, found.fields, key, path, others_have_ids=others_have_ids)
        return replace(known, error=found.error)
    if key is None:
        return Row(index, fallback_id(index) if others_have_ids else str(index), found)
    try:
        if (value := found.get(key)) is not None:
            return Row(index, str(value), found)
        problem = "is null" if key in found else f"is missing; {one_of(key, found)}"
    except Exception as failed:  # a number of more than 4,300 digits, or the object's own code
        problem = f"has no text: {failed}"
    error = RequestError(f"{path} row {index}: input.id is {shown(key)}, which {problem}")
    return Row(index, fallback_id(index), found, error)


def fallback_id(index: int) -> str:
    return f"no-id:{index}"


def is_fallback(row_id: str) -> bool:
    """Whether the row had no id of its own."""
    return row_id.startswith("no-id:") and _FALLBACK.fullmatch(row_id) is not None
