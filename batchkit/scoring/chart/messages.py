"""Messages between the scorer and the process that forks for each chart. JSON, never pickle."""

from __future__ import annotations

import json
from typing import Any, Literal, NamedTuple

Mode = Literal["official", "fixed"]

CONFINED = "+"  # a chart's process sends this first, or else why it is not confined
MAX_Y_CHARS = 2**16  # the longest reference of RealHiTBench has 2,236
MAX_RESULT_BYTES = 2**20  # two readings of MAX_Y_CHARS, each escaped, and an error


class SandboxLimits(NamedTuple):
    """Limits of one chart. It can't start processes, and threads only within its memory."""

    timeout_s: float = 20.0
    memory_bytes: int = 2**30  # address space, on top of the interpreter's with its libraries
    file_bytes: int = 2**24
    folder_bytes: int = 2**26  # of all files; checked 20 times a second


DEFAULT_LIMITS = SandboxLimits()


class Run(NamedTuple):
    """Code to run; ``table`` is copied for it, None if there is none."""

    code: str
    chart_type: str
    mode: Mode
    table: str | None
    limits: SandboxLimits


class Ended(NamedTuple):
    """How a chart's process ended.

    ``cause`` is why it was killed, None if it ended on its own with ``returncode`` (negative: by
    that signal). ``written`` is what it sent, unchanged: any text at all after CONFINED.
    """

    cause: Literal["time", "folder", "result"] | None
    returncode: int
    written: str


def encode(message: Run | Ended) -> bytes:
    return json.dumps(message._asdict()).encode()  # surrogates survive as escapes


def decode_run(data: bytes) -> Run:
    fields: dict[str, Any] = json.loads(data)
    return Run(**{**fields, "limits": SandboxLimits(*fields["limits"])})


def decode_ended(data: bytes) -> Ended:
    return Ended(**json.loads(data))
