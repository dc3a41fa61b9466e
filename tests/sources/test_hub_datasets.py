"""``hf://datasets/…`` as input, read with the hub's own client over real HTTP."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from subprocess import CompletedProcess

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.support.hub_server import HubServer, hub
from tests.support.own_process import batchkit

NAME = "org/reviews"
ADDRESS = f"hf://datasets/{NAME}"


def parquet(rows: int = 3, *, row_group_size: int | None = None, noise: int = 0) -> bytes:
    """``noise``: the number of bytes in each row that can't be compressed."""
    values = np.random.default_rng(0)
    table = pa.table(
        {
            "review": [f"review {n}" for n in range(rows)],
            **({"noise": [values.bytes(noise).hex() for _ in range(rows)]} if noise else {}),
        }
    )
    written = io.BytesIO()
    pq.write_table(table, written, row_group_size=row_group_size)
    return written.getvalue()


@pytest.fixture
def server() -> Iterator[HubServer]:
    with hub() as server:
        yield server


def run(server: HubServer, path: str, folder: Path, *more: str) -> CompletedProcess[str]:
    environment = {"HF_ENDPOINT": server.url, "HF_TOKEN": server.token, "HF_HOME": "hf"}
    args = ("run", "--model", "none", "--input", path, "--prompt", "{{ review }}", *more)
    return batchkit(*args, "--set", "engine.kind=dry-run", cwd=folder, **environment)


def given(server: HubServer, files: Mapping[str, bytes], revision: str = "") -> None:
    server.datasets[NAME + revision] = dict(files)


def test_the_first_rows_of_a_large_file_are_read_without_the_rest(
    server: HubServer, tmp_path: Path
) -> None:
    content = parquet(20_000, row_group_size=1000, noise=1024)
    given(server, {"data/train-00000-of-00001.parquet": content})
    ended = run(server, ADDRESS, tmp_path, "--limit", "10")
    assert json.loads(ended.stdout)["ok"] == 10, ended.stderr
    assert server.sent.total() < len(content) / 4


@pytest.mark.parametrize(
    ("names", "rows"),
    [
        (["data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet"], 6),
        (["data/train-00000-of-00001-0123456789abcdef.parquet"], 3),
        (["part-00000.parquet", "part-00001.parquet", "README.md"], 6),
        (["default/train/0000.parquet"], 3),
    ],
)
def test_a_dataset_of_one_split_is_read_whole(
    server: HubServer, tmp_path: Path, names: list[str], rows: int
) -> None:
    given(server, dict.fromkeys(names, parquet()))
    ended = run(server, ADDRESS, tmp_path)
    assert json.loads(ended.stdout)["ok"] == rows, ended.stderr


def test_a_revision_of_a_dataset_is_read(server: HubServer, tmp_path: Path) -> None:
    given(server, {"reviews.csv": b"review\ngood\n"})
    given(server, {"default/train/0000.parquet": parquet()}, "@refs/convert/parquet")
    ended = run(server, f"{ADDRESS}@refs/convert/parquet", tmp_path)
    assert json.loads(ended.stdout)["ok"] == 3, ended.stderr


def test_of_several_splits_one_must_be_chosen(server: HubServer, tmp_path: Path) -> None:
    names = [f"data/{split}-00000-of-00001.parquet" for split in ("test", "train")]
    given(server, dict.fromkeys(names, parquet()))
    ended = run(server, ADDRESS, tmp_path)
    assert ended.returncode == 2
    globs = f"{ADDRESS}/data/test-*.parquet, {ADDRESS}/data/train-*.parquet"
    assert f"{ADDRESS}: has several splits; set input.path to one of {globs}" in ended.stderr
    ended = run(server, f"{ADDRESS}/data/train-*.parquet", tmp_path)
    assert json.loads(ended.stdout)["ok"] == 3, ended.stderr


@pytest.mark.parametrize("is_there", [True, False])
def test_a_dataset_without_parquet_is_refused(
    server: HubServer, tmp_path: Path, is_there: bool
) -> None:
    if is_there:
        given(server, {"reviews.csv": b"review\ngood\n"})
    ended = run(server, ADDRESS, tmp_path)
    assert ended.returncode == 2
    assert f"{ADDRESS}: no Parquet files found; check the name" in ended.stderr
