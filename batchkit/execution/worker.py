"""A Worker: a supervised engine, and everything needed to make records of rows with it.

A run on one machine is one Worker, called by the run's own thread; with ``run.workers`` there is
one in each process that Ray starts (``cluster/``). The run's loop uses both in the same way.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

from batchkit.config.masking import learn, learn_secret
from batchkit.config.tables import JobConfig
from batchkit.engines.base import Engine
from batchkit.engines.memory_ladder import Ladder
from batchkit.engines.process.launcher import Launcher
from batchkit.engines.registry import open_engine
from batchkit.errors import EngineError
from batchkit.execution.attempts import Attempts
from batchkit.execution.events import EngineHistory, Found, Hear, Line, PoolLoad
from batchkit.execution.feeder import AHEAD, Feeder
from batchkit.execution.kept_engine import KeptEngine, Loaded
from batchkit.execution.records import to_record
from batchkit.execution.rollouts.begun import begun
from batchkit.execution.rollouts.function import Function
from batchkit.execution.rollouts.rollouts import Rollouts
from batchkit.execution.selection import Selection
from batchkit.execution.supervisor import SupervisedEngine
from batchkit.rendering.constant_files import constant_files
from batchkit.rendering.prefetch import Prefetch
from batchkit.rendering.steps import Renderer
from batchkit.scoring import Scored, Scoring, kept_fields
from batchkit.storage import identity
from batchkit.storage.manifest import WorkerState
from batchkit.storage.steps import GenerationLine, generation_line
from batchkit.storage.store import RecordLine, line_of
from batchkit.types import Completion, Request, Task

READ_AT_ONCE = 16

LogLine = RecordLine | GenerationLine
RenderedTasks = Prefetch[Task, Request | Completion] | Rollouts


class EngineFacts(NamedTuple):
    """What an engine reports once its model is loaded."""

    max_num_seqs: int
    versions: Mapping[str, str]


def render_ahead(
    job: JobConfig,
    renderer: Renderer,
    tasks: Iterator[Task],
    *,
    may_wait: bool,
    rendered: dict[int, Request | Completion] | None = None,
    rollout: Function | None = None,
) -> RenderedTasks:
    """Begins to render ``tasks``. ``may_wait``: reading them may block. ``rendered``: rows that
    have been, by index; each is taken out of it. ``rollout``: the function of a job with
    ``[rollout]``, if it is not the one that the job names."""
    if job.has_several:
        return begun(job, renderer, tasks, may_wait=may_wait, function=rollout)
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
    ``fill`` and ``poll`` in turn until ``is_done``. Its model is loaded in the constructor, with
    settings that an earlier start found to be safe (``known``).

    ``rows`` are its rows, from ``render_ahead`` with the same ``renderer``. ``references``: the
    right answers by id, if another run gives them. ``quarantined``: indices of rows that killed an
    engine before; each is run alone. ``opening`` is entered each time the model is loaded; what it
    was loaded from must be the same as ``engine_identity``, and so must the files of all prompts if
    they are in it. The engine prints to ``log``. With ``kept``, the engine comes from there if one
    waits there, and waits there again afterwards.

    Raises:
        JobError, EngineError: the model can't be loaded.
    """

    def __init__(
        self,
        job: JobConfig,
        renderer: Renderer,
        rows: RenderedTasks,
        hear: Hear,
        known: EngineHistory,
        *,
        log: Path,
        engine_identity: Mapping[str, Any],
        references: Mapping[str, str | None] | None = None,
        quarantined: Collection[int] = (),
        opening: Callable[[], AbstractContextManager[None]] = nullcontext,
        kept: KeptEngine | None = None,
    ) -> None:
        learn(os.environ, job.model_dump())  # a worker on Ray is in a process of its own
        learn_secret(os.environ.get(job.engine.api_key_env, "").strip())
        self._job = job
        self._hear = hear
        self._scoring = (
            Scoring(job.scoring, references, lambda text: hear(Line(text)))
            if job.scoring.is_on
            else None
        )
        self._kept_fields = kept_fields(job)
        self._loaded: Loaded
        idle = None if kept is None else kept.idle
        ladder = Ladder(known.steps if idle is None else idle.steps)
        if ladder.steps:
            hear(Line(f"engine settings remembered: {dict(ladder.overrides)}"))
        with ExitStack() as held:
            launcher = held.enter_context(closing(Launcher(log))) if kept is None else kept.launcher

            def open_one(job: JobConfig) -> Engine:
                with opening(), ExitStack() as opened:
                    options = job.engine.options
                    loaded = None if kept is None else kept.take(options, engine_identity)
                    if loaded is None:
                        engine = open_engine(job if kept is None else kept.named(job), launcher)
                        opened.enter_context(closing(engine))
                        _check_unchanged(self._job, engine_identity)
                        commits = identity.hub_commits(self._job)
                        loaded = Loaded(engine, options, ladder.steps, engine_identity, commits)
                    else:
                        opened.enter_context(closing(loaded.engine))
                    if loaded.commits:
                        hear(Found({"engine.commits": loaded.commits}))
                    opened.pop_all()
                    self._loaded = loaded
                    return loaded.engine

            self._engine = SupervisedEngine(
                job,
                hear,
                ladder=ladder,
                quarantined=quarantined,
                among_accidents=known.among_accidents,
                suspicions=known.suspicions,
                open_engine=open_one,
            )
            held.callback(self._release, kept)
            self._engine.load()  # it says which model a server serves, before it gets a row
            self._held = held.pop_all()
        self._rollouts = rows if isinstance(rows, Rollouts) else None
        self._unwritten = deque[Completion]()
        self._steps = {step.name: step for step in job.steps}
        self._step_scoring = {
            name: Scoring(step.scoring) for name, step in self._steps.items() if step.scoring.is_on
        }
        self._attempts = Attempts(job.retry, renderer.shortened, self._finds_nothing)
        selection = Selection(job, references)
        self._feeder = Feeder(job, self._engine, rows, self._attempts, self._parses, selection)
        self.unfinished_tokens = 0
        """Of the answers that have not ended, as of the last poll."""
        self.load = PoolLoad(self._feeder.window.size)
        self.engine_facts = EngineFacts(self._engine.max_num_seqs, self._engine.versions)

    def fill(self, *, taking: bool = True) -> list[LogLine]:
        """Submit rows while there is room, none if not ``taking``; returns rows settled by it."""
        if taking:
            return self._lines(self._feeder.fill())
        return [] if self._rollouts is None else self._lines(self._rollouts.ended())

    def written(self, count: int | None = None) -> None:
        """So many of the generations that were returned, or all, are in the ledger: their rows may
        ask further."""
        if self._rollouts is not None:
            n_written = len(self._unwritten) if count is None else count
            self._rollouts.answer([self._unwritten.popleft() for _ in range(n_written)])

    def poll(self) -> list[LogLine]:
        """The rows that the engine has finished; then adapts the window to its load."""
        lines = self._lines(self._feeder.poll())
        window = self._feeder.window
        change = window.fit(self._engine.max_num_seqs)
        load = self._engine.load()
        self.unfinished_tokens = load.unfinished_tokens
        change = change or window.adapt(load, self.in_flight)
        preemptions = self.load.preemptions + load.preempted
        self.load = PoolLoad(
            window.size, load.running, load.waiting, load.kv_cache_usage, preemptions
        )
        if change is not None:
            self._hear(Line(f"window {change.old} → {change.new}: {change.reason}"))
        return lines

    @property
    def in_flight(self) -> int:
        """Rows that the engine works on."""
        return len(self._feeder.in_flight)

    @property
    def is_done(self) -> bool:
        """True once every row has come back."""
        return self._feeder.is_done

    @property
    def retried(self) -> int:
        """Further attempts of rows so far."""
        return self._attempts.retried

    @property
    def capacity(self) -> int:
        """Rows that it can use at a time: those in its window, and as many being rendered."""
        return 2 * self._feeder.window.size

    def workers(self) -> list[WorkerState]:
        """The state of each of several workers, for ``status``."""
        return []

    def close(self) -> None:
        """Drop what is in flight and release all resources."""
        self._held.close()

    def _release(self, kept: KeptEngine | None) -> None:
        if kept is None or not self._engine.is_idle:
            self._engine.close()
        else:
            kept.idle = self._loaded

    def _lines(self, settled: Iterable[Completion]) -> list[LogLine]:
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

    def _parses(self, request: Request) -> bool:
        if request.call is None or request.call.step not in self._steps:
            return self._job.output.parse is not None
        return self._steps[request.call.step].parse is not None

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


def _check_unchanged(job: JobConfig, then: Mapping[str, Any]) -> None:
    """Files that were replaced while the engine loaded them show here, too.

    A worker on another machine may not see all files that the run saw: the others are compared.

    Raises:
        EngineError: they are other files than the run began with.
    """
    now = identity.engine_identity(job)
    if "prompt.files" in then:
        now["prompt.files"] = constant_files(job)
    if changes := identity.differences(_only(then, now), _only(now, then)):
        raise EngineError(
            "found other files than those that the run began with, and a run's answers are all"
            f" of one model and prompt: {'; '.join(changes)}. Every finished row is on disk: bring"
            " the old files back and run the same command again, or begin a new run (--fresh)"
        )


def _only(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in one.items() if key in other}
