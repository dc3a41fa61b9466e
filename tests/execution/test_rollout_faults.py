"""What the function of ``[rollout]`` may do wrong, and what that costs: its own row, never another."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.chat_server import Refused, error, serving
from tests.support.own_process import batchkit
from tests.support.rollouts import RUN, errors, generations, records, run, write
from tests.support.rows import read_jsonl

pytestmark = [pytest.mark.usefixtures("in_an_empty_folder"), pytest.mark.slow]

# Each is the body of the function; row 1 of 3 does it, the others only ask once.
HEAD = """
import asyncio, sys, time
async def solve(row, generate):
    first = await generate(row["q"])
    if row["q"] != "q1":
        return first.text
"""
FAULTS = {
    "raises": ("raise ValueError(row['q'])", "rollout: ", "ValueError: q1"),
    "returns nothing": ("pass", "rollout: ", "returned None (NoneType), expected a text, a dict"),
    "returns a list": ("return [1]", "rollout: ", r"returned \[1\] \(list\)"),
    "returns a blank": ("return ' '", "empty: ", "returned no text"),
    "returns no JSON": (
        "return {'a': object()}",
        "rollout: ",
        "a dict that can't be converted to JSON",
    ),
    "returns keys that are no text": (
        "return {1: 2}",
        "rollout: ",
        "a dict that can't be converted to JSON",
    ),
    "exits": ("sys.exit(7)", "rollout: ", "SystemExit: 7"),
    "exits in a task": ("await asyncio.create_task(leave())", "rollout: ", "SystemExit: 9"),
    "interrupts": ("raise KeyboardInterrupt", "rollout: ", "KeyboardInterrupt"),
    "cancels itself": (
        "asyncio.current_task().cancel(); await asyncio.sleep(9)",
        "rollout: ",
        "cancelled its own asyncio task",
    ),
    "awaits forever": ("await asyncio.Event().wait()", "timeout: ", "for 2 s"),
    "swallows its cancellation": (
        "while True:\n        try: await asyncio.Event().wait()\n        except BaseException: pass",
        "timeout: ",
        "neither generated nor returned",
    ),
    "asks for no messages": ("await generate(7)", "invalid_request: ", "generate: found 7"),
    "asks for an unknown engine": (
        "await generate('a', engine='x')",
        "invalid_request: ",
        "engine is 'x', but the job has no [engines]",
    ),
    "asks for a wrong tool": (
        "await generate('a', tools=[{'type': 'function'}])",
        "invalid_request: ",
        "tools",
    ),
    "chooses a tool without tools": (
        "await generate('a', tool_choice='required')",
        "invalid_request: ",
        "the row has no tools",
    ),
    "asks on another loop": (
        "await asyncio.to_thread(asyncio.run, generate('a'))",
        "invalid_request: ",
        "was called on another event loop",
    ),
    "a group of one": (
        "async with asyncio.TaskGroup() as group:\n        group.create_task(generate('refuse me'))",
        "invalid_request: ",
        "^invalid_request: .*no thanks",
    ),
    "one of many": (
        "await generate.many(['fine', 'refuse me', 'fine, too'])",
        "invalid_request: ",
        "^invalid_request: .*no thanks",
    ),
}


def answer(text: str, body: dict[str, Any]) -> str:
    if "refuse" in text:
        raise Refused(400, error("no thanks"))
    return f"answer to {text}"


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_the_function_fails_its_row_alone(fault: str) -> None:
    body, kind, message = FAULTS[fault]
    leave = "async def leave():\n    sys.exit(9)\n"
    with serving(answer) as server:
        write(f"{HEAD}    {body}\n{leave}", 3, server, run={"row_timeout_s": 2})
        ended = run()
    assert ended.exit_code == 3, ended.stderr
    assert [record["text"] for record in records()] == ["answer to q0", None, "answer to q2"]
    assert {*errors()} == {1}
    assert errors()[1].startswith(kind)
    assert re.search(message, errors()[1]) or message in errors()[1]
    assert records()[1]["generations"] >= 1


def test_a_traceback_has_the_users_frames_and_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-abcdefghijklmnopqrstuvwx")
    solve = """
import os
def parse(text):
    raise ValueError(f"{text} {os.environ['OPENAI_API_KEY']}")
async def solve(row, generate):
    return parse((await generate(row["q"])).text)
"""
    write(solve, 1)
    assert run().exit_code == 3
    shown = errors()[0]
    assert 'solve.py", line 6, in solve' in shown
    assert 'solve.py", line 4, in parse' in shown
    assert "ValueError: dry-run: no model answered row 0" in shown
    assert "execution/rollouts/" not in shown
    assert "asyncio" not in shown
    assert "sk-abc" not in (RUN / "results.jsonl").read_text()


@pytest.mark.parametrize("block", ["time.sleep(60)", "while True: pass"])
def test_code_that_blocks_all_rows_stops_the_run_and_is_named(block: str) -> None:
    code = f"""
import time
async def solve(row, generate):
    first = await generate(row["q"])
    if row["q"] == "q1":
        {block}
    return (await generate(first.text)).text
"""
    write(code, 6, run={"row_timeout_s": 1})
    ended = batchkit("run", "job.toml", cwd=Path.cwd(), timeout_s=60)
    assert ended.returncode == 1
    assert "row 1 (id 1) let no other row run for 1 s (run.row_timeout_s)" in ended.stderr
    assert "asyncio.to_thread" in ended.stderr
    assert 'solve.py", line 6, in solve' in ended.stderr
    assert errors()[1].startswith("timeout: the row's code let no other row run for 1 s")
    assert "Traceback" not in ended.stderr
    again = batchkit("run", "job.toml", cwd=Path.cwd(), timeout_s=60)
    assert again.returncode == 3, again.stderr
    assert {record["index"] for record in records()} == {*range(6)}
    assert {*errors()} == {1}
    assert len(generations()) == 2 * 5 + 1


def test_a_thread_that_never_ends_keeps_no_process_alive() -> None:
    code = """
import asyncio, time
async def solve(row, generate):
    text = (await generate(row["q"])).text
    if row["q"] == "q1":
        await asyncio.to_thread(time.sleep, 300)
    return text
"""
    write(code, 3, run={"row_timeout_s": 1})
    ended = batchkit("run", "job.toml", cwd=Path.cwd(), timeout_s=60)
    assert ended.returncode == 3, ended.stderr
    assert {*errors()} == {1}


def test_a_request_that_nobody_waits_for_is_dropped_or_recorded_and_ignored() -> None:
    code = """
import asyncio
async def solve(row, generate):
    try:
        await asyncio.wait_for(generate("slow"), 0.3)
    except asyncio.TimeoutError:
        return (await generate("quick")).text
"""
    with serving(_slowly) as server:
        write(code, 4, server, run={"max_in_flight": 2, "deduplicate": False})
        assert run().exit_code == 0
        assert server.answered["quick"] == 4
        assert server.answered["slow"] < 4, "those that were not submitted yet are dropped"
    assert [record["text"] for record in records()] == ["answer to quick"] * 4
    lines = [(line["index"], line["call"], line["text"]) for line in generations()]
    assert len({*lines}) == len(lines)
    assert lines.count((0, 0, "answer to slow")) == 1


def _slowly(text: str, body: dict[str, Any]) -> str:
    import time

    time.sleep(1.0 if text == "slow" else 0.0)
    return f"answer to {text}"


def test_an_error_of_the_input_waits_for_the_rows_before_it() -> None:
    code = """
async def solve(row, generate):
    return (await generate((await generate(row["q"])).text)).text
"""
    with serving(latency_s=0.05) as server:
        write(code, 10, server)
        Path("rows.csv").write_text(
            "q\n" + "".join(f"q{n}\n" for n in range(10)) + 'a"b,"\n"broken\n'
        )
        ended = run("--set", "input.path=rows.csv")
    assert ended.exit_code in (1, 2)
    found = read_jsonl(RUN / "results.jsonl")
    assert len(found) >= 10
    assert {record["status"] for record in found[:10]} == {"ok"}


def test_changes_after_the_question_change_nothing() -> None:
    code = """
import asyncio
async def solve(row, generate):
    messages, tools = [{"role": "user", "content": row["q"]}], []
    asked = asyncio.create_task(generate(messages))
    await asyncio.sleep(0)
    messages[0]["content"] = "changed"
    messages.append({"role": "user", "content": "changed"})
    row["deep"]["a"] = "changed"
    return (await asked).text
"""
    with serving() as server:
        write(code, [{"q": "q0", "deep": {"a": 1}}], server, output={"keep": ["deep"]})
        assert run().exit_code == 0
        assert [body["messages"] for body in server.bodies] == [[{"role": "user", "content": "q0"}]]
    assert records()[0]["fields"] == {"deep": {"a": 1}}
