"""Tools from a file, the job, a column or an OpenAI batch body; what is wrong in them is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from batchkit.config.loading import make_job
from batchkit.errors import JobError, RequestError, TemplateError
from batchkit.rendering.messages import as_text, with_note
from batchkit.rendering.renderer import PromptRenderer
from batchkit.rendering.templates.prompt import names_in
from batchkit.storage.identity import differences, identity
from batchkit.storage.job_toml import job_of_run, write_job
from batchkit.types import Row
from tests.support.dry_runs import job
from tests.support.rendering import refusal, render, renderer
from tests.support.sources import rows_of, write_rows

PLACE = {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": PLACE}}
CLOCK = {"type": "function", "function": {"name": "clock", "description": "Now, in UTC"}}
TOOLS = [WEATHER, CLOCK]
NAMED = {"type": "function", "function": {"name": "clock"}}
CHAT = {"messages": [{"role": "user", "content": "x"}]}
USER = {"user": "x"}


def test_tools_of_a_file_of_the_job_and_of_a_column_are_the_same(tmp_path: Path) -> None:
    path = tmp_path / "tools.json"
    path.write_text(json.dumps(TOOLS))
    for fields, tools, choice in (
        ({}, str(path), "clock"),
        ({}, TOOLS, NAMED),
        ({"t": TOOLS}, "{{ t }}", "clock"),
        ({"t": json.dumps(TOOLS)}, "{{ t }}", "clock"),
    ):
        request = render(fields, prompt={**USER, "tools": tools, "tool_choice": choice})
        assert (request.tools, request.tool_choice) == (TOOLS, NAMED)
        assert request.parallel_tool_calls is None


def test_a_tools_file_is_found_beside_the_job_and_travels_inside_it(tmp_path: Path) -> None:
    (tmp_path / "tools.json").write_text(json.dumps(TOOLS))
    table = {"engine": {"kind": "dry-run"}, "prompt": {**USER, "tools": "tools.json"}}
    made = PromptRenderer(make_job(table, "job.toml", base=tmp_path))
    (tmp_path / "tools.json").write_text(json.dumps([CLOCK]))
    assert made.job.prompt.tools == TOOLS


def test_the_definitions_and_their_order_are_the_runs_identity(tmp_path: Path) -> None:
    path = tmp_path / "tools.json"

    def found(tools: Any, **prompt: Any) -> dict[str, Any]:
        return identity(job(prompt={**USER, "tools": tools, **prompt}))

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
    sampling = {"structured_outputs": {"json": schema}}
    made = job(prompt={**USER, "tools": tools}, sampling=sampling)
    assert identity(made).job["prompt.tools"] == tools
    assert identity(made).job["sampling.structured_outputs"] == {"json": schema}
    write_job(tmp_path, made)
    assert job_of_run(tmp_path).prompt.tools == tools


@pytest.mark.parametrize(
    ("tools", "words"),
    [
        ([], "found [], expected a list of"),
        ({"a": 1}, "found {'a': 1}, expected a list of"),
        ([5], "[0]: found 5, expected {"),
        ([WEATHER, {**CLOCK, "type": "mcp"}], "[1].type: found 'mcp', expected {"),
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
    found = {f"prompt.tools: {path}: ": refusal(JobError, {}, prompt={**USER, "tools": str(path)})}
    if isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools):
        message = refusal(JobError, {}, prompt={**USER, "tools": tools})
        assert ("prompt.tools: " in message, words in message) == (True, True), message
    if tools:
        of_column = {**USER, "tools": "{{ t }}"}
        found["prompt.tools: "] = refusal(RequestError, {"t": tools}, prompt=of_column)
        found["body.tools: "] = refusal(RequestError, {"body": {**CHAT, "tools": tools}})
    for place, message in found.items():
        assert (message.startswith(place), words in message) == (True, True), message


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
        (RequestError, {"body": {"prompt": "a", "tools": TOOLS}}, None, "tools need chat messages"),
    ],
)
def test_what_is_wrong_with_tools_or_a_choice_is_named(
    kind: type[Exception], fields: dict[str, Any], prompt: dict[str, Any] | None, words: str
) -> None:
    assert words in refusal(kind, fields, prompt={} if prompt is None else {**USER, **prompt})


@pytest.mark.parametrize("none", [None, "", [], " "])
def test_a_row_without_tools_is_sent_without(none: Any) -> None:
    prompt = {**USER, "tools": "{{ t }}"}
    request = render({"t": none}, prompt={**prompt, "tool_choice": "auto"})
    assert (request.tools, request.tool_choice) == (None, None)
    message = refusal(RequestError, {"t": none}, prompt={**prompt, "tool_choice": "required"})
    assert message.startswith(
        "prompt.tool_choice: is 'required', but the row has no tools; add tools to"
    )


@pytest.mark.parametrize("choice", ["required", "clock", NAMED])
def test_a_forced_call_needs_a_grammar(choice: Any) -> None:
    prompt = {"tools": TOOLS, "tool_choice": choice}
    for kind, problem in {
        "vllm": "forcing a call needs engine.tool_call_parser",
        "transformers": "transformers can't force",
    }.items():
        message = refusal(JobError, {}, prompt=prompt, engine={"kind": kind, "model": "m"})
        assert f"prompt.tool_choice: {problem}" in message
    job(prompt=prompt, engine={"kind": "vllm", "model": "m", "tool_call_parser": "hermes"})


def test_the_report_and_the_order_of_rows_know_the_column_of_tools() -> None:
    made = renderer(prompt={"user": "{{ q }}", "tools": "{{ t }}"})
    assert names_in(made.job, made.job.prompt, []) == {"q", "t"}
    first, same, other = (
        made.hint(Row(n, str(n), {"t": tools, "q": "same"}))
        for n, tools in enumerate([TOOLS, TOOLS, [CLOCK]])
    )
    assert first.beginning == same.beginning != other.beginning


# OpenAI batch bodies


def test_a_body_brings_its_tools_and_the_words_of_its_template() -> None:
    own = {"tools": TOOLS, "tool_choice": NAMED, "parallel_tool_calls": False}
    words = {"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": False}}
    request = render({"body": {**CHAT, **own, **words}})
    assert {name: getattr(request, name) for name in own} == own
    assert request.chat_template_kwargs == {"enable_thinking": False, "reasoning_effort": "low"}
    assert request.sampling == {"temperature": 0.0, "max_tokens": 256}


def test_a_body_without_tools_chooses_among_those_of_the_job() -> None:
    body = {**CHAT, "tool_choice": "none", "parallel_tool_calls": False}
    request = render({"body": body}, prompt={"tools": TOOLS, "tool_choice": "auto"})
    assert (request.tools, request.tool_choice) == (TOOLS, "none")
    assert request.parallel_tool_calls is False
    request = render({"body": CHAT}, prompt={"tools": TOOLS, "tool_choice": "none"})
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
    read = rows_of(write_rows(tmp_path, "rows.parquet", rows))
    assert "level" in read[0].fields["t"][0]["function"]["parameters"]["properties"]
    made = renderer(prompt={"user": "{{ q }}", "tools": "{{ t }}"})
    assert [made.render(row).tools for row in read] == own
    for tools in (own, [row.fields["t"] for row in read]):
        assert [render({"body": {**CHAT, "tools": its}}).tools for its in tools] == own


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
    (row,) = rows_of(write_rows(tmp_path, "rows.parquet", [{"messages": messages}]))
    assert "tool_calls" in row.fields["messages"][0]
    assert renderer().render(row).messages == messages


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
        ({"role": "assistant", "tool_calls": [1]}, "found the tool call 1, expected"),
        ({"role": "assistant", "tool_calls": [{"function": {}}]}, 'expected {"function"'),
        ({"role": "tool", "content": None}, "content is None, expected a text or a list of parts"),
    ],
)
def test_wrong_tool_calls_fail_their_row(message: Any, words: str) -> None:
    assert words in refusal(RequestError, {"messages": [message]})


def test_a_note_is_added_to_a_conversation_that_ends_with_a_call() -> None:
    tables = {"retry": {"reask": 1, "reask_note": "again"}, "output": {"parse": "json"}}
    noted = with_note(render({"messages": TALK[1:2]}, **tables))
    assert noted.messages[-1]["content"] == "\nagain"
