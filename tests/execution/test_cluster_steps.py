"""Rows with several generations on workers of a real Ray, and what a dead worker costs them.

A small server answers in place of a model, so that a test sees what it is asked.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections import Counter
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from batchkit.runs.verify import verify
from batchkit.storage.log import STEPS
from tests.support.chat_server import MODEL, serving
from tests.support.faulty_runs import question_rows, running, start
from tests.support.ray_head import RayHead
from tests.support.rows import read_jsonl

pytestmark = pytest.mark.ray

STEPS_JOB = """
name = "faulty"
input.path = "rows.jsonl"
engine.kind = "openai-server"
engine.options.max_num_seqs = 8
[[steps]]
name = "draft"
prompt.user_file = "draft.txt"
[[steps]]
name = "judge"
prompt.user = "judge: {{ steps.draft.text }}"
[[steps]]
name = "revise"
prompt.user = "revise: {{ steps.judge.text }}"
"""
ROLLOUT_JOB = """
name = "faulty"
input.path = "rows.jsonl"
engine.kind = "openai-server"
engine.options.max_num_seqs = 8
[rollout]
function = "FUNCTION"
"""
SOLVER = """
async def solve(row, generate):
    drafts = await generate.many([f"{row['q']}, way {n}" for n in range(3)], step="draft")
    text = " and ".join(draft.text for draft in drafts)
    for n in range(2):
        text = (await generate(f"revise: {text}", step="revise")).text
    return text
"""


@pytest.fixture
def settings(ray_head: RayHead) -> list[str]:
    return [
        *("run.workers=2", f"run.ray_address={ray_head.address}", "run.worker_gpus=0"),
        f"engine.model={MODEL}",
    ]


@pytest.mark.parametrize(
    ("job", "generations", "lost_of_a_row"),
    [(STEPS_JOB, 3, 1), (ROLLOUT_JOB.replace("FUNCTION", "solver:solve"), 5, 3)],
    ids=["steps", "rollout"],
)
def test_rows_of_a_worker_that_is_killed_keep_the_generations_that_they_have(
    job: str,
    generations: int,
    lost_of_a_row: int,
    ray_head: RayHead,
    settings: list[str],
    tmp_path: Path,
) -> None:
    rows = question_rows({})
    (tmp_path / "draft.txt").write_text("draft: {{ q }}")
    (tmp_path / "solver.py").write_text(SOLVER)
    asked = count(1)

    def kill_once_in_the_middle(text: str, body: dict[str, Any]) -> str:
        if next(asked) == len(rows) * generations // 2:
            ray_head.worker_that_asks(server).kill()
        return f"answered {text}"

    with serving(kill_once_in_the_middle) as server:
        ended = start(
            tmp_path, tmp_path, rows, {}, [*settings, f"engine.base_url={server.url}"], job=job
        )
    assert ended.exit == 0, ended.stderr
    output = tmp_path / "output/faulty"
    lines = read_jsonl(output / STEPS)
    assert len(lines) == generations * len(rows)
    assert max(Counter((li["index"], li["step"], li["call"]) for li in lines).values()) == 1
    assert [record["text"] for record in ended.records] == [expected(row["q"], job) for row in rows]
    assert "died" in ended.log
    again = server.answered.total() - len(lines)
    held = int(ended.log.partition(" rows:")[0].rpartition(" ")[2])
    assert again <= lost_of_a_row * held
    assert max(server.answered.values()) <= 2
    assert verify(output).is_sound


def expected(question: str, job: str) -> str:
    if job == STEPS_JOB:
        return f"answered revise: answered judge: answered draft: {question}"
    drafts = " and ".join(f"answered {question}, way {n}" for n in range(3))
    return f"answered revise: answered revise: {drafts}"


TWO_ENGINES_JOB = (
    STEPS_JOB.replace('name = "judge"', 'name = "judge"\nengine = "judge"')
    + """
[engines.judge]
kind = "openai-server"
model = "tiny"
options.max_num_seqs = 4
"""
)
SERVER = f"{shlex.quote(sys.executable)} -S -m tests.support.chat_server --port {{port}}"


@pytest.mark.release
@pytest.mark.parametrize("is_together", [True, False], ids=["together", "in-turn"])
def test_workers_have_several_engines(
    is_together: bool, settings: list[str], tmp_path: Path
) -> None:
    rows = question_rows({})
    (tmp_path / "draft.txt").write_text("draft: {{ q }}")
    with serving() as one, serving() as judge:
        if is_together:
            places = [f"engine.base_url={one.url}", f"engines.judge.base_url={judge.url}"]
        else:  # worker_gpus = 0 would say that two models fit
            settings = [setting for setting in settings if "worker_gpus" not in setting]
            places = [f"{name}.server.command={SERVER}" for name in ("engine", "engines.judge")]
        ended = start(tmp_path, tmp_path, rows, {}, [*settings, *places], job=TWO_ENGINES_JOB)
    assert ended.exit == 0, ended.stderr
    asked = "0 images, asked:"
    assert [record["text"] for record in ended.records] == [
        f"{asked} revise: {asked} judge: {asked} draft: {row['q']}" for row in rows
    ]
    lines = read_jsonl(tmp_path / "output/faulty" / STEPS)
    assert Counter(Counter((li["index"], li["step"]) for li in lines).values()) == {
        1: 3 * len(rows)
    }
    assert {li["step"] for li in lines if li.get("engine") == "judge"} == {"judge"}
    turns = re.findall(r"next engine: (\S+); rows that wait for it: (\d+)", ended.log)
    waited = str(len(rows))
    assert turns == ([] if is_together else [("[engines.judge]", waited), ("[engine]", waited)])


CHANGED = "from pathlib import Path\nPath(__file__).write_text('# another')\n"


@pytest.mark.parametrize(
    ("function", "code", "exit_code", "words"),
    [
        # As on another machine: each process has its own file under this name.
        ("/proc/self/cwd/solver.py:solve", SOLVER, 2, ["can't be imported", "no such file"]),
        ("solver.py:solve", SOLVER + CHANGED, 1, ["found other files than", "rollout.source: "]),
    ],
    ids=["not found", "changed"],
)
def test_a_function_that_a_worker_finds_otherwise_stops_the_run(
    function: str,
    code: str,
    exit_code: int,
    words: list[str],
    settings: list[str],
    tmp_path: Path,
) -> None:
    (tmp_path / "solver.py").write_text(code)
    job = ROLLOUT_JOB.replace("FUNCTION", function)
    with serving() as server:
        settings = [*settings, "run.workers=1", f"engine.base_url={server.url}"]
        with running(tmp_path, tmp_path, question_rows({}), {}, settings, job=job) as process:
            _, stderr = process.communicate(timeout=120)
    assert process.returncode == exit_code
    assert all(word in stderr for word in words), stderr
    assert server.answered.total() == 0
