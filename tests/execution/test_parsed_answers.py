"""``output.parse``: an answer is JSON that fits its schema, or the failure ``invalid_output``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from batchkit.config.loading import make_job
from batchkit.errors import JobError
from tests.support.chat_server import ChatServer, Refused, serving
from tests.support.command_line import batchkit
from tests.support.rows import write_jsonl
from tests.support.server_runs import records, said, write_job

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


class Answers:
    """What the server answers to row n: its texts one after another, the last one repeated."""

    def __init__(self, *rows: list[Any]) -> None:
        self.rows = rows
        self.prompts: list[list[str]] = [[] for _ in rows]

    def __call__(self, text: str, body: dict[str, Any]) -> None:
        n = int(text.split()[1])
        self.prompts[n].append(text)
        answers = self.rows[n]
        answer = answers[min(len(self.prompts[n]), len(answers)) - 1]
        if isinstance(answer, Exception):
            raise answer
        raise Refused(200, said(answer) if isinstance(answer, str) else answer)


@pytest.fixture
def asked() -> Iterator[Any]:
    """Runs a job over one row for each list of answers; returns the newest records."""
    servers: list[Any] = []

    def ask(answers: Answers, **tables: Any) -> list[dict[str, Any]]:
        held = serving(answers)
        servers.append(held)
        server: ChatServer = held.__enter__()
        write_job(server, len(answers.rows), **{"output": {"parse": "json"}, **tables})
        ended = batchkit("run", "job.toml")
        assert ended.exit_code in (0, 3), ended.stderr
        return records()

    yield ask
    for held in servers:
        held.__exit__(None, None, None)


def one(asked: Any, answer: Any, **tables: Any) -> dict[str, Any]:
    (record,) = asked(Answers([answer]), **tables)
    found: dict[str, Any] = record
    return found


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (json.dumps(GOOD), GOOD),
        (f"  {json.dumps(GOOD, indent=2)}\n", GOOD),
        (f"Here it is:\n```json\n{json.dumps(GOOD)}\n```\nAnything else?", GOOD),
        ("[1, 2.5]", [1, 2.5]),
        ('"tea"', "tea"),
        ("false", False),
    ],
)
def test_an_answer_is_parsed_and_its_text_kept(asked: Any, text: str, value: Any) -> None:
    record = one(asked, text)
    assert (record["status"], record["parsed"], record["text"]) == ("ok", value, text)


TRUNCATED = ("TruncatedOutputError", "raise sampling.max_tokens")


@pytest.mark.parametrize(
    ("answer", "error_type", "words"),
    [
        ("Surely it is.", "", "line 1 column 1 (char 0); it begins 'Surely it is.'"),
        ('{"a": NaN}', "", "not JSON"),
        ('{"a": 1} {"b": 2}', "", "not JSON"),
        ("```json\n{}\n```\nor\n```json\n[]\n```", "", "not JSON"),
        ("```json\n{oh}\n```", "", "not JSON"),
        ('{"n": ' + "1" * 5000 + "}", "", ""),
        (said('{"topic": "bill', finish_reason="length"), *TRUNCATED),
        (said("12", finish_reason="length"), *TRUNCATED),  # it may be a part of a number
    ],
)
def test_what_is_not_json_is_invalid_output(
    asked: Any, answer: Any, error_type: str, words: str
) -> None:
    record = one(asked, answer)
    error = record["error"]
    assert (record["status"], record["text"], "parsed" in record) == ("failed", None, False)
    assert (error["kind"], error["type"]) == ("invalid_output", error_type or "InvalidOutputError")
    assert words in error["message"], error["message"]


def test_every_digit_of_a_long_number_is_kept(asked: Any) -> None:
    longer, whole = 89014103211118510720, {"properties": {"sim": {"type": "integer"}}}
    sampling = {"structured_outputs": {"json": whole}}
    found = one(asked, json.dumps({"sim": longer, "n": 2**63}), sampling=sampling)
    assert found["parsed"] == {"sim": str(longer), "n": 2**63}


def test_a_whole_answer_at_the_limit_is_an_answer(asked: Any) -> None:
    assert one(asked, said("{}", finish_reason="length"))["parsed"] == {}


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"topic": "billing"}, ["$", "'urgency' is a required property"]),
        ({"topic": "tea", "urgency": 1}, ["$.topic", "'tea' is not one of"]),
        ({"topic": "billing", "urgency": "3"}, ["$.urgency", "not of type 'integer'"]),
    ],
)
@pytest.mark.parametrize("as_text", [False, True])
def test_an_answer_is_held_against_the_schema(
    asked: Any, value: Any, words: list[str], as_text: bool
) -> None:
    schema = json.dumps(SCHEMA) if as_text else SCHEMA
    wanted = {"structured_outputs": {"json": schema}}
    good, bad = asked(Answers([json.dumps(GOOD)], [json.dumps(value)]), sampling=wanted)
    assert good["parsed"] == GOOD
    assert bad["error"]["kind"] == "invalid_output"
    assert all(word in bad["error"]["message"] for word in ["does not fit its schema", *words])


def test_a_schema_may_not_fetch_another_one(asked: Any) -> None:
    with serving() as other:
        schema = {"$ref": f"http://127.0.0.1:{other.port}/schema.json"}
        record = one(asked, "{}", sampling={"structured_outputs": {"json": schema}})
        assert other.connections == 0
    assert record["error"]["kind"] == "invalid_output"
    assert "can't be held against its schema" in record["error"]["message"]


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
    with serving(Answers(*[['{"a": 1}']] * len(schemas))) as server:
        write_job(server, 0, output={"parse": "json"}, sampling={"sampling_column": "own"})
        wanted = [{"structured_outputs": {"json": schema}} for schema in schemas]
        write_jsonl(Path("rows.jsonl"), ({"n": n, "own": own} for n, own in enumerate(wanted)))
        ended = batchkit("run", "job.toml")
        assert ended.exit_code == 3, ended.stderr
    good, *bad = records()
    assert good["parsed"] == {"a": 1}
    assert [record["error"]["kind"] for record in bad] == ["invalid_output"] * len(bad)
    assert "it is no JSON schema: $.required: None is not" in bad[0]["error"]["message"]


def test_a_pattern_that_takes_for_ever_fails_its_row_alone(asked: Any) -> None:
    schema = {"type": "string", "pattern": r"^(\w+\s?)+$"}
    wanted = {"structured_outputs": {"json": schema}}
    good, bad = asked(Answers(['"a b"'], [f'"{"a" * 60}!"']), sampling=wanted)
    assert good["parsed"] == "a b"
    assert "did not finish" in bad["error"]["message"]


@pytest.mark.parametrize(("temperature", "tries"), [(0.0, 1), (0.7, 3)])
def test_it_is_retried_unless_the_answer_would_be_the_same(
    asked: Any, temperature: float, tries: int
) -> None:
    answers = Answers(["oh"], ["oh", "{}"])
    sampling, retry = {"temperature": temperature}, {"attempts": 3}
    never, later = asked(answers, sampling=sampling, retry=retry)
    assert (len(answers.prompts[0]), never["attempt"]) == (tries, tries)
    assert (later["status"], later["attempt"]) == (("ok", 2) if tries > 1 else ("failed", 1))


def test_reask_adds_its_note(asked: Any) -> None:
    answers = Answers(["oh", "no", "{}"], ["oh"])
    retry = {"reask": 2, "reask_note": "Only JSON, please.", "attempts": 5}
    good, bad = asked(answers, retry=retry)
    assert answers.prompts[0] == ["row 0", *["row 0\nOnly JSON, please."] * 2]
    assert (good["parsed"], good["attempt"]) == ({}, 3)
    assert (bad["error"]["kind"], bad["attempt"]) == ("invalid_output", 3)


def test_reask_keeps_an_answer_if_the_next_one_is_worse(asked: Any) -> None:
    """The first answer is JSON without the key that the scoring looks for."""
    (record,) = asked(
        Answers(['{"b": 1}', "oh"]),
        retry={"reask": 2, "reask_note": "Say a."},
        scoring={"extract": "json", "key": "a"},
    )
    assert (record["status"], record["parsed"]) == ("ok", {"b": 1})


def test_retry_failed_runs_these_rows_again(asked: Any) -> None:
    asked(Answers(["oh", "{}"], ["{}"]))
    found = batchkit("retry-failed", "--kind", "invalid_output")
    assert found.exit_code == 0, found.stderr
    assert found.stdout == "retried 1 rows (1 invalid_output): 1 recovered\n"


def test_a_run_goes_on_only_with_the_parse_that_it_began_with(asked: Any) -> None:
    asked(Answers(["{}"]))
    changed = Path("job.toml").read_text().replace('parse = "json"', "")
    Path("job.toml").write_text(changed)
    found = batchkit("run", "job.toml")
    assert found.exit_code == 2
    assert 'output.parse: "json" → null' in found.stderr


def test_a_schema_that_is_none_is_a_mistake_in_the_job() -> None:
    table = {
        "engine": {"kind": "dry-run"},
        "output": {"parse": "json"},
        "sampling": {"structured_outputs": {"json": {"type": "text"}}},
    }
    with pytest.raises(JobError, match=r"no JSON schema.*\$\.type: 'text' is not valid"):
        make_job(table, "job.toml")
