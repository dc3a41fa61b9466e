"""A lane: one engine of a worker, the layers above it, and the requests that go through them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack

from batchkit.execution.checked_layer import CheckedLayer
from batchkit.execution.deduplicate import Answers, Deduplicate
from batchkit.execution.engine_layer import EngineLayer
from batchkit.execution.engine_pool import RunEngines
from batchkit.execution.events import EngineMessage, Load
from batchkit.execution.places import Place
from batchkit.execution.requests import Requests
from batchkit.execution.retry import Retry
from batchkit.execution.self_check import SelfCheck, is_checked
from batchkit.execution.start import Start
from batchkit.execution.window import Windowed
from batchkit.rendering.prefetch import AHEAD
from batchkit.rendering.tools import ignored_tools
from batchkit.types import Completion, Key, Request

POLL_S = 0.05  # longest wait of one poll, so that the loop soon notices signals and due retries


class Lane:
    """One engine and its requests. Each request comes back once, as the completion that settles it. Not thread-safe.

    The constructor loads the model.

    - ``place``: the place of its engine.
    - ``answers``: answers that equal requests can copy.
    - ``expected_s``: returns how many seconds the run is expected to take.
    - ``name``: name in ``[engines]``; "" for ``[engine]``.
    - ``max_num_seqs``, ``versions``: as the engine reported them after loading.

    Raises:
        JobError, EngineError: the model can't be loaded.
    """

    def __init__(
        self,
        start: Start,
        place: Place,
        requests: Requests,
        engines: RunEngines,
        answers: Answers,
        expected_s: Callable[[], float],
    ) -> None:
        self.name = place.name
        self._requests, self._hear = requests, engines.hear_of(place)
        self._open = set[Key]()  # the requests in the layers and the engine
        self._warned = False
        engine = engines.open(place)
        self.max_num_seqs = engine.max_num_seqs
        self.versions: Mapping[str, str] = engine.versions
        with ExitStack() as held:
            held.callback(engines.give_back, place, engine)
            fixed = start.job.run.max_in_flight
            stack: EngineLayer = Windowed(engine, self._hear, None if fixed == "auto" else fixed)
            job = start.job.with_engine(place.name)
            self._check: SelfCheck | None = None
            if is_checked(job):
                dtype = engine.versions.get("dtype")
                stack = self._check = SelfCheck(stack, job, dtype, self._hear, expected_s)
            for name, parameters in reversed(job.engine.layers.items()):
                stack = CheckedLayer(name, parameters, stack, self._hear)
            self._stack = Retry(Deduplicate(stack, answers), start)
            held.callback(self._stack.close)
            self._held = held.pop_all()

    def fill(self, timeout_s: float, most: int = AHEAD) -> list[Completion]:
        """Submit requests until the window is full. Wait up to ``timeout_s`` for a request while this lane has none.

        Return rows that ended without the engine, for example rows that can't be rendered, and the outcomes of rows with
        several generations. One call handles at most
        ``most`` requests, so that such rows are written soon even if there are many.
        """
        self._stack.resubmit()
        settled, room = list[Completion](), self._stack.room
        for _ in range(most):
            if room <= 0:
                break
            if self._requests.will_raise and (settled or self._open):
                break  # the input is broken: finish these rows before ``get`` raises the error
            rendered = self._requests.get(self.name, 0 if self._open else timeout_s)
            if rendered is None:
                break
            if isinstance(rendered, Request):
                self._open.add(rendered.key)
                self._stack.submit(rendered)
                room -= 1
            elif rendered.generations is not None:  # a whole row; its requests are settled already
                settled.append(rendered)
            elif (completion := self._stack.settle(rendered)) is None:
                self._open.add(rendered.request.key)
            else:
                settled.append(self._released(completion))
        return settled

    def poll(self, timeout_s: float) -> list[Completion]:
        """Return the completions of requests that are settled. Wait at most ``timeout_s`` for the first."""
        is_busy = bool(self._open) or self.is_checking
        done = self._stack.poll(timeout_s if is_busy else 0)
        self._open.difference_update(completion.request.key for completion in done)
        return [self._released(completion) for completion in done]

    @property
    def n_open(self) -> int:
        """The number of requests that have not come back."""
        return len(self._open)

    @property
    def is_done(self) -> bool:
        """True once every request has come back."""
        return not self._open and self._requests.exhausted

    def check(self) -> None:
        """Begin the self-check at the end of the run, if the job has one. Every request must have come back."""
        if self._check is not None:
            self._check.finish()

    def stop_check(self) -> None:
        """End a self-check that has begun, and report the rows that were compared."""
        if self._check is not None:
            self._check.stop()

    @property
    def is_checking(self) -> bool:
        """True while rows are computed again for the self-check."""
        return self._check is not None and self._check.is_busy

    @property
    def load(self) -> Load:
        return self._stack.load

    def close(self) -> None:
        """Drop requests in flight and give the engine back. If no request was in flight, it may be kept for the next
        run."""
        self._held.close()

    def _released(self, completion: Completion) -> Completion:
        """Return a settled completion, and free its media. Report once that the model's template ignores tools."""
        request = completion.request
        if not self._warned and (warning := ignored_tools(request, completion.prompt)):
            self._warned = True
            self._hear(EngineMessage(warning))
        self._requests.release(request)
        return completion
