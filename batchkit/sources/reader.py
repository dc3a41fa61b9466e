"""The parts that all formats share: a reader's signature, checks, and texts of errors."""

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
    """A row that can't be read. ``fields``: its known fields, for example the name of its file."""

    fields: dict[str, Any]
    error: RowError


Found = dict[str, Any] | Broken | RequestError | None
"""A row as its format found it: its fields, why it can't be read, or None if it was skipped."""

Skip = Callable[[int], bool]


class Reader(Protocol):
    """A function that reads the files of one format."""

    def __call__(self, path: str, table: InputTable, skip: Skip, index: int) -> Iterator[Found]:
        """Yield one value for every row of ``path``, in order, and keep none of them longer than needed.

        - ``index``: the number of the file's first row in the whole input.
        - ``skip``: called with a row's number. If it returns True, None is yielded for this row.

        Raises:
            InputError: the rest of the file can't be divided into rows.
        """


@dataclass(frozen=True)
class Format:
    """A format of input files.

    - ``suffixes``: suffixes of file names by which ``input.format = "auto"`` finds the format.
    - ``id``: default field for the row's id.
    - ``is_table``: True if all rows of a file have the same fields.
    - ``find``: set if ``input.path`` does not name the files directly. It returns the files, and a text about unused
      files.
    """

    read: Reader
    suffixes: Sequence[str] = ()
    id: str | None = None
    is_table: bool = False
    find: Callable[[InputTable], tuple[list[str], str]] | None = None


def check_columns(place: str, names: Sequence[Any]) -> None:
    """Raise InputError if columns of a table have no name, or two have the same name."""
    for number, (name, n_columns) in enumerate(Counter(names).items(), start=1):
        if not isinstance(name, str) or not name.strip():
            raise InputError(
                f"{place}: column {number} of {len(names)} has no name: found {shown(name)}, expected a"
                " text; name the column (pandas: to_csv(index=False))"
            )
        if n_columns > 1:
            raise InputError(f"{place}: two columns are named {shown(name)}; rename one")


def is_too_deep(value: Any) -> bool:
    """Return whether a JSON value is nested more than MAX_DEPTH deep."""
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
    """Return the error with which a row that can't be read fails. ``lines``: its line numbers from 1, as in an
    editor."""
    word = "line" if isinstance(lines, int) else "lines"
    return RequestError(f"{path} {word} {lines}: {problem}")


def shown(value: object, width: int = 60) -> str:
    """Return ``value`` as its Python literal, cut to ``width`` characters."""
    if isinstance(value, (str, bytes)):
        value = value[: width + 1]
    try:
        text = repr(value)
    except Exception:  # a number of more than 4,300 digits, or the object's own code
        text = f"({type(value).__name__})"
    return shortened(text, width)


def one_of(name: str, known: Iterable[str]) -> str:
    """Return a suggestion for the unknown ``name``: the most similar of ``known``, or a list of all of them."""
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
    """Return the Row for a value that a reader ``found``. The row's id is the value of the field ``key``; if ``key`` is
    None, the row's index.

    A row that can't be read, or lacks its id, has ``error`` set and a fallback id that no other row has.

    ``others_have_ids``: True if rows of other files have ids. A row without ``key`` then also gets a fallback id, since
    an id may be equal to its index.
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
        problem = f"can't be converted to text: {failed}"
    error = RequestError(f"{path} row {index}: the field {shown(key)} (input.id) {problem}")
    return Row(index, fallback_id(index), found, error)


def fallback_id(index: int) -> str:
    return f"no-id:{index}"


def is_fallback(row_id: str) -> bool:
    """Return whether ``row_id`` was made by ``fallback_id``, for a row without an id."""
    return row_id.startswith("no-id:") and _FALLBACK.fullmatch(row_id) is not None
