"""Vectors beside the log: every record finds its own, whatever happened to the process or the disk."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from batchkit.errors import StoreError
from batchkit.storage.ledger import Ledger, line_of
from batchkit.storage.log import RESULTS
from batchkit.storage.newest_lines import read_newest
from batchkit.storage.vectors import Vectors, VectorType, segment_path, segments_of
from tests.support.forks import LightFork
from tests.support.killed import ROWS, write_rows
from tests.support.records import indexes, record, vector, with_vector, written


def embedded(folder: Path) -> list[dict[str, Any]]:
    """The newest records that name a vector; each finds its own."""
    vectors = Vectors(folder)
    found = [one for one in read_newest(folder / RESULTS) if "embedding" in one]
    for one in found:
        np.testing.assert_array_equal(vectors.of(one), vector(one["index"]))
    return found


def places(folder: Path) -> list[tuple[int, ...]]:
    return [tuple(one["embedding"].values()) for one in embedded(folder)]


def batches(path: Path) -> list[list[int]]:
    """The rows in each record batch, as any reader of Arrow sees them."""
    with pa.OSFile(str(path)) as file, pa.ipc.open_stream(file) as stream:
        return [batch["index"].to_pylist() for batch in stream]


# Writing


def test_record_names_the_place_of_its_vector(tmp_path: Path) -> None:
    written(tmp_path, 5, 0, 2)
    assert places(tmp_path) == [(0, 1, 4), (0, 2, 4), (0, 0, 4)]
    assert b"vector" not in (tmp_path / RESULTS).read_bytes()
    with pa.ipc.open_stream((tmp_path / "vectors" / "000000.arrow").read_bytes()) as stream:
        table = stream.read_all()
    assert table["index"].to_pylist() == [5, 0, 2]
    assert table["vector"].type == pa.list_(pa.float32(), 4)
    assert table["vector"].to_pylist() == [vector(row).tolist() for row in (5, 0, 2)]


def test_half_precision_takes_half_the_room(tmp_path: Path) -> None:
    written(tmp_path, 0, 1, dtype="float16", dimensions=4096)
    written(tmp_path / "single", 0, 1, dimensions=4096)
    sizes = [segment_path(run, 0).stat().st_size for run in (tmp_path, tmp_path / "single")]
    assert sizes[1] - sizes[0] == 2 * 2 * 4096
    found = Vectors(tmp_path).of(next(read_newest(tmp_path / RESULTS)))
    assert (found.dtype, found.tolist()) == (np.float16, vector(0, 4096).astype("f2").tolist())


def test_each_start_begins_a_segment_of_its_own(tmp_path: Path) -> None:
    written(tmp_path, 0, 1)
    before = segment_path(tmp_path, 0).read_bytes()
    written(tmp_path, 2)
    Ledger(tmp_path).close()
    written(tmp_path, 3, 1)
    assert list(segments_of(tmp_path)) == [0, 1, 2]
    assert segment_path(tmp_path, 0).read_bytes() == before
    assert places(tmp_path) == [(0, 0, 4), (2, 1, 4), (1, 0, 4), (2, 0, 4)], "the newest counts"


def test_vectors_of_several_lengths_go_to_several_segments(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    for row, dimensions in enumerate([4, 2, 4, 2]):
        ledger.write([with_vector(row, dimensions)])
    ledger.close()
    found = [r["embedding"] for r in read_newest(tmp_path / RESULTS)]
    assert [tuple(place.values()) for place in found] == [
        (0, 0, 4),
        (1, 0, 2),
        (0, 1, 4),
        (1, 1, 2),
    ]
    assert Vectors(tmp_path).type_of(1) == VectorType("float32", 2)


def test_vectors_of_a_second_share_an_fsync(tmp_path: Path) -> None:
    now = 10.0
    ledger = Ledger(tmp_path, clock=lambda: now)
    for row in range(4):
        ledger.write([with_vector(row)])
        ledger.write([line_of(record(10 + row, None))])
        assert indexes(tmp_path) == [0, 10]  # the first ones had none to wait for
        assert (ledger.totals.ok, ledger.totals.failed) == (1, 1)
    now = 11.0
    ledger.write([])
    assert indexes(tmp_path) == [0, 1, 2, 3, 10, 11, 12, 13]
    ledger.write([with_vector(4)])
    ledger.sync()
    ledger.write([line_of(record(14, None))])
    assert indexes(tmp_path)[-1] == 14
    ledger.close()
    assert batches(segment_path(tmp_path, 0)) == [[0], [1, 2, 3], [4]]


def test_waiting_vectors_are_few(tmp_path: Path) -> None:
    dimensions = 1 << 20
    ledger = Ledger(tmp_path, clock=lambda: 0.0)
    ledger.write([with_vector(0)])
    ledger.flush()
    waiting = np.zeros(dimensions, np.float32)
    for row in range(1, 17):
        ledger.write([with_vector(row)._replace(vector=waiting)])
        assert ledger.totals.ok == (17 if row == 16 else 1)  # 64 MiB
    ledger.close()


# Reading what is damaged


@pytest.mark.slow
def test_segment_cut_anywhere_gives_its_whole_vectors(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    for rows in (range(2), range(2, 5)):
        ledger.write(with_vector(row) for row in rows)
        ledger.flush()
    ledger.close()
    path, records = segment_path(tmp_path, 0), list(read_newest(tmp_path / RESULTS))
    whole, found = path.read_bytes(), list[int]()
    for size in range(len(whole) + 1):
        path.write_bytes(whole[:size])
        vectors, n_read = Vectors(tmp_path), 0
        for one in records:
            with suppress(StoreError):
                np.testing.assert_array_equal(vectors.of(one), vector(one["index"]))
                n_read += 1
        found.append(n_read)
    assert sorted({*found}) == [0, 2, 5]
    assert found == sorted(found)
    path.write_bytes(whole[:-1])
    with pytest.raises(
        StoreError, match=r"000000\.arrow: has 2 whole vectors; the record of row 4 names"
    ):
        Vectors(tmp_path).of(records[4])


@pytest.mark.slow
def test_no_changed_byte_gives_another_vector(tmp_path: Path) -> None:
    written(tmp_path, 0, 1, 2)
    path, records = segment_path(tmp_path, 0), list(read_newest(tmp_path / RESULTS))
    whole, refused = path.read_bytes(), 0
    for place in range(len(whole)):
        for flipped in (0x01, 0x80, 0xFF):
            changed = bytearray(whole)
            changed[place] ^= flipped
            path.write_bytes(changed)
            vectors = Vectors(tmp_path)
            for one in records:
                try:
                    np.testing.assert_array_equal(vectors.of(one), vector(one["index"]))
                except StoreError:
                    refused += 1
    assert refused > 3 * 3 * 4 * 4  # more than those of the values' own bytes


def test_matrix_is_whole_or_refused(tmp_path: Path) -> None:
    """Between vectors of its length; each of its vectors is checked."""
    matrix = np.stack([vector(token) for token in range(7, 10)])
    ledger = Ledger(tmp_path)
    ledger.write([with_vector(0), line_of(record(1), matrix.tobytes(), tokens=3), with_vector(2)])
    ledger.close()
    path, records = segment_path(tmp_path, 0), list(read_newest(tmp_path / RESULTS))
    places = [one["embedding"] for one in records]
    assert [(place["row"], place.get("tokens")) for place in places] == [
        (0, None),
        (1, 3),
        (4, None),
    ]
    np.testing.assert_array_equal(Vectors(tmp_path).of(records[1]), matrix)
    for number in (0, 2):
        np.testing.assert_array_equal(Vectors(tmp_path).of(records[number]), vector(number))
    whole = path.read_bytes()
    for token in matrix:
        path.write_bytes(whole.replace(token.tobytes(), np.zeros(4, np.float32).tobytes()))
        with pytest.raises(StoreError, match="is damaged at that place"):
            Vectors(tmp_path).of(records[1])
    path.write_bytes(whole)
    with pytest.raises(StoreError, match="has the vector of row 2"):
        Vectors(tmp_path).of({**records[1], "embedding": {**places[1], "row": 2}})
    with pytest.raises(StoreError, match="has 5 whole vectors"):
        Vectors(tmp_path).of({**records[1], "embedding": {**places[1], "row": 3}})


def swap(run: Path, *rows: int, dimensions: int = 4) -> None:
    written(run / "other", *rows, dimensions=dimensions)
    shutil.copy(segment_path(run / "other", 0), segment_path(run, 0))


def put(run: Path, content: bytes) -> None:
    segment_path(run, 0).write_bytes(content)


SCHEMA = pa.schema([("a", pa.int64())]).serialize().to_pybytes()
UNUSABLE: dict[str, tuple[Callable[[Path], object], str]] = {
    "gone": (lambda run: shutil.rmtree(run / "vectors"), "is missing"),
    "another run's": (lambda run: swap(run, 1, 0), "has the vector of row 1, with 4 dimensions, at that place"),
    "longer": (lambda run: swap(run, 0, 1, dimensions=8), "has the vector of row 0, with 8 dimensions, at that place"),
    "empty": (lambda run: put(run, b""), "has 0 whole vectors"),
    "noise": (lambda run: put(run, b"PK\x03\x04 not Arrow"), "has 0 whole vectors"),
    "NULs": (lambda run: put(run, bytes(4096)), "has 0 whole vectors"),
    "another schema": (lambda run: put(run, SCHEMA), "has 0 whole vectors"),
}  # fmt: skip


@pytest.mark.parametrize(("spoil", "fault"), UNUSABLE.values(), ids=UNUSABLE)
def test_segment_without_the_vector_is_named(
    spoil: Callable[[Path], object], fault: str, tmp_path: Path
) -> None:
    written(tmp_path, 0, 1)
    spoil(tmp_path)
    with pytest.raises(StoreError) as raised:
        Vectors(tmp_path).of(next(read_newest(tmp_path / RESULTS)))
    assert str(raised.value) == (
        f"{segment_path(tmp_path, 0)}: {fault}; the record of row 0 names vector 0 of this file (counted from 0), with 4"
        " dimensions. Restore a copy of the file if there is one; otherwise the next start runs the rows"
        " without a vector again"
    )


def test_reader_finds_vectors_that_are_written_after_it_began(tmp_path: Path) -> None:
    ledger, vectors = Ledger(tmp_path), Vectors(tmp_path)
    for row in range(3):
        ledger.write([with_vector(row)])
        ledger.flush()
        (*_, newest) = read_newest(tmp_path / RESULTS)
        np.testing.assert_array_equal(vectors.of(newest), vector(row))
    ledger.close()


def test_links_are_not_followed_and_other_files_are_ignored(tmp_path: Path) -> None:
    (tmp_path / "vectors").mkdir()
    for name in (".DS_Store", ".000007.arrow.swp", "000008.arrow~", "notes.txt", "12.arrow"):
        (tmp_path / "vectors" / name).write_text("x")
    (tmp_path / "elsewhere").write_bytes(b"mine")
    segment_path(tmp_path, 0).symlink_to(tmp_path / "elsewhere")
    written(tmp_path, 0)
    assert (tmp_path / "elsewhere").read_bytes() == b"mine"
    assert places(tmp_path) == [(1, 0, 4)]


LOST: dict[str, Callable[[Path], object]] = {
    "the folder": lambda path: shutil.rmtree(path.parent),
    "a segment": Path.unlink,
    "the end of a segment": lambda path: os.truncate(path, 300),
}


@pytest.mark.parametrize("lose", LOST.values(), ids=LOST)
def test_vectors_that_are_lost_while_the_store_works_stop_it(
    lose: Callable[[Path], object], tmp_path: Path
) -> None:
    ledger = Ledger(tmp_path)
    ledger.write([with_vector(0)])
    ledger.sync()
    lose(segment_path(tmp_path, 0))
    ledger.write([line_of(record(1, None))])
    for act in (ledger.sync, ledger.close, lambda: Ledger(tmp_path)):
        with pytest.raises(StoreError, match="vectors are lost"):
            act()


# Kills


@pytest.mark.release
def test_kill_at_any_step_of_a_flush_costs_nothing(tmp_path: Path) -> None:
    """Every record that the log holds then finds its vector; the next start adds what is missing."""
    seen = set()
    for name in ("mkdir", "open", "write", "fsync"):
        number, ended = 0, False
        while not ended:
            number += 1
            folder = tmp_path / f"{name}{number}"
            folder.mkdir()
            command = [sys.executable, "-m", "tests.support.killed"]
            ended = LightFork([*command, f"os.{name}", str(number), str(folder)]).wait(60) == 0
            seen.add((len(embedded(folder)), len(list(folder.glob("*.torn-*")))))
            write_rows(Ledger(folder))
            assert indexes(folder) == list(ROWS)
            assert len((folder / RESULTS).read_bytes().splitlines()) == len(ROWS)
            assert [r["index"] for r in embedded(folder)] == [0, 1, 3, 4, 6, 7]
        assert number > 1
    assert len(seen) > 3
