"""``[rollout]`` on real vLLM: what ``generate`` may be given, and what it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.faulty_runs import JOB
from tests.support.forks import Fork
from tests.support.rows import read_jsonl, write_jsonl

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


def test_what_vllm_refuses_fails_its_row_alone(tmp_path: Path, text_model: Path) -> None:
    job = JOB.replace('[prompt]\nuser = "{{ q }}"\n', '[rollout]\nfunction = "solve.py:solve"\n')
    job = job.replace('sampling_column = "params"\n', "").replace("MODEL", str(text_model))
    kinds = [*OK, *FAILED] * 3
    (tmp_path / "job.toml").write_text(
        "\n".join(line for line in job.splitlines() if not line.startswith("worker_cls"))
    )
    (tmp_path / "solve.py").write_text(SOLVE)
    write_jsonl(tmp_path / "rows.jsonl", [{"kind": kind} for kind in kinds])
    with Fork(
        [sys.executable, "-m", "batchkit", "run", "job.toml", "--set", "output.keep=['kind']"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        _, stderr = process.communicate(timeout=120)
    assert process.returncode == 3, stderr
    assert "Traceback" not in stderr
    found = read_jsonl(tmp_path / "output/faulty/results.jsonl")
    assert len(found) == len(kinds)
    for record in found:
        kind, error = record["fields"]["kind"], record["error"]
        if kind in FAILED:
            expected, word = FAILED[kind]
            assert error is not None, kind
            assert (error["kind"], word in error["message"]) == (expected, True), error
        else:
            assert error is None, (kind, error)
    texts = {record["fields"]["kind"]: record["text"] for record in found}
    assert texts["late"] == "late"
    assert texts["caught"] == "Completion PromptTooLongError"
    assert json.loads(texts["several"])["n"] == 2
    lines = read_jsonl(tmp_path / "output/faulty/steps.jsonl")
    assert len({(line["index"], line["call"]) for line in lines}) == len(lines)
