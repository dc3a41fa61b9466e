"""The records of a run as a table: Arrow batches with the columns of a ``Layout``.

Of each line, msgspec parses only what has a column, ten thousand lines at a time.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import cached_property
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NotRequired, TypedDict

import msgspec
import orjson

from batchkit.errors import StoreError
from batchkit.runs.layout import Layout
from batchkit.runs.vector_column import EMBEDDING, PLACE, arrow_type, with_vectors
from batchkit.storage.lines import whole_record
from batchkit.storage.log import RESULTS
from batchkit.storage.newest import NewestLog
from batchkit.storage.score_store import Scores
from batchkit.storage.vectors import VectorType
from batchkit.types import COUNT_LIMIT

if TYPE_CHECKING:
    import pyarrow as pa

_BATCH = 10_000  # records
_BATCH_BYTES = 16 << 20
_VECTOR_BYTES = 64 << 20
_Count = Annotated[int, msgspec.Meta(ge=0, lt=COUNT_LIMIT)]


class _Usage(TypedDict):
    prompt_tokens: _Count
    completion_tokens: _Count
    reasoning_tokens: NotRequired[_Count | None]


class _Place(TypedDict):
    segment: _Count
    row: _Count
    dimensions: _Count


class _Error(TypedDict, total=False):
    kind: str | None
    type: str | None
    message: str | None


# What ``Record`` accepts, of the keys that have a column of a fixed type.
_TYPES: dict[str, Any] = {
    "index": _Count,
    "id": str,
    "status": Literal["ok", "failed"],
    "attempt": int | None,
    "text": str | None,
    "reasoning": str | None,
    "usage": _Usage | None,
    "latency_s": float | None,
    "finished_at": str | None,
    "error": _Error | None,
    "prediction": str | None,
    "fields": dict[str, Any] | None,
    "steps": dict[str, dict[str, Any]] | None,
    "prompt": str | None,
    "label": str | None,
    "embedding": _Place | None,
    "input_hash": str | None,
}
_DAMAGE = (msgspec.MsgspecError, ValueError, TypeError, OverflowError)  # also those of Arrow


def schema_of(layout: Layout) -> pa.Schema:
    """The schema of every batch of the table."""
    import pyarrow as pa

    fields = list(_schema_of_records(layout))
    if layout.embedding is not None:
        kinds = {EMBEDDING: arrow_type(layout.embedding)}
        places = PLACE.keys() - kinds.keys()
        fields = [
            field.with_type(kinds.get(field.name, field.type))
            for field in fields
            if field.name not in places
        ]
    return pa.schema(fields)


def read_batches(folder: Path, layout: Layout) -> Iterator[pa.Table]:
    """The newest record of each row, in the order of the input, with its newest scores.

    A batch has at most 10,000 records, and over 16 MB of the log, or 64 MiB of vectors, only if it is
    a single record.

    Raises:
        StoreError: a record is damaged, or its vector is not there.
    """
    batches = _Batches(folder, layout).read()
    if layout.embedding is None:
        return batches
    return with_vectors(batches, folder, layout.embedding)


def _schema_of_records(layout: Layout) -> pa.Schema:
    import pyarrow as pa

    return pa.schema([(name, _arrow_type(kind)) for name, kind in layout.columns().items()])


def _at_once(kind: VectorType | None) -> int:
    if kind is None:
        return _BATCH
    largest = 4 * (kind.dimensions or 4096)  # bytes
    return max(1, min(_BATCH, _VECTOR_BYTES // largest))


class _Batches:
    """Of the log, only the part being read is in memory."""

    def __init__(self, folder: Path, layout: Layout) -> None:
        self._path, self._layout = folder / RESULTS, layout
        self._scores = Scores(folder) if layout.scores is not None else None

    def read(self) -> Iterator[pa.Table]:
        import numpy as np

        at_once, start, done = _at_once(self._layout.embedding), 0, 0
        with closing(NewestLog(self._path)) as newest:
            starts, ends = newest.starts, newest.ends
            n_bytes = np.cumsum(ends - starts)
            while start < len(starts):
                fitting = int(np.searchsorted(n_bytes, done + _BATCH_BYTES, "right"))
                end = max(start + 1, min(start + at_once, fitting))
                places = [*zip(starts[start:end].tolist(), ends[start:end].tolist(), strict=True)]
                yield self._table(newest, places)
                newest.release()
                start, done = end, n_bytes[end - 1]

    def _table(self, newest: NewestLog, places: Sequence[tuple[int, int]]) -> pa.Table:
        raws = [newest.view[start:end] for start, end in places]
        try:
            return self._parsed(raws)
        except _DAMAGE as error:
            for (start, _), raw in zip(places, raws, strict=True):
                whole_record(raw, self._path, start)
                self._check(raw, start)
            raise StoreError(f"{self._path}: a record can't be read: {error}") from error

    def _parsed(self, raws: Sequence[bytes]) -> pa.Table:
        import pyarrow as pa

        b"".join(raws).decode()  # msgspec does not check what it passes over
        records = [*map(self._decode, raws)]
        self._put_scores(records)
        values = {first: [*map(attrgetter(first), records)] for first in self._first_keys}
        columns = zip(self._layout.paths(), self._schema, strict=True)
        arrays = [_column(values[first], rest, field.type) for (first, *rest), field in columns]
        return pa.Table.from_arrays(arrays, schema=self._schema)

    def _check(self, raw: bytes, start: int) -> None:
        """Raises StoreError if this line alone can't be read."""
        try:
            self._parsed([raw])
        except _DAMAGE as error:
            raise StoreError(
                f"{self._path}: the record at byte {start} is damaged: {error}. `batchkit verify"
                f" --repair {self._path.parent}` sets it aside; its row is then run again"
            ) from error

    @cached_property
    def _schema(self) -> pa.Schema:
        return _schema_of_records(self._layout)

    @cached_property
    def _first_keys(self) -> Sequence[str]:
        return [*dict.fromkeys(path[0] for path in self._layout.paths())]

    @cached_property
    def _decode(self) -> Callable[[bytes], Any]:
        """A line as an object with an attribute for each key of a record that has a column."""
        others = dict.fromkeys([*self._first_keys, "scores", "input_hash"])
        fields: list[Any] = [(name, _TYPES[name]) for name in _MUST]
        fields += [(name, _TYPES.get(name, Any), None) for name in others if name not in _MUST]
        return msgspec.json.Decoder(msgspec.defstruct("_Line", fields, gc=False)).decode

    def _put_scores(self, records: Sequence[Any]) -> None:
        if self._scores is None:
            return
        for record in records:
            found = self._scores.of(record.index, record.input_hash, record.finished_at)
            if found is not None:
                record.prediction, record.scores = found.prediction, found.scores


_MUST = ("index", "id", "status")


def _column(values: Sequence[Any], keys: Sequence[str], kind: pa.DataType) -> pa.Array:
    import pyarrow as pa

    for key in keys:
        values = [value.get(key) if value.__class__ is dict else None for value in values]
    if values.count(None) == len(values):
        return pa.nulls(len(values), kind)
    if kind == pa.string():
        values = [v if v.__class__ is str or v is None else _as_text(v) for v in values]
    elif pa.types.is_list(kind):  # of a row with one document, among rows with lists
        values = [[v] if isinstance(v, float | int) else v for v in values]
    return pa.array(values, kind)


def _arrow_type(kind: str) -> pa.DataType:
    import pyarrow as pa

    inner = kind.removeprefix("list<").removesuffix(">")
    found = pa.type_for_alias(inner)
    return found if inner == kind else pa.list_(found)


def _as_text(value: Any) -> str:
    try:
        return orjson.dumps(value).decode()
    except TypeError:  # an integer past 64 bits, which other readers have as a float
        return orjson.dumps(orjson.loads(json.dumps(value))).decode()
