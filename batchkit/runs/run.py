"""A run on disk, to read from Python."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import closing
from html import escape
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import orjson

from batchkit.config.masking import masked_text
from batchkit.config.tables.task import FOR_VECTORS, OF_TOKENS
from batchkit.errors import JobError
from batchkit.runs.compare import compare
from batchkit.runs.comparison import Comparison
from batchkit.runs.listing import find_run
from batchkit.runs.scores import table_of
from batchkit.runs.status import Status, status
from batchkit.runs.verify import Verification, verify
from batchkit.scoring.metrics import ScoreTable
from batchkit.sources.input import from_job
from batchkit.storage.checkpoint import check_log
from batchkit.storage.job_toml import job_of_run
from batchkit.storage.lines import answers_in_words
from batchkit.storage.log import RESULTS
from batchkit.storage.newest import Generations, NewestLog
from batchkit.storage.score_store import read_scored, scored
from batchkit.storage.vectors import Vectors

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd
    import polars as pl
    import pyarrow as pa

_PREVIEW = 5  # rows in a notebook
_MOST_TEXT = 300


class RowVector(NamedTuple):
    """The vector of one row of an embed run, a NumPy array; of ``token_embed`` a matrix, a line for each token."""

    id: str
    vector: np.ndarray[Any, Any]


class Run:
    """A run on disk, finished or not. ``target``: its folder, or the job file that made it; by default
    the run below ``output/`` that was started last.

    Each call reads the files as they are at that moment. Nothing starts an engine or writes to the run.
    ``record`` searches the log; use ``rows`` for many. ``rows``, ``vectors``, ``scores`` and
    ``verify`` need the same memory for a million rows as for a thousand, a few bytes for each row aside.

    Raises:
        JobError: there is no such run.
        StoreError: from any call: the run's files are missing or damaged.
    """

    def __init__(self, target: str | os.PathLike[str] | None = None) -> None:
        self.folder: Path = find_run(None if target is None else os.fspath(target))

    def __repr__(self) -> str:
        return f"Run({str(self.folder)!r})"

    def status(self) -> Status:
        """How many rows are done, failed and left, and the rate of a process that works on them. It does
        not check the log for damage, as ``verify`` does."""
        return status(self.folder)

    def verify(self) -> Verification:
        """The audit of the run against its checkpoint and its input, as ``batchkit verify`` prints it."""
        return verify(self.folder)

    def rows(self) -> Iterator[dict[str, Any]]:
        """The newest record of each row, in the order of the input, with its newest scores."""
        check_log(self.folder)
        return read_scored(self.folder)

    def record(self, row: str | int) -> dict[str, Any]:
        """As in ``rows``, of one row: by its id (a str) or its index (an int).

        Raises:
            KeyError: no record has it.
            JobError: several rows have this id.
        """
        check_log(self.folder)
        with closing(NewestLog(self.folder / RESULTS)) as log:
            lines = log.of(row) if isinstance(row, int) else _lines_with(row, log)
            records = map(orjson.loads, lines)
            found = [record for record in records if row in (record["id"], record["index"])]
        if not found:
            named = "index" if isinstance(row, int) else "id"
            raise KeyError(f"{self.folder}: no record has the {named} {row!r}")
        if len(found) > 1:
            rows = ", ".join(str(record["index"]) for record in found[:5])
            raise JobError(
                f"{self.folder}: id {row!r} names several rows: {rows}; give one's index"
            )
        return next(scored(found, self.folder))

    def steps(self, row: str | int) -> list[dict[str, Any]]:
        """What each generation of a row of ``[[steps]]`` or ``[rollout]`` answered, in the order in which
        they ended; empty for a row with one. Raises as ``record``."""
        return Generations(self.folder).of(self.record(row)["index"])

    def vectors(self) -> Iterator[RowVector]:
        """The vectors of the rows, in the order of the input; failed rows have none.

        Raises:
            JobError: the run has a task that makes no vectors.
        """
        if (task := job_of_run(self.folder).task) not in ("embed", *OF_TOKENS):
            raise JobError(
                f'{self.folder}: its task is "{task}"; vectors are made with {FOR_VECTORS}'
            )
        vectors = Vectors(self.folder)
        for record in self.rows():
            if record.get("embedding") is not None:
                yield RowVector(record["id"], vectors.of(record))

    def scores(self) -> ScoreTable:
        """The mean of each scorer, by group and over all rows. Its ``to_json()`` is the dict of
        ``batchkit score --json``.

        Raises:
            InputError: the rows are grouped by a field that the run did not keep, and the input changed.
        """
        return table_of(self.folder)

    def compare(self, *others: Run | str | os.PathLike[str]) -> Comparison:
        """This run against others of the same rows: differences of scores with their intervals, and the rows
        that became better or worse, as ``batchkit report`` prints them. Without others: the values of ``input.cross``
        in this run."""
        runs = [other if isinstance(other, Run) else Run(other) for other in others]
        return compare([self.folder, *(run.folder for run in runs)])

    def to_arrow(self, *, inputs: bool = False) -> pa.Table:
        """The newest record of each row as a table with the columns of ``batchkit export --parquet``: ``text``
        is the answer. ``inputs``: a line for each row of the input, with its columns first; those of the
        record are null if it has none yet.

        Raises:
            InputError: with ``inputs``, if the input is no longer what the run has read.
        """
        from batchkit.runs.table import joined_table, records_table

        if not inputs:
            return records_table(self.folder)
        job = job_of_run(self.folder)
        if job.input.path is None:
            raise JobError(f"{self.folder}: its rows came from Python, so they can't be read again")
        return joined_table(self.folder, from_job(job))

    def to_pandas(self, *, inputs: bool = False) -> pd.DataFrame:
        """``to_arrow`` as a DataFrame; a column of whole numbers of which some are missing is of pandas'
        type ``Int64``."""
        from batchkit.runs.table import frame_of

        return frame_of(self.to_arrow(inputs=inputs))

    def to_polars(self, *, inputs: bool = False) -> pl.DataFrame:
        """``to_arrow`` as a DataFrame of polars."""
        import polars as pl

        return pl.DataFrame(self.to_arrow(inputs=inputs))

    def _repr_html_(self) -> str:
        """What a notebook shows: the counts, and the first rows. All of the run is escaped text."""
        lines = self.status().to_text().splitlines()
        body = "".join(map(_html_row, islice(self.rows(), _PREVIEW)))
        return (
            f"<p>{escape(masked_text(lines[0]))}</p><table><thead><tr><th>index</th><th>id</th>"
            f"<th>status</th><th>answer</th></tr></thead><tbody>{body}</tbody></table>"
        )


def _lines_with(row_id: str, log: NewestLog) -> Iterator[bytes]:
    written = msgspec.json.encode(row_id)
    for line in log:
        if log.view.find(written, line.start, line.end) >= 0:
            yield log.view[line.start : line.end]


def _html_row(record: Mapping[str, Any]) -> str:
    answer = (record.get("error") or {}).get("message") or answers_in_words(record)[0]
    cells = record["index"], record["id"], record["status"], answer[:_MOST_TEXT]
    return f"<tr>{''.join(f'<td>{escape(str(cell))}</td>' for cell in cells)}</tr>"
