"""Whatever a server answers over real HTTP: what the run makes of it, writes and reads back.

Each row of a table is one response to one row of a job, and what its record has.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchkit.config.tables import JobConfig
from batchkit.errors import EngineError
from batchkit.execution.completions import to_record
from batchkit.execution.start import Start
from batchkit.storage.ledger import line_of
from batchkit.storage.lines import record_in
from batchkit.types import Choice, Completion, Cut, Request, Row, Usage
from tests.support.chat_server import MODEL, ChatServer, Flood, Refused, error, serving
from tests.support.command_line import batchkit
from tests.support.server_engine import KEY, ask, opened, request, texts
from tests.support.server_runs import answering, assert_settled, counted, records, said, write_job

pytestmark = pytest.mark.usefixtures("in_an_empty_folder")

START = Start.of(JobConfig(engine={"kind": "dry-run"}))
MiB = 1 << 20
CALL = {
    "id": "call-1",
    "type": "function",
    "function": {"name": "weather", "arguments": '{"city": "Paris"}'},
}
DIED = {"code": 502, "message": "the provider died"}


def nested(depth: int) -> Any:
    value: Any = "leaf"
    for _ in range(depth):
        value = [value]
    return value


def answer(content: Any, finish_reason: str = "stop", **beside: Any) -> dict[str, Any]:
    body = said(content, finish_reason)
    body["choices"][0]["message"] |= beside
    return body


def choices(*indexes: int | None) -> dict[str, Any]:
    choices = [{"index": i, "message": {"content": f"choice {i}"}} for i in indexes]
    return {**said(), "choices": choices}


def called(*calls: Any) -> dict[str, Any]:
    return answer("fine", tool_calls=[*calls])


def ok(text: str = "fine", **expected: Any) -> dict[str, Any]:
    """What the record of an answer has; None: nothing."""
    return {"status": "ok", "text": text, "error": None, **expected}


def failed(kind: str = "server", *, retryable: bool = True, message: str = "") -> dict[str, Any]:
    error = {"kind": kind, "retryable": retryable, "message": message}
    return {"status": "failed", "text": None, "error": error}


def refused(message: str) -> dict[str, Any]:
    return failed("invalid_request", retryable=False, message=message)


def function(name: str, arguments: str) -> dict[str, Any]:
    return {"id": None, "type": "function", "function": {"name": name, "arguments": arguments}}


NOT_A_COUNT = [-1, 2**32, 2**63, 2**64, 10**400, 1.5, 3.0, True, "3", None, [3], float("nan")]
WITH_REASONING = answer("Paris", reasoning="It is the capital.")
WITH_REASONING["usage"]["completion_tokens_details"] = {"reasoning_tokens": 3}
COUNTS = {"prompt_tokens": 3, "completion_tokens": 4}

# What may be the row's own fault, its record while others are answered, and what is said if none is.
BARRED: dict[str, tuple[Refused, dict[str, Any], str]] = {
    "a flagged input": (Refused(403, error("your input was flagged")), refused("403: your input"), "MY_KEY"),
    "a model that costs more": (Refused(402, error("costs more")), refused("402: costs more"), "has no credit"),
    "not modified": (Refused(304, b""), refused("304"), "redirects are not followed"),
    "a redirect": (Refused(307, b"", Location="http://a/login"), refused("307"), "moved to http://a/login"),
    "no such model": (Refused(404, error("no image model", "not_found_error")), refused("404: "), "no model"),
    "a load balancer's 404": (Refused(404, b"default backend - 404"), refused("404: default"), "also to a one-word prompt"),
    **{
        str(n): (Refused(n, b"no"), refused(f"{n}: no"), "also to a one-word prompt")
        for n in (405, 407, 410, 421, 426, 501)
    },
}  # fmt: skip

TABLE: dict[str, tuple[Any, dict[str, Any]]] = {
    # A failure that looks like an answer.
    "the reason is error": (said("half", "error"), failed()),
    "the reason is abort": (said("half", "abort"), failed()),
    "the reason is DeepSeek's": (said("half", "insufficient_system_resource"), failed()),
    "the reason is Zhipu's": (said("half", "network_error"), failed()),
    "the reason is an object of SGLang's": (said("half", {"type": "abort", "message": "x"}), failed()),
    "the choice has an error": (said("half", "stop", error=DIED), failed()),
    "the answer has an error": ({**said("half"), "error": DIED}, failed()),
    "the answer has an error in words": ({**said("half"), "error": "upstream died"}, failed()),
    # Any other reason.
    **{
        f"the reason is {reason}": (said("all of it", reason, error=None), ok("all of it", finish_reason=reason))
        for reason in ("repetition", "length", "stop", "something new", None)
    },
    "a reason that is an object": (said(finish_reason={"x": 1}), ok(finish_reason=None)),
    "a reason that is a number": (said(finish_reason=3), ok(finish_reason=None)),
    "a reason that is nested": (said(finish_reason=nested(300)), ok(finish_reason=None)),
    "a lone surrogate in the reason": (said(finish_reason="\udfff"), ok()),
    # Counts.
    **{f"{n!r:.20} prompt tokens": (counted(n), ok(usage=None)) for n in NOT_A_COUNT},
    **{f"{n!r:.20} answered tokens": (counted(3, n), ok(usage=None)) for n in NOT_A_COUNT},
    **{
        f"usage is {usage!r}": ({**said(), "usage": usage}, ok(usage=None))
        for usage in ([], "3", {"prompt_tokens": 3}, 7)
    },
    # Text, and what is beside it.
    "NUL": (said("a\0b"), ok("a\0b")),
    "a lone surrogate": (said("a\ud800b"), ok("a?b")),
    "white space of all kinds": (said("\u2028a\r\n\x85\u2029"), ok("\u2028a\r\n\x85\u2029")),
    "logprobs that are text": (said(logprobs="many"), ok(choices=None)),
    "logprobs that are nested": (said(logprobs=nested(300)), ok(choices=None)),
    "logprobs with NaN": (
        said(logprobs={"content": [{"token": "a", "logprob": float("nan")}]}),
        ok(choices=None),
    ),
    "logprobs of a token that is none": (
        said(logprobs={"content": [{"token": {"a": 1}, "logprob": -1}]}),
        ok(choices=None),
    ),
    "a number that no float holds": ({**said(), "created": 10**400}, ok()),
    "NaN beside the answer": ({**said(), "took": float("nan")}, ok()),
    "nested beside the answer": ({**said(), "more": nested(900)}, ok()),
    "a key twice": (json.dumps(said("b")).encode().replace(b"{", b'{"choices":[],', 1), ok("b")),
    **{
        f"the model is {model!r}, the {n}th": ({**said(), "model": model}, ok())
        for n, model in enumerate((None, 3, "", [], MODEL, MODEL, None))
    },
    "text in parts": (answer([{"type": "text", "text": "some"}, {"type": "text", "text": " tea"}]), ok("some tea")),
    # Choices, when one was asked for.
    "one index twice": (choices(0, 0), failed()),
    "two choices": (choices(1, 0), failed()),
    "two without an index": (choices(None, None), failed()),
    "one before the first": (choices(-1, 0), failed()),
    "one of another index": (choices(7), ok("choice 7", choices=None)),
    # Reasoning and tool calls.
    "reasoning": (
        WITH_REASONING,
        ok("Paris", reasoning="It is the capital.", usage={**COUNTS, "reasoning_tokens": 3}, tool_calls=None),
    ),
    "reasoning_content": (answer("a", reasoning_content="b"), ok("a", reasoning="b")),
    "reasoning that is a list": (answer("fine", reasoning=["x"]), ok(reasoning=None)),
    "a call": (
        answer(None, "tool_calls", tool_calls=[CALL]),
        ok("", tool_calls=[CALL], finish_reason="tool_calls", reasoning=None),
    ),
    "arguments that are an object": (
        called({"function": {"name": "f", "arguments": {"a": [1]}}}),
        ok(tool_calls=[function("f", '{"a":[1]}')]),
    ),
    "calls that are none among one": (
        called({"id": 7, "function": {"name": "f"}}, "x", {}),
        ok(tool_calls=[function("f", "{}")]),
    ),
    "a call without a name": (called({"function": {"name": 7, "arguments": ""}}), ok(tool_calls=None)),
    "calls that are no list": (answer("fine", tool_calls="f()"), ok(tool_calls=None)),
    "no calls": (called(), ok(tool_calls=None)),
    # How it is sent.
    "packed, though nobody asked for that": (
        Refused(200, said(), Content_Encoding="gzip"),
        failed(message="Content-Encoding 'gzip'"),
    ),
    "not packed": (Refused(200, said(), Content_Encoding="Identity"), ok()),
    "201": (Refused(201, said()), ok()),
    "206": (Refused(206, said()), ok()),
    "201 without an answer": (Refused(201, {"accepted": True}), failed()),
    "206 without an answer": (Refused(206, {"accepted": True}), failed()),
    # The row's own fault.
    "a broken image": (
        Refused(400, error("image is broken", param="messages")),
        refused("400: image is broken"),
    ),
    "what FastAPI refuses": (
        Refused(422, {"detail": [{"loc": ["body", "n"], "msg": "too many"}]}),
        refused("too many"),
    ),
    **{
        f"too long, {n}": (Refused(400, body), failed("prompt_too_long", retryable=False))
        for n, body in enumerate(
            (
                error("…", "invalid_request_error", code="context_length_exceeded"),
                error("…", param="input_tokens", code=400),
                error("…", param="input_text", code=400),
                error("Input length (2072) exceeds model's maximum context length (2048).", code=400),
            )
        )
    },
    # Refused as all may be, while others are answered.
    **{name: (answer, record) for name, (answer, record, _) in BARRED.items()},
    # Errors of any shape.
    **{
        f"an error whose message is a {type(message).__name__}": (
            Refused(422, {"error": {"message": message, "code": message}}),
            refused("the server answered 422: "),
        )
        for message in (nested(900), {"a": nested(400)}, "\ud800")
    },
}  # fmt: skip


def check(record: dict[str, Any], expected: dict[str, Any]) -> None:
    error = expected.get("error")
    if error is not None:
        assert error["message"] in record["error"]["message"]
        same = {name: record["error"][name] for name in ("kind", "retryable")}
        record, expected = {**record, "error": same}, {**expected, "error": {**error}}
        del expected["error"]["message"]
    assert {name: record.get(name) for name in expected} == expected


def test_each_answer_becomes_its_record_and_is_read_back() -> None:
    bodies = [body for body, _ in TABLE.values()]
    with serving(answering(bodies)) as server:
        write_job(server, len(bodies) + 1)
        assert batchkit("run", "job.toml").exit_code == 3
        asked = [body["messages"][0]["content"] for body in server.bodies]
        assert_settled(server)
    found = dict(zip(TABLE, records(), strict=False))
    for n, (name, (_, expected)) in enumerate(TABLE.items()):
        try:
            check(found[name], expected)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from None
        if expected["status"] == "ok" or expected["error"]["retryable"]:
            assert (asked.count(f"row {n}") > 1) == (expected["status"] == "failed"), name
    assert records()[-1]["usage"]["prompt_tokens"] == 2


STOPS = {
    **{name: (answer, message) for name, (answer, _, message) in BARRED.items()},
    "a wrong key": (Refused(401, error(f"Incorrect API key: {KEY}")), "MY_KEY"),
    "no money": (
        Refused(429, error("You exceeded…", code="insufficient_quota")),
        "account has no credit",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", STOPS)
def test_what_every_request_is_refused_stops_the_run(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusal, message = STOPS[kind]

    def before(text: str, body: dict[str, Any]) -> None:
        if server.answered.total() >= 4:
            raise refusal

    monkeypatch.setenv("MY_KEY", KEY)
    tables = {"engine": {"api_key_env": "MY_KEY"}}
    with (
        serving(before, key=KEY) as server,
        opened(server, {"max_num_seqs": 2}, **tables) as engine,
    ):
        for n in range(12):
            engine.submit(request(n))
        done = []
        with pytest.raises(EngineError) as stopped:  # noqa: PT012
            while True:
                done += engine.poll(0.05)
        with pytest.raises(EngineError):
            engine.poll(0.01)
    assert len(done) >= 3
    assert message in str(stopped.value)
    assert KEY not in str(stopped.value)


def answered_with(bodies: list[Any], exit_code: int, **tables: Any) -> list[dict[str, Any]]:
    """The records of a run with a row for each of ``bodies``."""
    with serving(answering(bodies)) as server:
        write_job(server, len(bodies), **tables)
        assert batchkit("run", "job.toml").exit_code == exit_code
        assert_settled(server)
    return records()


OF_TWO: dict[str, tuple[Any, list[str] | None]] = {
    "as many as asked": (choices(1, 0), ["choice 0", "choice 1"]),
    "without an index": (choices(None, None), ["choice None"] * 2),
    "one too many": (choices(0, 1, 2), None),
    "a gap": (choices(0, 5), None),
    "one index twice": (choices(0, 0), None),
    "none of the first": (choices(1), None),
}


@pytest.mark.slow  # four pauses between attempts
def test_an_answer_with_other_choices_than_asked_for_is_never_stored() -> None:
    bodies = [body for body, _ in OF_TWO.values()]
    made = answered_with(bodies, 3, sampling={"n": 2, "temperature": 1.0})
    found = [
        r["choices"] and [c["text"] for c in r["choices"]] if r["text"] else None for r in made
    ]
    assert dict(zip(OF_TWO, found, strict=True)) == {n: texts for n, (_, texts) in OF_TWO.items()}


def test_choices_have_their_own_reasoning_and_calls() -> None:
    first, second = answer("one", reasoning="a"), answer(None, tool_calls=[CALL])
    second["choices"][0]["index"] = 1
    first["choices"] += second["choices"]
    (record,) = answered_with([first], 0, sampling={"n": 2, "temperature": 1.0})
    assert record["reasoning"] == "a"
    assert record["choices"] == [
        {"text": "one", "reasoning": "a", "finish_reason": "stop", "logprobs": None},
        {"text": "", "tool_calls": [CALL], "finish_reason": "stop", "logprobs": None},
    ]


def test_a_tool_call_is_no_json_that_lacks_something() -> None:
    bodies = [answer(None, tool_calls=[CALL]), answer('{"a": 1}')]
    call, text = answered_with(bodies, 0, output={"parse": "json"})
    assert ("parsed" in call, text["parsed"]) == (False, {"a": 1})


@pytest.mark.parametrize("tokens", [0, -5, True, 2**70, "in words"])
def test_a_prompt_too_long_by_an_impossible_count_is_too_long(tokens: Any) -> None:
    details = {"code": "context_length_exceeded", "n_prompt_tokens": tokens, "n_ctx": 100}
    error: dict[str, Any] = {"message": "no", **details}
    if tokens == "in words":
        limit = f"maximum context length is {2 * 10**22} tokens"
        error = {"message": f"{limit}. However, your prompt resulted in {2 * 10**22 + 1} tokens"}
    with serving(answering([Refused(400, {"error": error})])) as server:
        write_long_job(server, [90, 90])
        assert batchkit("run", "job.toml").exit_code == 3
        assert_settled(server)
    assert records()[0]["error"]["kind"] == "prompt_too_long"


@pytest.mark.parametrize("status", [401, 402, 403, 302, 503, 429, 500])
def test_a_prompt_that_cannot_be_counted_is_too_long_and_stops_nothing(status: int) -> None:
    with serving(context=50, counts=False) as server:
        server.tokenize = Refused(status, error("not for you"), Location="/login")
        write_long_job(server, [1, 90, 1])
        done = batchkit("run", "job.toml")
        assert done.exit_code == 3, done.stderr
    assert [r["status"] for r in records()] == ["ok", "failed", "ok"]
    assert records()[1]["error"]["kind"] == "prompt_too_long"


@pytest.mark.parametrize(
    ("server_says", "options"),
    [
        ({"counts": True}, {}),
        ({"counts": False}, {}),
        ({"counts": False, "model": {"meta": {"n_ctx": 100}}}, {}),
        ({"counts": False, "model": {}}, {"max_model_len": 100}),
    ],
)
def test_a_prompt_that_is_too_long_is_cut_where_the_server_counts_it(
    server_says: dict[str, Any], options: dict[str, Any]
) -> None:
    with serving(context=100, **server_says) as server:
        tables = {"engine": {"options": options}, "sampling": {"max_tokens": 40}}
        write_long_job(server, [500, 1], **tables)
        assert batchkit("run", "job.toml").exit_code == 0
    assert 300 < records()[0]["truncated_tokens"] < 500


def write_long_job(server: ChatServer, words: list[int], **tables: Any) -> None:
    rows = [{"n": n, "text": "word " * count} for n, count in enumerate(words)]
    prompt = {"user": "row {{ text }} {{ n }}"}
    write_job(server, rows, prompt=prompt, retry={"on_too_long": "truncate-middle"}, **tables)


def test_an_answer_cut_off_inside_its_reasoning_says_so() -> None:
    cut, blank = answer(None, "length", reasoning="First, I"), answer(" ", "length")
    inside, without = answered_with([cut, blank], 3)
    assert (inside["status"], inside["text"], inside["finish_reason"]) == ("failed", None, "length")
    assert inside["reasoning"] == "First, I"
    assert inside["error"]["kind"] == without["error"]["kind"] == "empty"
    assert "inside its reasoning" in inside["error"]["message"]
    assert "sampling.max_tokens" in inside["error"]["message"]
    assert "reasoning" not in without["error"]["message"]
    status = json.loads(batchkit("status", "job.toml", "--json").stdout)
    assert status["failed_by_kind"] == {"empty": 2}


def test_show_has_calls_and_the_beginning_of_the_reasoning() -> None:
    body = answer(None, "tool_calls", reasoning="Well,\n" + "so " * 500, tool_calls=[CALL, CALL])
    body["usage"]["completion_tokens_details"] = {"reasoning_tokens": 3}
    answered_with([body, answer(None, "length", reasoning="Hm")], 3)
    shown = batchkit("show", "job.toml").stdout.splitlines()
    at = shown.index('→ weather({"city": "Paris"})')
    assert shown[at + 1] == 'weather({"city": "Paris"})'
    assert shown[at - 1].startswith("(thought: Well, so so")
    assert shown[at - 1].endswith("…)")
    assert len(shown[at - 1]) < 400
    assert "4 completion tokens, 3 of them reasoning" in shown[at + 2]
    assert "(thought: Hm)" in shown


def test_the_largest_counts_add_up_and_are_written() -> None:
    answered_with([counted(2**32 - 1, 2**32 - 1)] * 5, 0)
    status = json.loads(batchkit("status", "job.toml", "--json").stdout)
    assert status["prompt_tokens"] == 5 * (2**32 - 1)


def test_logprobs_of_what_is_impossible_have_openais_number() -> None:
    tops = [{"token": "b", "logprob": float("-inf")}, {"token": "c", "logprob": -1}]
    content = [{"token": "a", "logprob": -0.5, "bytes": [97], "top_logprobs": tops}]
    (record,) = answered_with([said(logprobs={"content": content})], 0)
    (token,) = record["choices"][0]["logprobs"]
    assert token["top_logprobs"] == [
        {"token": "b", "logprob": -9999.0},
        {"token": "c", "logprob": -1.0},
    ]


def limited(server: ChatServer, rows: int) -> None:
    engine = {"max_answer_bytes": MiB, "options": {"max_num_seqs": 4}}
    write_job(server, rows, engine=engine)


def test_an_answer_without_end_fails_its_row_and_no_other() -> None:
    flood = Flood(b'{"choices": [' + b" " * MiB, 300)
    with serving(answering([flood])) as server:
        limited(server, 6)
        assert batchkit("run", "job.toml").exit_code == 3
        assert server.flooded < 64 * MiB  # what the sockets hold, not all that there was
        assert len(server.bodies) == 6  # it would be as long if it were asked for again
        assert_settled(server)
    flooded, *others = records()
    error = flooded["error"]
    assert (error["kind"], error["retryable"]) == ("server", False)
    for part in ("engine.max_answer_bytes = 1048576", "sampling.max_tokens"):
        assert part in error["message"]
    assert {record["status"] for record in others} == {"ok"}


def test_the_beginning_of_an_endless_error_is_reported() -> None:
    flood = Flood(b"no such image, " * 100_000, 300, status=400)
    with serving(answering([flood])) as server:
        limited(server, 3)
        assert batchkit("run", "job.toml").exit_code == 3
        assert server.flooded < 64 * MiB
    failed, *others = records()
    assert failed["error"]["kind"] == "invalid_request"
    assert failed["error"]["message"].startswith("the server answered 400: no such image")
    assert len(failed["error"]["message"]) < 1100
    assert {record["status"] for record in others} == {"ok"}


def test_a_list_of_models_without_end_stops_at_the_limit() -> None:
    with serving() as server:
        limited(server, 1)
        server.model = {"owned_by": "x" * 3 * MiB}
        stopped = batchkit("run", "job.toml")
    assert stopped.exit_code == 1
    assert "/models" in stopped.stderr
    assert "engine.max_answer_bytes = 1048576" in stopped.stderr


@given(st.integers(), st.integers(), st.integers(), st.integers())
def test_the_record_of_any_cut_is_read(kept: int, before: int, room: int, after: int) -> None:
    request = Request(Row(0, "0", {}), None, "x", {}, "", cut=Cut(kept, before, room))
    completion = Completion(request, [Choice("fine", "stop")], Usage(after, 1))
    raw = line_of(to_record(START, completion)).raw
    assert record_in(raw) is not None


def test_a_row_that_asks_for_a_billion_answers_takes_no_memory_for_them() -> None:
    """The run was killed for it, and so was each later start."""
    with serving(answering([choices(0), choices(1, 0)])) as server, opened(server) as engine:
        one, two = ask(engine, (request(row, n=2**31) for row in range(2)))
    assert texts([one, two]) == ["choice 0", "ServerError"]


def test_a_server_that_returns_one_choice_whatever_n_is_reported_once() -> None:
    with serving(answering([choices(0)] * 6)) as server:
        write_job(server, 6, sampling={"n": 2, "temperature": 1.0})
        done = batchkit("run", "job.toml")
    assert done.exit_code == 0
    assert done.stderr.count("ignores n = 2 and returns 1 choice") == 1
