"""What every format has in common: its signature, and the texts of its errors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from batchkit.config.suggest import nearest
from batchkit.config.tables import InputTable
from batchkit.errors import RequestError, RowError


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
    """A format of files. ``count``: the rows of a file, if they can be counted without parsing them.
    ``id``: the field that names a row, unless the job says. ``is_table``: every row of a file has the
    same fields."""

    read: Reader
    suffixes: Sequence[str] = ()
    count: Callable[[str], int] | None = None
    id: str | None = None
    is_table: bool = False


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
    return text if len(text) <= width else text[: width - 1] + "…"


def one_of(name: str, known: Iterable[str]) -> str:
    """What ``name`` should have been: the nearest of ``known``, or all of them."""
    names = [str(key) for key in known]
    if (near := nearest(name, names)) is not None:
        return f"did you mean {near!r}?"
    return f"known: {shown(', '.join(names), 200)[1:-1]}" if names else "it has no fields"
