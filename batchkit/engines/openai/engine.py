"""A server that speaks OpenAI's API: OpenAI's own, ``vllm serve``, llama.cpp's ``llama-server``.

It either runs already, at ``engine.base_url``, or is started for the run (``own_server.py``).

The server does the batching; this engine keeps requests in flight. A request has no answer for one of
three reasons:

- it is the row's own fault (400, 413, 422, …, an answer that takes too long): that row fails;
- waiting does not fix it (401, no such model, no money): EngineError. The run stops, and continues when it is
  started again;
- anything else (``NoAnswer``) may be the row's fault or the server's. The row is tried again, and fails after a few tries
  if others are answered meanwhile; one that is turned away (429, 502, 503, 504, no connection), after
  ``give_up_s``. While nothing is answered, all requests wait, and now and then a request of one word is sent
  (``rate_limiter.py``); after ``give_up_s`` the run stops.

Another model than before ends the run. Nothing need fail when a server is replaced, so its list of
models is read again after an outage, after a gap, and before the last answer is returned.

A server of our own that ends, or is given up, is an engine that died: EngineDied. The supervisor
then starts another, and finds the row that kills it.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from batchkit.config.server_command import llama_server
from batchkit.config.tables import JobConfig
from batchkit.engines.base import EngineLoad, RenderedPrompt
from batchkit.engines.faults import EngineDied, Fault
from batchkit.engines.openai import api
from batchkit.engines.openai.chat import SAMPLING as SAMPLING
from batchkit.engines.openai.options import Options, options_of
from batchkit.engines.openai.own_server import OwnServer
from batchkit.engines.openai.pooling import ENDPOINTS
from batchkit.engines.openai.rate_limiter import NoAnswer, Place, RateLimiter, Why, pause_s
from batchkit.engines.openai.remote import Remote
from batchkit.errors import (
    EngineError,
    JobError,
    RequestError,
    RowError,
    RowTimeoutError,
    ServerError,
)
from batchkit.types import Completion, Pair, Request, Row

_CLOSE_S = 10.0
_GAP_S = 1.0  # of nothing in flight, in which a server may be replaced unseen
_QUIET_S = 5.0  # of an outage that nobody is told of


class OpenAIServerEngine:
    """Keeps up to ``max_num_seqs`` requests in flight.

    Threads: the processor's thread calls every method; one thread of ours runs the event loop that
    does the rest. Completions arrive in ``_done``; ``_ended`` is set once, after the completions
    before it.

    Raises:
        JobError: an option or a sampling parameter is wrong, or the server's program is missing.
        EngineError: the server does not answer, or refuses the key.
        StartFailed: the run's own server did not start.
    """

    def __init__(self, job: JobConfig, log: Path | None = None) -> None:
        self._options = options_of(job)
        self._row_timeout_s, self._task = job.run.row_timeout_s, job.task
        self._events: deque[str] = deque()  # the loop's thread appends, the caller's takes
        self._own = _own_server(job, self._options, self.limits, log)
        self._remote = Remote(
            job,
            self._own.base_url if self._own else job.engine.base_url or "",
            extra_body=self._options.extra_body,
            drop=self._options.drop,
            event=self._events.append,
            max_model_len=self._options.max_model_len,
        )
        self._limiter = RateLimiter(self._options.max_num_seqs)
        self._in_flight = 0
        self._quiet_s = _QUIET_S
        self._done: queue.SimpleQueue[Completion] = queue.SimpleQueue()
        self._ended: EngineError | None = None
        self._unsettled = 0  # requests in flight, as the event loop knows them
        self._tasks: set[asyncio.Task[None]] = set()
        self._closing = asyncio.Event()
        self._loop = asyncio.SelectorEventLoop()  # Ray sets uvloop, which lacks RFC 8305
        self._thread = threading.Thread(target=self._run, name="openai-server", daemon=True)
        self._thread.start()
        try:
            if self._own is not None:
                self._own.start()
            asyncio.run_coroutine_threadsafe(self._reach(), self._loop).result()
            self._check(job.params())
        except BaseException:
            self.close()
            raise

    @property
    def max_num_seqs(self) -> int:
        return self._options.max_num_seqs

    @property
    def limits(self) -> Mapping[str, Any]:
        return {"max_num_seqs": self._options.max_num_seqs}

    @property
    def versions(self) -> Mapping[str, str]:
        owners = {str(model["owned_by"]) for model in self._remote.models if "owned_by" in model}
        owner = {"owned_by": owners.pop()} if len(owners) == 1 else {}
        where = self._own.command if self._own else self._remote.base_url
        return {"server": where, **owner}

    def submit(self, request: Request) -> None:
        self._in_flight += 1
        self._loop.call_soon_threadsafe(self._begin, request)

    def poll(self, timeout_s: float) -> Sequence[Completion]:
        ended = self._ended  # read first: all completions before it are then in the queue
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

    def load(self) -> EngineLoad:
        running = min(self._limiter.running, self._in_flight)
        host_bytes = self._own.host_bytes if self._own else 0
        waiting, events = self._in_flight - running, []
        while self._events:
            events.append(self._events.popleft())
        return EngineLoad(running, waiting, 0.0, 0, host_bytes, events, self._remote.served)

    def close(self) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._closing.set)
            self._thread.join(_CLOSE_S)
        if self._own is not None:
            self._own.stop()

    def _check(self, params: Mapping[str, Any]) -> None:
        """Raises JobError if no request with these parameters can be sent to the server."""
        try:
            pair = Pair("Hi", ["Hi"], is_list=False)
            self._remote.body_of(Request(Row(-1, "", {}), None, "Hi", params, "", pair=pair))
        except RequestError as error:
            raise JobError(str(error)) from None

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
        """Check that the server answers; if it is ours, also watch it."""
        if self._own is not None:
            await self._own.come_up(self._remote.is_ready)
            self._tasks.add(self._loop.create_task(self._watch_over(self._own)))
        else:
            await self._remote.reach()

    async def _watch_over(self, own: OwnServer) -> None:
        self._end(EngineDied(await own.death()))

    def _begin(self, request: Request) -> None:
        if self._ended is None:
            if not self._unsettled:
                self._remote.doubt(_GAP_S)
            self._unsettled += 1
            task = self._loop.create_task(self._settle(request))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _settle(self, request: Request) -> None:
        """Return the request, answered or failed; or end the engine, which then returns no more."""
        try:
            completion = await self._answer(request)
        except RowError as error:
            completion = Completion(request, error=error)
        except EngineError as error:
            self._end(error)
            return
        except Exception as error:  # without this, the request would never come back
            failed = ServerError(f"{type(error).__name__}: {error}")
            completion = Completion(request, error=failed)
        self._unsettled -= 1
        if not self._unsettled:  # this may be the run's last answer
            self._remote.doubt()
            try:
                await self._remote.check_model()
            except (NoAnswer, RowError):
                pass  # it is away now; the answer is paid for
            except EngineError as error:
                self._end(error)
                return
        self._done.put(completion)

    def _end(self, error: EngineError) -> None:
        if self._ended is None:
            self._ended = error
            for task in self._tasks - {asyncio.current_task()}:
                task.cancel()

    async def _answer(self, request: Request) -> Completion:
        """Try until there is an answer, or the row's own error."""
        row = _Tries(self._limiter)
        while True:
            place = await self._place(request, row)
            try:
                return await self._ask(request, place)
            except NoAnswer as problem:
                row.count(self._loop.time())
                if row.is_at_fault(problem, self._loop.time(), self._options.give_up_s):
                    raise self._error_of(problem, row.tries) from None
                if row.is_alone or (problem.why is not Why.BUSY and not self._limiter.is_open):
                    await asyncio.sleep(pause_s(row.tries))

    async def _place(self, request: Request, row: _Tries) -> Place:
        """Wait for a place; while the server answers nothing, for the answer to a prompt of one word."""
        while (place := await self._limiter.enter()).is_probe:
            try:
                await self._ask(self._one_word(request), place)
            except (NoAnswer, RowTimeoutError) as problem:
                if isinstance(problem, NoAnswer) and problem.stops is not None:
                    raise EngineError(problem.stops) from None
                row.forget()
                self._report(problem)
                self._lose_patience(problem)
            except RowError:
                pass  # it is refused, and so the server works
        return place

    async def _ask(self, request: Request, place: Place) -> Completion:
        """``Remote.ask``; an answer, or a refusal other than a timeout, shows that it works."""
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

    def _one_word(self, request: Request) -> Request:
        is_chat, is_pair = request.messages is not None, request.pair is not None
        return Request(
            row=Row(-1, "", {}),
            messages=[{"role": "user", "content": "Hi"}] if is_chat else None,
            prompt=None if is_chat or is_pair else "Hi",
            sampling={"max_tokens": 1} if self._task == "generate" else {},
            input_hash="",
            pair=Pair("Hi", ["Hi"], is_list=False) if is_pair else None,
        )

    def _error_of(self, problem: NoAnswer, tries: int) -> RowError:
        if problem.why is Why.BARRED:
            return RequestError(f"{problem}, and answers other requests")
        if problem.why in (Why.BUSY, Why.DOWN):
            return ServerError(
                f"turned away for {self._options.give_up_s:g} s (engine.options.give_up_s) while"
                f" others were answered; last: {problem}"
            )
        return ServerError(f"{tries} times without an answer; last: {problem}")

    @property
    def _silence_s(self) -> float:
        """Seconds since the server first failed to answer; 0 if it has answered since."""
        since = self._limiter.troubled_since
        return 0.0 if since is None else self._loop.time() - since

    def _report(self, problem: Exception) -> None:
        """Tell the run what the server answers, less and less often."""
        if self._silence_s < self._quiet_s / 2:  # a new outage
            self._quiet_s = _QUIET_S
        if self._silence_s >= self._quiet_s:
            self._quiet_s = 2 * self._silence_s
            wait_s = self._limiter.waits_s
            self._events.append(
                f"{self._remote.base_url}: {problem}; {self._unsettled} requests wait, next try in"
                f" {wait_s:.0f} s"
            )

    def _lose_patience(self, problem: Exception) -> None:
        """Give up on the server if nothing has been answered for ``give_up_s``.

        Requests that are still in flight may yet be answered, within ``run.row_timeout_s``.
        """
        limit_s = self._options.give_up_s
        if self._limiter.running:
            limit_s = max(limit_s, self._row_timeout_s)
        if self._silence_s < limit_s:
            return
        silence = (
            f"no row answered for {self._silence_s:.0f} s (engine.options.give_up_s ="
            f" {self._options.give_up_s:g}); last: {problem}"
        )
        if self._own is not None:
            raise EngineDied(Fault("stall", "stall", silence))
        raise EngineError(
            f"{self._remote.base_url}: {silence}. Every finished row is on disk: check the server,"
            " then run the same command again"
        )


class _Tries:
    """The tries of one row that had no answer, since the server was last away."""

    def __init__(self, limiter: RateLimiter) -> None:
        self._limiter = limiter
        self._since = 0.0
        self.tries = 0

    def count(self, now: float) -> None:
        if not self.tries:
            self._since = now
        self.tries += 1

    def forget(self) -> None:
        """No other request is answered, either."""
        self.tries = 0

    @property
    def is_alone(self) -> bool:
        """Whether a request that was sent after the first of them was answered."""
        return self.tries > 0 and self._limiter.newest_answered > self._since

    def is_at_fault(self, problem: NoAnswer, now: float, give_up_s: float) -> bool:
        """A busy server turns rows away, too, and answers each of them eventually: ``give_up_s`` is for
        that."""
        if not self.is_alone or self.tries < problem.tries:
            return False
        return problem.why not in (Why.BUSY, Why.DOWN) or now - self._since >= give_up_s


class OpenAIServerPreflight:
    """Shows the messages and checks the parameters' names; only the server can count the tokens."""

    def __init__(self, job: JobConfig) -> None:
        self._job = job

    def render(self, request: Request) -> RenderedPrompt:
        ENDPOINTS[self._job.task].check_names(request.sampling)
        return RenderedPrompt(api.shown(request), None)


def open_engine(job: JobConfig, log: Path | None = None) -> OpenAIServerEngine:
    return OpenAIServerEngine(job, log)


def open_preflight(job: JobConfig) -> OpenAIServerPreflight:
    options_of(job)
    return OpenAIServerPreflight(job)


def _own_server(
    job: JobConfig, options: Options, limits: Mapping[str, Any], log: Path | None
) -> OwnServer | None:
    table = job.engine.server
    if table is None:
        return None
    if table.command is not None:
        limits = {"max_num_seqs": 1}  # can't be reduced
        return OwnServer(job, table, table.command, limits, log=log)
    command = llama_server(
        job.engine.model,
        max_model_len=options.max_model_len or 0,  # options_of checked that it is set
        max_num_seqs=options.max_num_seqs,
        task=job.task,
    )
    return OwnServer(job, table, command, limits, log=log)
