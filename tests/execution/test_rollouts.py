"""``[rollout]``: a function asks for a row's generations."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from batchkit.config.tables import JobConfig
from batchkit.errors import ChangedError, JobError
from batchkit.execution.processor import ProductionBatchProcessor
from batchkit.execution.summary import RunSummary
from tests.support import own_process
from tests.support.chat_server import Refused, error, serving
from tests.support.command_line import batchkit
from tests.support.forks import Fork
from tests.support.rollouts import RUN, calls, errors, generations, records, run, write
from tests.support.rows import write_jsonl
from tests.support.small_vllm import TEXT_ONLY
from tests.support.waiting import until

pytestmark = pytest.mark.usefixtures("in_an_empty_folder")

TOOL = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {}}},
}


def echo(text: str, body: dict[str, Any]) -> str:
    return f"<{text}>"


def test_all_that_a_generation_may_be_given_reaches_the_engine() -> None:
    Image.new("RGB", (20, 10), (200, 90, 20)).save("a.png")
    code = f"""
TOOLS = [{TOOL!r}]
async def solve(row, generate):
    picture = [{{"type": "image_url", "image_url": {{"url": "a.png"}}}}, {{"type": "text", "text": "what?"}}]
    seen = await generate([{{"role": "user", "content": picture}}], step="look", max_tokens=7)
    several = await generate(seen.text, n=2, logprobs=1, temperature=0.5)
    await generate("add", tools=TOOLS, tool_choice="required", chat_template_kwargs={{"thinking": False}})
    return {{"seen": seen.text, "texts": [choice.text for choice in several.choices],
            "tokens": seen.usage.completion_tokens, "reason": seen.finish_reason}}
"""

    def answer(text: str, body: dict[str, Any]) -> str:
        if body.get("n") == 2:
            choice = {"message": {"content": "one of two"}, "finish_reason": "stop"}
            raise Refused(200, {"choices": [{"index": n, **choice} for n in range(2)]})
        return echo(text, body)

    with serving(answer) as server:
        write(code, 1, server)
        assert run().exit_code == 0, errors()
        look, several, added = server.bodies
    assert look["max_tokens"] == 7
    assert look["messages"][0]["content"][0]["image_url"]["url"].startswith("data:image/png;base64")
    assert (several["n"], several["temperature"], several["logprobs"]) == (2, 0.5, True)
    assert added["tools"] == [TOOL]
    assert added["tool_choice"] == "required"
    assert added["chat_template_kwargs"] == {"thinking": False}
    (record,) = records()
    assert record["parsed"] == json.loads(record["text"])
    assert record["parsed"]["texts"] == ["one of two"] * 2
    assert record["generations"] == 3
    assert [line["step"] for line in generations()] == ["look", "", ""]


MANY = """found = await generate.many({}, return_exceptions=True)
    return " ".join(getattr(one, "text", type(one).__name__) for one in found)"""
EMOJI = r"""["cut: \ud83d", [{"role": "tool", "content": "\ud83d"}], "whole: \U0001f600"]"""


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ("return await generate(row['q'], chat=False)", "<q0>"),
        (MANY.format(["a", "refuse", "b"]), "<a> RequestError <b>"),
        (MANY.format(EMOJI), "RequestError RequestError <whole: \U0001f600>"),
    ],
    ids=["the whole prompt", "one of many fails", "half of a surrogate pair"],
)
def test_what_a_function_gets_for_what_it_asks(body: str, text: str) -> None:
    def answer(asked: str, body: dict[str, Any]) -> str:
        if asked == "refuse":
            raise Refused(400, error("no thanks"))
        assert "prompt" not in body or body["prompt"] == "q0"
        return echo(asked, body)

    with serving(answer) as server:
        write(f"async def solve(row, generate):\n    {body}\n", 1, server)
        assert run().exit_code == 0
    assert records()[0]["text"] == text
    failed = [line for line in generations() if line["status"] == "failed"]
    assert len(failed) == ("refuse" in body)


def killed_when(is_due: Callable[[], bool]) -> None:
    with own_process.begin("run", "job.toml", cwd=Path.cwd()) as process:
        until(is_due)
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()


RACING = """
import asyncio, os
async def solve(row, generate):
    async def after(wait_s, prompt):
        await asyncio.sleep(float(wait_s))  # a tool's
        return (await generate(prompt)).text
    prompts = ["wait one", "two", "wait three"]
    return " ".join(await asyncio.gather(*map(after, os.environ["TOOLS"].split(), prompts)))
"""


def test_calls_side_by_side_that_come_in_another_order_after_a_kill_all_get_their_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The recorded answer to the last one came, and the one before, in flight, was forgotten."""
    waits = True

    def answer(text: str, body: dict[str, Any]) -> str:
        if text.startswith("wait"):
            until(lambda: not waits, 30)
            time.sleep(0.5)
        return echo(text, body)

    monkeypatch.setenv("TOOLS", "0 0.1 0.2")
    with serving(answer) as server:
        write(RACING, 1, server, run={"row_timeout_s": 2})
        killed_when(lambda: len(server.bodies) == 3 and len(generations()) == 1)
        waits = False
        monkeypatch.setenv("TOOLS", "0 0.2 0.1")
        assert run().exit_code == 0, errors()
    assert records()[0]["text"] == "<wait one> <two> <wait three>"


TANGLED = """
import asyncio, random
async def part(generate, rng, depth):
    if depth == 0 or rng.random() < 0.3:
        kind, prompt = rng.random(), f"p{rng.randrange(99)}"
        if kind < 0.2:
            try:
                return (await asyncio.wait_for(generate(prompt), 0.01 * rng.random())).text
            except TimeoutError:
                return "late"
        if kind < 0.4:
            picture = [{"type": "image", "image": "a.png"}, {"type": "text", "text": prompt}]
            return (await generate([{"role": "user", "content": picture}])).text
        if kind < 0.5:
            raise ValueError("planted")
        if kind < 0.6:
            asyncio.create_task(generate(prompt))
        return (await generate(prompt)).text
    parts = [part(generate, rng, depth - 1) for _ in range(rng.randrange(1, 4))]
    return "|".join(map(str, await asyncio.gather(*parts, return_exceptions=rng.random() < 0.5)))
async def solve(row, generate):
    return await part(generate, random.Random(row["n"]), 2)
"""


def test_rows_of_tangled_tasks_all_end_and_no_pixels_are_forgotten() -> None:
    """Tasks within tasks, some of them cancelled, left behind or failed. If pixels of only one were still
    counted at the end of its row, rows would wait for ever."""
    Image.new("RGB", (64, 64), (200, 90, 20)).save("a.png")
    write(
        TANGLED,
        [{"n": n} for n in range(600)],
        engine={"options": {"latency_s": 0.005}},
        media={"max_memory_bytes": 4 * 64 * 64},
        rollout={"concurrency": 100},
    )
    assert run().exit_code == 3
    assert len(records()) == 600
    assert all("ValueError: planted" in message for message in errors().values())
    calls = [(line["index"], line["call"]) for line in generations()]
    assert len({*calls}) == len(calls) > 600


DIVERGING = """
import os
async def solve(row, generate):
    first = await generate(f"{row['q']} {os.environ['SALT']}")
    try:
        return (await generate(f"wait for {first.text}")).text
    except Exception:
        return "swallowed"
"""


@pytest.mark.parametrize("replay", ["strict", "fresh"])
def test_a_function_that_asks_for_something_else_stops_its_row_or_goes_on(
    replay: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = True

    def answer(text: str, body: dict[str, Any]) -> str:
        until(lambda: not (waits and text.startswith("wait")), 30)
        return echo(text, body)

    monkeypatch.setenv("SALT", "one")
    with serving(answer) as server:
        write(DIVERGING, 2, server, output={"replay": replay})
        killed_when(lambda: len(generations()) == 2)
        waits = False
        monkeypatch.setenv("SALT", "two")
        assert run().exit_code == (3 if replay == "strict" else 0)
    if replay == "strict":
        assert {*errors()} == {0, 1}
        assert errors()[0].startswith("rollout: call 0 differs from the requests made before")
    else:
        assert records()[0]["text"] == "<wait for <q0 two>>"


async def solve_twice(row: Any, generate: Any) -> str:
    first = await generate(row["q"])
    return f"{(await generate(first.text)).text} {len(first.text)}"


async def solve_once(row: Any, generate: Any) -> str:
    return str((await generate(row["q"])).text)


def processor(function: Any, **tables: Any) -> ProductionBatchProcessor:
    job = JobConfig(**{"name": "a", "engine": {"kind": "dry-run"}, **tables})
    return ProductionBatchProcessor(job, rollout=function, quiet=True)


ROWS = [{"q": "one"}, {"q": "two"}]


def test_a_function_from_python_answers_resumes_and_is_compared() -> None:
    async def main() -> RunSummary:  # as in a notebook, where a loop runs already
        return processor(solve_twice).process(ROWS)

    summary = asyncio.run(main())
    assert (summary.ok, summary.failed) == (2, 0)
    assert [record["generations"] for record in summary.records()] == [2, 2]
    assert processor(solve_twice).process(ROWS).skipped == 2
    with pytest.raises(ChangedError, match=r"rollout.function: .*:solve_twice.*:solve_once"):
        processor(solve_once).process(ROWS)


def test_the_commands_read_the_run_of_a_function_from_python() -> None:
    write_jsonl(Path("rows.jsonl"), ROWS)
    processor(solve_once, input={"path": "rows.jsonl"}).process()
    for command in (["status"], ["export", "--jsonl"], ["report"], ["verify"]):
        assert batchkit(*command, RUN).exit_code == 0
    ended = batchkit("run", RUN / "job.toml", "--fresh")
    assert ended.exit_code == 2
    assert "rollout=solve_once" in ended.stderr


@pytest.mark.parametrize(
    ("function", "tables", "message"),
    [
        (len, {}, r"rollout: found <built-in function len>, expected a function `async def"),
        (solve_once, {"workers": {"count": 2}}, "a function can't be sent to workers on Ray"),
        (
            solve_once,
            {"steps": [{"name": "a", "prompt": {"user": "b"}}]},
            r"\[rollout\]: its function submits all generations of a row",
        ),
        (solve_once, {"prompt": {"user": "{{ q }}"}}, "has its own prompts"),
    ],
    ids=["no coroutine", "workers", "steps", "a prompt"],
)
def test_a_function_that_does_not_fit_is_refused(
    function: Any, tables: dict[str, Any], message: str
) -> None:
    with pytest.raises(JobError, match=message):
        processor(function, **tables)


# The tool loop of docs/cookbook.md.
PAGE = (Path(__file__).parents[2] / "docs" / "cookbook.md").read_text(encoding="utf-8")
FOUND = re.search(r'^```python title="calculator.py"\n(.*?)^```', PAGE, re.MULTILINE | re.DOTALL)
assert FOUND is not None
CALCULATES = FOUND[1]
CLAIMS = {
    "12 * 17 * 3": "612",
    "-(2 + 3.5) / 2": "-2.75",
    "1 / 0": "error: division by zero",
    "9 ** 9 ** 9": "error: only numbers, + - * / and parentheses are known",
    "__import__('os').getcwd()": "error: only numbers",
    "2 +": "error: invalid syntax",
}


def calling(*expressions: str) -> Refused:
    """An answer that calls the calculator with each."""
    made = [
        {
            "id": f"call-{n}",
            "type": "function",
            "function": {"name": "calculate", "arguments": json.dumps({"expression": expression})},
        }
        for n, expression in enumerate(expressions)
    ]
    message = {"role": "assistant", "content": None, "tool_calls": made}
    choice = {"index": 0, "finish_reason": "tool_calls", "message": message}
    usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
    return Refused(200, {"choices": [choice], "usage": usage})


def results_in(body: dict[str, Any]) -> list[str]:
    return [each["content"] for each in body["messages"] if each["role"] == "tool"]


def test_the_model_gets_what_the_calculator_says_until_it_answers() -> None:
    def model(text: str, body: dict[str, Any]) -> str:
        results = results_in(body)
        if len(results) < len(CLAIMS):
            raise calling(*list(CLAIMS)[len(results) : len(results) + 2])
        return "It is " + results[0]

    with serving(model) as server:
        write(CALCULATES, [{"question": "How many?"}], server)
        assert run().exit_code == 0, errors()
        found = results_in(server.bodies[-1])
    assert [one[: len(claim)] for one, claim in zip(found, CLAIMS.values(), strict=True)] == [
        *CLAIMS.values()
    ]
    assert [body["tool_choice"] for body in server.bodies] == ["required", "auto", "auto", "auto"]
    (record,) = records()
    assert record["parsed"] == {"answer": "It is 612", "calls": 3}
    assert record["generations"] == len(generations()) == 4
    assert record["usage"]["completion_tokens"] == 3 + len(["It", "is", "612"])


BY_KIND = """
import asyncio
async def plain(generate):
    return await generate("tell me of tea")
async def typo(generate):
    return await generate("tell me of tea", temprature=1.0)
async def wrong_type(generate):
    return await generate("tell me of tea", stop=object(), max_tokens=4)
async def wrong_value(generate):
    return await generate("tell me of tea", max_tokens=-1)
async def too_long(generate):
    return await generate("tea " * 2000)
async def several(generate):
    found = await generate("tell me of tea", n=2, temperature=1.0, seed=1, logprobs=1)
    assert found.choices[0].logprobs[0] is not None
    return {"n": len(found.choices), "tokens": found.usage.completion_tokens}
async def without_template(generate):
    return await generate("tell me of", chat=False, max_tokens=4)
async def late(generate):
    try:
        await asyncio.wait_for(generate("tell me of tea", max_tokens=400), 0.01)
    except asyncio.TimeoutError:
        return "late"
async def caught(generate):
    found = await generate.many(["tea", "tea " * 2000], return_exceptions=True)
    return " ".join(type(one).__name__ for one in found)
async def solve(row, generate):
    return await globals()[row["kind"]](generate)
"""
REFUSED = {
    "typo": ("invalid_request", "temprature"),
    "wrong_type": ("invalid_request", "stop"),
    "wrong_value": ("invalid_request", "max_tokens"),
    "too_long": ("prompt_too_long", "tokens"),
}
FINE = ("plain", "several", "without_template", "late", "caught")


@pytest.mark.vllm
def test_what_vllm_refuses_fails_its_row_alone(text_model: Path) -> None:
    engine = {"kind": "vllm", "model": str(text_model), "options": TEXT_ONLY}
    kinds = [*FINE, *REFUSED] * 3
    rows = [{"kind": kind} for kind in kinds]
    write(BY_KIND, rows, engine=engine, sampling={"max_tokens": 12}, output={"keep": ["kind"]})
    done = own_process.batchkit("run", "job.toml", cwd=Path.cwd(), start=Fork)
    assert done.returncode == 3, done.stderr
    assert "Traceback" not in done.stderr
    assert len(records()) == len(kinds)
    for record in records():
        kind, error = record["fields"]["kind"], record["error"]
        if kind in REFUSED:
            expected, word = REFUSED[kind]
            assert error is not None, kind
            assert (error["kind"], word in error["message"]) == (expected, True), error
        else:
            assert error is None, (kind, error)
    texts = {record["fields"]["kind"]: record["text"] for record in records()}
    assert texts["late"] == "late"
    assert texts["caught"] == "Completion PromptTooLongError"
    assert json.loads(texts["several"])["n"] == 2
    assert set(calls(RUN).values()) == {1}


def test_a_generation_is_in_the_log_before_its_row_goes_on() -> None:
    solve = """
from pathlib import Path

async def solve(row, generate):
    for n in range(3):
        answer = await generate(f"{row['q']} {n}")
        assert answer.text in Path("output/a/steps.jsonl").read_text()
    return {"answer": answer.text}
"""
    with serving() as server:
        write(solve, 40, server)
        assert run().exit_code == 0, errors()
