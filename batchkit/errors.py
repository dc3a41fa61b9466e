"""Every error that batchkit raises on purpose.

BatchkitError                  exit code
├── JobError                   2   the command line or the job file is wrong
│   ├── InputError             2   the rows can't be read
│   │   └── BrokenInputError   1   some rows can't be read; earlier rows can
│   │       └── ChangedInputError  1   the input changed while the run read it
│   └── ChangedError           2   the job or its input changed since the run began
├── StoreError                 1   the run folder can't be written, read or locked
│   ├── LostVectorError        1   the vector of a record is missing or damaged
│   ├── HeldRunError           1   another process writes the run in the store
│   └── LostLockError          1   the folder's lock was lost; another process may have it
├── UploadError                1   an export could not be sent
├── EngineError                1   the engine is dead, or never started
├── FailedRowsError            3   rows failed, and the caller wants an error in that case
├── WrongAnswersError          1   the engine gives other answers in a batch than alone
├── TooManyFailuresError       1   run.fail_on_error was reached
├── BlockedError               1   a rollout's code blocks all other rows
├── BudgetError                1   a budget was used up before a judge or `plan` had finished
└── RowError                   –   one row failed; the run continues
    ├── TemplateError          template
    ├── MediaError             media
    ├── PromptTooLongError     prompt_too_long
    ├── RequestError           invalid_request
    │   └── WrongTaskError     invalid_request
    ├── RowTimeoutError        timeout
    ├── RenderTimeoutError     timeout
    ├── RowOutOfMemoryError    oom
    ├── EngineCrashError       engine_crash
    ├── ServerError            server
    │   └── AnswerTooLargeError  server
    ├── EmptyTextError         empty
    ├── InvalidOutputError     invalid_output
    │   └── TruncatedOutputError  invalid_output
    └── RolloutError           rollout
        └── ReplayError        rollout

A RowError becomes a failed record; every other error stops the run with the store consistent.
"""

from __future__ import annotations

import signal
from collections.abc import Collection
from typing import ClassVar


class BatchkitError(Exception):
    """Base of all batchkit errors; the message is written for the user at the terminal."""

    exit_code: ClassVar[int] = 1


class JobError(BatchkitError):
    """The job file or the command line can't be used."""

    exit_code = 2


class InputError(JobError):
    """The rows can't be read: a file is missing, unreadable, or not in the stated format."""


class BrokenInputError(InputError):
    """The input can't be read to its end. The rows read before are answered in this start, or after the input is
    fixed."""

    exit_code = 1


class ChangedInputError(BrokenInputError):
    """The files ``paths`` changed since this start began; some rows may have been answered from the old content, others
    from the new."""

    def __init__(self, message: str, paths: Collection[str]) -> None:
        super().__init__(message)
        self.paths = paths


class ChangedError(JobError):
    """The job or its input changed since the run began."""


class FailedRowsError(BatchkitError):
    """The run has ended, with failed rows; their records are on disk."""

    exit_code = 3


class StoreError(BatchkitError):
    """The run folder can't be written, read, or locked."""


class LostVectorError(StoreError):
    """The vector of a record is missing, is damaged, or belongs to another row."""


class HeldRunError(StoreError):
    """Another process writes the run in ``output.store``."""


class LostLockError(StoreError):
    """This process no longer holds the run folder's lock, and must not write to the folder."""


class UploadError(BatchkitError):
    """The export was written, but a server refused it or can't be reached."""


class EngineError(BatchkitError):
    """The engine is dead or could not start; it takes no more requests."""


class WrongAnswersError(BatchkitError):
    """The engine gives other answers in a batch than alone (``[self_check]``)."""


class TooManyFailuresError(BatchkitError):
    """More rows failed than ``run.fail_on_error`` allows, or all rows of a sample of ``plan`` failed."""


class BudgetError(BatchkitError):
    """A limit in ``[budget]`` was reached before the judge had read all answers, or ``plan`` had answered its
    sample."""


class BlockedError(BatchkitError):
    """The code of one row of ``[rollout]`` blocks all other rows."""


class Interrupted(BaseException):
    """A signal stopped the program; the exit code is 128 + ``signum``."""

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.signum = signum


class RowError(BatchkitError):
    """One row can't be answered. ``kind`` is the record's ``error.kind``."""

    kind: ClassVar[str] = "invalid_request"
    retryable: ClassVar[bool] = False


class TemplateError(RowError):
    """A template can't be rendered with this row's fields."""

    kind = "template"


class MediaError(RowError):
    """An image, a sound or a video is missing, must not be opened, is too large, or can't be decoded."""

    kind = "media"


class PromptTooLongError(RowError):
    """The prompt leaves no room for an answer within ``max_model_len``.

    An engine sets ``prompt_tokens`` (the length of the prompt) and ``max_model_len`` if these are known.
    """

    kind = "prompt_too_long"
    prompt_tokens: int | None = None
    max_model_len: int | None = None


class RequestError(RowError):
    """The row can't be made into a request, or the engine refused the request."""

    kind = "invalid_request"


class WrongTaskError(RequestError):
    """The row is for another ``task`` than the job."""


class RowTimeoutError(RowError):
    """The engine produced no token for this row within ``run.row_timeout_s``."""

    kind = "timeout"
    retryable = True


class RenderTimeoutError(RowError):
    """A template did not finish with this row within ``run.row_timeout_s``; the row is not retried."""

    kind = "timeout"


class RowOutOfMemoryError(RowError):
    """This row alone makes the engine run out of memory; a smaller image may help."""

    kind = "oom"
    retryable = True


class EngineCrashError(RowError):
    """This row alone crashes the engine."""

    kind = "engine_crash"


class ServerError(RowError):
    """The server fails on this row, but answers other rows."""

    kind = "server"
    retryable = True


class AnswerTooLargeError(ServerError):
    """The server's answer is larger than ``engine.max_answer_bytes``."""

    retryable = False


class EmptyTextError(RowError):
    """The engine answered with no text at all, or only white space."""

    kind = "empty"
    retryable = True


class InvalidOutputError(RowError):
    """The answer fails ``output.parse``: it is not JSON, or its JSON does not match the schema."""

    kind = "invalid_output"
    retryable = True


class TruncatedOutputError(InvalidOutputError):
    """The answer was cut off by ``max_tokens`` before its JSON ended."""


class RolloutError(RowError):
    """The rollout's function raised an error on this row, or returned a value that is not an answer."""

    kind = "rollout"


class ReplayError(RolloutError):
    """The function of a resumed rollout row made a request that differs from the logged one."""


def limit_reached(error: RecursionError | MemoryError) -> str:
    """Return a message for an exceeded Python limit (recursion or memory), with the file and line of the code."""
    import traceback

    frame = traceback.extract_tb(error.__traceback__)[-1]
    file = frame.filename.rpartition("/")[2]
    place = f"{file} line {frame.lineno}, {type(error).__name__}"
    if isinstance(error, MemoryError):
        return f"out of memory ({place}); use a machine with more memory, or smaller inputs and batches"
    return f"something in the job or its files is nested too deeply ({place}); flatten it"
