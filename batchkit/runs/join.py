"""A record's row: the fields that the record kept, or the row of the input that it answers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Set
from typing import Any

from batchkit.config.tables import JobConfig
from batchkit.errors import InputError
from batchkit.sources import read_rows
from batchkit.sources.rowhash import known_hashes
from batchkit.types import Row


def with_fields(
    records: Iterable[dict[str, Any]],
    job: JobConfig,
    names: set[str],
    rare: Set[str] = frozenset(),
) -> Iterator[tuple[dict[str, Any], Mapping[str, Any]]]:
    """Each record with its row's fields: those it kept if ``names`` are among them, else the row's.
    ``rare``: names of fields that a row may lack. They are looked for as well, and missing only if
    the row is.

    The rows are read again if they are needed; ``records`` must be in the order of the input. A
    failed record, which is only counted, keeps its own fields if its row has changed since.

    Raises:
        InputError: the rows are missing, or are no longer the ones that were answered.
    """
    walk = _Walk(job)
    for record in records:
        kept = record.get("fields") or {}
        is_enough = names <= kept.keys()
        if is_enough and (rare <= kept.keys() or job.input.path is None):
            yield record, kept
            continue
        if job.input.path is None:
            raise InputError(
                f"the fields {sorted(names)} are needed, and the run did not keep them: its rows came"
                " from Python; name them in output.keep"
            )
        try:
            row = walk.row(record["index"])
        except InputError:
            if not is_enough:
                raise
            row = None
        if row is not None and _answers(record, row):
            yield record, row.fields
        elif is_enough or (row is not None and record["status"] == "failed"):
            yield record, kept
        else:
            what = "is no longer there" if row is None else "is not the one that was answered"
            raise InputError(
                f"{job.input.path}: row {record['index']} (id {record['id']}) {what}; its fields"
                f" {sorted(names)} are needed, and the run did not keep them: bring the input back,"
                " or start a new run with them in output.keep"
            )


def with_group(records: Iterable[dict[str, Any]], job: JobConfig) -> Iterator[dict[str, Any]]:
    """Each record with the field that the job's table is grouped by, if it is still known."""
    group_by, walk = job.scoring.group_by, _Walk(job)
    for record in records:
        kept = record.get("fields") or {}
        if group_by is None or group_by in kept:
            yield record
            continue
        try:
            row = walk.row(record["index"])
        except InputError:  # the input is missing; the records are still there
            row = None
        is_same = row is not None and _answers(record, row)
        value = row.fields.get(group_by) if row is not None and is_same else None
        yield {**record, "fields": {**kept, group_by: value}}


class _Walk:
    """The rows of a job's input in order, without its limit."""

    def __init__(self, job: JobConfig) -> None:
        table = job.input.model_copy(update={"limit": None})
        self._rows = iter(()) if table.path is None else read_rows(table)
        self._row: Row | None = None

    def row(self, index: int) -> Row | None:
        """The row at ``index``, if it exists; call it with ascending indexes."""
        while self._row is None or self._row.index < index:
            self._row = next(self._rows, None)
            if self._row is None:
                return None
        return self._row if self._row.index == index else None


def _answers(record: Mapping[str, Any], row: Row) -> bool:
    return record.get("input_hash") in (None, *known_hashes(row.fields))
