"""Servers that are busy or away: waiting with fewer requests, and stopping with the reason."""

from __future__ import annotations

import asyncio
import re
import threading
import time
from collections import Counter
from contextlib import suppress
from email.utils import formatdate
from typing import Any

import pytest

from batchkit.engines.base import Engine
from batchkit.engines.openai.api import retry_after_s
from batchkit.engines.openai.connections import Connections, Response
from batchkit.engines.openai.rate_limiter import NoAnswer, RateLimiter, Why
from batchkit.engines.registry import open_engine
from batchkit.errors import EngineError, RowTimeoutError
from batchkit.types import Completion
from tests.support.chat_server import MODEL, HangUp, Refused, error, serving
from tests.support.engine_requests import collect
from tests.support.server_engine import KEY, ask, job, opened, request, texts
from tests.support.waiting import until

pytestmark = pytest.mark.slow


def _submit(engine: Engine, n: int) -> None:
    for index in range(n):
        engine.submit(request(index))


def test_a_storm_of_429_is_weathered_with_fewer_at_a_time() -> None:
    refused = 0

    def before(text: str, body: dict[str, Any]) -> None:
        nonlocal refused
        if server.inside > 4:
            refused += 1
            raise Refused(429, error("slow down", code="rate_limit_exceeded"), Retry_After="0.1")

    with serving(before, latency_s=0.02) as server, opened(server) as engine:
        done = ask(engine, map(request, range(120)))
    assert all(c.error is None for c in done)
    assert set(server.answered.values()) == {1}
    assert 0 < refused < 90


def test_retry_after_is_respected_by_all_rows() -> None:
    arrivals: list[float] = []

    def before(text: str, body: dict[str, Any]) -> None:
        arrivals.append(time.monotonic())
        if len(arrivals) == 1:
            raise Refused(429, error("wait"), Retry_After="1")

    with serving(before) as server, opened(server, {"max_num_seqs": 1}) as engine:
        done = ask(engine, map(request, range(3)))
    assert all(c.error is None for c in done)
    assert 1 <= arrivals[1] - arrivals[0] < 2


def test_a_server_that_is_too_slow_for_so_many_gets_fewer_at_a_time() -> None:
    def before(text: str, body: dict[str, Any]) -> None:
        if server.inside > 4:
            time.sleep(1)

    options = {"max_num_seqs": 16}
    # The latency keeps a quick client's requests together, so that more than 4 of them are in there.
    with (
        serving(before, latency_s=0.02) as server,
        opened(server, options, run={"row_timeout_s": 0.4}) as engine,
    ):
        done = ask(engine, map(request, range(80)), within_s=60)
    late = [c for c in done if isinstance(c.error, RowTimeoutError)]
    assert 0 < len(late) < 50
    assert sum(c.error is None for c in done) == 80 - len(late)


def test_a_request_that_is_interrupted_at_any_instant_holds_up_no_other() -> None:
    async def ask_all(url: str) -> None:
        connections = Connections({}, trust_env=False, max_bytes=1000)
        for turns in range(60):
            first = asyncio.create_task(models(connections, url))
            for _ in range(turns):
                await asyncio.sleep(0)
            first.cancel()  # as a timeout does
            with suppress(asyncio.CancelledError):
                await first
            assert (await models(connections, url)).status == 200
        await connections.close()

    async def models(connections: Connections, url: str) -> Response:
        return await connections.exchange("GET", f"{url}/models", None, 5)

    with serving() as server:
        asyncio.run(ask_all(server.url))


def test_retry_after_is_in_seconds_or_a_date() -> None:
    past = "Mon, 01 Jan 2024 00:00:00 GMT"
    for value, expected in {"3": 3, "-1": 0, "nan": 0, past: 0, "x": None, None: None}.items():
        assert retry_after_s(value) == expected


def test_retry_after_is_kept_up_to_give_up_s() -> None:
    async def waits_s(asked_s: float) -> float:
        limiter = RateLimiter(8, longest_wait_s=200.0)
        place = await limiter.enter()
        limiter.failed(place, NoAnswer("busy", Why.BUSY, retry_after_s=asked_s))
        return limiter.waits_s

    date = formatdate(time.time() + 120, usegmt=True)
    assert 115 < asyncio.run(waits_s(retry_after_s(date) or 0.0)) < 135
    assert 195 < asyncio.run(waits_s(3600.0)) < 225


@pytest.mark.parametrize(("status", "others"), [(429, 0), (429, 12), (504, 12), (408, 0)])
def test_a_row_that_is_always_turned_away_fails_in_the_end_and_no_other(
    status: int, others: int
) -> None:
    def before(text: str, body: dict[str, Any]) -> None:
        if text in ("row 0", "row 1"):
            raise Refused(status, error("Request too large: Limit 30000, Requested 50000"))

    options = {"max_num_seqs": 4, "give_up_s": 0.5}
    with serving(before) as server, opened(server, options) as engine:
        done = ask(engine, map(request, range(2 + others)), within_s=40)
    assert texts(done[:2]) == ["ServerError"] * 2
    assert "Limit 30000" in str(done[0].error)
    assert [c.error for c in done[2:]] == [None] * others


ONCE = {
    **{str(status): Refused(status, error("not now")) for status in (409, 424, 499)},  # 424: TGI's
    **{str(status): Refused(status, b"<html>upstream</html>") for status in (502, 503)},
    "the connection breaks off": HangUp(),
}


@pytest.mark.parametrize("kind", ONCE)
def test_what_fails_once_is_tried_again(kind: str) -> None:
    seen = Counter[str]()

    def before(text: str, body: dict[str, Any]) -> None:
        seen[text] += 1
        if seen[text] == 1 and text.endswith(("0", "5")):
            raise ONCE[kind]

    with serving(before) as server, opened(server, {"max_num_seqs": 8}) as engine:
        done = ask(engine, map(request, range(30)))
    assert all(c.error is None for c in done)
    del server.answered["Hi"]  # the probe
    assert set(server.answered.values()) == {1}
    assert seen.total() - seen["Hi"] == 36


def test_the_pace_halves_once_a_burst_and_grows_back_by_steps() -> None:
    async def burst() -> list[int]:
        limiter, limits = RateLimiter(32), []
        for place in [await limiter.enter() for _ in range(32)]:
            limiter.failed(place, NoAnswer("busy", Why.BUSY))
            limiter.leave(place)
        limits.append(limiter.limit)
        for _ in range(40):
            limiter.went_well(place)
        limits.append(limiter.limit)
        place = await limiter.enter()
        limiter.failed(place, NoAnswer("away", Why.DOWN))
        limits.append(limiter.limit)
        limiter.went_well(place)  # sent before: no proof
        limits.append(limiter.limit)
        limiter.leave(place)
        probe = await limiter.enter()
        assert probe.is_probe
        limiter.went_well(probe)
        limits.append(limiter.limit)
        return limits

    assert asyncio.run(burst()) == [16, 26, 1, 1, 26]


@pytest.mark.parametrize("status", [429, 500, 503])
def test_an_outage_is_reported_and_waited_for_with_one_probe_at_a_time(status: int) -> None:
    refused: list[str] = []
    at_a_time = set[int]()
    events: list[str] = []
    troubles: list[str] = []

    def before(text: str, body: dict[str, Any]) -> None:
        if text == "Hi":  # a probe
            at_a_time.add(server.inside)
        if time.monotonic() < well_at or len(events) < 2:  # on a busy machine that takes longer
            refused.append(text)
            raise Refused(status, error("busy\x1b[2J"))

    options = {"max_num_seqs": 8, "give_up_s": 5.0}
    with serving(before) as server, opened(server, options) as engine:
        well_at = time.monotonic() + 2.5
        _submit(engine, 8)
        done: list[Completion] = []
        while len(done) < 8:
            done += engine.poll(0.05)
            load = engine.load()
            events += load.events
            troubles.append(load.trouble)
    assert all(c.error is None for c in done)
    pattern = rf"the server answered {status}: busy\\u001b\[2J; \d requests wait, next try in \d+ s"
    *outage, end = events
    assert end.endswith("answers again")
    assert 2 <= len(outage) <= 4
    assert all(re.search(pattern, event) for event in outage)
    assert (troubles[0], troubles[-1]) == ("", "")
    assert all(re.search(pattern, trouble) for trouble in filter(None, troubles))
    shown = [*map(bool, troubles)]
    assert all(shown[shown.index(True) : -shown[::-1].index(True)]), "the whole time"
    assert len(refused) < 50
    assert refused == sorted(refused, key="Hi".__eq__), "nothing but probes after the first probe"
    assert at_a_time == {1}


def test_answers_to_requests_sent_before_an_outage_blame_no_row() -> None:
    """Long answers still come when the server's proxy refuses all that is new."""

    def before(text: str, body: dict[str, Any]) -> None:
        if text == "row 0":
            time.sleep(1.0)
        elif time.monotonic() < well_at:
            raise Refused(500, error("no upstream"))

    with serving(before) as server, opened(server, {"max_num_seqs": 8}) as engine:
        well_at = time.monotonic() + 3
        done = ask(engine, map(request, range(8)))
    assert [c.error for c in done] == [None] * 8


# --- what stops the run


def test_a_server_that_answers_nothing_is_given_up_and_no_row_is_blamed() -> None:
    def before(text: str, body: dict[str, Any]) -> None:
        if server.answered:
            raise Refused(500, error("EngineDeadError", "InternalServerError", code=500))

    with serving(before) as server, opened(server, {"give_up_s": 1.0}) as engine:
        ask(engine, [request(0)])
        _submit(engine, 5)
        with pytest.raises(EngineError) as given_up:
            collect(engine, 1, within_s=30)
    for part in (server.url, "give_up_s = 1", "EngineDeadError", "run the same command again"):
        assert part in str(given_up.value)


def test_an_unknown_model_stops_the_run_and_the_known_ones_are_listed() -> None:
    with (
        serving() as server,
        opened(server, engine={"model": "tinny"}) as engine,
        pytest.raises(EngineError, match=f"no model 'tinny'.*serves {MODEL}"),
    ):
        ask(engine, [request(0)])


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        ({"api_key_env": "NO_SUCH_VARIABLE"}, r"NO_SUCH_VARIABLE \(engine.api_key_env\), which is not set"),
        ({"base_url": "{host}"}, "ends in /v1"),
        ({"base_url": "http://127.0.0.1:1/v1"}, r"http://127.0.0.1:1/v1: .*ConnectError.*start the server"),
    ],
)  # fmt: skip
def test_a_server_that_can_not_be_used_is_reported_at_the_start(
    engine: dict[str, str], message: str
) -> None:
    with serving(key=KEY) as server:
        host = server.url.removesuffix("/v1")
        found = {name: value.format(host=host) for name, value in engine.items()}
        server.key = KEY if "api_key_env" in engine else None
        with pytest.raises(EngineError, match=message):
            open_engine(job(server, engine=found))


def test_close_does_not_wait_for_a_slow_answer() -> None:
    with serving(latency_s=60) as server:
        with opened(server) as engine:
            _submit(engine, 50)
            until(lambda: len(server.bodies) > 0)
            began = time.monotonic()
        assert time.monotonic() - began < server.latency_s
        names = [thread.name for thread in threading.enumerate()]
        assert "openai-server" not in names
