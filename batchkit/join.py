"""A record's row: the fields that it kept, or the row of the input that it answers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from batchkit.config import JobConfig
from batchkit.errors import InputError
from batchkit.rowhash import input_hash
from batchkit.sources import read_rows
from batchkit.types import Row


def with_fields(
    records: Iterable[dict[str, Any]], job: JobConfig, names: set[str]
) -> Iterator[tuple[dict[str, Any], Mapping[str, Any]]]:
    """Each record with its row's fields: those it kept if ``names`` are among them, else the row's.

    The rows are read again where they are needed; ``records`` come in the order of the input. A
    failed record, which is only counted, does with what it kept where its row has been mended.

    Raises:
        InputError: the rows are gone, or no longer the ones that were answered.
    """
    rows = None
    for record in records:
        kept = record.get("fields") or {}
        if names <= kept.keys():
            yield record, kept
            continue
        if rows is None:
            rows = _all_rows(job, names)
        row = next((row for row in rows if row.index == record["index"]), None)
        if row is not None and record.get("input_hash") in (None, input_hash(row.fields)):
            yield record, row.fields
        elif row is not None and record["status"] == "failed":
            yield record, kept
        else:
            what = "is no longer there" if row is None else "is not the one that was answered"
            raise InputError(
                f"{job.input.path}: row {record['index']} (id {record['id']}) {what}; its fields"
                f" {sorted(names)} are needed, and the run did not keep them: bring the input back,"
                " or begin anew with them in output.keep"
            )


def _all_rows(job: JobConfig, names: set[str]) -> Iterator[Row]:
    if job.input.path is None:
        raise InputError(
            f"the fields {sorted(names)} are needed, and the run did not keep them: its rows came"
            " from Python; name them in output.keep"
        )
    return read_rows(job.input.model_copy(update={"limit": None}))
