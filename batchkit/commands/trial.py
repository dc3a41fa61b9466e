"""Trials: starts of real runs, measured from what they have written.

``find-bs`` and ``bench`` make them in a scratch folder, and so does ``parity``; ``plan`` makes them in the
job's own.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from batchkit.config.tables import JobConfig
from batchkit.errors import EngineError, Interrupted
from batchkit.execution.kept_engine import KeptEngine
from batchkit.execution.run import start_run
from batchkit.execution.signals import StopRequest
from batchkit.execution.start import Options
from batchkit.execution.summary import RunSummary
from batchkit.sources.input import Input
from batchkit.storage.lines import tokens_in
from batchkit.storage.log import read_lines

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Answer:
    """A row, from its record: answered, or failed with an error of the ``kind``.

    ``began`` and ``ended``: seconds since the epoch, from its entry into the engine's queue on. Tokens are
    those of all its attempts, ``last_tokens`` those of the last one's answers.
    """

    index: int
    began: float
    ended: float
    prompt_tokens: int
    completion_tokens: int
    last_tokens: int
    kind: str = ""
    message: str = ""

    @property
    def latency_s(self) -> float:
        return self.ended - self.began


def answers_in(log: Path, offset: int = 0) -> Iterator[tuple[Answer, int]]:
    """The rows whose records are past ``offset``, and where in ``log`` each ends. A record that is being
    written is left out."""
    for line in read_lines(log, offset):
        if (record := line.record) is not None:
            ended, error = seconds_at(record.finished_at), record.error
            yield (
                Answer(
                    record.index,
                    ended - record.latency_s,
                    ended,
                    *tokens_in(record),
                    0 if record.usage is None else record.usage.completion_tokens,
                    "" if error is None else error.kind,
                    "" if error is None else error.message,
                ),
                line.end,
            )


def seconds_at(time: str) -> float:
    """A time of a record or of the metrics, in seconds since the epoch."""
    return datetime.fromisoformat(time).timestamp()


def tried(
    job: JobConfig,
    source: Input | None,
    options: Options,
    *,
    kept: KeptEngine | None = None,
    stop: StopRequest | None = None,
) -> RunSummary:
    """As ``start_run``.

    Raises:
        BatchkitError: the run stopped, or could not begin.
        Interrupted: a signal ended it.
    """
    summary = start_run(job, source, options, kept=kept, stop=stop).checked()
    if summary.exit >= 128:
        raise Interrupted(summary.exit - 128)
    return summary


@contextmanager
def scratch_folder(prefix: str) -> Iterator[Path]:
    """A new folder, removed at the end unless the EngineError that ends the block names a file in it."""
    folder = Path(tempfile.mkdtemp(prefix=prefix))
    is_kept = False
    try:
        yield folder
    except EngineError as error:
        is_kept = str(folder) in str(error)
        raise
    finally:
        if not is_kept:
            shutil.rmtree(folder, ignore_errors=True)
