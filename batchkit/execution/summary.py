"""The result of a start, and ``run.on_end``: a command that receives it."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from batchkit.config.numbers import number
from batchkit.config.tables import JobConfig
from batchkit.config.tables.run import words_of
from batchkit.errors import BatchkitError, Interrupted, StoreError
from batchkit.runs.failures import Failure, lines_of
from batchkit.sources.input import Input
from batchkit.storage.log import RESULTS
from batchkit.storage.manifest import read_manifest
from batchkit.storage.newest_lines import read_newest
from batchkit.storage.starts import Checked

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

TIMEOUT_S = 60.0
_STDERR = 2


@dataclass(frozen=True, slots=True)
class RunSummary:
    """The result of a start.

    ``ok``, ``failed``, ``generations``, ``failures`` and ``uncovered`` count the whole job; ``price`` is for all
    starts. The other numbers are for this start.
    """

    name: str
    folder: str
    total: int
    ok: int
    failed: int
    skipped: int  # rows settled before this start
    retried: int  # retries within this start
    reused: int  # answers copied from the runs in ``run.reuse``
    deduplicated: int  # answers copied from equal requests of this run
    seconds: float  # while the engine was loaded, without the loading
    load_seconds: float
    prompt_tokens: int
    completion_tokens: int
    generations: int  # of rows with several generations
    rows_per_s: float
    completion_tokens_per_s: float
    failed_by_kind: Mapping[str, int]
    # Exit code: 0 all rows ok; 3 some failed; 1 stopped by an error, or rows without a record remain; 130 or
    # 143 interrupted.
    exit: int
    # The budget that stopped the start, for example ``budget.max_seconds = 60``.
    stopped_by: str | None = None
    price: float | None = None  # None if the job has no price
    uncovered: int = 0  # transcripts that lack text for some of the sound
    # Empty if the start was stopped.
    failures: Sequence[Failure] = field(default=(), repr=False, compare=False)
    source: Input | None = field(default=None, repr=False, compare=False)  # the input of the rows
    # The self-check of this start.
    checked: Checked = field(default=Checked(), repr=False, compare=False)
    # When the run began; distinguishes the run from other runs in the same folder.
    run: str = field(default="", repr=False, compare=False)
    # False if the task gives no text.
    generates: bool = field(default=True, repr=False, compare=False)

    def to_json(self) -> dict[str, Any]:
        names = [field.name for field in fields(self) if field.repr]
        return {name: getattr(self, name) for name in names}

    def to_text(self, *, was_retry: bool = False) -> str:
        """Return a few lines for the terminal. ``was_retry``: True leaves out the advice to retry failed rows."""
        done = f"{self.ok:,} ok, {self.failed:,} failed of {self.total:,} rows"
        tokens = f"{self.completion_tokens_per_s:,.0f} output tok/s"
        if not self.generates:
            per_s = self.prompt_tokens / self.seconds if self.seconds else 0
            tokens = f"{per_s:,.0f} prompt tok/s"
        rates = f"{self.rows_per_s:.1f} rows/s, {tokens}"
        if self.generations:
            done = f"{done}, {self.generations:,} generations"
        lines = [f"{done}; {self.skipped:,} were done before; {self.seconds:.1f} s, {rates}"]
        copied = {"equal requests": self.deduplicated, "other runs": self.reused}
        if parts := [f"{n:,} from {source}" for source, n in copied.items() if n]:
            lines.append(f"answers copied: {', '.join(parts)}")
        if checked := self.checked.in_words():
            lines.append(checked)
        if self.price is not None:
            lines.append(f"price so far: {number(self.price)}")
        if self.uncovered:
            lines.append(
                f"{self.uncovered:,} recordings have sound without text: see `coverage` in their records,"
                " missing_s in exports"
            )
        if self.exit in (130, 143):
            lines.append("interrupted; run the same command to continue")
        elif self.stopped_by:
            lines.append(f"stopped by {self.stopped_by}: {self._left(self.stopped_by, was_retry)}")
        elif self.exit == 1:
            lines.append("rows without a record remain; next: batchkit run")
        lines += lines_of(self.failures, self.folder, was_retry=was_retry)
        return "\n".join([*lines, f"results in {self.folder}/{RESULTS}"])

    def _left(self, budget: str, was_retry: bool) -> str:
        """Return a line that says how to continue a run which ``budget`` has stopped."""
        rows = f"{max(0, self.total - self.ok - self.failed):,} rows are left"
        if was_retry:
            rows = f"{self.failed:,} failed rows are left"
        key = budget.partition(" ")[0]
        if key == "budget.max_seconds":
            return f"{rows}; run the same command to continue"
        return f"{rows}; to continue, raise this limit: --set {key}=…"

    def records(self) -> Iterator[dict[str, Any]]:
        """Yield the newest record of each row, in input order.

        Raises:
            StoreError: another run has replaced this one in the folder, for example with ``fresh=True``.
        """
        return read_newest(self._folder_of_run() / RESULTS)

    def to_arrow(self) -> pa.Table:
        """Return the input's rows with their answers, in input order, as a ``pyarrow.Table``.

        The input's columns come first, then the columns of ``batchkit export --parquet``; ``text`` is the answer. Rows
        without a record have null in the columns of the export.

        - An input column with the name of an export column gets the prefix ``fields.``, except ``id`` if ``input.id``
          names it.
        - A column whose values have no common Arrow type becomes text; a column of images is left out.
        - For rows from an iterator, only the fields in ``output.keep`` are available.

        Raises:
            InputError: the input has changed since the run read it.
            StoreError: as for ``records``.
        """
        from batchkit.runs.table import joined_table

        assert self.source is not None, "a start of a run has a source"
        return joined_table(self._folder_of_run(), self.source)

    def to_pandas(self) -> pd.DataFrame:
        """Return the result of ``to_arrow`` as a DataFrame. If the input was a DataFrame, its index is used.

        A column of whole numbers with missing values has pandas' type ``Int64``.
        """
        from batchkit.runs.table import frame_of

        frame = frame_of(self.to_arrow())
        if self.source is not None and self.source.labels is not None:
            frame.index = self.source.labels
        return frame

    def _repr_html_(self) -> str:
        """Return the HTML that a notebook shows for the ``Run``."""
        from batchkit.runs.run import Run

        return Run(self.folder)._repr_html_()

    def _folder_of_run(self) -> Path:
        folder = Path(self.folder)
        if (began := read_manifest(folder).created_at) != self.run:
            raise StoreError(
                f"{folder}: holds another run since {began}; this run was moved aside, to {folder}.1 or a"
                " higher number. Read the results of a run before the next run begins, or give each run another name"
            )
        return folder


class Outcome(NamedTuple):
    """The result of a start: the summary of finished rows, and the error that stopped it, if any. ``unsent``: an error
    for each folder that lacks its last parts."""

    summary: RunSummary
    error: BatchkitError | None = None
    unsent: Sequence[BatchkitError] = ()

    def checked(self) -> RunSummary:
        """Return the summary, or raise the error if there is one."""
        if self.error is not None:
            raise self.error
        return self.summary


@contextmanager
def notifying(job: JobConfig, say: Callable[[str], None]) -> Iterator[Callable[[RunSummary], None]]:
    """Run the command ``run.on_end`` when the block ends, even by an error. The command gets a summary on its stdin.

    Yields a function that takes a summary; the newest one counts. A run that could not begin has no summary, and prints
    its own error. If a signal stops the run before there is a summary, the command gets the run's name, folder and exit
    code.
    """
    newest: dict[str, Any] = {}
    try:
        yield lambda summary: newest.update(summary.to_json())
    except Interrupted as stop:
        newest = {"name": job.name, "folder": str(job.folder), **newest, "exit": 128 + stop.signum}
        raise
    finally:
        if newest and job.run.on_end is not None:
            notify(job.run.on_end, newest, say)


def notify(
    command: str | Sequence[str],
    summary: Mapping[str, Any],
    say: Callable[[str], None],
    *,
    timeout_s: float = TIMEOUT_S,
) -> None:
    """Run ``command`` with ``summary`` as one line of JSON on its stdin.

    The command's output goes to stderr, because stdout is for results. A failure is reported to ``say``.
    """
    words = words_of(command)
    try:
        done = subprocess.run(
            words, input=json.dumps(summary) + "\n", stdout=_STDERR, text=True, timeout=timeout_s
        )
    except subprocess.TimeoutExpired:
        say(f"run.on_end: {words[0]} was stopped after {timeout_s:g} s")
    except (OSError, ValueError) as error:  # ValueError: a NUL in a word
        say(f"run.on_end: can't run {words[0]}: {getattr(error, 'strerror', None) or error}")
    else:
        if done.returncode:
            say(f"run.on_end: {words[0]} ended with exit code {done.returncode}")
