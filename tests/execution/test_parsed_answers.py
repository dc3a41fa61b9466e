"""``output.parse``: an answer is JSON that fits its schema, or the failure ``invalid_output``."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.chat_server import serving
from tests.support.scripted import Script, answered, records, row, run
from tests.support.server_runs import said

pytestmark = [pytest.mark.usefixtures("in_an_empty_folder"), pytest.mark.slow]
SCHEMA = {
    "type": "object",
    "required": ["topic", "urgency"],
    "properties": {
        "topic": {"type": "string", "enum": ["delivery", "billing"]},
        "urgency": {"type": "integer", "maximum": 5},
    },
}
GOOD = {"topic": "billing", "urgency": 3}


def asked(script: Script, **tables: Any) -> dict[str, dict[str, Any]]:
    """The records, by id, of a row for each name in the script."""
    return answered(script, **{"output": {"parse": "json"}, **tables})


def one(answer: Any, **tables: Any) -> dict[str, Any]:
    """The record of a row that is answered so."""
    return asked(Script(r=[answer]), **tables)["r"]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (json.dumps(GOOD), GOOD),
        (f"  {json.dumps(GOOD, indent=2)}\n", GOOD),
        (f"Here it is:\n```json\n{json.dumps(GOOD)}\n```\nAnything else?", GOOD),
        ("[1, 2.5]", [1, 2.5]),
        ('"tea"', "tea"),
        ("false", False),
        (said("{}", finish_reason="length"), {}),
    ],
)
def test_an_answer_is_parsed_and_its_text_kept(text: Any, value: Any) -> None:
    record = one(text)
    text = text if isinstance(text, str) else "{}"
    assert (record["status"], record["parsed"], record["text"]) == ("ok", value, text)


TRUNCATED = ("TruncatedOutputError", "raise sampling.max_tokens")


@pytest.mark.parametrize(
    ("answer", "error_type", "words"),
    [
        ("Surely it is.", "", "line 1 column 1 (char 0); the answer begins 'Surely it is.'"),
        ('{"a": NaN}', "", "not JSON"),
        ('{"a": 1} {"b": 2}', "", "not JSON"),
        ("```json\n{}\n```\nor\n```json\n[]\n```", "", "not JSON"),
        ("```json\n{oh}\n```", "", "not JSON"),
        ('{"n": ' + "1" * 5000 + "}", "", ""),
        (said('{"topic": "bill', finish_reason="length"), *TRUNCATED),
        (
            said("{" + " \n" * 31 + " ", finish_reason="length"),
            "",
            "before its JSON was complete: 63 of 64 characters are white space; with vLLM, forbid white space",
        ),
        (said("12", finish_reason="length"), *TRUNCATED),  # it may be a part of a number
    ],
)
def test_what_is_not_json_is_invalid_output(answer: Any, error_type: str, words: str) -> None:
    record = one(answer)
    error = record["error"]
    assert (record["status"], record["text"], "parsed" in record) == ("failed", None, False)
    assert (error["kind"], error["type"]) == ("invalid_output", error_type or "InvalidOutputError")
    assert words in error["message"], error["message"]


def test_every_digit_of_a_long_number_is_kept() -> None:
    longer, whole = 89014103211118510720, {"properties": {"sim": {"type": "integer"}}}
    sampling = {"structured_outputs": {"json": whole}}
    found = one(json.dumps({"sim": longer, "n": 2**63}), sampling=sampling)
    assert found["parsed"] == {"sim": str(longer), "n": 2**63}


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"topic": "billing"}, ["$", "'urgency' is a required property"]),
        ({"topic": "tea", "urgency": 1}, ["$.topic", "'tea' is not one of"]),
        ({"topic": "billing", "urgency": "3"}, ["$.urgency", "not of type 'integer'"]),
    ],
)
@pytest.mark.parametrize("as_text", [False, True])
def test_an_answer_is_held_against_the_schema(value: Any, words: list[str], as_text: bool) -> None:
    schema = json.dumps(SCHEMA) if as_text else SCHEMA
    script = Script(good=[json.dumps(GOOD)], bad=[json.dumps(value)])
    found = asked(script, sampling={"structured_outputs": {"json": schema}})
    assert found["good"]["parsed"] == GOOD
    error = found["bad"]["error"]
    assert error["kind"] == "invalid_output"
    assert all(word in error["message"] for word in ["does not match its JSON schema", *words])


def test_a_schema_may_not_fetch_another_one() -> None:
    with serving() as other:
        schema = {"$ref": f"http://127.0.0.1:{other.port}/schema.json"}
        record = one("{}", sampling={"structured_outputs": {"json": schema}})
        assert other.connections == 0
    assert record["error"]["kind"] == "invalid_output"
    assert "can't be checked against its schema" in record["error"]["message"]


def test_a_row_whose_own_schema_is_none_fails_alone() -> None:
    """The engine may ignore what is wrong with it. Parquet has null for what other rows' schemas name."""
    schemas: list[Any] = [
        {"type": "object"},
        {"type": "object", "required": None},
        {"type": "object", "properties": {"a": None}},
        {"type": "objekt"},
        {"$schema": ["x"]},
        {"$schema": "http://json-schema.org/draft-04/schema", "$ref": ["x"]},
    ]
    rows = [
        row(f"r{n}", own={"structured_outputs": {"json": schema}})
        for n, schema in enumerate(schemas)
    ]
    with serving(Script(**{one["id"]: ['{"a": 1}'] for one in rows})) as server:
        tables = {"output": {"parse": "json"}, "sampling": {"sampling_column": "own"}}
        ended = run(server, rows, **tables)
    assert ended.exit_code == 3, ended.stderr
    found = records()
    assert found.pop("r0")["parsed"] == {"a": 1}
    assert [record["error"]["kind"] for record in found.values()] == ["invalid_output"] * 5
    assert "not a valid JSON schema: $.required: None is not" in found["r1"]["error"]["message"]


def test_a_pattern_that_takes_for_ever_fails_its_row_alone() -> None:
    schema = {"type": "string", "pattern": r"^(\w+\s?)+$"}
    script = Script(good=['"a b"'], bad=[f'"{"a" * 60}!"'])
    found = asked(script, sampling={"structured_outputs": {"json": schema}})
    assert found["good"]["parsed"] == "a b"
    assert "did not finish" in found["bad"]["error"]["message"]


@pytest.mark.parametrize(("temperature", "tries"), [(0.0, 1), (0.7, 3)])
def test_it_is_retried_unless_the_answer_would_be_the_same(temperature: float, tries: int) -> None:
    script = Script(never=["oh"], later=["oh", "{}"])
    found = asked(script, sampling={"temperature": temperature}, retry={"attempts": 3})
    assert (script.calls["never"], found["never"]["attempt"]) == (tries, tries)
    then = (found["later"]["status"], found["later"]["attempt"])
    assert then == (("ok", 2) if tries > 1 else ("failed", 1))


def test_reask_adds_its_note() -> None:
    script = Script(good=["oh", "no", "{}"], bad=["oh"])
    found = asked(script, retry={"reask": 2, "reask_note": "Only JSON, please.", "attempts": 5})
    assert script.asked["good"] == ["good ?", *["good ?\nOnly JSON, please."] * 2]
    assert (found["good"]["parsed"], found["good"]["attempt"]) == ({}, 3)
    assert (found["bad"]["error"]["kind"], found["bad"]["attempt"]) == ("invalid_output", 3)


def test_reask_keeps_an_answer_if_the_next_one_is_worse() -> None:
    """The first answer is JSON without the key that the scoring looks for."""
    script = Script(r=['{"b": 1}', "oh"])
    scoring = {"extract": {"json": {"key": "a"}}}
    found = asked(script, retry={"reask": 2, "reask_note": "Say a."}, scoring=scoring)
    assert (found["r"]["status"], found["r"]["parsed"]) == ("ok", {"b": 1})
