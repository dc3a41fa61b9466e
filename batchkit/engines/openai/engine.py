"""A server that speaks OpenAI's API: OpenAI's own, ``vllm serve``, llama.cpp's ``llama-server``.

It either runs already, at ``engine.base_url``, or is started for the run (``own_server.py``).

The server does the batching; this engine keeps requests in flight. Failures are of three kinds:

- the row's own fault (400, 413, 422, …, an answer that never arrives): that row fails;
- a server that is busy or away (429, 502, 503, 504, no connection): all requests wait and are
  retried, for ``give_up_s`` at most (``rate_limiter.py``); a row that is turned away for that long
  while others are answered fails with ``server``;
- what waiting does not fix (no access, no such model, no money, given up): EngineError. The run stops,
  and continues when it is started again. A 402, 403, 404, 405, … or redirect counts as this only if
  a request of one word gets it, too; otherwise it is the row's own.

A 500, a 424, a broken connection or an invalid answer may be the row's fault or the server's. The
row is retried a few times, and fails with ``server`` if others, or a request of one word, are
answered meanwhile.

Another model than before ends the run. Nothing need fail when a server is replaced, so its list of
models is read again from time to time, after a gap, and before the last answer is returned.

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
from batchkit.engines.openai.connections import ServerFault, TurnedAway
from batchkit.engines.openai.endpoints import check_names
from batchkit.engines.openai.options import Options, options_of
from batchkit.engines.openai.own_server import OwnServer
from batchkit.engines.openai.rate_limiter import MOST_FAULTS, Away, RateLimiter, pause_s
from batchkit.engines.openai.remote import Barred, Remote
from batchkit.errors import (
    EngineError,
    JobError,
    RequestError,
    RowError,
    RowTimeoutError,
    ServerError,
)
from batchkit.types import Completion, Pair, Request, Row

SAMPLING = api.SAMPLING
_CLOSE_S = 10.0
_GAP_S = 1.0  # of nothing in flight, in which a server may be replaced unseen


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
        self._answers = 0
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
                await self._remote.serves_the_same_model()
            except (TurnedAway, ServerFault):
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
        faults, tries, answers = 0.0, 0, 0
        away = Away(self._options.give_up_s, self._answers)
        while True:
            found = await self._tried(request)
            if isinstance(found, Completion):
                return found
            if isinstance(found, Barred):
                if await self._is_sound(request):
                    raise RequestError(
                        f"the server answered {found.reason}, and answers other requests"
                    )
                self._limiter.is_troubled()
            elif isinstance(found, TurnedAway):
                others = self._answers > away.answers
                is_due = away.is_suspicious or self._silence_s() >= self._patience_s
                if others or (is_due and await self._is_sound(request)):
                    if away.is_final(self._loop.time()):
                        raise ServerError(
                            f"turned away for {self._options.give_up_s:g} s"
                            f" (engine.options.give_up_s) while others were answered; last: {found}"
                        )
                    away.answers = self._answers
                    await asyncio.sleep(pause_s(away.tries))
                    continue
                away.count_alone()
            self._lose_patience(found)
            if isinstance(found, RowTimeoutError):
                raise found
            if isinstance(found, ServerFault):
                answers = answers if tries else self._answers
                faults, tries = faults + found.weight, tries + 1
                others_fare_better = self._answers > answers
                if faults >= MOST_FAULTS and (others_fare_better or await self._is_sound(request)):
                    raise ServerError(f"{tries} times without an answer; last: {found}")
            if not isinstance(found, TurnedAway):
                await asyncio.sleep(pause_s(max(1, tries)))

    async def _tried(
        self, request: Request
    ) -> Completion | TurnedAway | RowTimeoutError | ServerFault | Barred:
        """The answer, or why this try gave none. Raises an error that no other try would change."""
        sent_at = await self._limiter.enter()
        try:
            return await self._ask(request)
        except TurnedAway as error:
            self._limiter.turned_away(
                sent_at, is_down=error.is_down, retry_after_s=error.retry_after_s
            )
            return error
        except RowTimeoutError as error:
            self._limiter.timed_out(sent_at)
            return error
        except ServerFault as error:
            self._limiter.is_troubled()
            return error
        except Barred as error:
            return error
        finally:
            self._limiter.leave()

    async def _ask(self, request: Request) -> Completion:
        """``Remote.ask``; an answer, or a refusal other than a timeout, shows that it works."""
        try:
            completion = await self._remote.ask(request)
        except RowTimeoutError:
            raise
        except RowError:
            self._limiter.went_well()
            raise
        self._answers += 1
        self._limiter.went_well()
        return completion

    async def _is_sound(self, request: Request) -> bool:
        """Whether the server answers, or at least refuses, a prompt of one word."""
        is_chat, is_pair = request.messages is not None, request.pair is not None
        word = Request(
            row=Row(-1, "", {}),
            messages=[{"role": "user", "content": "Hi"}] if is_chat else None,
            prompt=None if is_chat or is_pair else "Hi",
            sampling={"max_tokens": 1} if self._task == "generate" else {},
            input_hash="",
            pair=Pair("Hi", ["Hi"], is_list=False) if is_pair else None,
        )
        try:
            await self._ask(word)
        except (RowTimeoutError, TurnedAway, ServerFault):
            return False
        except RowError:
            pass
        return True

    def _silence_s(self) -> float:
        """Seconds since the server first failed to answer; 0 if it has answered since."""
        since = self._limiter.troubled_since
        return 0.0 if since is None else self._loop.time() - since

    @property
    def _patience_s(self) -> float:
        limit_s = self._options.give_up_s
        return max(limit_s, self._row_timeout_s) if self._limiter.running else limit_s

    def _lose_patience(self, problem: Exception) -> None:
        """Give up on the server if nothing has been answered for ``give_up_s``.

        Requests that are still in flight may yet be answered, within ``run.row_timeout_s``.
        """
        silence_s = self._silence_s()
        if self._limiter.troubled_since is not None and silence_s >= self._patience_s:
            silence = (
                f"no row answered for {silence_s:.0f} s (engine.options.give_up_s ="
                f" {self._options.give_up_s:g}); last: {problem}"
            )
            if self._own is not None:
                raise EngineDied(Fault("stall", "stall", silence))
            raise EngineError(
                f"{self._remote.base_url}: {silence}. Every finished row is on disk: check the server,"
                " then run the same command again"
            )


class OpenAIServerPreflight:
    """Shows the messages and checks the parameters' names; only the server can count the tokens."""

    def __init__(self, job: JobConfig) -> None:
        self._job = job

    def render(self, request: Request) -> RenderedPrompt:
        check_names(self._job, request.sampling)
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
