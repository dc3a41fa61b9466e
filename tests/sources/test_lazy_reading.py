"""Rows come before the input ends, and memory does not grow with the input."""

from __future__ import annotations

import io
import os
import tracemalloc
from collections.abc import Callable
from itertools import chain, islice, product, repeat
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fsspec.spec import AbstractFileSystem

from batchkit.config.tables import InputTable
from batchkit.errors import InputError
from batchkit.sources import count_rows, json_list, never, read_rows
from tests.support.sources import rows_of, table, write_rows

pytestmark = pytest.mark.slow

ENDLESS = {  # how a file begins, and what follows for ever
    "jsonl": (b"", b'{"a": 1}\n'),
    "csv": (b"a,b\n", b"1,2\n"),
    "prompts": (b"", b"hello\n"),
}


class _Endless(io.RawIOBase):
    def __init__(self, first: bytes, again: bytes) -> None:
        self.parts = chain([first] if first else [], repeat(again))

    def read(self, size: int = -1) -> bytes:
        return next(self.parts)


class _EndlessFiles(AbstractFileSystem):  # type: ignore[misc]
    """A file system whose files, named by their formats, never end."""

    protocol = "endless"

    def _open(self, path: str, mode: str = "rb", **_: Any) -> Any:
        return _Endless(*ENDLESS[path])


@pytest.mark.parametrize("format_name", list(ENDLESS))
def test_first_rows_come_before_the_input_ends(format_name: Any) -> None:
    fsspec.register_implementation("endless", _EndlessFiles, clobber=True)
    rows = read_rows(table(f"endless://{format_name}", format=format_name, limit=100_000))
    assert [row.index for row in islice(rows, 3)] == [0, 1, 2]
    assert [row.index for row in rows][-1] == 99_999


def read_all(source: InputTable) -> int:
    return sum(1 for _ in read_rows(source))


def read_as_stream(source: InputTable) -> int:
    rows = json_list.read(source.path, source, never, 0, max_whole_bytes=2**20)
    return sum(1 for _ in rows)


@pytest.mark.parametrize(
    ("name", "count"),
    [
        *product(["x.jsonl", "x.csv"], [read_all, count_rows]),
        ("x.json", read_as_stream),
    ],
)
def test_memory_does_not_grow_with_the_input(
    tmp_path: Path, name: str, count: Callable[[InputTable], int]
) -> None:
    path = write_rows(tmp_path, name, [{"id": i, "text": "x" * 2000} for i in range(20_000)])
    assert path.stat().st_size > 40_000_000
    next(read_rows(table(path)))  # imports
    tracemalloc.start()
    try:
        assert count(table(path)) == 20_000
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes < 12 * 2**20


def test_parquet_is_held_a_batch_at_a_time(tmp_path: Path) -> None:
    images = pa.table({"image": [os.urandom(100_000) for _ in range(1500)]})
    pq.write_table(images, tmp_path / "x.parquet", use_dictionary=False, write_batch_size=10)
    del images
    before, most = pa.total_allocated_bytes(), 0
    for _ in read_rows(table(tmp_path / "x.parquet")):
        most = max(most, pa.total_allocated_bytes() - before)
    assert most < 48 * 2**20  # of 143 MiB in one row group


def test_parquet_row_groups_that_are_skipped_whole_are_not_read(tmp_path: Path) -> None:
    path = write_rows(tmp_path, "x.parquet")
    offset = pq.ParquetFile(path).metadata.row_group(0).column(0).data_page_offset
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(b"\xff" * 16)
    assert [row.index for row in read_rows(table(path), skip={0, 1}.__contains__)] == [2, 3]
    with pytest.raises(InputError):
        rows_of(path)


def test_rows_in_memory_are_counted_while_they_are_read() -> None:
    """To fsspec, all who open a file of ``memory://`` have one, at one place."""
    lines = [b'{"n": %d, "q": "%s"}\n' % (n, b"x" * 1000) for n in range(5000)]
    fsspec.filesystem("memory").pipe_file("/counted.jsonl", b"".join(lines))
    source = table("memory://counted.jsonl")
    rows = read_rows(source)
    found = [next(rows)]
    assert count_rows(source) == len(lines)
    found += rows
    assert [row.fields["n"] for row in found] == [*range(len(lines))]
