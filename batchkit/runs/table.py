"""The records of a run as a table: its columns, and their values as Arrow batches.

Arrow itself parses the lines of the log, thousands at once. Lines with values that its schema can't
represent (choices, a kept field that is not text, damage) are read record by record.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import orjson

from batchkit.runs.layout import Column, answer_columns, step_columns
from batchkit.runs.parsed_columns import parsed_columns
from batchkit.runs.vector_column import (
    EMBEDDING,
    PLACE,
    arrow_type,
    vector_type,
    with_vectors,
)
from batchkit.scoring import kept_fields, score_names
from batchkit.storage.job_toml import job_of_run
from batchkit.storage.ledger import RESULTS, whole_record
from batchkit.storage.newest import NewestLog
from batchkit.storage.schema import COUNT_LIMIT
from batchkit.storage.score_store import SCORES, read_scored
from batchkit.storage.vectors import VectorType

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa

_BATCH = 10_000  # records
_BATCH_BYTES = 16 << 20
_VECTOR_BYTES = 64 << 20
_FEW = 500  # batches this small are read record by record, not halved again


class Layout(NamedTuple):
    """The columns of a table of records besides those of every record.

    ``answer``: those for what the job's answers hold besides text.
    ``embedding``: the type of the vectors; None: no column for them.
    ``scores``: one column ``scores.<name>`` each, and one for the prediction; None: not scored.
    ``steps``: those of ``[[steps]]``. ``keep``: the kept fields, as text. ``parsed``: the type of each
    key of the parsed answers. A field, a key or a step with the name of another column gets the prefix
    ``fields.``, ``parsed.`` or ``steps.`` until its name is free.
    """

    scores: Sequence[str] | None
    keep: Sequence[str]
    parsed: Mapping[str, str] = MappingProxyType({})
    embedding: VectorType | None = None
    answer: Mapping[str, Column] = MappingProxyType({})
    steps: Mapping[str, Column] = MappingProxyType({})

    @classmethod
    def of(cls, folder: Path) -> Layout:
        """Fixed by the job, so that every export of a run has the same columns; those of parsed
        answers and of scores also depend on the answers."""
        job = job_of_run(folder)
        scores = score_names(job.scoring) if job.scoring.is_on else None
        parsed = parsed_columns(folder / RESULTS, job)
        answer = answer_columns(folder / RESULTS, job)
        vectors = vector_type(folder, job)
        return cls(scores, kept_fields(job), parsed, vectors, answer, step_columns(job))

    def columns(self) -> dict[str, str]:
        """The columns' names and Arrow types, in order; for a vector, those that name its place."""
        found = {name: column.type for name, column in {**_COLUMNS, **self.answer}.items()}
        if self.embedding is not None:
            found |= dict.fromkeys(PLACE, "int64")
        if self.scores is not None:
            found |= {"prediction": "string"}
            found |= {f"scores.{name}": "double" for name in self.scores}
        steps = {name: column.type for name, column in self.steps.items()}
        fields = dict.fromkeys(self.keep, "string")
        for prefix, columns in (("steps.", steps), ("parsed.", self.parsed), ("fields.", fields)):
            for name, kind in columns.items():
                while name in found:
                    name = f"{prefix}{name}"
                found[name] = kind
        return found

    def keys(self) -> list[tuple[str, ...]]:
        """The keys of each column's value in a record, in the order of ``columns``."""
        found = [column.keys for column in {**_COLUMNS, **self.answer}.values()]
        if self.embedding is not None:
            found += PLACE.values()
        if self.scores is not None:
            found += [("prediction",), *(("scores", name) for name in self.scores)]
        found += [column.keys for column in self.steps.values()]
        found += [("parsed", name) for name in self.parsed]
        return found + [("fields", name) for name in self.keep]

    def reader(self) -> Callable[[Mapping[str, Any]], list[Any]]:
        """Reads a record's values in the order of ``columns``."""
        plan = [*zip(self.keys(), self.columns().values(), strict=True)]

        def read(record: Mapping[str, Any]) -> list[Any]:
            return [_of_type(kind, _at(record, keys)) for keys, kind in plan]

        return read


_COLUMNS = {
    "index": Column("int64", ("index",)),
    "id": Column("string", ("id",)),
    "status": Column("string", ("status",)),
    "attempt": Column("int32", ("attempt",)),
    "text": Column("string", ("text",)),
    "finish_reason": Column("string", ("finish_reason",)),
    "prompt_tokens": Column("int64", ("usage", "prompt_tokens")),
    "completion_tokens": Column("int64", ("usage", "completion_tokens")),
    "latency_s": Column("double", ("latency_s",)),
    "finished_at": Column("string", ("finished_at",)),
    "error_kind": Column("string", ("error", "kind")),
    "error_type": Column("string", ("error", "type")),
    "error_message": Column("string", ("error", "message")),
    "choices": Column("string", ("choices",)),
    "prompt": Column("string", ("prompt",)),
    "truncated_tokens": Column("int64", ("truncated_tokens",)),
}


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
    batches = _batches_of_records(folder, layout)
    if layout.embedding is None:
        return batches
    return with_vectors(batches, folder, layout.embedding)


def _schema_of_records(layout: Layout) -> pa.Schema:
    import pyarrow as pa

    return pa.schema([(name, _arrow_type(kind)) for name, kind in layout.columns().items()])


def _batches_of_records(folder: Path, layout: Layout) -> Iterator[pa.Table]:
    at_once = _at_once(layout.embedding)
    if layout.scores is not None and (folder / SCORES).exists():  # they are merged in one by one
        records = read_scored(folder)
        while batch := list(islice(records, at_once)):
            yield _of_records(batch, layout)
        return
    yield from _Log(folder / RESULTS, layout).batches(at_once)


def _at_once(kind: VectorType | None) -> int:
    if kind is None:
        return _BATCH
    largest = 4 * (kind.dimensions or 4096)  # bytes
    return max(1, min(_BATCH, _VECTOR_BYTES // largest))


class _Log:
    """The log, of which only the part being read is in memory."""

    def __init__(self, path: Path, layout: Layout) -> None:
        import pyarrow as pa

        self._path, self._layout = path, layout
        self._schema = _schema_of_records(layout)
        self._newest = NewestLog(path)  # not closed: Arrow's buffer points into it
        bounds, view = self._newest.bounds, self._newest.view
        self._lines = pa.Array.from_buffers(
            pa.large_binary(),
            len(bounds) - 1,
            [None, pa.py_buffer(bounds), pa.py_buffer(view)],
        )

    def batches(self, at_once: int) -> Iterator[pa.Table]:
        import numpy as np

        lines = self._newest.lines
        n_bytes = np.cumsum(self._newest.ends - self._newest.starts)
        start, done = 0, 0
        while start < len(lines):
            fitting = int(np.searchsorted(n_bytes, done + _BATCH_BYTES, "right"))
            end = max(start + 1, min(start + at_once, fitting))
            yield self._table(lines[start:end])
            self._newest.release()
            start, done = end, n_bytes[end - 1]

    def _table(self, lines: np.ndarray[Any, Any]) -> pa.Table:
        import pyarrow as pa

        try:
            return self._parsed(lines)
        except pa.ArrowInvalid:
            if len(lines) <= _FEW:
                return self._read(lines)
        middle = len(lines) // 2
        return pa.concat_tables([self._table(lines[:middle]), self._table(lines[middle:])])

    def _parsed(self, lines: np.ndarray[Any, Any]) -> pa.Table:
        """Parsed by Arrow. Raises ArrowInvalid if the table would differ from that of ``_read``."""
        import pyarrow as pa
        import pyarrow.compute as pc
        from pyarrow import json

        raws, start = self._lines.take(pa.array(lines)), int(self._newest.bounds[lines[0]])
        first = whole_record(raws[0].as_py(), self._path, start)
        text = raws.buffers()[-1]  # the lines, concatenated
        _check_utf8(text)
        found = json.read_json(
            pa.BufferReader(text),
            read_options=json.ReadOptions(use_threads=False, block_size=text.size + 1),
            parse_options=json.ParseOptions(
                explicit_schema=_json_schema(self._layout, first),
                unexpected_field_behavior="ignore",
            ),
        )
        if found.num_rows != len(lines):
            raise pa.ArrowInvalid("two values in a line")
        columns = [
            (pc.struct_field(found[key], inner) if inner else found[key]).cast(field.type)
            for (key, *inner), field in zip(self._layout.keys(), self._schema, strict=True)
        ]
        for column in columns:  # Arrow's parser also takes NaN and Infinity
            flat = pc.list_flatten(column) if pa.types.is_list(column.type) else column
            if flat.type == "double" and not pc.all(pc.is_finite(flat), min_count=0).as_py():
                raise pa.ArrowInvalid("not a number")
        table = pa.Table.from_arrays(columns, schema=self._schema)
        _check_values(table)
        return table

    def _read(self, lines: np.ndarray[Any, Any]) -> pa.Table:
        """Parsed record by record."""
        import pyarrow as pa

        offsets = self._newest.bounds[lines].tolist()
        raws = self._lines.take(pa.array(lines)).to_pylist()
        records = map(whole_record, raws, [self._path] * len(raws), offsets)
        return _of_records(records, self._layout)


def _json_schema(layout: Layout, first: Mapping[str, Any]) -> pa.Schema:
    """What Arrow should find in lines like that of the record ``first``: its kept fields, and no
    choices, votes or tool calls, whose JSON Arrow couldn't keep.
    """
    import pyarrow as pa

    found: dict[str, Any] = {}
    for keys, field in zip(layout.keys(), _schema_of_records(layout), strict=True):
        *outer, name = keys
        kind = field.type
        if name in ("choices", "votes", "tool_calls") and not outer:
            kind = pa.null()
        elif outer == ["fields"]:
            value = (first.get("fields") or {}).get(name)
            kind = {int: pa.int64(), bool: pa.bool_()}.get(type(value), kind)
        place = found
        for key in outer:
            place = place.setdefault(key, {})
        place[name] = kind
    return pa.schema([(key, _nested(kind)) for key, kind in found.items()])


def _nested(kind: Any) -> pa.DataType:
    import pyarrow as pa

    if not isinstance(kind, dict):
        return kind
    return pa.struct([(key, _nested(inner)) for key, inner in kind.items()])


def _check_utf8(text: pa.Buffer) -> None:
    """Raises ArrowInvalid. Arrow's parser does not check this."""
    import numpy as np
    import pyarrow as pa

    bounds = pa.py_buffer(np.array([0, text.size]))
    pa.Array.from_buffers(pa.large_string(), 1, [None, bounds, text]).validate(full=True)


def _check_values(table: pa.Table) -> None:
    """Checks what ``schema.fault_in`` requires besides types. Raises ArrowInvalid."""
    import pyarrow as pa
    import pyarrow.compute as pc

    fits = [
        table["id"].null_count == 0,
        pc.all(pc.is_in(table["status"], pa.array(["ok", "failed"])), min_count=0).as_py(),
        table["prompt_tokens"].is_null().equals(table["completion_tokens"].is_null()),
    ]
    places = [name for name in PLACE if name in table.column_names]
    fits += [table[name].is_null().equals(table[places[0]].is_null()) for name in places]
    counts = ["index", "attempt", "prompt_tokens", "completion_tokens", "reasoning_tokens"]
    counts += ["generations", "selected", *places]
    for name in (name for name in counts if name in table.column_names):
        within = pc.min_max(table[name]).as_py()
        fits.append(within["min"] is None or 0 <= within["min"] <= within["max"] < COUNT_LIMIT)
    if not all(fits):
        raise pa.ArrowInvalid("not a record")


def _of_records(records: Iterable[Mapping[str, Any]], layout: Layout) -> pa.Table:
    import pyarrow as pa

    schema = _schema_of_records(layout)
    values = zip(*map(layout.reader(), records), strict=True)
    arrays = [pa.array(column, field.type) for column, field in zip(values, schema, strict=True)]
    return pa.Table.from_arrays(arrays, schema=schema)


def _arrow_type(kind: str) -> pa.DataType:
    import pyarrow as pa

    inner = kind.removeprefix("list<").removesuffix(">")
    found = pa.type_for_alias(inner)
    return found if inner == kind else pa.list_(found)


def _at(record: Any, keys: Sequence[str]) -> Any:
    for key in keys:
        record = record.get(key) if isinstance(record, Mapping) else None
    return record


def _of_type(kind: str, value: Any) -> Any:
    if kind == "string":
        return _as_text(value)
    if kind.startswith("list<") and isinstance(value, float | int):
        return [value]  # the score of a row with one document, among rows with lists
    return value


def _as_text(value: Any) -> str | None:
    if value is None or isinstance(value, str):
        return value
    return orjson.dumps(value).decode()
