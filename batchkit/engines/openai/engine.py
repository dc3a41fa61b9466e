"""An engine that sends requests to a server with OpenAI's API: OpenAI's own, ``vllm serve``, ``llama-server``.

The server runs at ``engine.base_url``, or the run starts it (``own_server.py``). The server makes batches; this engine
keeps requests in flight. There are three reasons why a request gets no answer:

- The row is at fault (400, an answer that takes too long). This row fails.
- Waiting does not help (401, unknown model, no money). EngineError stops the run.
- The row or the server may be at fault (``NoAnswer``). The row is tried again.

A row that is tried again fails after a few attempts if other rows are answered meanwhile. If the server rejected the
row (429, 502, no connection), the row fails only after ``give_up_s``. While no row is answered, all requests wait, and
one-word prompts probe the server (``rate_limiter.py``). If this lasts longer than ``give_up_s``, the run stops.

A server may be replaced by a server with another model without any failed request. This must end the run. Therefore the
list of models is read again after an outage, after an idle time, and before the last answer is returned.

If a server that the run started ends or does not answer any more, the engine counts as dead: the supervisor starts a
new server and finds the row that kills it.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from batchkit.config.server_command import llama_server
from batchkit.config.tables import JobConfig
from batchkit.engines.base import EngineLoad, RenderedPrompt
from batchkit.engines.faults import EngineDied, Fault
from batchkit.engines.openai.connections import allow_connections
from batchkit.engines.openai.options import ServerOptions, options_of
from batchkit.engines.openai.own_server import OwnServer
from batchkit.engines.openai.pooling import ENDPOINTS
from batchkit.engines.openai.rate_limiter import (
    MOST_FAULTS,
    NoAnswer,
    RateLimiter,
    RequestSlot,
    Why,
    pause_s,
)
from batchkit.engines.openai.remote import Remote
from batchkit.errors import (
    EngineError,
    JobError,
    RequestError,
    RowError,
    RowTimeoutError,
    ServerError,
)
from batchkit.rendering.body import task_of
from batchkit.rendering.messages import as_text
from batchkit.types import Audio, Completion, Pair, Request, Row, Speech

_CLOSE_S = 10.0
_GAP_S = 1.0  # an idle time in which the server may have been replaced without a failed request
_QUIET_S = 5.0  # shorter outages are not reported


class OpenAIServerEngine:
    """An engine that keeps up to ``max_num_seqs`` requests in flight at a server.

    Threads: the processor's thread calls every method; a second thread runs the event loop. The second thread puts
    completions into ``_done``. It sets ``_ended``, the error that ends the engine, once, after the last completion.

    Raises:
        JobError: An option or sampling parameter is wrong, or the server's program is missing.
        EngineError: The server does not answer, or refuses the key.
        StartFailed: The server that the run starts did not become ready.
    """

    def __init__(self, job: JobConfig, log: Path | None = None) -> None:
        self._options = options_of(job)
        self._row_timeout_s, self._task = job.run.row_timeout_s, job.task
        self.max_num_seqs = self._options.max_num_seqs
        allow_connections(self.max_num_seqs)
        self.limits = {"max_num_seqs": self.max_num_seqs}
        # Filled by the event loop's thread, emptied by the caller's.
        self._events: deque[str] = deque()
        self._own = _own_server(job, self._options, log)
        base_url = self._own.base_url if self._own else job.engine.base_url or ""
        self._remote = Remote(job, base_url, self._options, self._events.append)
        self._limiter = RateLimiter(self.max_num_seqs, self._options.give_up_s)
        self._in_flight = 0
        self._quiet_s = min(_QUIET_S, self._options.give_up_s / 10)
        self._next_report_s = self._quiet_s
        self._done: queue.SimpleQueue[Completion] = queue.SimpleQueue()
        self._ended: EngineError | None = None
        self._unsettled = 0  # requests in flight, as the event loop knows them
        self._tasks: set[asyncio.Task[None]] = set()
        # Answered, but the server's model is still being checked.
        self._unchecked: list[Completion] = []
        self._closing = asyncio.Event()
        # Ray sets uvloop, which lacks RFC 8305 (happy eyeballs).
        self._loop = asyncio.SelectorEventLoop()
        self._thread = threading.Thread(target=self._run, name="openai-server", daemon=True)
        self._thread.start()
        try:
            if self._own is not None:
                self._own.start()
            asyncio.run_coroutine_threadsafe(self._reach(), self._loop).result()
            owners = {
                str(model["owned_by"]) for model in self._remote.models if "owned_by" in model
            }
            owner = {"owned_by": owners.pop()} if len(owners) == 1 else {}
            where = self._own.command if self._own else self._remote.base_url
            self.versions = {"server": where, **owner}
            self._remote.body_of(_one_word(job.task, job.params()))
        except RequestError as error:
            self.close()
            raise JobError(str(error)) from None
        except BaseException:
            self.close()
            raise

    def submit(self, request: Request) -> None:
        self._in_flight += 1
        self._loop.call_soon_threadsafe(self._begin, request)

    def poll(self, timeout_s: float) -> Sequence[Completion]:
        ended = self._ended  # read first: all completions before the end are then in the queue
        done: list[Completion] = []
        try:
            done.append(self._done.get(timeout=max(0.0, timeout_s)))
            while True:
                done.append(self._done.get_nowait())
        except queue.Empty:
            pass
        self._in_flight -= len(done)
        if ended is not None and not done:
            raise ended
        return done

    def abort(self, requests: Sequence[Request]) -> None:
        """Do nothing: the server may already work on these requests."""

    def load(self) -> EngineLoad:
        running = min(self._limiter.running, self._in_flight)
        host_bytes = self._own.host_bytes if self._own else 0
        trouble = self._trouble()
        events = [self._events.popleft() for _ in range(len(self._events))]
        waiting, served = self._in_flight - running, self._remote.served
        return EngineLoad(running, waiting, 0.0, 0, host_bytes, events, served, trouble=trouble)

    def close(self) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._closing.set)
            self._thread.join(_CLOSE_S)
        if self._own is not None:
            self._own.stop()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._until_closed())

    async def _until_closed(self) -> None:
        try:
            await self._closing.wait()
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await self._remote.close()

    async def _reach(self) -> None:
        """Check that the server answers. If the run started the server, also watch its process."""
        if self._own is None:
            await self._remote.reach()
        else:
            await self._own.come_up(self._remote.is_ready)
            self._tasks.add(self._loop.create_task(self._watch_over(self._own)))

    async def _watch_over(self, own: OwnServer) -> None:
        self._end(EngineDied(await own.death()))

    def _begin(self, request: Request) -> None:
        if self._ended is None:
            if not self._unsettled:
                self._remote.recheck_models(_GAP_S)
            self._unsettled += 1
            task = self._loop.create_task(self._settle(request))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _settle(self, request: Request) -> None:
        """Put the request's completion into ``_done``. An error that concerns all requests ends the engine instead."""
        try:
            completion = await self._answer(request)
        except RowError as error:
            completion = Completion(request, error=error)
        except EngineError as error:
            self._end(error)
            return
        except Exception as error:  # otherwise the request would never come back
            completion = Completion(request, error=ServerError(f"{type(error).__name__}: {error}"))
        self._unsettled -= 1
        if not self._unsettled:  # this may be the run's last answer
            self._remote.recheck_models()
            self._unchecked.append(completion)
            try:
                await self._remote.check_model()
            except (NoAnswer, RowError):
                pass  # the server does not answer now, but this answer came before
            except EngineError as error:
                self._unchecked.clear()  # these answers may come from another model
                self._end(error)
                return
            self._unchecked.remove(completion)
        self._done.put(completion)

    def _end(self, error: EngineError) -> None:
        if self._ended is None:
            for completion in self._unchecked:  # answered before the end
                self._done.put(completion)
            self._ended = error
            for task in self._tasks - {asyncio.current_task()}:
                task.cancel()

    async def _answer(self, request: Request) -> Completion:
        """Send the request until there is an answer or an error of this row.

        Attempts are counted from the first failure. The row is at fault if the server has answered another request that
        was sent after the first failure. A busy server rejects some rows while it answers others; a rejected row fails
        only after ``give_up_s``.
        """
        tries, since = 0, 0.0
        while True:
            place = await self._limiter.enter()
            if place.is_probe:
                if not await self._probe(request, place):
                    tries = 0
                continue
            try:
                return await self._ask(request, place)
            except NoAnswer as problem:
                now = self._loop.time()
                since = since if tries else now
                tries += 1
                others_are_answered = self._limiter.newest_answered > since
                waits_s = self._options.give_up_s if problem.why in (Why.BUSY, Why.DOWN) else 0.0
                if others_are_answered and tries >= MOST_FAULTS and now - since >= waits_s:
                    raise self._error_of(problem, tries) from None
                if others_are_answered or not (problem.why is Why.BUSY or self._limiter.is_open):
                    await asyncio.sleep(pause_s(tries))

    async def _probe(self, request: Request, place: RequestSlot) -> bool:
        """Send a one-word prompt to a server that has stopped answering; return whether it answers now."""
        try:
            kind = "chat" if request.messages else task_of(request.endpoint, self._task)
            asked = _one_word(kind, {"max_tokens": 1} if self._task == "generate" else {})
            await self._ask(replace(asked, endpoint=request.endpoint), place)
        except (NoAnswer, RowTimeoutError) as problem:
            if isinstance(problem, NoAnswer) and problem.stops is not None:
                raise EngineError(problem.stops) from None
            self._give_up_if_silent(problem)
            return False
        except RowError:
            pass  # a refusal shows that the server works
        return True

    async def _ask(self, request: Request, place: RequestSlot) -> Completion:
        """Send the request once, and report to the rate limiter whether the server works. A refusal also shows that it
        works."""
        try:
            completion = await self._remote.ask(request)
        except RowTimeoutError as error:
            self._limiter.failed(place, NoAnswer(str(error), Why.SLOW))
            raise
        except NoAnswer as problem:
            self._limiter.failed(place, problem)
            raise
        except RowError:
            self._limiter.went_well(place)
            raise
        else:
            self._limiter.went_well(place)
            return completion
        finally:
            self._limiter.leave(place)

    def _error_of(self, problem: NoAnswer, tries: int) -> RowError:
        if problem.why is Why.BARRED:
            return RequestError(
                f"{problem}; the server answers other requests, so correct this row"
            )
        if problem.why in (Why.BUSY, Why.DOWN):
            return ServerError(
                f"the server rejected this request for {self._options.give_up_s:g} s"
                f" (engine.options.give_up_s) but answered others; the last error: {problem}"
            )
        return ServerError(f"{tries} attempts without a usable answer; the last error: {problem}")

    @property
    def _silence_s(self) -> float:
        """Seconds since the first failure of the current outage; 0 if there is no outage."""
        since = self._limiter.troubled_since
        return 0.0 if since is None else time.monotonic() - since

    def _trouble(self) -> str:
        """Return the server's error if an outage has lasted for some seconds, otherwise "". Also report the error as an
        event, at growing intervals."""
        silence_s, where = self._silence_s, self._remote.base_url
        if silence_s <= self._quiet_s:
            if self._next_report_s > self._quiet_s:
                self._next_report_s = self._quiet_s
                self._events.append(f"{where}: answers again")
            return ""
        trouble = (
            f"{where}: {self._limiter.last_problem}; {self._in_flight} requests wait, next try in"
            f" {self._limiter.waits_s:.0f} s"
        )
        if silence_s >= self._next_report_s:
            self._next_report_s = 2 * silence_s
            self._events.append(trouble)
        return trouble

    def _give_up_if_silent(self, problem: Exception) -> None:
        """Raise an error if no request has been answered for ``give_up_s``.

        While requests run, the limit is at least ``run.row_timeout_s``, because they may still be answered.

        Raises:
            EngineDied: The run started the server, so a new server may help.
            EngineError: The run did not start the server.
        """
        limit_s = self._options.give_up_s
        if self._limiter.running:
            limit_s = max(limit_s, self._row_timeout_s)
        if self._silence_s < limit_s:
            return
        silence = (
            f"no row answered for {self._silence_s:.0f} s (engine.options.give_up_s ="
            f" {self._options.give_up_s:g}); the last error: {problem}"
        )
        if self._own is not None:
            raise EngineDied(Fault("stall", "stall", silence))
        raise EngineError(
            f"{self._remote.base_url}: {silence}. All finished rows are saved: check the server,"
            " then run the same command again"
        )


def _one_word(kind: str, sampling: Mapping[str, Any]) -> Request:
    """Return a one-word request of ``kind`` ("chat" or a task). For speech, return a request with one second of
    silence."""
    request = Request(Row(-1, "", {}), None, None, sampling, "")
    if kind == "chat":
        return replace(request, messages=[{"role": "user", "content": "Hi"}])
    if kind == "score":
        return replace(request, pair=Pair("Hi", ["Hi"], is_list=False))
    if kind != "transcribe":
        return replace(request, prompt="Hi")
    import numpy as np

    silence = Audio(np.zeros(16_000, np.float32), 16_000)
    return replace(request, prompt="Hi", clips=[silence], speech=Speech("en"))


class OpenAIServerPreflight:
    """A preflight that shows messages as text and checks the parameters' names; only the server can count tokens."""

    def __init__(self, job: JobConfig) -> None:
        self._job = job

    def render(self, request: Request) -> RenderedPrompt:
        ENDPOINTS[task_of(request.endpoint, self._job.task)].check_names(request.sampling)
        return RenderedPrompt(as_text(request), None)


def open_engine(job: JobConfig, log: Path | None = None) -> OpenAIServerEngine:
    return OpenAIServerEngine(job, log)


def open_preflight(job: JobConfig) -> OpenAIServerPreflight:
    options_of(job)
    return OpenAIServerPreflight(job)


def _own_server(job: JobConfig, options: ServerOptions, log: Path | None) -> OwnServer | None:
    table = job.engine.server
    if table is None:
        return None
    if table.command is not None:
        # batchkit can't reduce the memory use of a given command.
        return OwnServer(job, table.command, {"max_num_seqs": 1}, log=log)
    command = llama_server(
        job.engine.model,
        max_model_len=options.max_model_len or 0,  # options_of checked that it is set
        max_num_seqs=options.max_num_seqs,
        task=job.task,
    )
    return OwnServer(job, command, {"max_num_seqs": options.max_num_seqs}, log=log)
