"""What an embed run gives: a column of vectors, one matrix, numbers in JSON; each at its row."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchkit import Run
from batchkit.execution.processor import ProductionBatchProcessor
from batchkit.runs.layout import Layout
from batchkit.runs.table import read_batches
from batchkit.storage.ledger import Ledger, line_of
from batchkit.storage.vectors import segment_path
from tests.support.command_line import batchkit
from tests.support.dry_runs import RUN, run
from tests.support.embed_runs import expected, prepare, stored
from tests.support.mounts import mounted
from tests.support.records import record, with_vector
from tests.support.rows import read_jsonl, write_jsonl

pytestmark = pytest.mark.usefixtures("in_an_empty_folder")

FAILED = (3, 5)
ANSWERED = [0, 1, 2, 4, 6, 7, 8, 9]


def embed(dtype: str = "float32", n: int = 10) -> None:
    prepare(n, failing=FAILED, output={"vector_dtype": dtype})
    assert run().exit_code == 3


def wanted() -> np.ndarray[Any, Any]:
    return np.stack(expected(read_jsonl(Path("in.jsonl"))))[ANSWERED]


def export(*args: str) -> None:
    batchkit("export", *args).ok()


def appended(folder: Path, *lines: Any) -> None:
    ledger = Ledger(folder)
    for line in lines:
        ledger.write([line])
    ledger.close()


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_each_format_has_the_vectors_at_their_rows(dtype: str) -> None:
    embed(dtype)
    export("--parquet", "--npy", "--jsonl", "--csv")
    table = pq.read_table(RUN / "results.parquet")
    kind = {"float32": pa.float32(), "float16": pa.float16()}[dtype]
    assert table["embedding"].type == pa.list_(kind, 8)
    assert table["id"].to_pylist() == [f"k{row}" for row in range(10)]
    assert table["embedding"].is_null().to_pylist() == [row in FAILED for row in range(10)]
    frame = pd.read_parquet(RUN / "results.parquet")
    np.testing.assert_array_equal(np.stack(frame["embedding"].dropna().tolist()), wanted())
    matrix = np.load(RUN / "results.npy", mmap_mode="r")
    assert matrix.dtype == np.dtype(dtype)
    np.testing.assert_array_equal(matrix, wanted())
    ids = json.loads((RUN / "results.ids.json").read_text())
    assert ids == [f"k{row}" for row in ANSWERED]
    lines = read_jsonl(RUN / "results.newest.jsonl")
    assert [one["index"] for one in lines if "embedding" in one] == ANSWERED
    vectors = [one["embedding"] for one in lines if "embedding" in one]
    np.testing.assert_array_equal(np.dtype(dtype).type(vectors), wanted())
    assert "→ embedding of 8 dimensions" in batchkit("show", "--id", "k0").stdout
    others = [name for name in table.column_names if name != "embedding"]
    assert pd.read_csv(RUN / "results.csv").columns.tolist() == others


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_each_format_has_a_matrix_for_each_row_of_token_embed(dtype: str) -> None:
    prepare(10, failing=FAILED, output={"vector_dtype": dtype}, task="token_embed")
    rows = [
        {**row, **({"q": "a " * n} if "q" in row else {})}
        for n, row in enumerate(read_jsonl(Path("in.jsonl")))
    ]
    write_jsonl(Path("in.jsonl"), rows)
    assert run().exit_code == 3
    assert batchkit("verify", str(RUN)).exit_code == 0
    matrices = [one.reshape(-1, 8) for one in expected(rows)]
    answered = [matrices[row] for row in ANSWERED]
    assert [len(matrix) for matrix in answered] == [row + 1 for row in ANSWERED]
    for found, matrix in zip(Run(RUN).vectors(), answered, strict=True):
        np.testing.assert_array_equal(found.vector, matrix)
    export("--parquet", "--npy", "--jsonl")
    column = pq.read_table(RUN / "results.parquet")["embedding"]
    assert column.is_null().to_pylist() == [row in FAILED for row in range(10)]
    assert column.drop_null().to_pylist() == [matrix.tolist() for matrix in answered]
    ten_tokens = 320
    batches = list(read_batches(RUN, Layout.of(RUN), max_vector_bytes=ten_tokens))
    assert 1 < len(batches) < len(rows)
    assert pa.concat_tables(batches)["embedding"].combine_chunks() == column.combine_chunks()
    lines = [one for one in read_jsonl(RUN / "results.newest.jsonl") if "embedding" in one]
    for one, matrix in zip(lines, answered, strict=True):
        np.testing.assert_array_equal(np.dtype(dtype).type(one["embedding"]), matrix)
    whole, offsets = np.load(RUN / "results.npy"), np.load(RUN / "results.offsets.npy")
    parts = np.split(whole, offsets[1:-1])
    assert (offsets[0], offsets[-1]) == (0, len(whole))
    for part, matrix in zip(parts, answered, strict=True):
        np.testing.assert_array_equal(part, matrix)
    assert "→ embedding of 2 tokens, each 8 dimensions" in batchkit("show", "--id", "k1").stdout


def test_each_format_has_the_entities_of_token_classify() -> None:
    prepare(4, failing=(2,), task="token_classify")
    rows = read_jsonl(Path("in.jsonl"))
    rows[1]["q"] = "  Zoë, a 😀  b "
    write_jsonl(Path("in.jsonl"), rows)
    assert run().exit_code == 3
    assert batchkit("verify", str(RUN)).exit_code == 0
    export("--parquet", "--npy", "--jsonl", "--csv")
    table = pq.read_table(RUN / "results.parquet")
    found = [value and json.loads(value) for value in table["entities"].to_pylist()]
    assert found[2] is None
    assert [entity["text"] for entity in found[1]] == ["Zoë,", "a", "😀", "b"]
    for row, entities in zip(rows, found, strict=True):
        for entity in entities or ():
            assert row["q"][entity["start"] : entity["end"]] == entity["text"]
    lines = read_jsonl(RUN / "results.newest.jsonl")
    assert [line.get("entities") for line in lines] == found
    cells = pd.read_csv(RUN / "results.csv")["entities"].dropna()
    assert [*map(json.loads, cells)] == [found[0], found[1], found[3]]
    whole, offsets = np.load(RUN / "results.npy"), np.load(RUN / "results.offsets.npy")
    assert (whole.shape, offsets.tolist()) == ((11, 2), [0, 3, 8, 11])
    for entity, scores in zip(found[1], whole[4:8], strict=True):  # behind its special token
        assert entity["label"] == f"LABEL_{scores.argmax()}"
        assert entity["score"] == scores.max()
    assert table["embedding"].to_pylist()[1] == whole[3:8].tolist()
    assert f"Zoë, ({found[1][0]['label']}), a (" in batchkit("show", "--id", "k1").stdout


@pytest.mark.slow
def test_npy_of_many_rows_can_be_mapped() -> None:
    """The number of its rows, which is not known at first, has more digits than a zero."""
    prepare(1_234)
    assert run().exit_code == 0
    done = batchkit("export", "--npy", "deep/m.npy")
    assert "deep/m.npy: 1,234 rows" in done.stdout
    matrix, found = np.load("deep/m.npy", mmap_mode="r"), stored()
    np.testing.assert_array_equal(matrix, [found[row] for row in range(1_234)])
    assert len(json.loads(Path("deep/m.ids.json").read_text())) == 1_234


def test_output_of_a_run_may_be_a_matrix_if_it_has_vectors() -> None:
    prepare(4)
    assert run("--output", "vectors.npy").exit_code == 0
    assert np.load("vectors.npy").shape == (4, 8)
    Path("job.toml").write_text(Path("job.toml").read_text().replace('task = "embed"\n', ""))
    assert '.npy is for task = "embed"' in run("--fresh", "--output", "vectors.npy").refused()
    assert run("--fresh").exit_code == 0
    done = batchkit("export", "--npy").refused()
    assert '--npy is for task = "embed", "token_embed" or' in done
    assert 'but the task of this run is "generate"' in done


@pytest.mark.parametrize("failing", [(0, 1, 2), ()], ids=["no answer", "several lengths"])
def test_vectors_without_one_length_are_lists_and_no_matrix(failing: tuple[int, ...]) -> None:
    prepare(3, failing=failing, run={"check_rows": 0})
    run()
    if not failing:
        appended(RUN, with_vector(1, 3))
    export("--parquet", "a.parquet")
    column = pq.read_table("a.parquet")["embedding"]
    assert column.type == pa.list_(pa.float32())
    lengths = [None if vector is None else len(vector) for vector in column.to_pylist()]
    assert lengths == ([None] * 3 if failing else [8, 3, 8])
    done = batchkit("export", "--npy").refused()
    assert "a matrix needs vectors of one length, but the run has no vectors yet, or" in done
    # Older records do not matter: as after `retry-failed --set pooling.dimensions=…` of all rows.
    appended(RUN, *(with_vector(row, 3) for row in range(2)), line_of(record(2, None)))
    export("--npy", "a.npy")
    assert np.load("a.npy").shape == (2, 3)
    assert json.loads(Path("a.ids.json").read_text()) == ["q0", "q1"]


def test_summary_has_the_vectors_as_a_column() -> None:
    prepare(5, failing=(2,))
    summary = ProductionBatchProcessor("job.toml", quiet=True).process()
    vectors: list[Any] = [vector.tolist() for vector in expected(read_jsonl(Path("in.jsonl")))]
    vectors[2] = None
    table = summary.to_arrow()
    assert table["embedding"].type == pa.list_(pa.float32(), 8)
    assert table["embedding"].to_pylist() == vectors
    assert [v if v is None else v.tolist() for v in summary.to_pandas()["embedding"]] == vectors
    lines = sorted((RUN / "results.jsonl").read_bytes().splitlines(keepends=True))
    (RUN / "checkpoint.json").unlink()
    (RUN / "results.jsonl").write_bytes(b"".join(lines[:2]))  # the other rows have no record
    assert summary.to_arrow()["embedding"].to_pylist() == [*vectors[:2], None, None, None]


@pytest.mark.parametrize("flag", ["--parquet", "--npy", "--jsonl"])
def test_vector_that_is_not_there_stops_an_export_and_is_named(flag: str) -> None:
    embed()
    Path("old").write_text("kept")
    segment = segment_path(RUN, 0)
    segment.write_bytes(segment.read_bytes()[:100])  # not even its schema
    done = batchkit("export", flag, "old").refused(1)
    assert "vectors/000000.arrow: has 0 whole vectors; the record of row 0 names vector 0" in done
    assert "the next start runs the rows without a vector again" in done
    assert Path("old").read_text() == "kept"
    shutil.rmtree(RUN / "vectors")
    assert "vectors/000000.arrow: is missing" in batchkit("export", "--parquet", "old").stderr


def test_the_vectors_are_not_written_over_nor_is_a_folder_that_is_mounted_read_only() -> None:
    embed()
    segment = segment_path(RUN, 0)
    os.link(segment, "linked.parquet")
    content = segment.read_bytes()
    for place in (segment, segment.with_name("a.parquet"), "linked.parquet"):
        assert "belongs to a run" in batchkit("export", "--parquet", place).refused(1)
    assert segment.read_bytes() == content
    before = sorted(RUN.rglob("*"))
    with mounted(RUN, "--bind", "-o", "ro", source=RUN):
        export("--parquet", "a.parquet", "--npy", "a.npy")
    assert np.load("a.npy").shape == (8, 8)
    assert sorted(RUN.rglob("*")) == before
