"""Rows given from Python: prompts, chat messages or dicts, in a list, a table or an iterator."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import Any, NamedTuple

from batchkit.errors import JobError, RequestError
from batchkit.sources.depth import TOO_DEEP, TooDeepError, copied
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

    Tables are DataFrames of pandas, datasets of ``datasets``, and all that gives an Arrow stream, as
    polars and pyarrow do; they are recognised by their methods, since none of these packages need be
    installed. A value that is not a row fails alone.

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
    if isinstance(rows, _NO_ROWS) or getattr(rows, "ndim", 1) == 0:
        raise _refused(type(rows).__name__)
    if hasattr(rows, "iloc") and hasattr(rows, "columns"):  # pandas
        frame = rows.copy(deep=False)  # columns that the caller adds later are not in it
        _check_names(frame.columns)
        return _Values(lambda: _of_pandas(frame), lambda: len(frame), frame.index)
    if _is_column(rows):
        column = rows.tolist() if hasattr(rows, "tolist") else rows.to_list()
        return _Values(lambda: iter(column), lambda: len(column), getattr(rows, "index", None))
    if hasattr(rows, "to_pylist") and not hasattr(rows, "schema"):  # a column of pyarrow
        return _Values(lambda: _of_column(rows), lambda: len(rows))
    if isinstance(rows, Sequence):
        return _Values(lambda: iter(rows), rows.__len__)
    if hasattr(rows, "__arrow_c_stream__") and not hasattr(rows, "with_format"):
        return _of_stream(rows)
    if hasattr(rows, "with_format") and getattr(rows, "format", {}).get("type") != "custom":
        rows = rows.with_format(None)  # of Hugging Face: else its values may be torch's or numpy's
    if all(hasattr(type(rows), name) for name in ("__len__", "__getitem__")):  # torch's Dataset
        return _Values(lambda: _each(rows), lambda: len(rows))
    if isinstance(rows, Iterable):
        return _Values(lambda: iter(rows), None)
    raise _refused(type(rows).__name__)


def _of_stream(rows: Any) -> _Values:
    """A stream of batches is read as it comes, and once; what can give several streams, whole."""
    import pyarrow as pa

    try:
        stream = pa.RecordBatchReader.from_stream(rows)
        _check_names(stream.schema.names)
        if isinstance(rows, Iterator):
            return _Values(lambda: _of_batches(stream), None)
        table = stream.read_all()
    except pa.ArrowException as error:
        raise JobError(f"{PLACE}: {type(rows).__name__}: {error}") from error
    return _Values(lambda: _of_batches(table.to_batches()), lambda: len(table))


def _of_batches(batches: Iterable[Any]) -> Iterator[Any]:
    from batchkit.sources.parquet import rows_of

    position = 0
    for batch in batches:
        yield from rows_of(batch, PLACE, position)
        position += len(batch)


def _of_column(column: Any) -> Iterator[Any]:
    import pyarrow as pa

    for row in _of_batches(pa.table({"prompt": column}).to_batches()):
        yield row["prompt"] if isinstance(row, dict) else row


def _check_names(names: Iterable[Any]) -> None:
    for name, n_columns in Counter(names).items():
        if not isinstance(name, str):
            raise JobError(f"{PLACE}: column {shown(name)} has no text for a name; rename it")
        if n_columns > 1:
            raise JobError(f"{PLACE}: two columns are named {shown(name)}; rename one")


def _of_pandas(frame: Any) -> Iterator[Any]:
    """NaN, NaT and NA all become None."""
    for start in range(0, len(frame), CHUNK_ROWS):
        chunk = frame.iloc[start : start + CHUNK_ROWS]
        yield from chunk.astype(object).where(chunk.notna(), None).to_dict("records")


def _each(rows: Any) -> Iterator[Any]:
    """A row that can't be made, as of a broken image, fails alone."""
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
