"""A check before a run continues with another ``speculative_config``: some of its rows are answered again.

With greedy decoding, vLLM keeps only drafted tokens that the model would have chosen itself, so answers stay the same.
But rounding may decide between two tokens that are about equally likely, and an option may be wrong for the model.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from heapq import nlargest
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

from batchkit.config.tables import JobConfig
from batchkit.errors import ChangedError
from batchkit.execution.start import Start
from batchkit.runs.answers import SideAnswer
from batchkit.sources.input import Input
from batchkit.storage.identity import Identity, beside, changed_settings
from batchkit.storage.lines import failure_kind
from batchkit.storage.log import RESULTS
from batchkit.storage.newest_lines import read_newest
from batchkit.types import Row

_CHECKED = re.compile(
    r"engines?\.(?:[\w-]+\.)?options\.spec(?:ulative_config|_method|_model|_tokens)"
)
_ROWS = 16


def can_be_checked(start: Start, changes: Sequence[str]) -> bool:
    """Return whether ``changes`` (lines of ``differences``) concern only options that may change after ``check``.

    This needs greedy decoding of all requests, because answers that are drawn at random can't be compared.
    """
    options, job = start.options, start.job
    may_adjust = options.adjust_sampling is not None or options.begun_with is not None
    if may_adjust or not all(_CHECKED.fullmatch(change.partition(":")[0]) for change in changes):
        return False
    return job.task == "generate" and is_greedy(job)


def is_greedy(job: JobConfig) -> bool:
    """Return whether the job decodes all its requests greedily, as far as the job file tells. Rows, and lines of a
    batch file, may have their own temperature."""
    if job.rollout is not None or any(job.retry.temperatures or ()):
        return False
    jobs = [its for _, its in job.of_each_step()]
    has_own = any(its.sampling.sampling_column is not None or its.may_have_lines for its in jobs)
    return not has_own and all(its.sampling.temperature == 0 for its in jobs)


def unchecked(then: Identity, now: Identity) -> dict[str, Any]:
    """Return the options in the identity ``now`` that need ``check``, because ``then`` has other values."""
    return {key: now.get(key) for key in changed_settings(then, now) if _CHECKED.fullmatch(key)}


def check(
    start: Start, source: Input, changed: Sequence[str], answer: Callable[[JobConfig, Input], None]
) -> int:
    """Answer some rows of the run again and compare the answers with the recorded ones. Return the number of rows.

    - ``changed``: the keys of the changed options.
    - ``answer``: runs a job with an input. The job's run folder is ``parity`` in the run folder, and is kept.

    Raises:
        ChangedError: an answer differs.
    """
    job, then = start.job, drawn(start.job, _ROWS)
    of_check = job.as_part(name="parity", output={"dir": str(job.folder)})
    answer(of_check, only(source, then))
    now = {record["index"]: record for record in read_newest(of_check.folder / RESULTS)}
    for index, record in then.items():
        old, new = text_of(record), text_of(now[index])
        if old != new:
            keys = ", ".join(changed)
            raise ChangedError(
                f"{job.folder}: {keys} changed since this run began, and row {index} (id {record['id']}) now has"
                f" another answer\n  {beside(old, new)}\nRemove the change of {keys}, or choose: --fresh or"
                " --on-change new (begin a new run and keep the old one), --on-change requeue (run all rows again),"
                " or another name (--set name=…)"
            )
    return len(then)


def drawn(job: JobConfig, n_rows: int) -> dict[int, dict[str, Any]]:
    """Return the records of up to ``n_rows`` answered rows by index, drawn at random with ``run.seed``.

    Rows with longer answers are drawn more often, because each token can show a difference (weighted sampling without
    replacement: Efraimidis and Spirakis, 2006).
    """
    random = Random(job.run.seed)
    answered = (r for r in read_newest(Path(job.folder, RESULTS)) if failure_kind(r) is None)
    found = nlargest(
        n_rows, answered, key=lambda r: random.random() ** (1 / max(1, len(text_of(r))))
    )
    return {record["index"]: record for record in found}


def only(source: Input, indexes: Collection[int]) -> Input:
    """Return ``source`` with only the rows that have these indexes."""

    def rows(skip: Callable[[int], bool]) -> Iterator[Row]:
        found = source.everything(lambda index: index not in indexes or skip(index))
        return islice(found, len(indexes))  # do not read the rest of the input

    return source._replace(read=rows, size=lambda: len(indexes))


def text_of(record: Mapping[str, Any]) -> str:
    """Return the answers of all steps of the row, or why the row failed."""
    if (error := record.get("error")) is not None:
        return f"failed: {error['kind']}: {error['message']}"
    steps = (record.get("steps") or {}).values()
    texts = [SideAnswer.of({"finish_reason": None, **part}).text for part in (*steps, record)]
    return "\n".join(texts)
