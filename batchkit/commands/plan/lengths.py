"""The lengths of a job's prompts, counted as by ``validate``, and the share of rows that would fail."""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import closing
from itertools import islice
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from batchkit.commands import Say
from batchkit.commands.validate import checked
from batchkit.config.tables import JobConfig
from batchkit.execution.reuse import check_reuse, reusable
from batchkit.rendering.global_order import first_block, worth_ordering
from batchkit.rendering.request_hash import RequestHashes, is_determined
from batchkit.rendering.steps import renderer_of
from batchkit.runs.status import counts_of
from batchkit.sources import never
from batchkit.sources.input import Input
from batchkit.sources.sample import drawn, in_random_order, indexes_of
from batchkit.storage.answers import AnswerIndex, SeenHashes
from batchkit.storage.checkpoint import Totals
from batchkit.storage.index_set import IndexSet
from batchkit.storage.log import RESULTS
from batchkit.storage.runfolder import is_run
from batchkit.types import Request

MOST_COUNTED, MOST_WITH_IMAGES = 100_000, 2_000
_SAY_EVERY_S = 5.0
_UNTIMED = 64  # the first rows include time for imports and thread start


class Lengths(NamedTuple):
    """The lengths of a job's prompts.

    - ``rows``: number of rows of the job. ``left``: number of rows without a record.
    - ``counted``: number of rows without a record that were rendered, chosen at random if not all of them were.
    - ``indexes``: indexes of the rendered rows that would reach the engine. ``sizes``: their prompt sizes in ``unit``:
      tokens or characters, or seconds for recordings.
    - ``is_exact``: True if all sizes are prompt tokens.
    - ``most_tokens``: maximum length of an answer; None if unknown.
    - ``deduplicated``, ``reused``: rendered rows whose answer would be copied from an equal request, or another run.
    - ``order``: the order in which rows would run, as in ``run.order``.
    - ``row_s``: seconds to render and count one row; the run can't be faster than this. 0 if unknown.
    """

    rows: int
    left: int
    counted: int
    indexes: NDArray[np.int64]
    sizes: NDArray[np.float64]
    unit: Literal["tokens", "characters", "seconds"]
    is_exact: bool
    most_tokens: float | None
    deduplicated: int
    reused: int
    order: str
    row_s: float

    @property
    def scale(self) -> float:
        """The number of rows without a record for each rendered row."""
        return self.left / self.counted if self.counted else 0.0

    @property
    def computed(self) -> float:
        """The share of rows that would reach the engine."""
        return len(self.indexes) / self.counted if self.counted else 1.0

    @property
    def failing(self) -> float:
        """The share of rows that would fail before they reach the engine."""
        n_good = len(self.indexes) + self.deduplicated + self.reused
        return 1 - n_good / self.counted if self.counted else 0.0


def count_lengths(job: JobConfig, source: Input, most: int | None, say: Say) -> Lengths:
    """Render at most ``most`` rows of ``source`` without a record, and return the lengths of their prompts.

    Raises:
        JobError: The job itself is invalid.
    """
    indexes = indexes_of(source, job.input)
    done = counts_of(job.folder).totals if is_run(job.folder) else Totals()
    order: Iterable[int] = in_random_order(indexes, seed=job.run.seed)
    if job.run.sample is not None:
        order = indexes = [*drawn(indexes, job.input, job.run.sample, seed=job.run.seed)]
    most = most or (MOST_WITH_IMAGES if job.prompt.has_media else MOST_COUNTED)
    chosen = IndexSet(islice((index for index in order if not done.is_settled(index)), most))
    rows = left = len(indexes)
    if done.records:
        left = sum(not done.is_settled(index) for index in indexes)
    with closing(Copies(job, say)) as copies:
        found = _counted(job, source, chosen, copies, say)
    return found._replace(rows=rows, left=left, order=_order(job, source, rows))


def _counted(job: JobConfig, source: Input, chosen: IndexSet, copies: Copies, say: Say) -> Lengths:
    """Return the lengths of the rows in ``chosen``, as if the job had no other rows."""
    sizes: dict[int, float] = {}
    in_tokens, most_tokens = True, 0.0
    began = time.monotonic()
    next_line, n = began + _SAY_EVERY_S, 0
    for n, (row, request, prompt, error) in enumerate(
        checked(job, source.read(lambda index: index not in chosen))
    ):
        now = time.monotonic()
        if n == _UNTIMED:
            began = now
        if now >= next_line:
            next_line = now + _SAY_EVERY_S
            say(f"counting the prompts' tokens: {n:,} of {len(chosen):,} rows")
        if error is not None or copies.are_known(request):
            continue
        size: float | None = None if prompt is None else prompt.prompt_tokens
        in_tokens = in_tokens and size is not None
        if request.speech is not None:
            size = request.speech.seconds
        elif size is None:
            text = None if prompt is None else prompt.text
            size = len(str(row.fields) if text is None else text)
        sizes[row.index] = size
        of_answer = request.sampling.get("max_tokens") or 0
        most_tokens = max(most_tokens, of_answer * (request.sampling.get("n") or 1))
    ordered, is_speech = sorted(sizes), job.task == "transcribe"
    return Lengths(
        rows=len(chosen),
        left=len(chosen),
        counted=len(chosen),
        indexes=np.array(ordered, dtype=np.int64),
        sizes=np.array([sizes[index] for index in ordered], dtype=np.float64),
        unit="seconds" if is_speech else "tokens" if in_tokens else "characters",
        is_exact=in_tokens and not job.has_several,
        most_tokens=None if job.has_several and not is_speech else most_tokens,
        deduplicated=copies.deduplicated,
        reused=copies.reused,
        order=job.run.order,
        row_s=(time.monotonic() - began) / (n - _UNTIMED) if n > 2 * _UNTIMED else 0.0,
    )


class Copies:
    """Counts of requests that would be copied. ``say`` gets lines about runs that can't be reused."""

    def __init__(self, job: JobConfig, say: Say) -> None:
        check_reuse(job)
        self._job, self._hashes, self._seen = job, RequestHashes(job), SeenHashes()
        if is_run(job.folder):
            self._seen.add_answers_of(job.folder / RESULTS)
        self._indexes = [AnswerIndex(folder / RESULTS) for folder in reusable(job, say)]
        self.deduplicated = self.reused = 0

    def close(self) -> None:
        for index in self._indexes:
            index.close()

    def are_known(self, request: Request) -> bool:
        """Return whether the answer would be copied, and count the request. Rows with several generations are not
        counted."""
        job = self._job
        if job.has_several or not is_determined(request, generates=job.generates):
            return False
        asked = self._hashes.hashed(request).request_hash
        if job.run.deduplicate and self._seen.add(asked):
            self.deduplicated += 1
            return True
        is_reused = any(index.find(asked) is not None for index in self._indexes)
        self.reused += is_reused
        return is_reused


def _order(job: JobConfig, source: Input, n_rows: int) -> str:
    """Return the order that ``run.order`` gives the rows."""
    if job.run.order != "auto":
        return job.run.order
    block = first_block(source.read(never), renderer_of(job).hint)
    is_global = block.is_all or worth_ordering(block, n_rows, job.run.look_ahead)
    return "global" if is_global else "window"
