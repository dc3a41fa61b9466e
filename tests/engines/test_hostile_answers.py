"""Whatever a server answers over real HTTP: what the run writes, it reads back, and so do the exports."""

from __future__ import annotations

import csv
import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchkit.execution.records import to_record
from batchkit.storage.ledger import line_of
from batchkit.storage.schema import fault_in
from batchkit.types import Choice, Completion, Cut, Request, Row, Usage
from tests.support.chat_server import ChatServer, Flood, Refused, serving
from tests.support.command_line import batchkit
from tests.support.rows import write_jsonl
from tests.support.server_runs import (
    RUN,
    answering,
    assert_settled,
    counted,
    records,
    said,
    write_job,
)

pytestmark = pytest.mark.usefixtures("in_an_empty_folder", "short_pauses")


MiB = 1 << 20


def nested(depth: int) -> Any:
    value: Any = "leaf"
    for _ in range(depth):
        value = [value]
    return value


NOT_A_COUNT = [-1, 2**32, 2**63, 2**64, 10**400, 1.5, 3.0, True, "3", None, [3], float("nan")]


def test_a_count_that_cannot_be_true_is_none() -> None:
    bodies: list[Any] = [counted(value) for value in NOT_A_COUNT]
    bodies += [counted(3, value) for value in NOT_A_COUNT]
    bodies += [{**said(), "usage": usage} for usage in ([], "3", {"prompt_tokens": 3}, 7)]
    with serving(answering(bodies)) as server:
        write_job(server, len(bodies) + 1)
        assert batchkit("run", "job.toml").exit_code == 0
        assert_settled(server)
    *odd, whole = records()
    assert [record["usage"] for record in odd] == [None] * len(bodies)
    assert {record["text"] for record in odd} == {"fine"}
    assert whole["usage"]["prompt_tokens"] == 2


def test_the_largest_counts_add_up_and_are_written() -> None:
    bodies: list[Any] = [counted(2**32 - 1, 2**32 - 1)] * 5
    with serving(answering(bodies)) as server:
        write_job(server, len(bodies))
        assert batchkit("run", "job.toml").exit_code == 0
        assert_settled(server)
    status = json.loads(batchkit("status", "job.toml", "--json").stdout)
    assert status["prompt_tokens"] == 5 * (2**32 - 1)


ODD_ANSWERS: dict[str, tuple[Any, str]] = {
    "a reason that is an object": (said(finish_reason={"x": 1}), "fine"),
    "a reason that is a number": (said(finish_reason=3), "fine"),
    "a reason that is nested": (said(finish_reason=nested(300)), "fine"),
    "NUL": (said("a\0b"), "a\0b"),
    "a lone surrogate": (said("a\ud800b"), "a?b"),
    "a lone surrogate in the reason": (said(finish_reason="\udfff"), "fine"),
    "white space of all kinds": (said("\u2028a\r\n\x85\u2029"), "\u2028a\r\n\x85\u2029"),
    "logprobs that are text": (said(logprobs="many"), "fine"),
    "logprobs that are nested": (said(logprobs=nested(300)), "fine"),
    "logprobs with NaN": (
        said(logprobs={"content": [{"token": "a", "logprob": float("nan")}]}),
        "fine",
    ),
    "logprobs of a token that is none": (
        said(logprobs={"content": [{"token": {"a": 1}, "logprob": -1}]}),
        "fine",
    ),
    "a number that no float holds": ({**said(), "created": 10**400}, "fine"),
    "NaN beside the answer": ({**said(), "took": float("nan")}, "fine"),
    "nested beside the answer": ({**said(), "more": nested(900)}, "fine"),
    "a key twice": (json.dumps(said("b")).encode().replace(b"{", b'{"choices":[],', 1), "b"),
}


def test_an_odd_answer_is_written_so_that_it_is_read() -> None:
    bodies = [body for body, _ in ODD_ANSWERS.values()]
    with serving(answering(bodies)) as server:
        write_job(server, len(bodies))
        done = batchkit("run", "job.toml")
        found = dict(zip(ODD_ANSWERS, records(), strict=True))
        assert done.exit_code == 0, [(n, r["error"]) for n, r in found.items() if r["error"]]
        assert_settled(server)
    assert {n: r["text"] for n, r in found.items()} == {n: t for n, (_, t) in ODD_ANSWERS.items()}
    reasons = {name: record["finish_reason"] for name, record in found.items()}
    for name in ("an object", "a number", "nested"):
        assert reasons[f"a reason that is {name}"] is None
    assert [record for record in found.values() if record.get("choices")] == []


def test_logprobs_of_what_is_impossible_have_openais_number() -> None:
    tops = [{"token": "b", "logprob": float("-inf")}, {"token": "c", "logprob": -1}]
    content = [{"token": "a", "logprob": -0.5, "bytes": [97], "top_logprobs": tops}]
    with serving(answering([said(logprobs={"content": content})])) as server:
        write_job(server, 1)
        assert batchkit("run", "job.toml").exit_code == 0
        assert_settled(server)
    (record,) = records()
    (token,) = record["choices"][0]["logprobs"]
    assert token["top_logprobs"] == [
        {"token": "b", "logprob": -9999.0},
        {"token": "c", "logprob": -1.0},
    ]


def test_kept_fields_of_any_kind_are_read_back_and_exported() -> None:
    with serving() as server:
        write_job(server, 1, output={"keep": ["id", "v", "w"]}, input={"id": "id"})
        rows = [
            {"n": 0, "id": "a\nb\0" + "x" * MiB, "v": nested(150), "w": "\0\u2028"},
            {"n": 1, "id": " ", "v": 2**70, "w": [1.5, None, {"index": 1}]},
        ]
        write_jsonl(Path("rows.jsonl"), rows)
        done = batchkit("run", "job.toml")
        assert done.exit_code == 0, done.stderr
        assert_settled(server)
    first, second = records()
    assert (first["id"], first["fields"]["w"]) == (rows[0]["id"], rows[0]["w"])
    assert second["fields"]["w"] == rows[1]["w"]
    with (RUN / "results.csv").open(newline="", encoding="utf-8") as file:
        csv.field_size_limit(4 * MiB)
        assert [row["id"] for row in csv.DictReader(file)] == [row["id"] for row in rows]


# How much of an answer is read


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


@pytest.mark.parametrize("times", [1, 2])
def test_the_limit_is_on_what_a_compressed_answer_unpacks_to(times: int) -> None:
    body = json.dumps(said("x" * 64 * MiB)).encode()
    small = json.dumps(said("small")).encode()
    for _ in range(times):
        body, small = gzip.compress(body), gzip.compress(small)
    encoding = ", ".join(["gzip"] * times)
    bodies = [Refused(200, one, Content_Encoding=encoding) for one in (body, small)]
    assert len(body) < MiB
    with serving(answering(bodies)) as server:
        limited(server, 4)
        assert batchkit("run", "job.toml").exit_code == 3
    bomb, packed, *others = records()
    assert bomb["error"]["kind"] == "server"
    if times == 1:
        assert "engine.max_answer_bytes" in bomb["error"]["message"]
        assert packed["text"] == "small"
    else:  # nobody asked for that
        assert packed["error"]["kind"] == "server"
        assert "gzip, gzip" in packed["error"]["message"]
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


@pytest.mark.parametrize("message", [nested(900), {"a": nested(400)}, [1, {"b": 2}], "\ud800"])
def test_an_error_of_any_shape_is_reported(message: Any) -> None:
    refused = Refused(422, {"error": {"message": message, "code": message}})
    with serving(answering([refused])) as server:
        limited(server, 2)
        assert batchkit("run", "job.toml").exit_code == 3
        assert_settled(server)
    error = records()[0]["error"]
    assert error["kind"] == "invalid_request"
    assert error["message"].startswith("the server answered 422: ")


@pytest.mark.parametrize("tokens", [0, -5, True, 2**70])
def test_a_prompt_too_long_by_an_impossible_count_is_too_long(tokens: Any) -> None:
    details = {"code": "context_length_exceeded", "n_prompt_tokens": tokens, "n_ctx": 100}
    with serving(answering([Refused(400, {"error": {"message": "no", **details}})])) as server:
        prompt = {"user": "row {{ text }} {{ n }}"}
        write_job(server, 2, prompt=prompt, retry={"on_too_long": "truncate-middle"})
        write_jsonl(Path("rows.jsonl"), ({"n": n, "text": "word " * 90} for n in range(2)))
        assert batchkit("run", "job.toml").exit_code == 3
    assert records()[0]["error"]["kind"] == "prompt_too_long"


def test_a_list_of_models_without_end_stops_at_the_limit() -> None:
    with serving() as server:
        limited(server, 1)
        server.model = {"owned_by": "x" * 3 * MiB}
        stopped = batchkit("run", "job.toml")
    assert stopped.exit_code == 1
    assert "/models" in stopped.stderr
    assert "engine.max_answer_bytes = 1048576" in stopped.stderr


def test_a_count_in_words_that_cannot_be_true_leaves_a_record_that_is_read() -> None:
    reason = (
        f"maximum context length is {2 * 10**22} tokens. However, your prompt resulted in"
        f" {2 * 10**22 + 1} tokens"
    )

    def before(text: str, body: dict[str, Any]) -> None:
        if len(text.split()) == 92:  # a shorter one is answered
            raise Refused(400, {"error": {"message": reason}})

    with serving(before) as server:
        write_job(
            server,
            2,
            prompt={"user": "row {{ text }} {{ n }}"},
            retry={"on_too_long": "truncate-middle"},
        )
        rows = [{"n": 0, "text": "word " * 90}, {"n": 1, "text": "short"}]
        write_jsonl(Path("rows.jsonl"), rows)
        assert batchkit("run", "job.toml").exit_code == 3
        assert_settled(server)
    first, second = records()
    assert first["error"]["kind"] == "prompt_too_long"
    assert second["status"] == "ok"


@given(st.integers(), st.integers(), st.integers(), st.integers())
def test_the_record_of_any_cut_is_read(kept: int, before: int, room: int, after: int) -> None:
    request = Request(Row(0, "0", {}), None, "x", {}, "", cut=Cut(kept, before, room))
    completion = Completion(request, [Choice("fine", "stop")], Usage(after, 1))
    line = json.loads(line_of(to_record(completion, ())).raw)
    assert fault_in(line) is None


PACKED = json.dumps(said("packed")).encode()
CODINGS: dict[str, tuple[str, bytes, bool]] = {
    "upper case": ("GZIP", gzip.compress(PACKED), True),
    "its old name": ("x-gzip", gzip.compress(PACKED), False),
    "two members": ("gzip", gzip.compress(PACKED[:20]) + gzip.compress(PACKED[20:]), False),
    "no checksum": ("gzip", gzip.compress(PACKED)[:-8], False),
    "bytes behind it": ("gzip", gzip.compress(PACKED) + b"more", False),
}


def test_a_packed_answer_is_whole_and_in_any_legal_spelling() -> None:
    bodies = [Refused(200, body, Content_Encoding=coding) for coding, body, _ in CODINGS.values()]
    with serving(answering(bodies)) as server:
        write_job(server, len(bodies))
        assert batchkit("run", "job.toml").exit_code == 3
    found = {name: r["status"] == "ok" for name, r in zip(CODINGS, records(), strict=True)}
    assert found == {name: is_legal for name, (_, _, is_legal) in CODINGS.items()}


@pytest.mark.parametrize("status", [201, 206])
def test_a_whole_answer_with_another_2xx_is_an_answer_and_anything_else_is_tried_again(
    status: int,
) -> None:
    bodies = [Refused(status, said("fine")), Refused(status, {"accepted": True})]
    with serving(answering(bodies)) as server:
        write_job(server, 2)
        assert batchkit("run", "job.toml").exit_code == 3
    whole, none = records()
    assert whole["text"] == "fine"
    assert (none["error"]["kind"], none["error"]["retryable"]) == ("server", True)
