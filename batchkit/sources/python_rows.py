"""Rows given from Python: prompts, chat messages or dicts, in a list, a table or an iterator."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import Any, NamedTuple

from batchkit.errors import JobError, RequestError
from batchkit.sources.depth import TOO_DEEP, TooDeepError, copied, is_too_deep
from batchkit.sources.ids import fallback_id, row_of
from batchkit.sources.reader import shown
from batchkit.types import Row

PLACE = "(rows from Python)"
CHUNK_ROWS = 1024  # rows of a table that are converted to dicts at a time
_NO_ROWS = bytes | bytearray | memoryview | io.IOBase


class PythonRows(NamedTuple):
    """``read`` yields the rows from the first one; it works only once if ``size`` is None.

    The dicts and lists are copies: what the caller later does to the originals does not matter.
    ``labels``: the index of a DataFrame or Series of pandas.
    """

    read: Callable[[], Iterator[Row]]
    size: Callable[[], int] | None
    labels: Any = None


class _Values(NamedTuple):
    read: Callable[[], Iterator[Any]]
    size: Callable[[], int] | None
    labels: Any = None


def python_rows(rows: Any, key: str | None) -> PythonRows:
    """``rows`` with their ids under ``key``; a single str or dict is one row.

    Tables are DataFrames of pandas and polars, datasets of ``datasets``, pyarrow's tables, and all
    that gives an Arrow stream; they are recognised by their methods, since none of these packages
    need be installed. A value that is not a row fails alone.

    Raises:
        JobError: no value of ``rows`` can be a row; for an iterator, its first value decides.
    """
    if isinstance(rows, Mapping) and any(hasattr(split, "column_names") for split in rows.values()):
        raise JobError(
            f"{PLACE}: found {type(rows).__name__} of {', '.join(map(str, rows))}; give one"
        )
    if isinstance(rows, Mapping) and _are_columns(rows):
        raise JobError(
            f"{PLACE}: found {type(rows).__name__} of columns, all of one length; give"
            " pandas.DataFrame(rows), or [rows] if it is one row"
        )
    values = _values([rows] if isinstance(rows, str | Mapping) else rows)
    looked_at: Iterable[Any] = values.read()
    if values.size is None:
        left = iter(looked_at)
        looked_at = begun = list(islice(left, 1))
        values = values._replace(read=lambda: chain(begun, left))
    kinds: list[str] = []
    for value in looked_at:
        if isinstance(value, RequestError) or isinstance(_fields(0, value), dict):
            break
        kinds = kinds or [_kind(value)]
    else:
        if kinds:
            raise _refused(f"{type(rows).__name__} of {kinds[0]}")
    return PythonRows(
        lambda: (_row(index, value, key) for index, value in enumerate(values.read())),
        values.size,
        values.labels,
    )


def _values(rows: Any) -> _Values:
    if isinstance(rows, _NO_ROWS):
        raise _refused(type(rows).__name__)
    if (table := _of_table(rows)) is not None:
        return table
    if getattr(rows, "ndim", 1) == 0:  # numpy's scalar array has __iter__ but can't be iterated
        raise _refused(type(rows).__name__)
    if hasattr(rows, "to_pylist"):  # a column of pyarrow
        return _Values(lambda: _of_column(rows), lambda: len(rows))
    labels = rows.index if hasattr(rows, "iloc") else None
    if _is_column(rows):
        rows = rows.tolist() if hasattr(rows, "tolist") else rows.to_list()
    if isinstance(rows, Sequence):
        return _Values(lambda: iter(rows), rows.__len__, labels)
    if hasattr(rows, "__arrow_c_stream__"):  # of duckdb, for example
        return _of_stream(rows)
    if all(hasattr(type(rows), name) for name in ("__len__", "__getitem__")):  # torch's Dataset
        return _Values(lambda: _each(rows, (rows[n] for n in range(len(rows)))), lambda: len(rows))
    if hasattr(rows, "column_names") and hasattr(rows, "with_format"):  # a stream of Hugging Face
        rows = rows.with_format(None)
    if isinstance(rows, Iterable):
        return _Values(lambda: iter(rows), None)
    raise _refused(type(rows).__name__)


def _of_table(rows: Any) -> _Values | None:
    labels = None
    if hasattr(rows, "iloc") and hasattr(rows, "columns"):  # pandas
        rows = rows.copy(deep=False)  # columns that the caller adds later are not in it
        names, read, labels = rows.columns, lambda: _of_pandas(rows), rows.index
    elif hasattr(rows, "iter_rows") and hasattr(rows, "height"):  # polars
        names, read = rows.columns, lambda: rows.iter_rows(named=True)
    elif hasattr(rows, "to_pylist") and hasattr(rows, "schema"):  # pyarrow
        names, read = rows.schema.names, lambda: _of_pyarrow(rows)
    elif hasattr(rows, "column_names") and hasattr(rows, "__len__"):  # Hugging Face
        is_computed = getattr(rows, "format", {}).get("type") == "custom"  # by with_transform
        plain = rows if is_computed else rows.with_format(None)  # not of torch or numpy
        names, read = rows.column_names, lambda: _each(plain, iter(plain))
    else:
        return None
    _check_names(names)
    return _Values(read, lambda: len(rows), labels)


def _of_stream(rows: Any) -> _Values:
    """A stream of batches is read as it comes, and once; what can give several streams, whole."""
    import pyarrow as pa

    try:
        stream = pa.RecordBatchReader.from_stream(rows)
        _check_names(stream.schema.names)
        if isinstance(rows, Iterator):
            return _Values(lambda: chain.from_iterable(map(_of_pyarrow, stream)), None)
        table = stream.read_all()
    except pa.ArrowException as error:
        raise JobError(f"{PLACE}: {type(rows).__name__}: {error}") from error
    return _Values(lambda: _of_pyarrow(table), lambda: len(table))


def _check_names(names: Iterable[Any]) -> None:
    for name, n_columns in Counter(names).items():
        if not isinstance(name, str):
            raise JobError(f"{PLACE}: column {shown(name)} has no text for a name; rename it")
        if n_columns > 1:
            raise JobError(f"{PLACE}: two columns are named {shown(name)}; rename one")


def _of_pandas(frame: Any) -> Iterator[Any]:
    """NaN, NaT and NA all become None, and the arrays that pandas makes of a Parquet file's lists lists."""
    for start in range(0, len(frame), CHUNK_ROWS):
        chunk = frame.iloc[start : start + CHUNK_ROWS]
        for row in chunk.astype(object).where(chunk.notna(), None).to_dict("records"):
            yield {name: _with_lists(value) for name, value in row.items()}


def _with_lists(value: Any) -> Any:
    kind = type(value)
    if kind is str or is_too_deep(value):
        return value
    if kind.__name__ == "ndarray" and value.ndim == 1 and value.dtype.kind not in "mM":
        return [*map(_with_lists, value.tolist())]  # but of times: their numbers
    if kind is dict:
        return {key: _with_lists(part) for key, part in value.items()}
    return [*map(_with_lists, value)] if kind is list else value


def _of_pyarrow(table: Any) -> Iterator[Any]:
    from batchkit.sources.parquet import NOT_PYTHON, row_by_column

    for start in range(0, len(table), CHUNK_ROWS):
        chunk = table.slice(start, CHUNK_ROWS)
        try:
            yield from chunk.to_pylist()
        except NOT_PYTHON:
            for n in range(len(chunk)):
                yield row_by_column(chunk.slice(n, 1), f"{PLACE} row {start + n}")


def _each(rows: Any, values: Iterator[Any]) -> Iterator[Any]:
    """``values``, which are those of ``rows``; one that can't be made, as of a broken image, fails alone."""
    for n in range(n_rows := len(rows)):
        try:
            value = next(values)
        except StopIteration:
            return
        except Exception as error:  # the caller's own code, or a decoder's, runs here
            value = RequestError(f"{PLACE} row {n}: {type(error).__name__}: {error}")
            values = (rows[later] for later in range(n + 1, n_rows))
        yield value


def _of_column(column: Any) -> Iterator[Any]:
    from batchkit.sources.parquet import NOT_PYTHON

    for n, value in enumerate(column):
        try:
            yield value.as_py()
        except NOT_PYTHON as error:
            yield RequestError(f"{PLACE} row {n}: {error}")


def _row(index: int, value: Any, key: str | None) -> Row:
    fields = _fields(index, value)
    if not isinstance(fields, RequestError):
        try:
            fields = copied(fields)
        except TooDeepError:
            fields = RequestError(f"row {index} is {TOO_DEEP}")
    row = row_of(index, fields, key, PLACE)
    if key is not None and isinstance(fields, dict) and fields.get(key) is None:
        return Row(index, fallback_id(index), fields)  # prompts have no ids
    return row


def _fields(index: int, value: Any) -> dict[str, Any] | RequestError:
    if isinstance(value, str):
        return {"prompt": value}
    if isinstance(value, RequestError):
        return value
    if isinstance(value, dict | Mapping):  # dict first, because it is the faster check
        return value if type(value) is dict else dict(value)
    if _is_list(value) and all(isinstance(message, Mapping) for message in value):
        return {"messages": [*map(dict, value)]}
    return RequestError(f"row {index} is {_kind(value)}; give a prompt, chat messages, or a dict")


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, _NO_ROWS)


def _is_column(value: Any) -> bool:
    """Of pandas, numpy or polars."""
    has_list = hasattr(value, "tolist") or hasattr(value, "to_list")
    return hasattr(value, "dtype") and has_list and getattr(value, "ndim", 1) == 1


def _are_columns(rows: Mapping[Any, Any]) -> bool:
    """Whether it is a table by column, as ``dataset[:10]`` and ``frame.to_dict("list")`` are."""
    columns = rows.values()
    are_lists = all(_is_column(it) or (_is_list(it) and not isinstance(it, str)) for it in columns)
    return are_lists and "messages" not in rows and len({*map(len, columns)}) == 1


def _kind(value: Any) -> str:
    of = f" of {type(value[0]).__name__}" if _is_list(value) and len(value) else ""
    return type(value).__name__ + of


def _refused(found: str) -> JobError:
    return JobError(
        f"{PLACE}: found {found}; expected prompts, chat messages, dicts or a DataFrame. A file is"
        " named in input.path"
    )
