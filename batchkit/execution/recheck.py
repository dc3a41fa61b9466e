"""The self-check of a run that has ended: some of its rows are answered again alone and compared with the records."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from batchkit.config.tables import JobConfig, SamplingTable
from batchkit.errors import JobError, WrongAnswersError
from batchkit.execution.parity import drawn, is_greedy, only
from batchkit.execution.self_check import is_own, logprobs_of, sampling_alone
from batchkit.runs.answers import SideAnswer
from batchkit.runs.verdicts import Verdict, of_numbers, of_texts, tie_of
from batchkit.sources.input import Input
from batchkit.storage.lines import failure_kind
from batchkit.storage.log import RESULTS
from batchkit.storage.newest_lines import read_newest
from batchkit.storage.starts import Checked, read_history
from batchkit.storage.vectors import Vectors

FOLDER = "self-check"  # in the run folder: the run that answers the rows again

Answer = Callable[[JobConfig, Input], object]
"""A function that runs a job with an input."""


def recheck(job: JobConfig, source: Input, n_rows: int, answer: Answer) -> Checked:
    """Answer up to ``n_rows`` rows of the run of ``job`` again, one at a time, and compare the answers with the
    records.

    Rows that an earlier self-check found to be different are among them. ``answer`` runs a job whose run folder is in
    the run folder, and is kept.

    Raises:
        JobError: answers of the job can't be repeated, because they are drawn at random, or rows have several
            generations.
    """
    if job.generates and not is_greedy(job):
        raise JobError(
            f"{job.folder}: its answers are drawn at random (sampling.temperature), so they can't be compared with"
            " other answers to the same requests"
        )
    if job.has_several:
        raise JobError(
            f"{job.folder}: its rows have several generations, whose answers can't be compared in this way"
        )
    then = {**_found_before(job.folder), **drawn(job, n_rows)}
    then = dict([*then.items()][:n_rows])
    again, began = _one_by_one(job), time.monotonic()
    answer(again, only(source, then))
    compared = _Compared(job.folder, again.folder)
    now = {record["index"]: record for record in read_newest(again.folder / RESULTS)}
    return Checked().with_findings(
        [
            {"index": index, "id": record["id"], **compared.verdict(record, now[index]).to_json()}
            for index, record in then.items()
            if index in now and failure_kind(now[index]) is None
        ],
        time.monotonic() - began,
    )


def check_result(job: JobConfig, checked: Checked) -> None:
    """Raise WrongAnswersError if more rows are different than ``self_check.max_different`` allows."""
    if job.self_check.is_exceeded(checked.different, checked.rows):
        raise WrongAnswersError(
            f"{job.folder}: {checked.different} of {checked.rows} rows have another answer if they are computed alone"
            f" (self_check.max_different = {job.self_check.max_different:g}). `batchkit compare --self {job.folder}` shows them, and tries"
            " settings that may cure the fault"
        )


def _found_before(folder: Path) -> dict[int, dict[str, Any]]:
    """Return the records of the rows that earlier self-checks found to be different, by index."""
    found = read_history(folder).self_checks.differences
    indexes = {its["index"] for its in found if its["kind"] == "different"}
    return {
        record["index"]: record
        for record in read_newest(folder / RESULTS)
        if record["index"] in indexes and failure_kind(record) is None
    }


def _one_by_one(job: JobConfig) -> JobConfig:
    """Return the job that answers rows of ``job`` one at a time."""
    changes: dict[str, Any] = {}
    if job.task == "generate" and is_own(job.engine):
        logprobs = {"logprobs": logprobs_of(job.engine)}
        changes["sampling"] = SamplingTable(
            **sampling_alone({**job.sampling.params(), **logprobs}, job.engine)
        )
    return job.as_part(
        name=FOLDER, run={"max_in_flight": 1}, output={"dir": str(job.folder)}, **changes
    )


class _Compared:
    """The comparison of a run's records with the records of the run in the folder ``again``."""

    def __init__(self, folder: Path, again: Path) -> None:
        last = read_history(again).last_start
        self._dtype = None if last is None else last.engine.get("dtype")
        self._before, self._after = Vectors(folder), Vectors(again)

    def verdict(self, batched: Mapping[str, Any], alone: Mapping[str, Any]) -> Verdict:
        old, new = self._before.pooled(batched), self._after.pooled(alone)
        if old is not None and new is not None:
            return of_numbers(old, new, self._dtype)
        return of_texts(SideAnswer.of(batched), SideAnswer.of(alone), tie_of(self._dtype))
