"""The layer of the self-check above an engine that only counts: which rows it asks for, when, and how much of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from batchkit.config.tables import JobConfig
from batchkit.execution.engine_layer import EngineLayer
from batchkit.execution.events import Event, Load, SelfChecked
from batchkit.execution.self_check import FIRST_ANSWERS, SelfCheck, is_checked
from batchkit.types import Audio, Choice, Completion, Request, Row, Speech, Usage


class CountingLayer(EngineLayer):
    """Answers each request at the next poll, and counts how many are in flight."""

    def __init__(self, latency_s: float) -> None:
        self.latency_s, self.requests, self.most = latency_s, list[Request](), 0
        self._in_flight = list[Request]()

    @property
    def room(self) -> int:
        return 8 - len(self._in_flight)

    def submit(self, request: Request) -> None:
        self.requests.append(request)
        self._in_flight.append(request)
        if request.alone:
            self.most = max(self.most, len(self._in_flight))

    def resubmit(self) -> None:
        pass

    def poll(self, timeout_s: float) -> Sequence[Completion]:
        done, self._in_flight = self._in_flight, []
        return [self._answered(request) for request in done]

    @property
    def unanswered(self) -> int:
        return len(self._in_flight)

    @property
    def load(self) -> Load:
        return Load(preemptions=int(len(self.requests) > 100))

    def _answered(self, request: Request) -> Completion:
        n_tokens = min(request.sampling.get("max_tokens", 100), 100)
        choice = Choice("x" * n_tokens, "length")
        usage = Usage(len(request.prompt or ""), n_tokens)
        return Completion(request, [choice], usage, self.latency_s * n_tokens / 100)


def asked(
    n_rows: int,
    *,
    latency_s: float = 1.0,
    expected_s: float = 0.0,
    make: Callable[[int], dict[str, Any]] = lambda n: {},
    **self_check: Any,
) -> tuple[list[Request], CountingLayer, list[Event]]:
    """The requests that were computed again, for rows that are submitted in groups of eight."""
    job = JobConfig(engine={"model": "m"}, self_check=self_check)
    below, heard = CountingLayer(latency_s), list[Event]()
    layer = SelfCheck(below, job, "float32", heard.append, lambda: expected_s)

    def turn() -> None:
        layer.resubmit()
        layer.poll(0)

    n = 0
    while n < n_rows:
        for _ in range(min(layer.room, n_rows - n)):
            sampling = {"temperature": 0.0, "max_tokens": 100}
            request = Request(Row(n, str(n), {}), None, "p" * (n % 90 + 5), sampling, "")
            layer.submit(_with(request, make(n)))
            n += 1
        turn()
    while layer.unanswered or layer.is_busy:
        turn()
    layer.finish()
    while layer.is_busy:
        turn()
    return [request for request in below.requests if request.alone], below, heard


def _with(request: Request, changes: dict[str, Any]) -> Request:
    from msgspec.structs import replace

    return replace(request, **changes)


def test_half_of_the_rows_are_computed_near_the_start_and_the_rest_at_the_end() -> None:
    found, below, heard = asked(1000, rows=9)
    assert len({request.key for request in found}) == len(found) == 9
    assert below.most == 1  # nothing else was in flight
    places = [n for n, request in enumerate(below.requests) if request.alone]
    assert places[:5] == [*range(places[0], places[0] + 5)]
    assert FIRST_ANSWERS <= places[0] < FIRST_ANSWERS + 16
    assert places[5:] == [*range(1005, 1009)]
    verdicts = [its for event in heard if isinstance(event, SelfChecked) for its in event.findings]
    assert [its["kind"] for its in verdicts] == ["equal"] * 9


def test_a_short_run_is_checked_at_its_end_only() -> None:
    found, below, _ = asked(40, rows=6)
    assert len(found) == 6
    assert below.requests[40:] == found


def test_the_longest_the_shortest_and_each_adapter_are_among_them() -> None:
    def make(n: int) -> dict[str, Any]:
        return {"lora": "rare" if n == 77 else "common", "media_bytes": 9 * (n == 33)}

    found, _, _ = asked(200, rows=6, make=make)
    lengths = [len(request.prompt or "") for request in found]
    assert {5, 94} <= set(lengths)
    assert {77, 33} <= {request.row.index for request in found}
    assert any(96 <= request.row.index < 104 for request in found)  # while others were preempted


def test_the_drawn_rows_keep_little_media_in_memory() -> None:
    found, _, _ = asked(40, rows=12, make=lambda n: {"media_bytes": 2**26})
    assert 0 < sum(request.media_bytes for request in found) <= 2**28
    assert len(asked(40, rows=12, make=lambda n: {"media_bytes": 2**29 * (n < 35)})[0]) == 5


def test_a_drawn_part_of_a_recording_keeps_only_its_own_samples() -> None:
    recording = np.zeros(2**20, np.float32)

    def make(n: int) -> dict[str, Any]:
        part = Audio(recording[n * 100 : n * 100 + 100], 16_000)
        return {"clips": [part], "speech": Speech()}

    found, _, _ = asked(40, rows=6, make=make)
    assert len(found) == 6
    assert not any(np.shares_memory(request.clips[0].samples, recording) for request in found)


def test_by_default_a_check_takes_no_more_than_its_share_of_the_run() -> None:
    assert asked(1000)[0] == []  # the run has taken no time yet
    found, _, _ = asked(
        1000, expected_s=1000.0
    )  # 5 s for this pause, 1 s of them until it is empty
    assert len(found) == 8
    assert {request.sampling["max_tokens"] for request in found} == {50}  # 0.5 s of 1 s


def test_answers_drawn_at_random_are_not_computed_again_but_scored() -> None:
    drawn = {"sampling": {"temperature": 1.0, "max_tokens": 100}}
    found, _, _ = asked(40, rows=3, make=lambda n: drawn)
    assert [request.scored for request in found] == ["x" * 100] * 3
    penalized = {"sampling": {"temperature": 1.0, "presence_penalty": 1.0}}
    assert asked(40, rows=3, make=lambda n: penalized)[0] == []


def test_which_engines_are_checked_by_default() -> None:
    def job(kind: str, rows: int | None = None, **engine: Any) -> JobConfig:
        return JobConfig(engine={"kind": kind, "model": "m", **engine}, self_check={"rows": rows})

    server = {"base_url": "http://127.0.0.1:1/v1"}
    assert is_checked(job("vllm"))
    assert is_checked(job("openai-server", server={"command": "llama-server --port {port}"}))
    assert is_checked(job("openai-server", 4, **server))
    assert not is_checked(job("openai-server", **server))
    assert not is_checked(job("vllm", 0))
    assert not is_checked(job("dry-run", 4))
