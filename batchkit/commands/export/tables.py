"""Exports that are tables in a folder: Lance and Delta. Each export is a new version of the table, in one commit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from batchkit.commands import Say
from batchkit.commands.export import about_run, say_what_lacks
from batchkit.commands.export.outputs import Export, refuse_own_file
from batchkit.errors import StoreError
from batchkit.runs.inputs import InputColumns
from batchkit.runs.layout import Layout
from batchkit.storage.files import building

if TYPE_CHECKING:
    import pyarrow as pa

_MARK = "batchkit.run"  # a key of ``about_run``
_LOGS = {"lance": "_versions", "delta": "_delta_log"}
_UPKEEP = ("VACUUM", "OPTIMIZE")  # Delta operations that leave the rows as they are


def _write(kind: str, folder: Path, path: Path, say: Say, lacks: Say) -> dict[Path, int]:
    """Write a table in the format ``kind``. An error leaves the older version of the table as it was, and no new
    folder."""
    import pyarrow as pa

    from batchkit.runs.table import read_batches, schema_of

    refuse_own_file(path, folder)
    inputs = InputColumns(folder)
    layout = _with_allowed_names(Layout.of(folder, inputs.names))
    schema = schema_of(layout)
    if kind == "delta":
        schema = pa.schema([field.with_type(_without_half(field.type)) for field in schema])
    rows, stopped_by = 0, list[BaseException]()

    def batches() -> Iterator[pa.RecordBatch]:
        nonlocal rows
        try:
            for table in read_batches(folder, layout, inputs):
                rows += table.num_rows
                yield from table.cast(schema).to_batches()
            say_what_lacks(inputs, path, say, lacks)
        except BaseException as error:
            stopped_by.append(error)
            raise

    about = about_run(folder)
    reader = pa.RecordBatchReader.from_batches(schema.with_metadata(about), batches())
    try:
        with nullcontext(path) if path.exists() else building(path) as place:
            _WRITERS[kind](place, reader, about)
    except Exception as error:  # the libraries raise OSError, ValueError and bare exceptions
        if stopped_by:  # the library's error only quotes it
            raise stopped_by[0] from None
        raise StoreError(f"{path}: not written: {str(error).partition(chr(10))[0]}") from error
    return {path: rows}


def _write_lance(path: Path, reader: pa.RecordBatchReader, about: Mapping[str, str]) -> None:
    import lance

    lance.write_dataset(reader, path, mode="overwrite" if _is_table(path, "lance") else "create")


def _write_delta(path: Path, reader: pa.RecordBatchReader, about: Mapping[str, str]) -> None:
    from deltalake import CommitProperties, write_deltalake

    properties = CommitProperties(custom_metadata=dict(about))
    write_deltalake(
        path, reader, mode="overwrite", schema_mode="overwrite", commit_properties=properties
    )


_WRITERS = {"lance": _write_lance, "delta": _write_delta}


def _is_foreign(kind: str, path: Path) -> bool:
    """Return True unless batchkit wrote the newest data of the table ``path``, or there is nothing yet."""
    if not _is_table(path, kind):
        return path.exists() and (not path.is_dir() or any(path.iterdir()))
    try:
        if kind == "lance":
            import lance

            return _MARK.encode() not in (lance.dataset(path).schema.metadata or {})
        from deltalake import DeltaTable

        commits = DeltaTable(path).history()
        newest = next(one for one in commits if not one["operation"].startswith(_UPKEEP))
        return _MARK not in newest
    except Exception:  # a damaged table
        return True


def _is_table(path: Path, kind: str) -> bool:
    return (path / _LOGS[kind]).is_dir()


LANCE = Export(
    partial(_write, "lance"), says=True, package="lance", is_foreign=partial(_is_foreign, "lance")
)
DELTA = Export(
    partial(_write, "delta"),
    says=True,
    package="deltalake",
    is_foreign=partial(_is_foreign, "delta"),
)


def _with_allowed_names(layout: Layout) -> Layout:
    """Return ``layout`` with names that both formats allow: Lance forbids dots, Delta names that differ only in case.

    A dot becomes ``_``. Of two columns with the same name, the one with the result keeps it.
    """
    names, taken = dict[str, str](), set[str]()
    for name, column in sorted(layout.columns.items(), key=lambda one: one[1].keys[0] == "fields"):
        allowed = name.replace(".", "_").replace("`", "_") or "_"
        while allowed.lower() in taken:
            allowed = f"{column.keys[0]}_{allowed}"
        taken.add(allowed.lower())
        names[name] = allowed
    return layout._replace(columns={names[name]: one for name, one in layout.columns.items()})


def _without_half(kind: pa.DataType) -> pa.DataType:
    """Return the type with float32 in place of float16, which Delta does not have."""
    import pyarrow as pa

    if kind == pa.float16():
        return pa.float32()
    if not pa.types.is_nested(kind):
        return kind
    size = kind.list_size if pa.types.is_fixed_size_list(kind) else -1
    return pa.list_(_without_half(kind.value_type), size)
