"""``[rollout]`` on real vLLM: what ``generate`` may be given, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.forks import Fork
from tests.support.own_process import batchkit
from tests.support.rollouts import RUN, calls, records, write
from tests.support.small_vllm import TEXT_ONLY

pytestmark = pytest.mark.vllm

SOLVE = """
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
FAILED = {
    "typo": ("invalid_request", "temprature"),
    "wrong_type": ("invalid_request", "stop"),
    "wrong_value": ("invalid_request", "max_tokens"),
    "too_long": ("prompt_too_long", "tokens"),
}
OK = ("plain", "several", "without_template", "late", "caught")


@pytest.mark.usefixtures("in_an_empty_folder")
def test_what_vllm_refuses_fails_its_row_alone(text_model: Path) -> None:
    engine = {"kind": "vllm", "model": str(text_model), "options": TEXT_ONLY}
    kinds = [*OK, *FAILED] * 3
    rows = [{"kind": kind} for kind in kinds]
    write(SOLVE, rows, engine=engine, sampling={"max_tokens": 12}, output={"keep": ["kind"]})
    done = batchkit("run", "job.toml", cwd=Path.cwd(), start=Fork)
    assert done.returncode == 3, done.stderr
    assert "Traceback" not in done.stderr
    assert len(records()) == len(kinds)
    for record in records():
        kind, error = record["fields"]["kind"], record["error"]
        if kind in FAILED:
            expected, word = FAILED[kind]
            assert error is not None, kind
            assert (error["kind"], word in error["message"]) == (expected, True), error
        else:
            assert error is None, (kind, error)
    texts = {record["fields"]["kind"]: record["text"] for record in records()}
    assert texts["late"] == "late"
    assert texts["caught"] == "Completion PromptTooLongError"
    assert json.loads(texts["several"])["n"] == 2
    assert set(calls(RUN).values()) == {1}
