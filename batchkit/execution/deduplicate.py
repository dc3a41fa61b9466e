"""The layer ``Deduplicate``: equal requests are computed once, and answers of other runs are used again.

Only requests whose answer is determined are copied (``rendering/request_hash.py``). A request equal to one in flight
waits for it. If an equal request was answered before, its answer is read from the log. A failure is not copied: the next
equal request is then computed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from batchkit.execution.engine_layer import EngineLayer
from batchkit.execution.start import Start
from batchkit.rendering.request_hash import is_determined
from batchkit.storage.answers import AnswerIndex, SeenHashes
from batchkit.storage.log import RESULTS, STEPS
from batchkit.storage.steps import completion_of
from batchkit.storage.vectors import Vectors
from batchkit.types import Completion, Request, Usage

_NOTHING = Usage(0, 0)
_MOST_WAITING = 4096  # requests of one lane that wait for an equal one


class Answers:
    """The answers that requests of one worker can copy: of requests in flight, of the run's own log, and of the runs in
    ``run.reuse``.

    - ``folder``: the run folder; None if this process can't read it, as on Ray. Then only answers of requests that are
      in flight together are copied.
    - ``flush``: writes all settled records to the log.
    - ``reused``: folders of other runs, made under an equal identity.

    Attributes:

    - ``in_flight``: by request hash, the requests that wait for the answer, each with its layer.
    """

    def __init__(
        self,
        start: Start,
        folder: Path | None = None,
        flush: Callable[[], None] = lambda: None,
        reused: Sequence[Path] = (),
    ) -> None:
        job = start.job
        self._generates, self._flush = job.generates, flush
        self._is_on = job.run.deduplicate
        self._log = STEPS if job.has_several else RESULTS
        self.in_flight: dict[str, list[tuple[Deduplicate, Request]]] = {}
        self._folder = folder
        self._own: _Recorded | None = None
        self._seen = SeenHashes()
        with ExitStack() as held:
            self._reused = [held.enter_context(closing(_Recorded(at, self._log))) for at in reused]
            self._held = held.pop_all()
        if folder is not None and self._is_on:
            self._seen.add_answers_of(folder / self._log)

    def covers(self, request: Request) -> bool:
        """Return whether the answer to ``request`` may be a copy."""
        if request.call is not None and request.attempt > 1:
            return False  # the hash of a generation does not have the temperature of its attempt
        may_copy = self._is_on or bool(self._reused)
        return may_copy and is_determined(request, generates=self._generates)

    def find(self, request: Request) -> Completion | None:
        """Return a recorded answer to an equal request, as the completion of ``request``, or None if nothing equal was
        answered."""
        if self._is_on and self._folder is not None and self._seen.add(request.request_hash):
            if self._own is None:
                self._own = self._held.enter_context(closing(_Recorded(self._folder, self._log)))
            if (found := self._own.completion(request)) is None:
                self._flush()
                found = self._own.completion(request)
            if found is not None:
                line, completion = found
                return replace(completion, duplicate_of=line["index"])
        for run in self._reused:
            if (found := run.completion(request)) is not None:
                return replace(found[1], reused_from=run.name)
        return None

    def close(self) -> None:
        self._held.close()


class _Recorded:
    """The answers in a run folder. ``log``: the name of the log that has them."""

    def __init__(self, folder: Path, log: str) -> None:
        self.name = str(folder)
        self._index, self._vectors = AnswerIndex(folder / log), Vectors(folder)
        self.close = self._index.close

    def completion(self, request: Request) -> tuple[dict[str, Any], Completion] | None:
        """Return the recorded answer to a request with the same hash: its line, and the line as the completion of
        ``request``."""
        line = self._index.find(request.request_hash)
        if line is None and self._index.update():
            line = self._index.find(request.request_hash)
        n_asked = request.sampling.get("n") or 1
        if line is None or (n_asked > 1 and len(line.get("choices") or ()) != n_asked):
            return None  # ``[select]`` has dropped choices
        if request.call is not None and line["attempt"] > 1:
            return None
        completion = replace(completion_of(line, request), usage=_NOTHING, latency_s=0.0)
        completion = replace(completion, earlier_usage=None, prompt=line.get("prompt"))
        if (pooled := self._vectors.pooled(line)) is not None:
            completion = replace(completion, pooled=pooled, choices=())
        return line, completion


class Deduplicate(EngineLayer):
    """The layer that copies answers of equal requests. ``answers``: shared by the lanes of a worker."""

    def __init__(self, below: EngineLayer, answers: Answers) -> None:
        super().__init__(below)
        self._answers = answers
        self._n_waiting = 0  # for an equal request
        self._again = deque[Request]()  # each waited for a request that failed
        self._ready: list[Completion] = []

    @property
    def room(self) -> int:
        return 0 if self._n_waiting >= _MOST_WAITING else self.below.room - len(self._again)

    def submit(self, request: Request) -> None:
        answers = self._answers
        if not answers.covers(request):
            self.below.submit(request)
        elif (waiting := answers.in_flight.get(request.request_hash)) is not None:
            waiting.append((self, request))
            self._n_waiting += 1
        elif (completion := answers.find(request)) is not None:
            self._ready.append(completion)
        else:
            answers.in_flight[request.request_hash] = []
            self.below.submit(request)

    def resubmit(self) -> None:
        self.below.resubmit()
        while self._again and self.below.room > 0:
            self.below.submit(self._again.popleft())

    def poll(self, timeout_s: float) -> Sequence[Completion]:
        done = self.below.poll(0 if self._ready else timeout_s)
        for completion in done:
            self._share(completion)
        ready, self._ready = self._ready, []
        return [*done, *ready] if ready else done

    @property
    def unanswered(self) -> int:
        return self.below.unanswered + self._n_waiting + len(self._again) + len(self._ready)

    def _share(self, completion: Completion) -> None:
        """Answer the requests that wait for this one. If it failed, the first of them is computed."""
        waiting = self._answers.in_flight.pop(completion.request.request_hash, None)
        if not waiting:
            return
        if completion.error is not None:
            layer, request = waiting.pop(0)
            layer._n_waiting -= 1
            layer._again.append(request)
            self._answers.in_flight[request.request_hash] = waiting
            return
        for layer, request in waiting:
            copy = replace(completion, request=request, usage=_NOTHING, earlier_usage=None)
            copy = replace(copy, latency_s=0.0, duplicate_of=completion.request.row.index)
            layer._n_waiting -= 1
            layer._ready.append(copy)
