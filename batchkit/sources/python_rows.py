"""Rows given from Python: prompts, chat messages or dicts, in a list, a table or an iterator."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import Any, NamedTuple

from batchkit.config.regular_file import is_file
from batchkit.errors import JobError, RequestError
from batchkit.sources.reader import (
    MAX_DEPTH,
    TOO_DEEP,
    check_columns,
    fallback_id,
    row_of,
)
from batchkit.types import Row

PLACE = "(rows from Python)"
CHUNK_ROWS = 1024  # rows of a table that are converted to dicts at a time
_FLAT = {str, int, float, bool, type(None), bytes}  # most values
_NO_ROWS = bytes | bytearray | memoryview | io.IOBase


class Values(NamedTuple):
    """Rows given from Python.

    - ``read()``: yields the rows, beginning with the first. It can be called only once if ``size`` is None.
    - ``size()``: returns the number of rows.
    - ``labels``: the index of a pandas DataFrame or Series; None for other rows.
    - ``id``: the field that identifies the rows, or None.
    """

    read: Callable[[], Iterator[Any]]
    size: Callable[[], int] | None
    labels: Any = None
    id: str | None = None


def python_rows(rows: Any, key: str | None) -> Values:
    """Return ``rows`` as ``Row`` objects. A single str or dict is one row.

    The ids are the values of the field ``key``. If ``key`` is None, they are the values of the field ``id``, if the
    first valid row has one. Dicts and lists are copied, so the caller may change the originals. A value that is not a
    row becomes a row with an error.

    Tables are DataFrames of pandas, datasets of ``datasets``, and all objects that give an Arrow stream, such as those
    of polars and pyarrow. Tables are recognized by their methods, because these packages need not be installed.

    Raises:
        JobError: no value of ``rows`` can be a row; for an iterator, its first value decides.
    """
    if isinstance(rows, Mapping) and _are_columns(rows):
        raise JobError(
            f"{PLACE}: found {type(rows).__name__} of columns or of datasets; pass one of the datasets,"
            " pandas.DataFrame(rows) if they are columns, or [rows] if it is one row"
        )
    if isinstance(rows, str) and "." in rows and is_file(rows):
        raise JobError(
            f"{PLACE}: {rows!r} is the name of a file; to read the file, set input.path; to send the text itself, pass"
            f" [{rows!r}]"
        )
    if type(rows) is list and rows and all(map(_is_message, rows)):
        raise JobError(
            f"{PLACE}: found a list of chat messages. If it is one conversation, pass [rows]. If each item is a row with"
            " the fields role and content, pass pandas.DataFrame(rows)"
        )
    values = _values([rows] if isinstance(rows, str | Mapping) else rows)
    looked_at: Iterable[Any] = values.read()
    if values.size is None:
        left = iter(looked_at)
        looked_at = begun = list(islice(left, 1))
        values = values._replace(read=lambda: chain(begun, left))
    first_kind = ""
    for value in looked_at:
        fields = _fields(0, value)
        if isinstance(value, RequestError) or isinstance(fields, dict):
            if key is None and isinstance(fields, dict) and fields.get("id") is not None:
                key = "id"
            first_kind = ""
            break
        first_kind = first_kind or _kind(value)
    if first_kind:
        raise _refused(f"{type(rows).__name__} of {first_kind}")
    read = values.read
    return values._replace(
        read=lambda: (_row(index, value, key) for index, value in enumerate(read())), id=key
    )


def _values(rows: Any) -> Values:
    if isinstance(rows, _NO_ROWS):
        raise _refused(type(rows).__name__)
    if hasattr(rows, "iloc") and hasattr(rows, "columns"):  # pandas
        frame = rows.copy(deep=False)  # so that columns that the caller adds later are not read
        check_columns(PLACE, frame.columns)
        return Values(lambda: _of_pandas(frame), lambda: len(frame), frame.index)
    if _is_column(rows):
        column = _listed(rows)
        index = getattr(rows, "index", None)  # index is a method of a pyarrow.Array
        labels = None if callable(index) else index
        return Values(lambda: iter(column), lambda: len(column), labels)
    if isinstance(rows, Sequence):
        return Values(lambda: iter(rows), rows.__len__)
    if hasattr(rows, "__arrow_c_stream__") and not hasattr(rows, "with_format"):
        return _of_stream(rows)
    if hasattr(rows, "with_format") and getattr(rows, "format", {}).get("type") != "custom":
        rows = rows.with_format(None)  # a Hugging Face dataset may give values of torch or numpy
    if all(hasattr(type(rows), name) for name in ("__len__", "__getitem__")):  # torch's Dataset
        return Values(lambda: _each(rows), lambda: len(rows))
    if isinstance(rows, Iterable):
        return Values(lambda: iter(rows), None)
    raise _refused(type(rows).__name__)


def _of_stream(rows: Any) -> Values:
    """Return the rows of an Arrow stream. The rows can be read only once if the object gives a single stream."""
    import pyarrow as pa

    try:
        stream = pa.RecordBatchReader.from_stream(rows)
        check_columns(PLACE, stream.schema.names)
        if isinstance(rows, Iterator):
            return Values(lambda: _of_batches(stream), None)
        table = stream.read_all()
    except pa.ArrowException as error:
        raise JobError(f"{PLACE}: {type(rows).__name__}: {error}") from error
    return Values(lambda: _of_batches(table.to_batches()), lambda: len(table))


def _of_batches(batches: Iterable[Any]) -> Iterator[Any]:
    from batchkit.sources.parquet import rows_of

    position = 0
    for batch in batches:
        yield from rows_of(batch, PLACE, position)
        position += len(batch)


def _of_pandas(frame: Any) -> Iterator[Any]:
    """Yield the rows; NaN, NaT and NA become None."""
    for start in range(0, len(frame), CHUNK_ROWS):
        chunk = frame.iloc[start : start + CHUNK_ROWS]
        yield from chunk.astype(object).where(chunk.notna(), None).to_dict("records")


def _each(rows: Any) -> Iterator[Any]:
    """Yield the rows of a dataset. If a row can't be created, for example with a broken image, yield its error."""
    values = iter(rows) if hasattr(rows, "__iter__") else map(rows.__getitem__, range(len(rows)))
    for n in range(n_rows := len(rows)):
        try:
            value = next(values)
        except StopIteration:
            return
        except Exception as error:  # the caller's own code, or a decoder's, runs here
            value = RequestError(f"{PLACE} row {n}: {type(error).__name__}: {error}")
            values = map(rows.__getitem__, range(n + 1, n_rows))
        yield value


def _row(index: int, value: Any, key: str | None) -> Row:
    fields = _fields(index, value)
    if not isinstance(fields, RequestError):
        try:
            fields = _copied(fields)
        except _TooDeepError:
            fields = RequestError(f"row {index} is {TOO_DEEP}")
    row = row_of(index, fields, key, PLACE)
    if key is not None and isinstance(fields, dict) and fields.get(key) is None:
        return Row(index, fallback_id(index), fields)  # prompts have no ids
    return row


def _copied(value: Any, levels: int = MAX_DEPTH) -> Any:
    """Return ``value`` with copies of the dicts and lists in it, because a generator may reuse them for its next row.

    One-dimensional arrays become lists: pandas makes arrays of lists in a Parquet file.

    Raises:
        _TooDeepError: the dicts and lists are nested more than ``levels`` deep.
    """
    kind = type(value)
    if kind in _FLAT:
        return value
    if not levels:
        raise _TooDeepError
    if kind.__name__ == "ndarray" and value.ndim == 1 and value.dtype.kind not in "mM":
        # Kinds m and M are times, which would become numbers.
        return _copied(value.tolist(), levels)
    if isinstance(value, dict):
        return {key: _copied(part, levels - 1) for key, part in value.items()}
    if isinstance(value, list):
        return [_copied(part, levels - 1) for part in value]
    return value


class _TooDeepError(Exception):
    pass


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
    """Return whether ``value`` is a column of pandas, numpy, polars or pyarrow."""
    has_type = hasattr(value, "dtype") or (hasattr(value, "type") and hasattr(value, "to_pylist"))
    return has_type and getattr(value, "ndim", 1) == 1


def _listed(column: Any) -> list[Any]:
    for name in ("tolist", "to_list", "to_pylist"):
        if hasattr(column, name):
            return list(getattr(column, name)())
    raise _refused(type(column).__name__)


def _are_columns(rows: Mapping[Any, Any]) -> bool:
    """Return whether the dict ``rows`` is not one row but a table by column, such as ``dataset[:10]``, or several
    datasets."""
    if any(hasattr(it, "column_names") for it in rows.values()):
        return True
    are_lists = all(
        _is_column(it) or (_is_list(it) and not isinstance(it, str)) for it in rows.values()
    )
    return are_lists and "messages" not in rows and len({*map(len, rows.values())}) == 1


def _is_message(row: Any) -> bool:
    return isinstance(row, dict) and row.keys() == {"role", "content"}


def _kind(value: Any) -> str:
    of = f" of {type(value[0]).__name__}" if _is_list(value) and len(value) else ""
    return type(value).__name__ + of


def _refused(found: str) -> JobError:
    return JobError(
        f"{PLACE}: found {found}; expected prompts, chat messages, dicts or a DataFrame. To read a file, set"
        " input.path"
    )
