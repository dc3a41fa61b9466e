"""What every format has in common: its signature, its checks, and the texts of its errors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from batchkit.config.suggest import nearest
from batchkit.config.tables import InputTable
from batchkit.errors import InputError, RequestError, RowError

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
    row of a file has the same fields."""

    read: Reader
    suffixes: Sequence[str] = ()
    id: str | None = None
    is_table: bool = False


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
    """Whether lists and mappings are nested more than MAX_DEPTH deep, or contain themselves."""
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        level = [part for part in level if isinstance(part, dict | list | tuple | Mapping)]
        if not level:
            return False
        level = list({id(inner): inner for part in level for inner in _inside(part)}.values())
    return True


def _inside(part: Any) -> Any:
    return part.values() if isinstance(part, Mapping) else part


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
