"""What a server sends that isn't this request's answer is never stored as one."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from batchkit.errors import EngineError
from batchkit.execution.completions import failed_unless_whole
from batchkit.types import Choice, Completion, Request, Row
from tests.support.chat_server import HangUp, Raw, Refused, error, http, serving
from tests.support.command_line import batchkit
from tests.support.dry_runs import RUN
from tests.support.engine_requests import collect
from tests.support.server_engine import ask, opened, request
from tests.support.server_runs import answering, records, said, write_job
from tests.support.waiting import until

pytestmark = [pytest.mark.usefixtures("in_an_empty_folder"), pytest.mark.slow]


# --- the answer to another request


def own(text: str) -> Any:
    return {"id": f"chatcmpl-{text}", **said(f"asked: {text}")}


SMUGGLED = http(said("asked: row 3"))
SURPLUSES: dict[str, Callable[[str], Raw]] = {
    "the answer twice": lambda text: Raw(http(own(text)) * 2),
    "a Content-Length that is too small": lambda text: Raw(http(own(text)) + SMUGGLED),
    "another row's answer late": lambda text: Raw(http(own(text)), SMUGGLED, wait_s=0.1),
}


@pytest.mark.parametrize("kind", SURPLUSES)
@pytest.mark.parametrize("max_num_seqs", [1, 4])
def test_bytes_behind_an_answer_never_become_the_answer_to_another_row(
    kind: str, max_num_seqs: int
) -> None:
    is_first = iter([True])

    def before(text: str, body: dict[str, Any]) -> None:
        if text == "row 5" and next(is_first, False):
            raise SURPLUSES[kind](text)
        if "late" in kind:
            time.sleep(0.03)  # so that the second one comes while a later row waits
        raise Refused(200, own(text))

    with serving(before) as server:
        write_job(server, 12, engine={"options": {"max_num_seqs": max_num_seqs}})
        assert batchkit("run", "job.toml").exit_code == 0
        assert server.connections >= 12  # each request has one of its own
    assert [r["text"] for r in records()] == [f"asked: row {n}" for n in range(12)]


@pytest.mark.parametrize("reason", ["abort", "error"])
def test_an_answer_that_any_engine_broke_off_is_a_failure(reason: str) -> None:
    asked = Request(Row(0, "0", {}), None, "tell", {}, "")
    whole = Completion(asked, [Choice("an answer", "length")])
    broken = Completion(asked, [Choice("an answer", "stop"), Choice("an ans", reason)])
    assert failed_unless_whole(whole) is whole
    error = failed_unless_whole(broken).error
    assert error is not None
    assert (error.kind, error.retryable) == ("server", True)


# --- the answer of another model, or another number of answers


def test_a_server_that_answers_as_another_model_stops_each_start() -> None:
    def before(text: str, body: dict[str, Any]) -> None:
        model = "tiny-2024-08-06" if server.answered.total() < 4 else "OTHER-7B"
        server.answered[text] += 1
        raise Refused(200, {**own(text), "model": model})

    with serving(before) as server:
        write_job(server, 12, engine={"options": {"max_num_seqs": 1}})
        for shown in ("now answers as model 'OTHER-7B'", '→ {"answers_as":"OTHER-7B"}'):
            done = batchkit("run", "job.toml")
            assert (done.exit_code, shown in done.stderr) == (1, True), done.stderr
            assert len(records()) == 4
        assert batchkit("run", "job.toml", "--fresh").exit_code == 0
    assert len(records()) == 12


LISTS = pytest.mark.parametrize(
    ("first", "second", "is_another"),
    [
        ({"root": "/models/a"}, {"root": "/models/b"}, True),
        ({"meta": {"n_params": 7, "n_ctx": 64}}, {"meta": {"n_params": 8, "n_ctx": 64}}, True),
        ({"id": "a.gguf"}, {"id": "b.gguf"}, True),
        ({"id": "a.gguf", "created": 1}, {"id": "a.gguf", "created": 2}, False),
        ({"meta": {"n_params": 7, "n_ctx": 64}}, {"meta": {"n_params": 7, "n_ctx": 99}}, False),
        ({"meta": {"n_params": 7}}, {"meta": None}, False),
    ],
)


@LISTS
def test_a_server_that_answers_under_any_name_is_known_by_its_list_when_it_comes_back(
    first: dict[str, Any], second: dict[str, Any], is_another: bool
) -> None:
    with serving(model=first) as server, opened(server, {"max_num_seqs": 2}) as engine:
        assert len(ask(engine, map(request, range(4)))) == 4
        server.kill()
        for n in range(4, 8):
            engine.submit(request(n))
        assert engine.poll(0.5) == []
        with serving(model=second, port=server.port) as again:
            if is_another:
                with pytest.raises(EngineError, match="the server's model has changed"):
                    collect(engine, 4)
                assert again.answered.total() == 0
            else:
                assert [c.error for c in collect(engine, 4)] == [None] * 4


A, B = {"root": "/models/a"}, {"root": "/models/b"}


def test_a_server_that_was_replaced_while_nothing_was_in_flight_gets_no_row() -> None:
    with serving(model=A) as server, opened(server) as engine:
        assert len(ask(engine, map(request, range(4)))) == 4
        server.kill()
        with serving(model=B, port=server.port) as other:
            time.sleep(1.1)
            for n in range(4, 8):
                engine.submit(request(n))
            with pytest.raises(EngineError, match="root was '/models/a', is '/models/b'"):
                collect(engine, 4)
            assert other.answered.total() == 0


def test_a_server_whose_model_changes_and_that_never_fails_stops_each_start() -> None:
    later = iter([B])

    def before(text: str, body: dict[str, Any]) -> None:
        if server.answered.total() >= 6:  # two requests may end at once, and 6 is never seen
            server.model = next(later, server.model)

    with serving(before, model=A) as server:
        write_job(server, 12, engine={"options": {"max_num_seqs": 2}})
        for shown in ("root was '/models/a', is '/models/b'", "engine.served: "):
            done = batchkit("run", "job.toml")
            assert (done.exit_code, shown in done.stderr) == (1, True), done.stderr
            assert len(records()) < 12
        server.model = A
        assert batchkit("run", "job.toml").exit_code == 0
        assert len(records()) == 12


def test_a_server_that_goes_away_after_its_last_answer_has_answered_it() -> None:
    def before(text: str, body: dict[str, Any]) -> None:
        if server.answered.total() == 3:
            server.ready_at = math.inf

    with serving(before, model=A) as server:
        write_job(server, 4, engine={"options": {"max_num_seqs": 1}})
        assert batchkit("run", "job.toml").exit_code == 0
    assert [r["status"] for r in records()] == ["ok"] * 4


@LISTS
def test_a_server_with_another_model_at_the_next_start_is_not_asked(
    first: dict[str, Any], second: dict[str, Any], is_another: bool
) -> None:
    with serving(model=first) as server:
        write_job(server, 6)
        assert batchkit("run", "job.toml", "--limit", "3").exit_code == 0
    for _ in range(2):  # what the first start knew is not forgotten in the second
        with serving(model=second, port=server.port) as other:
            found = batchkit("run", "job.toml")
        assert found.exit_code == (1 if is_another else 0), found.stderr
        assert ("engine.served: " in found.stderr) == is_another
        if is_another:
            assert other.answered.total() == 0
    with serving(model=first, port=server.port):
        assert batchkit("run", "job.toml").exit_code == 0
    assert len(records()) == 6


def test_an_answer_counts_though_the_engine_ends_while_the_model_is_checked() -> None:
    is_checking, is_over = threading.Event(), threading.Event()

    def first_waits() -> None:
        server.lists = lambda: None
        is_checking.set()
        is_over.wait(60)

    def before(text: str, body: dict[str, Any]) -> None:
        if text == "row 1":
            raise Refused(401, error("Incorrect API key provided"))

    done = list[Completion]()
    with serving(before) as server, opened(server) as engine:
        server.lists = first_waits
        engine.submit(request(0))
        assert is_checking.wait(60)
        engine.submit(request(1))
        with pytest.raises(EngineError, match="Incorrect API key"):
            until(lambda: done.extend(engine.poll(0.1)))
        is_over.set()
    assert [completion.request.row.index for completion in done] == [0]


def test_a_retry_asks_only_the_model_of_the_run() -> None:
    with serving(answering([said(), Refused(400, error("no"))]), model=A) as server:
        write_job(server, 3)
        assert batchkit("run", "job.toml").exit_code == 3
        before = records()
        found = batchkit("retry-failed", str(RUN), "--set", "engine.kind=dry-run")
        assert found.exit_code == 2
        assert "its text would be mixed with the answers of" in found.stderr
        assert records() == before
    retry = ("retry-failed", str(RUN), "--set", "engine.options.max_model_len=400")
    with serving(model=B, port=server.port) as other:
        found = batchkit(*retry)
    assert found.exit_code == 1
    assert "engine.served: " in found.stderr
    assert other.answered.total() == 0
    with serving(model=A, port=server.port):
        assert batchkit(*retry).exit_code == 0


@pytest.mark.parametrize("is_refused", [True, False])
def test_a_server_that_lists_less_while_it_loads_is_known_once_it_has_loaded(
    is_refused: bool,
) -> None:
    """llama.cpp's lists its model at once, and the model's size when it has loaded it."""

    def before(text: str, body: dict[str, Any]) -> None:
        if not again.model["meta"]:
            again.model = {"meta": {"n_params": 8}}
            if is_refused:
                raise Refused(503, error("Loading model", "unavailable_error", code=503))

    first = {"meta": {"n_params": 7}}
    with serving(model=first) as server, opened(server, {"max_num_seqs": 2}) as engine:
        assert len(ask(engine, map(request, range(4)))) == 4
        server.kill()
        for n in range(4, 8):
            engine.submit(request(n))
        assert engine.poll(0.5) == []
        with (
            serving(before, model={"meta": None}, port=server.port) as again,
            pytest.raises(EngineError, match="n_params was 7, is 8"),
        ):
            collect(engine, 4)


@pytest.mark.parametrize("status", [500, 503, 504, 521, 530, "no answer"])
def test_a_server_is_away_whatever_a_proxy_answers_for_it(status: int | str) -> None:
    def before(text: str, body: dict[str, Any]) -> None:
        if server.answered.total() == 5 and server.model["root"] != "/models/b":
            server.model = {"root": "/models/b"}
            if isinstance(status, int):
                raise Refused(status, error("away"))
            time.sleep(1.5)
            raise HangUp

    with serving(before, model={"root": "/models/a"}) as server:
        engine = {"options": {"max_num_seqs": 1}}
        write_job(server, 12, engine=engine, run={"row_timeout_s": 1})
        done = batchkit("run", "job.toml")
        assert done.exit_code == 1
    assert "root was '/models/a', is '/models/b'" in done.stderr
    assert [r["index"] for r in records() if r["status"] == "ok"] == [0, 1, 2, 3, 4]
