"""The layer ``SelfCheck``: some requests are computed again alone, and the answers are compared.

Engines compute requests in batches. A fault in a kernel, in the prefix cache or in an adapter may then change answers
without any error. The layer draws some of the engine's answers, pauses twice (after the first few hundred answers, and
at the end), and submits the drawn requests again, one at a time, with nothing else in flight. It neither changes the run's
requests nor its records.
"""

from __future__ import annotations

import heapq
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from random import Random
from typing import Any

from msgspec.structs import replace

from batchkit.config.tables import EngineTable, JobConfig
from batchkit.errors import EngineCrashError, RowOutOfMemoryError, WrongAnswersError
from batchkit.execution.engine_layer import EngineLayer
from batchkit.execution.events import Hear, Message, SelfChecked
from batchkit.rendering.renderer import with_media_bytes
from batchkit.rendering.request_hash import is_greedy
from batchkit.runs.answers import SideAnswer, tokens_of
from batchkit.runs.verdicts import Verdict, noise_between, of_drawn, of_numbers, of_texts, tie_of
from batchkit.types import BROKEN_OFF, Audio, Completion, Request

FIRST_ANSWERS = 300  # answers before the first check
MOST_ROWS = 16  # default of ``self_check.rows``
_SHARE = 0.01  # of the run's expected time, by default
_LEAST_TOKENS = 16  # of a shortened answer
_MEDIA_BYTES = 2**28  # of all drawn requests, which stay in memory
_LOGPROBS = 10
_NOISE = 4  # a gap of up to this many times the engine's noise is a near tie
_SHOWN = 5
# An answer that was drawn at random can be scored if its request has only these parameters. Others change the odds.
_OF_DRAWING = {
    *("temperature", "top_p", "top_k", "min_p", "max_tokens", "logprobs"),
    *("stop", "stop_token_ids", "include_stop_str_in_output", "extra_args", "n", "seed"),
}


def is_checked(job: JobConfig) -> bool:
    """Return whether answers of ``job``'s engine are computed again.

    By default, a server that the run did not start is not checked: others may use it at the same time, and each request
    may cost money.
    """
    rows = job.self_check.rows
    if rows == 0 or job.run.max_in_flight == 1 or job.engine.kind == "dry-run":
        return False
    return rows is not None or is_own(job.engine)


def is_own(engine: EngineTable) -> bool:
    """Return whether the engine is not a server that others may use."""
    return engine.kind != "openai-server" or engine.server is not None


def sampling_alone(sampling: Mapping[str, Any], engine: EngineTable) -> dict[str, Any]:
    """Return ``sampling`` for a request that is computed alone. With vLLM, it does not read the prefix cache, which may
    hold the fault."""
    uncached = {"skip_reading_prefix_cache": True} if engine.kind == "vllm" else {}
    return {**sampling, **uncached}


def logprobs_of(engine: EngineTable) -> int:
    """Return for how many likely tokens to ask, to find the gap of a difference."""
    most: int = engine.options.get("max_logprobs", _LOGPROBS)
    return max(0, min(_LOGPROBS, most))


class SelfCheck(EngineLayer):
    """The layer that computes some requests again, alone, and compares the two answers to each.

    - ``job``: the job of this engine.
    - ``dtype``: of the model's weights; None if the engine does not report it.
    - ``hear``: receives the results.
    - ``expected_s``: returns how many seconds the run is expected to take, without loading.

    Raises (from ``poll`` and ``stop``):
        WrongAnswersError: more answers than ``self_check.max_different`` allows are different.
    """

    def __init__(
        self,
        below: EngineLayer,
        job: JobConfig,
        dtype: str | None,
        hear: Hear,
        expected_s: Callable[[], float],
    ) -> None:
        super().__init__(below)
        self._job, self._hear, self._expected_s = job, hear, expected_s
        self._began = time.monotonic()
        self._drawn = Drawn(job)
        self._verdicts = _Verdicts(job, dtype)
        self._pace = _Pace()
        self._held = deque[Request]()  # submitted during a pause
        self._due = deque[Completion]()  # answers to compute again in this pause
        self._asked: _Alone | None = None  # in flight, alone
        self._pause: _Pause | None = None  # the newest
        self._most_running = 1
        self._spent_s = 0.0  # by earlier pauses

    @property
    def is_busy(self) -> bool:
        """True during a pause, in which no other request may be submitted."""
        return bool(self._due) or self._asked is not None

    @property
    def room(self) -> int:
        return 0 if self.is_busy else self.below.room

    def submit(self, request: Request) -> None:
        if self.is_busy:
            self._held.append(request)
        else:
            self.below.submit(request)

    def resubmit(self) -> None:
        self.below.resubmit()
        if self._due and self._asked is None and self.below.unanswered == 0:
            self._ask()
        while self._held and not self.is_busy:
            self.below.submit(self._held.popleft())

    def poll(self, timeout_s: float) -> Sequence[Completion]:
        done = self.below.poll(timeout_s)
        if self._pause is not None and self.is_busy:
            used = 0 if self._asked is not None else self.below.unanswered + len(done)
            self._pause.note(used)
        if self._asked is not None:
            for completion in done:
                self._judge(self._asked, completion)
            return []
        if done:
            load = self.below.load
            self._most_running = max(self._most_running, load.running)
            for completion in done:
                self._pace.note(completion)
                self._drawn.offer(completion, load.preemptions)
        if self._pause is None and self._drawn.n_offered >= FIRST_ANSWERS:
            self._begin(is_end=False)
        return done

    @property
    def unanswered(self) -> int:
        return self.below.unanswered + len(self._held)

    def finish(self) -> None:
        """Begin the check at the end of the run, once all requests have come back."""
        self._begin(is_end=True)

    def stop(self) -> None:
        """Compute no more rows again, because the run stops. Report the rows that were compared."""
        self._due.clear()
        if self._verdicts.has_new:
            self._conclude()

    def _begin(self, *, is_end: bool) -> None:
        """Draw answers and begin a pause, if they can be checked in the time that is left for it."""
        rows = self._job.self_check.rows
        most = MOST_ROWS if rows is None else rows
        n_rows = most - len(self._verdicts) if is_end else (most + 1) // 2
        budget_s, drain_s = float("inf"), 0.0
        if rows is None:
            elapsed_s = time.monotonic() - self._began
            of_run_s = elapsed_s if is_end else max(elapsed_s, self._expected_s()) / 2
            drain_s = 0.0 if is_end else self._pace.slowest_s
            budget_s = _SHARE * of_run_s - self._spent_s
            n_rows = min(n_rows, self._pace.rows_within(budget_s - drain_s))
        if n_rows <= 0:
            return
        self._pause = _Pause(budget_s, self._most_running)
        self._pace.set_limit((budget_s - drain_s) / n_rows)
        self._due.extend(self._drawn.take(n_rows))
        if self._due:
            self._hear(Message(f"self-check: computing {len(self._due)} rows again, each alone"))

    def _ask(self) -> None:
        """Submit the next drawn request, or end the pause if its time would not suffice."""
        pause = self._pause
        if pause and self._verdicts and pause.lost_s + pause.row_s > pause.budget_s:
            self._due.clear()
            self._conclude()
            return
        self._asked = _Alone(self._due.popleft(), self._job, self._pace.most_tokens)
        self.below.submit(self._asked.request)

    def _judge(self, asked: _Alone, completion: Completion) -> None:
        """Compare an answer that was computed alone with the one of the batch. A request that fails alone is left out; if
        it kills the engine, the pause ends."""
        if completion.error is None:
            asked.answers.append(completion)
            if (again := self._verdicts.next_request(asked)) is not None:
                self.below.submit(again)
                return
        elif isinstance(completion.error, EngineCrashError | RowOutOfMemoryError):
            self._due.clear()  # each further row might cost several restarts of the engine
        self._asked = None
        if self._pause is not None:
            self._pause.row_s = max(self._pause.row_s, time.monotonic() - asked.began)
        if asked.answers:
            self._verdicts.add(asked)
        if not self._due:
            self._conclude()

    def _conclude(self) -> None:
        assert self._pause is not None
        lost_s = self._pause.lost_s
        self._pause.lost_s = 0.0  # a pause that is stopped may end twice
        self._spent_s += lost_s
        self._hear(SelfChecked(self._verdicts.take_new(), lost_s))
        self._verdicts.check()


class _Verdicts:
    """The rows that were computed again, each with its verdict.

    ``dtype``: of the model's weights; None if the engine does not report it.
    """

    def __init__(self, job: JobConfig, dtype: str | None) -> None:
        self._job, self._dtype = job, dtype
        self._found: list[tuple[Completion, Verdict]] = []
        self._n_taken = 0  # of ``_found``
        # Difference between two computations of a request; None if not measured.
        self._noise: float | None = None

    def __len__(self) -> int:
        return len(self._found)

    def next_request(self, asked: _Alone) -> Request | None:
        """Return the request to submit once more because its text differs; None if enough is known.

        The log-probabilities of the second answer show whether two tokens are about equally likely. (To ask for them
        always would cost time: vLLM compiles a function for the first such request.) At the first difference, the request
        is computed a third time, to measure how much two computations of the same request differ.
        """
        if not asked.differs:
            return None
        if len(asked.answers) == 1:
            return asked.with_logprobs
        if self._noise is None:
            if len(asked.answers) == 2:
                return asked.with_logprobs
            one, two = (_side(answer).tokens or () for answer in asked.answers[1:])
            self._noise = noise_between(one, two)
        return None

    def add(self, asked: _Alone) -> None:
        """Compare the newest answer to ``asked`` with the one of the batch."""
        tie = max(tie_of(self._dtype), _NOISE * (self._noise or 0.0))
        self._found.append((asked.batched, asked.verdict(tie, self._dtype)))

    @property
    def has_new(self) -> bool:
        """True if ``take_new`` would return something."""
        return len(self._found) > self._n_taken

    def take_new(self) -> list[Mapping[str, Any]]:
        """Return the findings since the last call."""
        new = self._found[self._n_taken :]
        self._n_taken = len(self._found)
        return [_finding(*one) for one in new]

    def check(self) -> None:
        """Raise WrongAnswersError if more rows are different than ``self_check.max_different`` allows."""
        different = [one for one in self._found if one[1].kind == "different"]
        if not self._job.self_check.is_exceeded(len(different), len(self)):
            return
        allowed, folder = self._job.self_check.max_different, self._job.folder
        rows = "\n".join(f"  {_in_words(*one)}" for one in different[:_SHOWN])
        raise WrongAnswersError(
            f"{len(different)} of {len(self)} rows have another answer if they are computed alone"
            f" (self_check.max_different = {allowed:g}):\n{rows}\n"
            f"The engine computes batches wrongly. `batchkit compare --self {folder}` tries settings on these rows, one"
            " after another: enforce_eager = true, enable_prefix_caching = false and other values of attention_backend in"
            " [engine.options], and the environment variable VLLM_BATCH_INVARIANT=1. All finished rows are on disk, but"
            " their answers may be wrong. To continue without this check: --set self_check.rows=0"
        )


class _Pause:
    """A pause, and the engine's time that it takes from the run, ``lost_s``.

    Until the run's requests have come back, only the part of the engine that they no longer use is lost.

    - ``budget_s``: limit for ``lost_s``.
    - ``most_running``: the largest number of requests that the engine has computed at once.
    - ``row_s`` (attribute): the longest time that a row took alone.
    """

    def __init__(self, budget_s: float, most_running: int) -> None:
        self.budget_s, self._most_running = budget_s, most_running
        self._noted = time.monotonic()
        self.lost_s = self.row_s = 0.0

    def note(self, n_used: int) -> None:
        """Add the time since the last call, in which the engine computed ``n_used`` requests of the run."""
        now = time.monotonic()
        self.lost_s += (now - self._noted) * (1 - min(1.0, n_used / self._most_running))
        self._noted = now


class Drawn:
    """A random sample of an engine's answers, drawn with ``run.seed``. It includes the longest and the shortest prompt,
    a row of each adapter, a row with media, and one that was answered just after a preemption."""

    def __init__(self, job: JobConfig) -> None:
        self._generates, self._random = job.generates, Random(job.run.seed)
        self._is_vllm = job.engine.kind == "vllm"
        self._most = job.self_check.rows or MOST_ROWS
        self._kinds: dict[str, list[tuple[float, int, Completion]]] = {}  # heaps, by kind
        self._numbers = count()
        self._taken = set[int]()
        self.n_offered = self._n_preempted = 0

    def offer(self, completion: Completion, n_preempted: int) -> None:
        """Take an answer into account. ``n_preempted``: number of preemptions so far."""
        self.n_offered += 1
        is_preempted, self._n_preempted = n_preempted > self._n_preempted, n_preempted
        request = completion.request
        if not self._can_be_repeated(completion):
            return
        drawn, number = self._random.random(), next(self._numbers)
        length = completion.usage.prompt_tokens if completion.usage else 0
        self._keep("longest", length, number, completion)
        self._keep("shortest", -length, number, completion)
        if request.lora is not None:
            self._keep(f"adapter {request.lora}", drawn, number, completion)
        if request.media_bytes:
            self._keep("media", drawn, number, completion)
        if is_preempted:
            self._keep("preempted", drawn, number, completion)
        self._keep("any", drawn, number, completion, self._most)

    def take(self, n: int) -> list[Completion]:
        """Return up to ``n`` answers that were not returned before: one of each kind, then others."""
        special = [heap for kind, heap in self._kinds.items() if kind != "any"]
        found = dict[int, Completion]()
        for heap in [*special, self._kinds.get("any", [])]:
            for _, number, completion in sorted(heap, reverse=True):
                if len(found) < n and number not in self._taken:
                    found[number] = completion
        self._taken.update(found)
        return [*found.values()]

    def _can_be_scored(self, completion: Completion) -> bool:
        """Return whether the tokens of an answer that was drawn at random can be judged by their probability alone."""
        sampling, choices = completion.request.sampling, completion.choices
        has_text = len(choices) > 0 and bool(choices[0].text)
        is_plain = all(not value or name in _OF_DRAWING for name, value in sampling.items())
        return self._is_vllm and has_text and is_plain

    def _can_be_repeated(self, completion: Completion) -> bool:
        request, choices = completion.request, completion.choices
        broken = any(choice.finish_reason in BROKEN_OFF for choice in choices)
        return (
            completion.error is None
            and not broken
            and not any(choice.reasoning or choice.tool_calls for choice in choices)
            and (not _is_drawn(request, self._generates) or self._can_be_scored(completion))
        )

    def _keep(
        self, kind: str, priority: float, number: int, completion: Completion, most: int = 1
    ) -> None:
        heap = self._kinds.setdefault(kind, [])
        if len(heap) == most and priority <= heap[0][0]:
            return
        heapq.heappush(heap, (priority, number, _with_own_samples(completion)))
        while len(heap) > most or self._media_bytes > _MEDIA_BYTES:
            heapq.heappop(heap)

    @property
    def _media_bytes(self) -> int:
        return sum(one.request.media_bytes for heap in self._kinds.values() for *_, one in heap)


def _with_own_samples(completion: Completion) -> Completion:
    """Return the completion with a copy of its sound: part of a recording would keep the whole recording in memory."""
    request = completion.request
    if request.speech is None:
        return completion
    clips = [Audio(clip.samples.copy(), clip.sample_rate) for clip in request.clips]
    return replace(completion, request=with_media_bytes(replace(request, clips=clips)))


class _Alone:
    """A request that is computed alone.

    - ``batched``: the answer in the batch.
    - ``most_tokens``: limit for the answer alone. A longer answer is compared only at its beginning.
    - ``answers`` (attribute): the answers alone. ``began``: when it was submitted, by the monotonic clock.
    """

    def __init__(self, batched: Completion, job: JobConfig, most_tokens: float) -> None:
        self.batched, self._job = batched, job
        self._is_drawn = _is_drawn(batched.request, job.generates)
        can_be_shortened = job.generates and not self._is_drawn
        self.is_beginning = can_be_shortened and _can_be_shortened(batched, most_tokens)
        self.answers = list[Completion]()
        self.began = time.monotonic()
        sampling = sampling_alone(batched.request.sampling, job.engine)
        if self.is_beginning:
            sampling["max_tokens"] = int(most_tokens)
            sampling["min_tokens"] = min(sampling.get("min_tokens") or 0, int(most_tokens))
        self.request = replace(batched.request, sampling=sampling, alone=True)
        if self._is_drawn:
            scoring = {"temperature": 0.0, "max_tokens": 1, "logprobs": logprobs_of(job.engine)}
            text = batched.choices[0].text
            self.request = replace(self.request, sampling=scoring, scored=text)

    @property
    def with_logprobs(self) -> Request:
        logprobs = {"logprobs": logprobs_of(self._job.engine)}
        return replace(self.request, sampling={**self.request.sampling, **logprobs})

    @property
    def differs(self) -> bool:
        """True if the newest answer has another text than the one of the batch."""
        is_text = bool(self.batched.choices) and not self._is_drawn
        return is_text and self.verdict(0.0, None).kind != "equal"

    def verdict(self, tie: float, dtype: str | None) -> Verdict:
        """Compare the newest answer with the one of the batch. ``tie`` and ``dtype`` as in ``runs/verdicts.py``."""
        batched, alone = self.batched, self.answers[-1]
        if batched.pooled is not None and alone.pooled is not None:
            return of_numbers(batched.pooled, alone.pooled, dtype)
        if self._is_drawn:
            return of_drawn(_side(alone).tokens or (), batched.request.sampling)
        return of_texts(_side(batched), _side(alone), tie, is_beginning=self.is_beginning)


class _Pace:
    """The speed of an engine, which decides how many rows can be computed again, and how much of their answers.

    ``slowest_s``: the longest time that a request took. ``most_tokens``: the limit of tokens for an answer alone.
    """

    def __init__(self) -> None:
        self.slowest_s, self.most_tokens = 0.0, float("inf")
        # Of the fastest request. A request alone is at least as fast.
        self._token_s = self._row_s = float("inf")

    def note(self, completion: Completion) -> None:
        self.slowest_s = max(self.slowest_s, completion.latency_s)
        if completion.error is not None or not completion.latency_s:
            return
        n_tokens = completion.usage.completion_tokens if completion.usage else 0
        self._token_s = min(self._token_s, completion.latency_s / max(1, n_tokens))
        self._row_s = min(self._row_s, completion.latency_s)

    def rows_within(self, budget_s: float) -> int:
        """Return how many rows can be computed alone within ``budget_s``, at least in their beginnings."""
        least_s = min(self._row_s, _LEAST_TOKENS * self._token_s)
        return 10**6 if least_s == 0 else int(max(0.0, budget_s) / least_s)

    def set_limit(self, row_s: float) -> None:
        """Limit answers to the tokens that are computed in ``row_s``; infinity is no limit."""
        is_limited = row_s < float("inf")
        self.most_tokens = max(_LEAST_TOKENS, row_s / self._token_s) if is_limited else row_s


def _is_drawn(request: Request, generates: bool) -> bool:
    """Return whether the answer was drawn at random. Even with a seed, rounding may lead to another token."""
    return generates and not is_greedy(request)


def _can_be_shortened(completion: Completion, most_tokens: float) -> bool:
    """Return whether the answer has more than ``most_tokens``, and its beginning is the answer to a shorter request."""
    usage = completion.usage
    is_long = usage is not None and usage.completion_tokens > most_tokens
    return is_long and len(completion.choices) == 1


def _side(completion: Completion) -> SideAnswer:
    choice = completion.choices[0]
    tokens = None if choice.logprobs is None else tokens_of(choice.logprobs)
    return SideAnswer(choice.text, choice.finish_reason, tokens)


def _finding(completion: Completion, verdict: Verdict) -> Mapping[str, Any]:
    row, step = completion.request.row, completion.request.step
    return {
        "index": row.index,
        "id": row.id,
        **({"step": step} if step else {}),
        **verdict.to_json(),
    }


def _in_words(completion: Completion, verdict: Verdict) -> str:
    request = completion.request
    where = f"row {request.row.index} (id {request.row.id})"
    if request.call is not None:
        where += f", {request.call.in_words}"
    if verdict.token is None:
        return where if verdict.gap is None else f"{where}: difference {verdict.gap:.2g}"
    gap = "unknown" if verdict.gap is None else f"{verdict.gap:.3g}"
    texts = f"{verdict.batched!r} in the batch, {verdict.alone!r} alone"
    return f"{where}: token {verdict.token}: {texts}, gap {gap}"
