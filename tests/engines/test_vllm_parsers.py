"""Reasoning and tool calls equal those of vLLM's OpenAI server: real answers, row by row."""

from __future__ import annotations

import re
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from batchkit.config.tables import JobConfig
from batchkit.engines.process.launcher import Launcher
from batchkit.engines.registry import open_engine, open_preflight
from batchkit.errors import JobError, RequestError
from batchkit.types import Choice, Completion, Request
from tests.support.engine_requests import ask, request
from tests.support.small_vllm import TEXT_ONLY
from tests.support.taught_model import LESSONS, TOOLS, build_taught_model
from tests.support.vllm_reference import chat_reference

pytestmark = pytest.mark.vllm

OPTIONS = {**TEXT_ONLY, "max_num_seqs": 128}  # all of a group, in fewer steps
PARSERS = [
    ("qwen3", "hermes"),
    ("qwen3", "qwen3_coder"),
    ("deepseek_r1", "llama3_json"),
    ("granite", "granite"),
    (None, "mistral"),
]
LONG, SHORT = 120, 6  # tokens: enough for each answer, and too few for most


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "taught"
    build_taught_model(path)
    return path


def a_job(model: Path, **engine: Any) -> JobConfig:
    return JobConfig(engine={"model": str(model), "options": OPTIONS, **engine})


def requests() -> list[Request]:
    """Each question without tools, with them, cut off, and twice at once."""
    found = []
    for n, question in enumerate(LESSONS):
        messages = [{"role": "user", "content": question}]
        plain = replace(request(n, max_tokens=LONG), messages=messages)
        asked = replace(plain, tools=TOOLS, tool_choice="auto")
        short = {**plain.sampling, "max_tokens": SHORT}
        twice = {**plain.sampling, "temperature": 0.01, "n": 2, "seed": 1}
        found += [
            plain,
            asked,
            replace(asked, tool_choice="none"),
            replace(asked, sampling=short),
            replace(asked, sampling=twice),
            replace(plain, chat_template_kwargs={"enable_thinking": False}),
        ]
    chooses = [one for one in found if one.tool_choice == "auto"]
    return [*found, *(replace(one, parallel_tool_calls=False) for one in chooses)]


def with_grammar() -> list[Request]:
    """Calls that the model would not make, forced by a grammar behind the reasoning or at once."""
    _, asked, *_ = requests()
    named = {"type": "function", "function": {"name": "price"}}
    strict = [{**tool, "function": {**tool["function"], "strict": True}} for tool in TOOLS]
    sampling = {**asked.sampling, "structured_outputs": {"choice": ["the lake", "the roof"]}}
    return [
        *(
            replace(asked, tool_choice=choice, chat_template_kwargs=kwargs)
            for choice in ("required", named)
            for kwargs in ({}, {"enable_thinking": False})
        ),
        *(
            replace(one, sampling=sampling, tools=tools)
            for one in requests()[1:13:6]
            for tools in (TOOLS, strict)
        ),
        replace(asked, tool_choice="required", parallel_tool_calls=False),
    ]


def bounded() -> list[Request]:
    """Reasoning that is ended before its own end, or not needed to be."""
    return [
        replace(one, sampling={**one.sampling, "thinking_token_budget": budget})
        for one in requests()[:8:7]
        for budget in (0, 3, 50)
    ]


def body_of(request: Request) -> dict[str, Any]:
    names = ("tools", "tool_choice", "parallel_tool_calls")
    given = {name: getattr(request, name) for name in names}
    return {
        "messages": request.messages,
        "chat_template_kwargs": request.chat_template_kwargs,
        **request.sampling,
        **{name: value for name, value in given.items() if value is not None},
    }


def answered(done: Completion) -> dict[str, Any]:
    assert done.usage is not None, done.error
    return {
        "choices": [_parts(choice) for choice in done.choices],
        "prompt_tokens": done.usage.prompt_tokens,
        "completion_tokens": done.usage.completion_tokens,
        "reasoning_tokens": done.usage.reasoning_tokens,
    }


def _parts(choice: Choice) -> dict[str, Any]:
    calls = choice.tool_calls or []
    assert len({call["id"] for call in calls}) == len(calls)
    return {
        "text": choice.text,
        "reasoning": choice.reasoning,
        "tool_calls": [call["function"] for call in calls],
        "finish_reason": choice.finish_reason,
    }


def as_answered(body: dict[str, Any]) -> dict[str, Any]:
    details = body["usage"].get("completion_tokens_details") or {}
    return {
        "choices": [
            {
                "text": choice["message"]["content"] or "",
                "reasoning": choice["message"]["reasoning"] or None,
                "tool_calls": [
                    {name: call["function"][name] for name in ("name", "arguments")}
                    for call in choice["message"].get("tool_calls") or []
                ],
                "finish_reason": choice["finish_reason"],
            }
            for choice in body["choices"]
        ],
        "prompt_tokens": body["usage"]["prompt_tokens"],
        "completion_tokens": body["usage"]["completion_tokens"],
        "reasoning_tokens": details.get("reasoning_tokens"),
    }


@pytest.mark.release
def test_answers_equal_those_of_the_server(model: Path, launcher: Launcher) -> None:
    # The parser that a grammar waits for is the engine's, and all groups have one engine.
    options = {**OPTIONS, "model": str(model), "reasoning_parser": "qwen3"}
    asked_of = {
        parsers: requests() + (with_grammar() + bounded() if parsers[0] == "qwen3" else [])
        for parsers in PARSERS
    }
    groups = [
        {"reasoning_parser": reasoning, "tool_call_parser": tools, "bodies": [*map(body_of, asked)]}
        for (reasoning, tools), asked in asked_of.items()
    ]
    calls, thoughts = 0, 0
    expected = chat_reference(options, groups)
    for ((reasoning, tools), asked), bodies in zip(asked_of.items(), expected, strict=True):
        job = a_job(model, reasoning_parser=reasoning, tool_call_parser=tools)
        with closing(open_engine(job, launcher)) as engine:
            ours = [answered(done) for done in ask(engine, *asked)]
        for one, mine, body in zip(asked, ours, bodies, strict=True):
            assert mine == as_answered(body), (reasoning, tools, one)
        if tools == "hermes":
            _check_transformers(job, launcher.log, bodies)
        calls += sum(bool(c["tool_calls"]) for answer in ours for c in answer["choices"])
        thoughts += sum(bool(c["reasoning"]) for answer in ours for c in answer["choices"])
    assert calls > 5
    assert thoughts > 10


def _check_transformers(job: JobConfig, log: Path, bodies: list[dict[str, Any]]) -> None:
    """The same answers, where no grammar limits the calls to one."""
    options = {name: OPTIONS[name] for name in ("dtype", "max_model_len", "max_num_seqs")}
    engine = job.engine.model_copy(update={"kind": "transformers", "options": options})
    job, asked = job.model_copy(update={"engine": engine}), requests()
    with closing(Launcher(log)) as launcher, closing(open_engine(job, launcher)) as opened:
        answers = ask(opened, *asked)
    for one, mine, body in zip(asked, answers, bodies, strict=False):
        if one.parallel_tool_calls is None:
            assert answered(mine) == as_answered(body), one


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        ({"reasoning_parser": "quen3"}, "engine.reasoning_parser: vLLM has no parser 'quen3', it"),
        ({"tool_call_parser": "hermess"}, "did you mean 'hermes'?"),
        ({"tool_call_parser": "x"}, "qwen3_coder"),
        (
            {"options": {**OPTIONS, "reasoning_config": {"reasoning_end": "x"}}},
            "engine.options.reasoning_config.reasoning_end: Unexpected keyword argument",
        ),
        ({"tool_call_parser": "jamba"}, "engine: tool_call_parser jamba cannot be used with"),
        (
            {"options": {**OPTIONS, "reasoning_parser": "qwen3"}},
            "engine.options.reasoning_parser: set engine.reasoning_parser instead",
        ),
    ],
)
def test_a_parser_that_cannot_be_used_is_named(
    model: Path, engine: dict[str, Any], message: str
) -> None:
    with pytest.raises(JobError, match=re.escape(message)):
        open_preflight(a_job(model, **engine))


def test_a_budget_for_thinking_needs_to_know_where_it_ends(model: Path) -> None:
    job = a_job(model)
    sampling = job.sampling.model_copy(update={"thinking_token_budget": 9})
    with pytest.raises(JobError, match=r"sampling\.thinking_token_budget: vLLM has to know"):
        open_preflight(job.model_copy(update={"sampling": sampling}))
    with pytest.raises(RequestError, match=r"thinking_token_budget: vLLM has to know"):
        open_preflight(job).render(request(0, thinking_token_budget=9))
    ends = {"reasoning_start_str": "<think>", "reasoning_end_str": "</think>"}
    known = a_job(model, options={**OPTIONS, "reasoning_config": ends})
    assert open_preflight(known).render(request(0, thinking_token_budget=9)).text
