"""One engine's answers to the rows: a run's loop without log, adaptive window and retries."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from math import isfinite
from typing import Any, NamedTuple

from batchkit.commands.parity.sides import Side
from batchkit.engines.base import Engine
from batchkit.engines.process.launcher import Launcher
from batchkit.engines.registry import open_engine
from batchkit.errors import JobError, PromptTooLongError, RowError
from batchkit.execution.window import Window
from batchkit.rendering.prefetch import Prefetch
from batchkit.rendering.renderer import PromptRenderer
from batchkit.sources import read_rows
from batchkit.types import Choice, Completion, Request, Row

POLL_S = 0.05


class Token(NamedTuple):
    """``logprob`` is None if the engine gives none; ``top``: the likeliest tokens, by text."""

    text: str
    logprob: float | None = None
    top: Mapping[str, float] = {}


class SideAnswer(NamedTuple):
    """A row's answer or its ``error``. ``tokens`` is None if the engine gives none."""

    id: str
    text: str = ""
    finish_reason: str | None = None
    tokens: Sequence[Token] | None = None
    prompt_tokens: int | None = None
    error: RowError | None = None


class Told(NamedTuple):
    """A side, for the output. ``failed`` counts its rows; ``left_out``: keys of the job."""

    name: str
    kind: str
    model: str
    versions: Mapping[str, str]
    failed: int
    rows_per_s: float
    left_out: Sequence[str]


class Answers(NamedTuple):
    """The answers of one side, by row index. ``seconds``: without loading the model."""

    side: Side
    rows: Mapping[int, SideAnswer]
    versions: Mapping[str, str]
    seconds: float

    def told(self) -> Told:
        failed = sum(answer.error is not None for answer in self.rows.values())
        rate = len(self.rows) / self.seconds if self.seconds else 0.0
        engine = self.side.job.engine
        sampling = [f"sampling.{name}" for name in sorted(self.side.greedy.left_out)]
        left_out = [*self.side.left_out, *sampling]
        return Told(
            self.side.name, engine.kind, engine.model, self.versions, failed, rate, left_out
        )


def answers_of(side: Side, renderer: PromptRenderer, launcher: Launcher) -> Answers:
    """Raises:
    JobError: the side's engine finds it invalid.
    InputError: the rows can't be read.
    EngineError: the engine could not start, or died.
    """
    try:
        engine = open_engine(side.job, launcher)
    except JobError as error:
        raise JobError(f"{side}: {error}") from error
    with closing(engine):
        began = time.monotonic()
        rows = {done.request.row.index: _answer(done) for done in _ask(side, engine, renderer)}
        return Answers(side, rows, dict(engine.versions), time.monotonic() - began)


def _ask(side: Side, engine: Engine, renderer: PromptRenderer) -> Iterator[Completion]:
    """A failure is final: a retry, for example with fewer pixels, would change the prompt."""
    job, in_flight = side.job, 0
    window = Window(engine.max_num_seqs).size

    def render(row: Row) -> Request | Completion:
        rendered = renderer.render_or_fail(row)
        if isinstance(rendered, Completion):
            return rendered
        return replace(rendered, sampling=side.greedy(rendered.sampling))

    prefetch = Prefetch(
        read_rows(job.input),
        render,
        threads=job.run.render_threads,
        ahead=2 * job.run.render_threads,
        max_bytes=job.media.max_memory_bytes,
    )
    with closing(prefetch):
        while in_flight or not prefetch.exhausted:
            while in_flight < window:
                rendered = prefetch.get(timeout_s=0 if in_flight else POLL_S)
                if rendered is None:
                    break
                if isinstance(rendered, Completion):
                    yield rendered
                    continue
                engine.submit(rendered)
                in_flight += 1
            for done in engine.poll(POLL_S) if in_flight else ():
                if (shorter := _shorter(done, renderer)) is not None:
                    engine.submit(shorter)
                    continue
                in_flight -= 1
                prefetch.release(done.request)
                yield done


def _shorter(done: Completion, renderer: PromptRenderer) -> Request | None:
    """The request with a shorter prompt, if it is too long and the job allows cutting."""
    if not isinstance(done.error, PromptTooLongError):
        return None
    return renderer.shortened(done.request, done.error)


def _answer(done: Completion) -> SideAnswer:
    row_id = done.request.row.id
    if done.error is not None:
        return SideAnswer(row_id, error=done.error)
    choice = done.choices[0]
    prompt_tokens = None if done.usage is None else done.usage.prompt_tokens
    return SideAnswer(row_id, choice.text, choice.finish_reason, _tokens(choice), prompt_tokens)


def _tokens(choice: Choice) -> Sequence[Token] | None:
    if choice.logprobs is None:
        return None
    return [Token(t["token"], t["logprob"], _by_text(t["top_logprobs"])) for t in choice.logprobs]


def _by_text(top: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Of two tokens with one text, the likelier. Tokens that a grammar forbids are left out."""
    found: dict[str, float] = {}
    for token in top:
        if isfinite(token["logprob"]):
            found.setdefault(token["token"], token["logprob"])
    return found
