"""One engine's answers to the rows: an ordinary run in a folder of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from batchkit.commands.parity.sides import Side
from batchkit.engines.process.launcher import LOG
from batchkit.errors import (
    BrokenInputError,
    EmptyTextError,
    EngineError,
    InputError,
    Interrupted,
    JobError,
)
from batchkit.execution.run import start_run
from batchkit.execution.signals import StopRequest
from batchkit.execution.start import Options
from batchkit.storage.answers import answers_in_words
from batchkit.storage.manifest import read_manifest
from batchkit.types import ErrorInfo


class Token(NamedTuple):
    """``logprob`` is None if the engine gives none; ``top``: the likeliest tokens, by text."""

    text: str
    logprob: float | None = None
    top: Mapping[str, float] = {}


class SideAnswer(NamedTuple):
    """A row's answer or its ``error``. ``text`` has its reasoning and tool calls, too.

    ``tokens`` is None if the engine gives none. ``input_hash`` is the row's, as in its record.
    """

    id: str
    input_hash: str
    text: str = ""
    finish_reason: str | None = None
    tokens: Sequence[Token] | None = None
    prompt_tokens: int | None = None
    error: ErrorInfo | None = None


class Answers(NamedTuple):
    """The answers of one side, by row index. ``seconds``: without loading the model."""

    side: Side
    rows: Mapping[int, SideAnswer]
    versions: Mapping[str, str]
    seconds: float

    @property
    def failed(self) -> int:
        return sum(answer.error is not None for answer in self.rows.values())

    @property
    def rows_per_s(self) -> float:
        return len(self.rows) / self.seconds if self.seconds else 0.0

    @property
    def left_out(self) -> list[str]:
        """Keys of the job that this side does not use."""
        sampling = [f"sampling.{name}" for name in sorted(self.side.greedy.left_out)]
        return [*self.side.left_out, *sampling]


def answers_of(side: Side, stop: StopRequest) -> Answers:
    """Run the side's job.

    Raises:
        JobError: the side's engine finds it invalid.
        InputError: the rows can't be read.
        EngineError: the engine could not start, or died too often. It names the engine's log.
    """
    try:
        options = Options(adjust_sampling=side.greedy, quiet=True, command="parity")
        summary = start_run(side.job, options=options, stop=stop).checked()
    except BrokenInputError as error:
        raise InputError(str(error)) from error
    except InputError:
        raise
    except JobError as error:
        raise JobError(f"{side}: {error}") from error
    except EngineError as error:
        message, log = str(error), side.job.folder / LOG
        if log.exists() and str(log) not in message:
            message += f"; what it printed is in {log}"
        raise EngineError(f"{side}: {message}") from error
    if stop.signum is not None:
        raise Interrupted(stop.signum)
    rows = {record["index"]: _answer(record) for record in summary.records()}
    versions = read_manifest(side.job.folder).last_start.engine
    return Answers(side, rows, versions, summary.seconds)


def _answer(record: Mapping[str, Any]) -> SideAnswer:
    """An answer without text is compared like any other, although a run counts it as failed."""
    error, finish_reason = record["error"], record["finish_reason"]
    if error is not None and error["kind"] != EmptyTextError.kind:
        return SideAnswer(record["id"], record["input_hash"], error=ErrorInfo(**error))
    return SideAnswer(
        record["id"],
        record["input_hash"],
        "\n".join(filter(None, [record.get("reasoning"), answers_in_words(record)[0]])),
        finish_reason,
        _tokens(record["choices"][0]["logprobs"]) if "choices" in record else None,
        None if record["usage"] is None else record["usage"]["prompt_tokens"],
    )


def _tokens(logprobs: Sequence[Mapping[str, Any]] | None) -> Sequence[Token] | None:
    if logprobs is None:
        return None
    return [Token(t["token"], t["logprob"], _by_text(t["top_logprobs"])) for t in logprobs]


def _by_text(top: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Of two tokens with one text, the likelier. Tokens that a grammar forbids have no logprob."""
    return {t["token"]: t["logprob"] for t in reversed(top) if t["logprob"] is not None}
