"""A Worker: a supervised engine, and everything needed to make records of rows with it.

A run on one machine is one Worker, called by the run's own thread; with ``run.workers`` there is
one in each process that Ray starts (``cluster/``). The run's loop uses both in the same way.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from batchkit.config.masking import learn, learn_secret
from batchkit.config.tables import JobConfig
from batchkit.engines.base import Engine
from batchkit.engines.process.launcher import log_of
from batchkit.execution.attempts import Attempts
from batchkit.execution.events import EngineHistory, Hear, Line, PoolLoad
from batchkit.execution.fed_engine import FedEngine
from batchkit.execution.feeder import AHEAD, POLL_S, Feeder
from batchkit.execution.kept_engine import KeptEngine
from batchkit.execution.records import to_record
from batchkit.execution.rollouts.begun import begun
from batchkit.execution.rollouts.function import Function
from batchkit.execution.rollouts.rollouts import PausedRow, Rollouts
from batchkit.execution.selection import Selection
from batchkit.rendering.prefetch import READ_AT_ONCE, Prefetch
from batchkit.rendering.steps import Renderer
from batchkit.scoring import Scored, Scoring, kept_fields, scoring_of_steps
from batchkit.storage.manifest import WorkerState
from batchkit.storage.steps import GenerationLine, generation_line
from batchkit.storage.store import RecordLine, line_of
from batchkit.types import Completion, Request, Task

_SHARED_POLL_S = POLL_S / 8  # of several engines, each waits while the others may have answers

Returned = RecordLine | GenerationLine | PausedRow
"""What a worker returns: lines for the logs, and rows that another engine has to go on with."""
RenderedTasks = Prefetch[Task, Request | Completion] | Rollouts


class EngineFacts(NamedTuple):
    """What engines report once their models are loaded: how many requests they run at once together, and
    the versions of each, by its name."""

    max_num_seqs: int
    versions: Mapping[str, Mapping[str, str]]


def render_ahead(
    job: JobConfig,
    renderer: Renderer,
    tasks: Iterator[Task],
    *,
    engines: Sequence[str],
    may_wait: bool,
    references: Mapping[str, str | None] | None,
    rendered: dict[int, Request | Completion] | None = None,
    rollout: Function | None = None,
) -> RenderedTasks:
    """Begins to render ``tasks``, for ``engines``. ``may_wait``: reading them may block. ``references``
    as for ``Worker``. ``rendered``: rows that have been, by index; each is taken out of it.
    ``rollout``: the function of a job with ``[rollout]``, if it is not the one that the job names."""
    if job.has_several:
        return begun(
            job,
            renderer,
            tasks,
            engines=engines,
            may_wait=may_wait,
            references=references,
            function=rollout,
        )
    ready = {} if rendered is None else rendered

    def render(task: Task) -> Request | Completion:
        found = ready.pop(task.row.index, None)
        return renderer.render_or_fail(task.row, task.attempt) if found is None else found

    return Prefetch(
        tasks,
        render,
        threads=job.run.render_threads,
        ahead=AHEAD,
        max_bytes=job.media.max_memory_bytes,
        at_once=1 if may_wait or renderer.takes_long else READ_AT_ONCE,
    )


class Worker:
    """Makes records of rows; every row comes back once, as the line for the log. One thread calls
    ``fill`` and ``poll`` in turn until ``is_done``. The models of its ``engines``, by name, are loaded in
    the constructor, with settings that an earlier start found to be safe (``known``, by name).

    ``rows`` are its rows, from ``render_ahead`` with the same ``renderer``. ``references``: the
    right answers by id, if another run gives them. ``quarantined``: indices of rows that killed an
    engine before; each is run alone. ``opening`` is entered each time a model is loaded; what it
    was loaded from must be the same as ``engine_identity``, and so must the files of all prompts if
    they are in it. ``[engine]`` prints to ``log``. With ``kept``, an engine comes from there
    if it waits there, and waits there again afterwards. ``environments``: of the engines' processes.

    Raises:
        JobError, EngineError: the model can't be loaded.
    """

    def __init__(
        self,
        job: JobConfig,
        renderer: Renderer,
        rows: RenderedTasks,
        hear: Hear,
        known: Mapping[str, EngineHistory],
        *,
        engines: Sequence[str],
        log: Path,
        engine_identity: Mapping[str, Any],
        references: Mapping[str, str | None] | None = None,
        quarantined: Collection[int] = (),
        opening: Callable[[], AbstractContextManager[None]] = nullcontext,
        kept: KeptEngine | None = None,
        environments: Mapping[str, Mapping[str, str]] = MappingProxyType({}),
    ) -> None:
        learn(os.environ, job.model_dump())  # a worker on Ray is in a process of its own
        for name in engines:
            key = job.with_engine(name).engine.api_key_env
            learn_secret(os.environ.get(key, "").strip())
        self._job = job
        self._hear = hear
        self._scoring = (
            Scoring(job.scoring, references, lambda text: hear(Line(text)))
            if job.scoring.is_on
            else None
        )
        self._kept_fields = kept_fields(job)
        self._rollouts = rows if isinstance(rows, Rollouts) else None
        self._unwritten = deque[Completion]()
        self._step_scoring = scoring_of_steps(job)
        self._engines: list[FedEngine] = []
        selection = Selection(job, references)

        def feeder(engine: Engine, own: JobConfig, name: str) -> Feeder:
            its = rows if isinstance(rows, Prefetch) else rows.of(name)
            attempts = Attempts(job.retry, renderer.shortened, self._finds_nothing)
            return Feeder(own, engine, its, attempts, selection)

        with ExitStack() as held:
            for name in engines:
                engine = FedEngine(
                    job,
                    name,
                    feeder,
                    hear,
                    known.get(name, EngineHistory()),
                    log=log_of(log, name),
                    engine_identity=engine_identity,
                    quarantined=quarantined,
                    opening=opening,
                    kept=kept,
                    environment=environments.get(name, {}),
                )
                held.enter_context(closing(engine))
                self._engines.append(engine)
            self._held = held.pop_all()
        self.engine_facts = EngineFacts(
            sum(engine.max_num_seqs for engine in self._engines),
            {engine.name: engine.versions for engine in self._engines},
        )

    def fill(self, *, taking: bool = True) -> list[Returned]:
        """Submit rows while there is room, none if not ``taking``; returns rows settled by it."""
        settled: list[Completion] = []
        if not taking:
            settled += [] if self._rollouts is None else self._rollouts.ended()
        for engine in self._engines if taking else ():
            if len(self._engines) > 1 and self._is_broken and (settled or self.in_flight):
                break  # what the others have is paid for: write it before the error is raised
            settled += engine.fill()
        lines = self._lines(settled)
        if self._rollouts is not None:
            lines += self._rollouts.paused()
        return lines

    def written(self, count: int | None = None) -> None:
        """So many of the generations that were returned, or all, are in the ledger: their rows may
        ask further."""
        if self._rollouts is not None:
            n_written = len(self._unwritten) if count is None else count
            self._rollouts.answer([self._unwritten.popleft() for _ in range(n_written)])

    def poll(self) -> list[Returned]:
        """The rows that the engines have finished."""
        timeout_s = POLL_S if len(self._engines) == 1 else _SHARED_POLL_S
        settled = chain.from_iterable(engine.poll(timeout_s) for engine in self._engines)
        return self._lines(settled)

    @property
    def in_flight(self) -> int:
        """Requests that the engines work on."""
        return sum(engine.in_flight for engine in self._engines)

    @property
    def unfinished_tokens(self) -> int:
        """Of the answers that have not ended, as of the last poll."""
        return sum(engine.unfinished_tokens for engine in self._engines)

    @property
    def load(self) -> PoolLoad:
        return sum((engine.load for engine in self._engines), PoolLoad())

    @property
    def is_done(self) -> bool:
        """True once every row has come back."""
        return all(engine.is_done for engine in self._engines)

    @property
    def retried(self) -> int:
        """Further attempts of rows so far."""
        return sum(engine.retried for engine in self._engines)

    @property
    def capacity(self) -> int:
        """Rows that it can use at a time: those in its windows, and as many being rendered."""
        return 2 * sum(engine.window for engine in self._engines)

    def workers(self) -> list[WorkerState]:
        """The state of each of several workers, for ``status``."""
        return []

    def close(self) -> None:
        """Drop what is in flight and release all resources."""
        self._held.close()

    @property
    def _is_broken(self) -> bool:
        return self._rollouts is not None and self._rollouts.broken

    def _lines(self, settled: Iterable[Completion]) -> list[Returned]:
        return [
            self._record_line(completion)
            if completion.request.call is None
            else self._generation_line(completion)
            for completion in settled
        ]

    def _record_line(self, completion: Completion) -> RecordLine:
        record = to_record(
            completion,
            self._kept_fields,
            with_prompt=self._job.output.prompt,
            with_choices=self._job.keeps_choices,
            scored=self._scored(completion),
        )
        return line_of(record, self._job.output.vector_dtype)

    def _generation_line(self, completion: Completion) -> GenerationLine:
        self._unwritten.append(completion)
        return generation_line(completion)

    def _scored(self, completion: Completion) -> Scored | None:
        if self._scoring is None:
            return None
        if completion.error is not None:
            return Scored(None, {})
        row = completion.request.row
        return self._scoring.score(_scored_text(completion), row.fields, row.id)

    def _finds_nothing(self, completion: Completion) -> bool:
        call, row = completion.request.call, completion.request.row
        scoring = self._scoring if call is None else self._step_scoring.get(call.step)
        if scoring is None:
            return False
        return scoring.finds_nothing(_scored_text(completion), row.fields, row.id)


def _scored_text(completion: Completion) -> str:
    """What the scoring reads of an answer: its text, or the label of a class."""
    if completion.pooled is not None:
        return completion.pooled.label or ""
    return completion.text
