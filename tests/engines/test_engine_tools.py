"""Tools, tool calls of earlier turns and a row's own names reach the chat template, or the server."""

from __future__ import annotations

import base64
import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from batchkit.config.tables import JobConfig
from batchkit.engines.registry import open_engine, open_preflight
from batchkit.errors import RequestError
from batchkit.execution.retry import with_smaller_media
from batchkit.rendering.renderer import PromptRenderer
from batchkit.types import Request, Row
from tests.support.chat_server import serving
from tests.support.forks import Fork
from tests.support.images import RED, png
from tests.support.model_runs import run_job, write_job
from tests.support.own_process import batchkit
from tests.support.server_engine import ask, job, opened
from tests.support.small_vllm import TEXT_ONLY
from tests.support.transformers_jobs import make_job

pytestmark = pytest.mark.vllm

CLOCK = {"type": "function", "function": {"name": "clock", "description": "Now", "parameters": {}}}
ZONED = {"name": "clock", "arguments": '{"zone": "UTC"}'}
CALL = {"id": "a", "type": "function", "function": ZONED}
TALK = [
    {"role": "user", "content": "What time is it?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "hm"},
    {"role": "tool", "tool_call_id": "a", "content": "noon"},
]
BODY = {"messages": TALK, "tools": [CLOCK], "tool_choice": "none", "reasoning_effort": "low"}
TEMPLATE = """\
{%- for tool in tools or [] %}[{{ tool | tojson }}]{% endfor %}
{%- for m in messages -%}
{%- set text = m.content if m.content is string else m.content | map(attribute="text") | join %}
{{- "|" ~ m.role ~ ":" ~ text ~ (m.reasoning_content or "") }}
{%- for call in m.tool_calls or [] %}{{ call.function.name }}@{{ call.function.arguments.zone }}
{%- endfor %}
{%- endfor %}|thinking {{ enable_thinking }}, {{ reasoning_effort }}"""
SHOWN = f"[{json.dumps(CLOCK)}]|user:What time is it?|assistant:hmclock@UTC|tool:noon|thinking True, low"


def _request(**body: Any) -> Request:
    names = {"chat_template_kwargs": {"reasoning_effort": "low"}, "tool_choice": "none", **body}
    return Request(Row(0, "0", {}), TALK, None, {}, "", tools=[CLOCK], **names)


def test_vllms_chat_template_gets_what_a_batch_line_says(text_model: Path, tmp_path: Path) -> None:
    bodies = [
        BODY,
        {**BODY, "chat_template_kwargs": {"enable_thinking": 0}},
        {**BODY, "reasoning_effort": "none"},
        {**BODY, "tool_choice": "required"},
    ]
    engine = {"model": str(text_model), "options": {**TEXT_ONLY, "chat_template": TEMPLATE}}
    write_job(
        tmp_path, [{"custom_id": f"{n}", "body": b} for n, b in enumerate(bodies)], engine=engine
    )
    _, first, second, third, forced = shown(tmp_path, "--limit", "4")
    assert "images: none, tools: clock (tool_choice: none)" in first
    assert SHOWN in first
    assert SHOWN.replace("thinking True", "thinking 0") in second
    assert SHOWN.replace("thinking True, low", "thinking False, none") in third
    assert "tool_choice: forcing a call needs engine.tool_call_parser" in forced


def shown(folder: Path, *args: str) -> list[str]:
    """What ``run --dry-run`` prints before the first row, and of each."""
    return run_job(folder, "--dry-run", *args).stdout.split("--- row ")


def test_a_dry_run_shows_each_step_with_the_names_that_it_is_sent_with(
    text_model: Path, tmp_path: Path
) -> None:
    own = {"user": "one", "chat_template_kwargs": {"enable_thinking": 7}}
    options = {"chat_template": TEMPLATE}
    write_job(
        tmp_path,
        [{"n": 0}, {"n": 1}],
        engine={"kind": "transformers", "model": str(text_model), "options": options},
        prompt={"chat_template_kwargs": {"reasoning_effort": "low"}},
        steps=[
            {"name": "a", "when": "{{ n }}", "prompt": own},
            {"name": "b", "prompt": {"user": "two"}},
        ],
    )
    _, first, second = shown(tmp_path)
    assert "|user:two|thinking , low" in first
    assert "|user:one|thinking 7, low" in second


def test_the_template_of_transformers_gets_the_same(text_model: Path) -> None:
    made = make_job(text_model, chat_template=TEMPLATE)
    assert open_preflight(made).render(_request()).text == SHOWN


_MESSAGES = "{% for m in messages %}{{ m.role }}: {{ m.content }} {% endfor %}"


@pytest.mark.parametrize("kind", ["transformers", "vllm"])
@pytest.mark.parametrize("ignores", [True, False])
def test_a_chat_template_that_ignores_tools_is_named(
    kind: str, ignores: bool, text_model: Path, tmp_path: Path
) -> None:
    options = TEXT_ONLY if kind == "vllm" else {}
    options = {**options, "chat_template": _MESSAGES if ignores else TEMPLATE}
    write_job(
        tmp_path,
        [{"q": "What time is it?"}],
        prompt={"user": "{{ q }}", "tools": [CLOCK]},
        engine={"kind": kind, "model": str(text_model), "options": options},
        sampling={"max_tokens": 4},
    )
    for command in ("validate", "run") if ignores else ("validate",):
        done = batchkit(command, "job.toml", cwd=tmp_path, start=Fork)
        assert done.returncode == 0, done.stderr
        warning = "tools: the model's chat template ignores them, so the model does not see clock"
        assert (done.stdout + done.stderr).count(warning) == ignores


def test_a_batch_line_that_forces_a_call_fails_where_nothing_enforces_it(text_model: Path) -> None:
    with pytest.raises(RequestError, match="tool_choice: transformers can't force"):
        open_preflight(make_job(text_model)).render(_request(tool_choice="required"))


def test_a_server_gets_tools_and_reasoning_effort_as_openai_has_them() -> None:
    prompt = {"chat_template_kwargs": {"mood": "calm", "reasoning_effort": "high"}}
    with serving() as server, opened(server, prompt=prompt) as engine:
        ask(engine, [_request(parallel_tool_calls=False)])
        (body,) = server.bodies
        shown = open_preflight(job(server)).render(_request()).text
    assert shown is not None
    assert shown.startswith(f"tool: {json.dumps(CLOCK)}\nuser: What time is it?")
    assert body["messages"] == TALK
    assert body["tools"] == [CLOCK]
    assert (body["tool_choice"], body["parallel_tool_calls"]) == ("none", False)
    assert body["reasoning_effort"] == "low"
    assert body["chat_template_kwargs"] == {"mood": "calm"}


def test_a_row_has_its_own_reasoning_effort_where_the_job_has_one_for_all() -> None:
    rows = [Row(0, "0", {"body": BODY}), Row(1, "1", {"body": {"messages": TALK}})]
    with serving() as server:
        made = job(server, sampling={"reasoning_effort": "high"})
        with closing(open_engine(made)) as engine:
            ask(engine, [PromptRenderer(made).render(row) for row in rows])
    efforts = {len(body.get("tools", [])): body["reasoning_effort"] for body in server.bodies}
    assert efforts == {1: "low", 0: "high"}


def test_a_server_gets_the_detail_of_an_image() -> None:
    url = "data:image/png;base64," + base64.b64encode(png(RED)).decode()
    parts = [
        {"type": "image_url", "image_url": {"url": url, "detail": "low"}},
        {"type": "image_url", "image_url": {"url": url}},
    ]
    row = Row(0, "0", {"body": {"messages": [{"role": "user", "content": parts}]}})
    with serving() as server:
        made = job(server)
        with closing(open_engine(made)) as engine:
            ask(engine, [with_smaller_media(PromptRenderer(made).render(row))])
        (body,) = server.bodies
    sent = [part["image_url"].get("detail") for part in body["messages"][0]["content"]]
    assert sent == ["low", None]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "add"}}])
def test_a_dry_run_makes_the_call_that_is_required(choice: Any) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer", "minimum": 3}}}
    tools = [{"type": "function", "function": {"name": "add", "parameters": schema}}, CLOCK]
    engine = open_engine(JobConfig(engine={"kind": "dry-run"}))
    (done,) = ask(engine, [replace(_request(), tools=tools, tool_choice=choice)])
    (made,) = done.choices
    assert (made.text, made.finish_reason) == ("", "tool_calls")
    assert made.tool_calls is not None
    (call,) = made.tool_calls
    assert call["function"] == {"name": "add", "arguments": '{"n":3}'}
