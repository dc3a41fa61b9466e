"""The Python API to read a run from disk."""

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
from batchkit.config.tables import JobConfig
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
from batchkit.storage.manifest import Manifest, read_manifest
from batchkit.storage.newest_lines import Generations, NewestLog
from batchkit.storage.score_store import read_scored, scored
from batchkit.storage.starts import History, read_history
from batchkit.storage.vectors import Vectors

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd
    import polars as pl
    import pyarrow as pa

_PREVIEW = 5  # rows shown in a notebook
_MOST_TEXT = 300


class RowVector(NamedTuple):
    """The vector of one row of an embed run, as a NumPy array; for ``token_embed`` a matrix with one line per
    token."""

    id: str
    vector: np.ndarray[Any, Any]


class Run:
    """A run on disk, finished or not. ``target`` is its folder or its job file; by default the latest run below
    ``output/``.

    Each call reads the current files. No call starts an engine or writes to the run. ``record`` searches the log;
    use ``rows`` to read many records. The memory use of ``rows``, ``vectors``, ``scores`` and ``verify`` grows by
    only a few bytes per row.

    Raises:
        JobError: There is no such run.
        StoreError: From any call: the run's files are missing or damaged.
    """

    def __init__(self, target: str | os.PathLike[str] | None = None) -> None:
        self.folder: Path = find_run(None if target is None else os.fspath(target))

    def __repr__(self) -> str:
        return f"Run({str(self.folder)!r})"

    def status(self) -> Status:
        """Return the counts of done, failed and remaining rows, and the rate if a process is running.

        Does not check the log for damage; ``verify`` does.
        """
        return status(self.folder)

    def verify(self) -> Verification:
        """Check the run against its checkpoint and its input, as ``batchkit verify`` does."""
        return verify(self.folder)

    def job(self) -> JobConfig:
        """Return the run's job, from its folder."""
        return job_of_run(self.folder)

    def manifest(self) -> Manifest:
        """Return what decides the run's answers."""
        return read_manifest(self.folder)

    def history(self) -> History:
        """Return the notes of the run's starts, and the facts that they have learned."""
        return read_history(self.folder)

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield the newest record of each row in input order, with its newest scores."""
        check_log(self.folder)
        return read_scored(self.folder)

    def record(self, row: str | int) -> dict[str, Any]:
        """Return the newest record of one row, given its id (a str) or its index (an int).

        Raises:
            KeyError: No record has this id or index.
            JobError: Several rows have this id.
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
                f"{self.folder}: id {row!r} names several rows: {rows}; give the index of one"
            )
        return next(scored(found, self.folder))

    def steps(self, row: str | int) -> list[dict[str, Any]]:
        """Return all generations of a row of ``[[steps]]`` or ``[rollout]``, in the order in which they ended.

        Empty for a row with a single generation. Raises the exceptions of ``record``.
        """
        return Generations(self.folder).of(self.record(row)["index"])

    def vectors(self) -> Iterator[RowVector]:
        """Yield the vectors of the rows in input order. Failed rows have none.

        Raises:
            JobError: The run's task produces no vectors.
        """
        if (task := self.job().task) not in ("embed", *OF_TOKENS):
            raise JobError(
                f'{self.folder}: has no vectors; vectors are for {FOR_VECTORS}, but the task of this run is "{task}"'
            )
        vectors = Vectors(self.folder)
        for record in self.rows():
            if record.get("embedding") is not None:
                yield RowVector(record["id"], vectors.of(record))

    def scores(self) -> ScoreTable:
        """Return the mean of each scorer, by group and over all rows.

        ``to_json()`` of the result is the dict of ``batchkit score --json``.

        Raises:
            InputError: The rows are grouped by a field that the run did not keep, and the input changed.
        """
        return table_of(self.folder)

    def compare(self, *others: Run | str | os.PathLike[str]) -> Comparison:
        """Compare this run with other runs of the same rows, as ``batchkit report`` does.

        The result has score differences with intervals, and the rows that became better or worse. Without ``others``,
        the values of ``input.cross`` in this run are compared.
        """
        runs = [other if isinstance(other, Run) else Run(other) for other in others]
        return compare([self.folder, *(run.folder for run in runs)])

    def to_arrow(self, *, inputs: bool = False) -> pa.Table:
        """Return the newest record of each row as a table, with the columns of ``batchkit export --parquet``.

        The column ``text`` has the answers. By default, the table has one line per record; the input columns are those
        in ``output.keep``.

        ``inputs``: True gives one line per input row, also for rows without a record, whose record columns are null.
        All input columns come first, with their own types.

        Raises:
            InputError: With ``inputs``: the input changed since the run read it.
        """
        from batchkit.runs.table import joined_table, records_table

        if not inputs:
            return records_table(self.folder)
        job = self.job()
        if job.input.path is None:
            raise JobError(
                f"{self.folder}: its rows came from Python, so they can't be read again; leave"
                " out `inputs=True`, or call `to_arrow()` of the summary that `process` returned"
            )
        return joined_table(self.folder, from_job(job))

    def to_pandas(self, *, inputs: bool = False) -> pd.DataFrame:
        """Return the table of ``to_arrow`` as a pandas DataFrame. Integer columns with missing values have type
        ``Int64``."""
        from batchkit.runs.table import frame_of

        return frame_of(self.to_arrow(inputs=inputs))

    def to_polars(self, *, inputs: bool = False) -> pl.DataFrame:
        """Return the table of ``to_arrow`` as a polars DataFrame."""
        import polars as pl

        return pl.DataFrame(self.to_arrow(inputs=inputs))

    def _repr_html_(self) -> str:
        """Return HTML for notebooks: the counts and the first rows. All text of the run is escaped."""
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
