"""The self-check of a run that has ended: some of its rows are answered again alone and compared with the records."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from batchkit.config.tables import JobConfig, SamplingTable
from batchkit.errors import JobError, WrongAnswersError
from batchkit.execution.parity import drawn, is_greedy, only
from batchkit.runs.verdicts import Verdict, of_numbers, of_texts, tie_of
from batchkit.sources.input import Input
from batchkit.storage.lines import failure_kind
from batchkit.storage.log import RESULTS
from batchkit.storage.newest_lines import read_newest
from batchkit.storage.starts import Checked, read_history
from batchkit.storage.vectors import Vectors
from batchkit.types import Choice, Pooled

FOLDER = "self-check"  # in the run folder: the run that answers the rows again
_LOGPROBS = 10

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
    alone, began = _alone(job), time.monotonic()
    answer(alone, only(source, then))
    dtype = _dtype_of(alone.folder)
    compared = _Compared(job, alone.folder, dtype)
    now = {record["index"]: record for record in read_newest(alone.folder / RESULTS)}
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
    allowed = job.self_check.max_different
    if checked.different > allowed * checked.rows:
        raise WrongAnswersError(
            f"{job.folder}: {checked.different} of {checked.rows} rows have another answer if they are computed alone"
            f" (self_check.max_different = {allowed:g}). `batchkit compare --self {job.folder}` shows them, and tries"
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


def _alone(job: JobConfig) -> JobConfig:
    """Return the job that answers rows of ``job`` one at a time."""
    changes: dict[str, Any] = {}
    if job.task == "generate" and (job.engine.kind != "openai-server" or job.engine.server):
        sampling = {**job.sampling.params(), "logprobs": _LOGPROBS}
        if job.engine.kind == "vllm":
            sampling["skip_reading_prefix_cache"] = True
        changes["sampling"] = SamplingTable(**sampling)
    return job.as_part(
        name=FOLDER, run={"max_in_flight": 1}, output={"dir": str(job.folder)}, **changes
    )


def _dtype_of(folder: Path) -> str | None:
    last = read_history(folder).last_start
    return None if last is None else last.engine.get("dtype")


class _Compared:
    """The comparison of records of a run with those of the run in the folder ``alone``."""

    def __init__(self, job: JobConfig, alone: Path, dtype: str | None) -> None:
        self._dtype = dtype
        self._before, self._after = Vectors(job.folder), Vectors(alone)

    def verdict(self, batched: Mapping[str, Any], alone: Mapping[str, Any]) -> Verdict:
        if batched.get("text") is None:
            old, new = _pooled(batched, self._before), _pooled(alone, self._after)
            return of_numbers(old, new, self._dtype)
        return of_texts(_choice(batched), _choice(alone), tie_of(self._dtype), is_beginning=False)


def _pooled(record: Mapping[str, Any], vectors: Vectors) -> Pooled:
    score = record.get("score")
    place = record.get("embedding")
    return Pooled(
        vector=None if place is None else vectors.of(record).astype("<f4").tobytes(),
        probabilities=record.get("probabilities"),
        scores=[score] if isinstance(score, float | int) else score,
        tokens=(place or {}).get("tokens"),
    )


def _choice(record: Mapping[str, Any]) -> Choice:
    choices: Sequence[Mapping[str, Any]] = record.get("choices") or [record]
    first = choices[0]
    return Choice(
        first["text"],
        first["finish_reason"],
        first.get("logprobs"),
        first.get("reasoning"),
        first.get("tool_calls"),
    )
