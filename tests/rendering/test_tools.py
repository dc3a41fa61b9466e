"""Tools from a file, the job, a column or an OpenAI batch body; what is wrong in them is named."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchkit.config.loading import make_job
from batchkit.config.tables import InputTable
from batchkit.errors import JobError, RequestError, RowError, TemplateError
from batchkit.rendering.messages import as_text, with_note
from batchkit.rendering.renderer import PromptRenderer
from batchkit.rendering.templates.prompt import names_in
from batchkit.sources import read_rows
from batchkit.storage.identity import differences, identity
from batchkit.storage.job_toml import job_of_run, write_job
from batchkit.types import Request, Row

PLACE = {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": PLACE}}
CLOCK = {"type": "function", "function": {"name": "clock", "description": "Now, in UTC"}}
TOOLS = [WEATHER, CLOCK]
NAMED = {"type": "function", "function": {"name": "clock"}}
CHAT = {"messages": [{"role": "user", "content": "x"}]}


def renderer(prompt: Mapping[str, Any], **tables: Any) -> PromptRenderer:
    given = {"engine": {"kind": "dry-run"}, "prompt": dict(prompt), **tables}
    return PromptRenderer(make_job(given, "job.toml"))


def render(fields: Mapping[str, Any], **prompt: Any) -> Request:
    return renderer(prompt).render(Row(0, "0", fields))


def refusal(kind: type[Exception], fields: Mapping[str, Any], **prompt: Any) -> str:
    with pytest.raises(kind) as refused:
        render(fields, **prompt)
    return str(refused.value)


def body_refusal(body: Mapping[str, Any]) -> str:
    with pytest.raises(RequestError) as refused:
        render({"body": {**CHAT, **body}})
    return str(refused.value)


def test_tools_of_a_file_of_the_job_and_of_a_column_are_the_same(tmp_path: Path) -> None:
    path = tmp_path / "tools.json"
    path.write_text(json.dumps(TOOLS))
    of_file = render({"q": "?"}, user="{{ q }}", tools=str(path), tool_choice="clock")
    inline = render({"q": "?"}, user="{{ q }}", tools=TOOLS, tool_choice=NAMED)
    column = {"q": "?", "t": TOOLS}
    of_column = render(column, user="{{ q }}", tools="{{ t }}", tool_choice="clock")
    text = {"q": "?", "t": json.dumps(TOOLS)}
    of_text = render(text, user="{{ q }}", tools="{{ t }}", tool_choice="clock")
    for request in (of_file, inline, of_column, of_text):
        assert (request.tools, request.tool_choice) == (TOOLS, NAMED)
        assert request.parallel_tool_calls is None


def test_a_tools_file_is_found_beside_the_job_and_travels_inside_it(tmp_path: Path) -> None:
    (tmp_path / "tools.json").write_text(json.dumps(TOOLS))
    table = {"engine": {"kind": "dry-run"}, "prompt": {"user": "x", "tools": "tools.json"}}
    made = PromptRenderer(make_job(table, "job.toml", base=tmp_path))
    (tmp_path / "tools.json").write_text(json.dumps([CLOCK]))
    assert made.job.prompt.tools == TOOLS


def test_the_definitions_and_their_order_are_the_runs_identity(tmp_path: Path) -> None:
    path = tmp_path / "tools.json"

    def found(tools: Any, **prompt: Any) -> dict[str, Any]:
        table = {"engine": {"kind": "dry-run"}, "prompt": {"user": "x", "tools": tools, **prompt}}
        return identity(make_job(table, "job.toml"))

    path.write_text(json.dumps(TOOLS))
    then = found(str(path))
    assert differences(then, found(TOOLS)) == []
    turned = {"type": "function", "function": {"parameters": PLACE, "name": "weather"}}
    path.write_text(json.dumps([turned, CLOCK]))
    (line,) = differences(then, found(str(path)))
    assert line.startswith("prompt.tools: ")
    (line,) = differences(then, found(TOOLS, tool_choice="required"))
    assert line.startswith("prompt.tool_choice: ")


def test_parameters_with_the_name_of_a_secret_are_kept(tmp_path: Path) -> None:
    schema = {"type": "object", "properties": {"password": {"type": "string"}}}
    tools = [{"type": "function", "function": {"name": "log_in", "parameters": schema}}]
    job = make_job(
        {
            "engine": {"kind": "dry-run"},
            "prompt": {"user": "x", "tools": tools},
            "sampling": {"structured_outputs": {"json": schema}},
            "output": {"dir": str(tmp_path)},
        },
        "job.toml",
    )
    assert identity(job)["prompt.tools"] == tools
    assert identity(job)["sampling.structured_outputs"] == {"json": schema}
    folder = tmp_path / "run"
    folder.mkdir()
    write_job(folder, job)
    assert job_of_run(folder).prompt.tools == tools


@pytest.mark.parametrize(
    ("tools", "words"),
    [
        ([], "found [], expected a list of"),
        ({"a": 1}, "found {'a': 1}, expected a list of"),
        ([5], "[0]: found 5, expected {"),
        (
            [WEATHER, {**CLOCK, "type": "mcp"}],
            '[1].type: found \'mcp\', expected {"type": "function"',
        ),
        ([{"type": "function"}], "[0].function: is missing, expected {"),
        ([{"function": {}}], "[0].function.name: is missing, expected {"),
        ([{"function": {"name": 3}}], "[0].function.name: found 3, expected {"),
        ([WEATHER, WEATHER], "'weather' is defined more than once"),
        ([{"function": {"name": "f", "description": 1}}], "[0].function.description: found 1"),
        ([{"function": {"name": "f", "parameters": "x"}}], "[0].function.parameters: found 'x'"),
    ],
)
def test_wrong_definitions_are_named_wherever_they_are(
    tools: Any, words: str, tmp_path: Path
) -> None:
    path = tmp_path / "tools.json"
    path.write_text(json.dumps(tools))
    assert f"prompt.tools: {path}: {words}"[:60] in (
        message := refusal(JobError, {}, user="x", tools=str(path))
    )
    assert words in message
    if isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools):
        message = refusal(JobError, {}, user="x", tools=tools)
        assert "prompt.tools: " in message
        assert words in message
    if tools:
        message = refusal(RequestError, {"t": tools}, user="x", tools="{{ t }}")
        assert message.startswith("prompt.tools: ")
        assert words in message
        assert words in (message := body_refusal({"tools": tools}))
        assert message.startswith("body.tools: ")


WRONG = {"function": {"name": "f", "parameters": {"type": "strin"}}}
OF_THE_JOB: list[tuple[dict[str, Any], str]] = [
    ({"tools": [WRONG]}, "[0].function.parameters: not a valid JSON schema: $.type: 'strin'"),
    ({"tools": TOOLS, "tool_choice": "wether"}, "'wether'; did you mean 'weather'?"),
    ({"tools": TOOLS, "tool_choice": "x"}, "no tool has the name 'x'; tools has weather, clock"),
    ({"tools": TOOLS, "tool_choice": {"a": 1}}, "found {'a': 1}, expected 'auto', 'none'"),
    ({"tool_choice": "auto"}, "tool_choice is 'auto', but there are no tools"),
    ({"tools": TOOLS, "chat": False}, "leave out system, images and tools"),
]
OF_A_COLUMN: list[tuple[Any, str]] = [
    ("weather", "prompt.tools: found 'weather', expected JSON"),
    ([WEATHER], "prompt.tool_choice: no tool has the name 'clock'; tools has weather"),
]
OF_A_BODY: list[tuple[dict[str, Any], str]] = [
    ({"tool_choice": "required"}, "body.tool_choice: is 'required', but the row has no tools"),
    ({"tools": TOOLS, "tool_choice": 1}, "body.tool_choice: found 1, expected 'auto'"),
    ({"tools": TOOLS, "parallel_tool_calls": 1}, "body.parallel_tool_calls: found 1"),
    ({"reasoning_effort": 3}, "body.reasoning_effort: found 3, expected text"),
    ({"chat_template_kwargs": "x"}, "body.chat_template_kwargs: found 'x', expected a table"),
    ({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs.chat_template: no"),
]
COLUMN = {"tools": "{{ t }}", "tool_choice": "clock"}


@pytest.mark.parametrize(
    ("kind", "fields", "prompt", "words"),
    [
        *((JobError, {}, prompt, words) for prompt, words in OF_THE_JOB),
        *((RequestError, {"t": tools}, COLUMN, words) for tools, words in OF_A_COLUMN),
        (TemplateError, {}, COLUMN, "'{{ t }}' is undefined"),
        *((RequestError, {"body": {**CHAT, **body}}, None, words) for body, words in OF_A_BODY),
        (
            RequestError,
            {"body": {"prompt": "Once", "tools": TOOLS}},
            None,
            "tools need chat messages",
        ),
    ],
)
def test_what_is_wrong_with_tools_or_a_choice_is_named(
    kind: type[Exception], fields: dict[str, Any], prompt: dict[str, Any] | None, words: str
) -> None:
    of_job = {} if prompt is None else {"user": "x", **prompt}
    assert words in refusal(kind, fields, **of_job)


@pytest.mark.parametrize("none", [None, "", [], " "])
def test_a_row_without_tools_is_sent_without(none: Any) -> None:
    request = render({"t": none}, user="x", tools="{{ t }}", tool_choice="auto")
    assert (request.tools, request.tool_choice) == (None, None)
    message = refusal(RowError, {"t": none}, user="x", tools="{{ t }}", tool_choice="required")
    assert (
        message
        == "prompt.tool_choice: is 'required', but the row has no tools; add tools to the row, or leave the choice out"
    )


@pytest.mark.parametrize("choice", ["required", "clock", NAMED])
def test_a_forced_call_needs_a_grammar(choice: Any) -> None:
    prompt = {"tools": TOOLS, "tool_choice": choice}
    with pytest.raises(
        JobError, match=r"prompt\.tool_choice: forcing a call needs engine\.tool_call_parser"
    ):
        renderer(prompt, engine={"kind": "vllm", "model": "m"})
    with pytest.raises(JobError, match=r"prompt\.tool_choice: transformers can't force"):
        renderer(prompt, engine={"kind": "transformers", "model": "m"})
    renderer(prompt, engine={"kind": "vllm", "model": "m", "tool_call_parser": "hermes"})


def test_the_report_and_the_order_of_rows_know_the_column_of_tools() -> None:
    table = {"engine": {"kind": "dry-run"}, "prompt": {"user": "{{ q }}", "tools": "{{ t }}"}}
    job = make_job(table, "job.toml")
    assert names_in(job, job.prompt, []) == {"q", "t"}
    made = PromptRenderer(job)
    first, same, other = (
        made.hint(Row(n, str(n), {"t": tools, "q": "same"}))
        for n, tools in enumerate([TOOLS, TOOLS, [CLOCK]])
    )
    assert first.beginning == same.beginning != other.beginning


# OpenAI batch bodies


def test_a_body_brings_its_tools_and_the_words_of_its_template() -> None:
    body = {
        **CHAT,
        "tools": TOOLS,
        "tool_choice": NAMED,
        "parallel_tool_calls": False,
        "reasoning_effort": "low",
        "chat_template_kwargs": {"enable_thinking": False},
    }
    request = render({"body": body})
    assert request.tools == TOOLS
    assert request.tool_choice == NAMED
    assert request.parallel_tool_calls is False
    assert request.chat_template_kwargs == {"enable_thinking": False, "reasoning_effort": "low"}
    assert request.sampling == {"temperature": 0.0, "max_tokens": 256}


def test_a_body_without_tools_chooses_among_those_of_the_job() -> None:
    body = {**CHAT, "tool_choice": "none", "parallel_tool_calls": False}
    request = render({"body": body}, tools=TOOLS, tool_choice="auto")
    assert (request.tools, request.tool_choice) == (TOOLS, "none")
    assert request.parallel_tool_calls is False
    request = render({"body": CHAT}, tools=TOOLS, tool_choice="none")
    assert (request.tool_choice, request.parallel_tool_calls) == ("none", None)


# Conversations with tool calls


CALL = {"id": "a", "type": "function", "function": {"name": "weather", "arguments": '{"place":1}'}}
TALK = [
    {"role": "user", "content": "Rain?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "a", "content": "no"},
]


def test_a_conversation_keeps_its_tool_calls_and_their_answers() -> None:
    request = render({"messages": TALK})
    assert request.messages == TALK
    assert request.images == []
    without = [TALK[0], {"role": "assistant", "tool_calls": [CALL]}, TALK[2]]
    assert render({"messages": without}).messages == TALK
    assert as_text(request) == 'user: Rain?\nassistant: weather({"place":1})\ntool: no'


def test_tools_of_a_parquet_column_have_their_own_parameters_alone(tmp_path: Path) -> None:
    """Parquet gives the definitions of each row the names of all, with null."""
    level = {"type": ["integer", "null"], "default": None, "enum": [1, None]}
    lamp = {"name": "lamp", "strict": True, "parameters": {"properties": {"level": level}}}
    own = [TOOLS, [{"type": "function", "function": lamp}], None]
    rows = [{"q": "?", "t": tools} for tools in own]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    read = [*read_rows(InputTable(path=str(tmp_path / "rows.parquet")))]
    assert "level" in read[0].fields["t"][0]["function"]["parameters"]["properties"]
    made = renderer({"user": "{{ q }}", "tools": "{{ t }}"})
    assert [made.render(row).tools for row in read] == own
    bodies = [renderer({}).render(Row(0, "0", {"body": {**CHAT, "tools": t}})) for t in own]
    of_rows = [{"body": {**CHAT, "tools": row.fields["t"]}} for row in read]
    of_bodies = [renderer({}).render(Row(0, "0", fields)) for fields in of_rows]
    assert [body.tools for body in of_bodies] == [body.tools for body in bodies] == own


def test_a_null_in_a_message_is_a_key_that_it_lacks(tmp_path: Path) -> None:
    """Parquet gives each message the keys of all. Templates ask for ``'tool_calls' in message``, and
    servers refuse a name that is null."""
    function = {"name": "clock", "arguments": "{}"}
    calls = [{"id": "1", "type": "function", "function": function}]
    messages = [
        {"role": "user", "name": "bo", "content": "?"},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "1", "content": "noon"},
    ]
    pq.write_table(pa.Table.from_pylist([{"messages": messages}]), tmp_path / "rows.parquet")
    (row,) = read_rows(InputTable(path=str(tmp_path / "rows.parquet")))
    assert "tool_calls" in row.fields["messages"][0]
    assert renderer({}).render(row).messages == messages


def test_arguments_become_text_and_the_rows_own_are_not_changed() -> None:
    table = {"name": "weather", "arguments": {"place": "Kyjív", "n": 1.0}}
    fields = {"messages": [{"role": "assistant", "tool_calls": [{"function": table}]}]}
    before = json.dumps(fields)
    request = render(fields)
    (call,) = request.messages[0]["tool_calls"]
    assert call["function"]["arguments"] == '{"place": "Kyjív", "n": 1.0}'
    call["function"]["arguments"] = {}
    assert json.dumps(fields) == before


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ({"role": "assistant", "tool_calls": "x"}, "tool_calls is 'x', expected a list"),
        ({"role": "assistant", "tool_calls": [1]}, "tool call 1, expected a function with"),
        ({"role": "assistant", "tool_calls": [{"function": {}}]}, "expected a function with name"),
        ({"role": "tool", "content": None}, "content is None, expected text or parts"),
    ],
)
def test_wrong_tool_calls_fail_their_row(message: Any, words: str) -> None:
    assert words in refusal(RequestError, {"messages": [message]})


def test_a_note_is_added_to_a_conversation_that_ends_with_a_call() -> None:
    job = {"retry": {"reask": 1, "reask_note": "again"}, "output": {"parse": "json"}}
    row = Row(0, "0", {"messages": TALK[1:2]})
    noted = with_note(renderer({}, **job).render(row))
    assert noted.messages[-1]["content"] == "\nagain"
