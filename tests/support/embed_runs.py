"""Embed runs of the dry-run engine in the working directory, and the vector that each row has to have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from batchkit.config.loading import load_job
from batchkit.engines.dry_run import open_engine
from batchkit.sources.rowhash import input_hash
from batchkit.storage.newest_lines import read_newest
from batchkit.storage.vectors import Vectors
from batchkit.types import Request, Row
from tests.support import dry_runs
from tests.support.dry_runs import RUN
from tests.support.jobs import with_tables
from tests.support.rows import read_jsonl

Vector = np.ndarray[Any, Any]


def write_job(**tables: Any) -> None:
    embed = {"task": "embed", "input": {"path": "in.jsonl", "id": "key"}}
    dry_runs.write_job(**with_tables(embed, tables))


def prepare(n: int = 10, failing: tuple[int, ...] = (), **tables: Any) -> None:
    """``n`` rows; those in ``failing`` lack the field that the template asks for."""
    rows = [{"key": f"k{row}", "q": f"question {row}"} for row in range(n)]
    for row in failing:
        del rows[row]["q"]
    dry_runs.write_rows(rows)
    write_job(**tables)


def expected(rows: Sequence[Mapping[str, Any]]) -> list[Vector]:
    """The vectors of rows with these fields, from the engine alone."""
    job = load_job(Path("job.toml"))
    engine = open_engine(job)
    for number, fields in enumerate(rows):
        row, params = Row(number, "", fields), job.pooling.params()
        engine.submit(Request(row, None, str(fields.get("q")), params, input_hash(fields)))
    found: list[Vector] = []
    while len(found) < len(rows):
        for completion in engine.poll(1.0):
            assert completion.pooled is not None
            assert completion.pooled.vector is not None
            vector = np.frombuffer(completion.pooled.vector, "<f4")
            found.append(vector.astype(job.output.vector_dtype))
    return found


def stored(folder: Path = RUN) -> dict[int, Vector]:
    """The vectors that the newest records name, by row."""
    vectors = Vectors(folder)
    found = read_newest(folder / "results.jsonl")
    return {one["index"]: vectors.of(one) for one in found if "embedding" in one}


def check(folder: Path = RUN) -> list[int]:
    """Each record has the vector of its row. Returns the rows that have one."""
    found, rows = stored(folder), read_jsonl(Path("in.jsonl"))
    wanted = expected(rows)
    for index, vector in found.items():
        np.testing.assert_array_equal(vector, wanted[index])
    return list(found)
