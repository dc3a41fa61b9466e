"""The messages between a run and its engine's process. ``channel.py`` carries them."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct

from batchkit.config.tables import JobConfig
from batchkit.engines.base import EngineLoad
from batchkit.engines.faults import Fault
from batchkit.errors import RowError
from batchkit.types import Choice, Completion, Cut, Pair, Pooled, Request, Row, Usage


class _Message(Struct, frozen=True, array_like=True, tag=True, forbid_unknown_fields=True):
    pass


class Open(_Message, frozen=True):
    """The job whose engine to open, the first message.

    Pickled: a job file may hold dates, and a program's job tuples, which JSON and msgpack would turn
    into other values. Nothing else is pickled, and the run unpickles nothing.
    """

    pickled: bytes

    @classmethod
    def of(cls, job: JobConfig) -> Open:
        return cls(pickle.dumps(job))

    @property
    def job(self) -> JobConfig:
        job: JobConfig = pickle.loads(self.pickled)
        return job


class Submit(_Message, frozen=True):
    """What engines read of a Request; the rest, like the row's id and fields, stays with the run.

    What a row of the input decides has no narrower type: the engine refuses a wrong value, as it
    would in the run's own process.
    """

    number: int
    index: int
    messages: Any
    prompt: str | None
    sampling: Any
    attempt: int
    media_bytes: int
    cut: Cut | None
    tools: Any
    tool_choice: Any
    parallel_tool_calls: bool | None
    chat_template_kwargs: Any
    pair: Any

    @classmethod
    def of(cls, number: int, request: Request) -> Submit:
        return cls(
            number,
            request.row.index,
            request.messages,
            request.prompt,
            request.sampling,
            request.attempt,
            request.media_bytes,
            request.cut,
            request.tools,
            request.tool_choice,
            request.parallel_tool_calls,
            request.chat_template_kwargs,
            request.pair,
        )

    @property
    def request(self) -> Request:
        """A new one each time."""
        return Request(
            Row(self.index, "", {}),
            self.messages,
            self.prompt,
            self.sampling,
            input_hash="",
            attempt=self.attempt,
            media_bytes=self.media_bytes,
            cut=self.cut,
            tools=self.tools,
            tool_choice=self.tool_choice,
            parallel_tool_calls=self.parallel_tool_calls,
            chat_template_kwargs=self.chat_template_kwargs,
            pair=None if self.pair is None else Pair(*self.pair),
        )


class Close(_Message, frozen=True):
    """Close the engine and end."""


class Ready(_Message, frozen=True):
    """The model is loaded."""

    limits: Mapping[str, Any]
    versions: Mapping[str, str]
    load: EngineLoad


class Refused(_Message, frozen=True):
    """The job is wrong: the message of a JobError."""

    message: str


class NotStarted(_Message, frozen=True):
    """The engine did not start: the arguments of StartFailed."""

    message: str
    fault: Fault
    limits: Mapping[str, Any]


class Done(_Message, frozen=True):
    """A Completion without its request, which the run keeps under ``number``."""

    number: int
    choices: Sequence[Choice]
    usage: Usage | None
    latency_s: float
    error: RowError | None
    prompt: str | None
    pooled: Pooled | None

    @classmethod
    def of(cls, number: int, done: Completion) -> Done:
        return cls(
            number,
            done.choices,
            done.usage,
            done.latency_s,
            done.error,
            done.prompt,
            done.pooled,
        )

    def completion(self, request: Request) -> Completion:
        return Completion(
            request,
            self.choices,
            self.usage,
            self.latency_s,
            self.error,
            self.prompt,
            pooled=self.pooled,
        )


class Turn(_Message, frozen=True):
    """What finished in one turn; also sent empty, twice a second, as a sign of life."""

    done: Sequence[Done]
    load: EngineLoad


class Died(_Message, frozen=True):
    """The engine died; nothing follows. ``number``: the request that killed it, if known."""

    fault: Fault
    number: int | None


OfRun = Open | Submit | Close
OfEngine = Ready | Refused | NotStarted | Turn | Died
