"""A run as an input of another job: the newest record of each row, with the columns of the run's input."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from batchkit.config.tables import InputTable
from batchkit.errors import InputError, StoreError
from batchkit.runs.inputs import InputRows
from batchkit.runs.reach import Reach
from batchkit.sources.fingerprint import changed_files
from batchkit.sources.reader import Format, Found, Skip
from batchkit.storage.checkpoint import check_log, read_checkpoint
from batchkit.storage.log import RESULTS
from batchkit.storage.newest_lines import read_newest
from batchkit.storage.runfolder import is_run
from batchkit.storage.score_store import SCORES, read_scored
from batchkit.storage.starts import current_manifest, read_history

_ALWAYS = ("id", "status", "text", "prediction", "scores", "fields")
_IF_SET = (
    *("reasoning", "tool_calls", "parsed", "choices", "steps"),
    *("label", "probabilities", "score", "order", "entities", "error"),
)


def read(path: str, table: InputTable, skip: Skip, index: int) -> Iterator[Found]:
    """Yield the records of a run as rows (see ``Reader``). Failed rows are skipped unless ``input.where`` selects a
    ``status``.

    ``path``: the run's ``results.jsonl``. For its ``scores.jsonl``, nothing is yielded: that file is among the
    input files only so that its fingerprint is stored.
    """
    if Path(path).name != RESULTS:
        return
    folder = Path(path).parent
    try:
        check_log(folder)
        inputs = _inputs(folder)
        for record in records_of(table):
            yield None if skip(index) else _fields(record, inputs)
            index += 1
    except StoreError as error:
        raise InputError(str(error)) from error


def records_of(table: InputTable) -> Iterator[dict[str, Any]]:
    """Yield the record of each row of the input ``table``, in the order of the rows and before ``input.where``."""
    folder = _folder(table)
    for record in read_newest(folder / RESULTS) if _is_log(table) else read_scored(folder):
        if record["status"] == "ok" or "status" in table.where:
            yield record


def _is_log(table: InputTable) -> bool:
    """Return True if ``input.path`` names the run's ``results.jsonl``. The rows then have the scores that were computed
    when they finished; later scores of the run don't change this input."""
    return Path(table.path or "").name == RESULTS


def _folder(table: InputTable) -> Path:
    path = Path(table.path or "")
    return path.parent if _is_log(table) else path


def found(table: InputTable) -> tuple[list[str], str]:
    """Return the files with the rows of the run in ``input.path``, and a note about missing rows or columns.

    Raises:
        InputError: The folder has no run, or the run has no answers.
    """
    folder = _folder(table)
    if not is_run(folder):
        raise InputError(
            f"{folder}: there is no run in this folder; give the folder of a run, such as output/NAME"
        )
    names = (RESULTS,) if _is_log(table) else (RESULTS, SCORES)
    files = [str(folder / name) for name in names if (folder / name).exists()]
    if not files:
        raise InputError(f"{folder}: the run has no answers; run it first")
    return files, "; ".join(filter(None, (_left_out(folder, table), _lacking(folder, table))))


def _left_out(folder: Path, table: InputTable) -> str:
    """Return a note about rows of the run that this input skips. They are counted at the run's last checkpoint."""
    try:
        total = read_history(folder).total
    except StoreError as error:
        raise InputError(str(error)) from error
    checkpoint = read_checkpoint(folder)
    totals = checkpoint and checkpoint.totals
    n_ok, n_failed = (totals.ok, totals.failed) if totals else (0, 0)
    if n_failed and "status" not in table.where:
        failed = f'{n_failed:,} failed rows are left out; input.where = {{ status = "failed" }} selects them'
    else:
        failed = ""
    if total is not None and n_ok + n_failed < total:
        some = f"the run is not finished: {n_ok + n_failed:,} of {total:,} rows have a record"
    else:
        some = ""
    found = "; ".join(filter(None, (some, failed)))
    return found and f"{folder}: {found}"


def _inputs(folder: Path) -> InputRows:
    """Return the rows of the run's own input. Only files that a reader of the run may open are read."""
    reach = Reach.of(folder)
    return InputRows(reach.job, reach=reach)


def _lacking(folder: Path, table: InputTable) -> str:
    """Return a note if rows will lack columns of the run's own input, otherwise ""."""
    rows, first = _inputs(folder), next(read_scored(folder), None)
    if first is not None and rows.row(first) is None:
        return f"{folder}: its rows have only the columns in the run's output.keep, because {rows.problem}"
    for path, how in changed_files(
        InputTable(), current_manifest(folder).input, thorough=False
    ).items():
        return (
            f"{path} has changed ({how}): rows that differ from those the run read have only the columns in the"
            " run's output.keep"
        )
    return ""


def _fields(record: dict[str, Any], inputs: InputRows) -> dict[str, Any]:
    """Return a record as an input row: the columns of the run's own input, and the parts of the answer, by name.

    If a column of the input has the same name as a part of the answer, the column is only in ``fields``, with the other
    kept columns.
    """
    row = inputs.row(record)
    columns = {**({} if row is None else row.fields), **(record.get("fields") or {})}
    answer = {name: record.get(name) for name in _ALWAYS}
    answer |= {name: record[name] for name in _IF_SET if record.get(name) is not None}
    hidden = {name: columns[name] for name in columns.keys() & answer.keys()}
    return {**columns, **answer, "fields": {**hidden, **(record.get("fields") or {})}}


FORMAT = Format(read, id="id", find=found)
