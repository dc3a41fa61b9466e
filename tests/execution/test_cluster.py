"""Several workers on a real Ray: what they answer, and what is left when one of them dies.

Tests that only count rows use a small server or the dry-run engine in place of a model.
"""

from __future__ import annotations

import json
import re
import shlex
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Any

import psutil
import pytest

from batchkit.runs.status import status
from batchkit.runs.verify import verify
from batchkit.storage.log import STEPS
from tests.support.chat_server import MODEL, ChatServer, serving
from tests.support.faulty_runs import (
    N_ROWS,
    assert_only_failed,
    ended_in,
    question_rows,
    running,
    start,
    wait_for_records,
)
from tests.support.own_process import is_stopped_by, printing_to
from tests.support.ray_head import CPUS, RayHead
from tests.support.rows import read_jsonl
from tests.support.waiting import until

pytestmark = pytest.mark.ray

ASKS = """
name = "faulty"
input.path = "rows.jsonl"
prompt.user = "{{ q }}"
engine.kind = "openai-server"
"""


@pytest.fixture
def two(ray_head: RayHead) -> list[str]:
    """Settings for two workers."""
    return ["workers.count=2", f"workers.ray_address={ray_head.address}", "workers.gpus=0"]


def lose_a_worker(ray_head: RayHead, held: ExitStack) -> Callable[[], None]:
    return lambda: ray_head.workers()[0].kill()


def lose_a_node(ray_head: RayHead, held: ExitStack) -> Callable[[], None]:
    raylet = held.enter_context(ray_head.another_node(CPUS))

    def kill() -> None:
        for one in [raylet, *raylet.children(recursive=True)]:
            one.kill()

    return kill


@pytest.mark.release
@pytest.mark.parametrize(
    ("lose", "state"), [(lose_a_worker, None), (lose_a_node, "waiting for resources")]
)
def test_a_worker_or_a_node_that_is_gone_costs_nothing_but_a_second_run_of_its_rows(
    lose: Callable[[RayHead, ExitStack], Callable[[], None]],
    state: str | None,
    ray_head: RayHead,
    two: list[str],
    tmp_path: Path,
) -> None:
    killed = threading.Event()

    def once_it_is_killed(text: str, body: dict[str, Any]) -> str:
        killed.wait()
        return f"answered: {text}"

    rows = question_rows({})
    with ExitStack() as held:
        kill = lose(ray_head, held)
        server = held.enter_context(serving(once_it_is_killed))
        held.callback(killed.set)
        # A worker has a place where another one has all CPUs only on another node.
        cpus = CPUS if state else CPUS // 2
        settings = [*two, f"workers.cpus={cpus}", *at(server, max_num_seqs=8)]
        with running(tmp_path, tmp_path, rows, {}, settings, job=ASKS) as process:
            while server.inside < 16:  # eight of each worker
                assert process.poll() is None
                time.sleep(0.05)
            kill()
            killed.set()
            ended = ended_in(tmp_path, process)
    assert_only_failed(ended, [f"answered: {row['q']}" for row in rows], {})
    assert len(ended.stdout.splitlines()) == 1, "Ray's own words go elsewhere"
    lost = [worker for worker in status(tmp_path / "output/faulty").workers if worker["restarts"]]
    # Ray may give the new worker a place on the lost node, before it knows of the loss: that costs no row.
    deaths = [int(n) for n in re.findall(r"worker \d died.* with (\d+) rows", ended.log)]
    assert [worker["restarts"] for worker in lost] == [len(deaths)]
    assert sum(n_rows > 0 for n_rows in deaths) == 1
    assert state in (None, lost[0]["state"])
    assert deaths[0] >= 8
    assert verify(tmp_path / "output/faulty").is_sound


@pytest.mark.release
def test_a_row_that_kills_workers_is_found_and_fails_alone(
    ray_head: RayHead, two: list[str], tmp_path: Path
) -> None:
    rows = question_rows({})
    deaths: list[int] = []

    def kill_the_asker_of_9(text: str, body: dict[str, Any]) -> str:
        if text == rows[9]["q"]:
            asker = ray_head.worker_that_asks(server)
            deaths.append(asker.pid)
            asker.kill()
        return f"answered: {text}"

    with serving(kill_the_asker_of_9) as server:
        settings = [*two, *at(server, max_num_seqs=2)]  # few rows in a lease: few deaths
        ended = start(tmp_path, tmp_path, rows, {}, settings, job=ASKS)
    texts = [f"answered: {row['q']}" for row in rows]
    assert_only_failed(ended, texts, {9: "engine_crash"})
    assert "row 9 (id 9) kills workers even if it runs alone: the row has failed" in ended.stderr
    assert 2 <= len(deaths) <= 6


def test_sigint_stops_all_workers_and_keeps_what_is_finished(
    ray_head: RayHead, two: list[str], tmp_path: Path
) -> None:
    ended = threading.Event()

    def a_few(text: str, body: dict[str, Any]) -> None:
        if len(server.answered) >= 4:
            ended.wait()

    with serving(a_few) as server, ExitStack() as held:
        held.callback(ended.set)
        settings = [*two, *at(server, max_num_seqs=4)]
        with running(tmp_path, tmp_path, question_rows({}), {}, settings, job=ASKS) as process:
            wait_for_records(tmp_path, 4)
            until(lambda: len(ray_head.workers()) == 2)
            workers = ray_head.workers()
            process.send_signal(signal.SIGINT)
            until(
                lambda: (
                    "stopping: waiting up to" in (tmp_path / "output/faulty/run.log").read_text()
                )
            )
            ended.set()
            stdout, stderr = process.communicate(timeout=90)
    summary = json.loads(stdout)
    assert process.returncode == summary["exit"] == 130, stderr
    assert 4 < summary["ok"] == server.answered.total() < N_ROWS
    assert len(workers) == 2
    assert not psutil.wait_procs(workers, timeout=30)[1], "nothing is left behind"


# These with vLLM.
def test_an_engine_in_a_worker_is_kept_going_as_on_one_machine(
    calm: list[str], two: list[str], tmp_path: Path, text_model: Path
) -> None:
    rows = question_rows({5: "error"})
    settings = [*two, "engine.options.additional_config={ over = 4 }"]
    ended = start(tmp_path, text_model, rows, {}, settings)
    assert_only_failed(ended, calm, {5: "engine_crash"})
    assert "next engine with max_num_seqs = 4" in ended.stderr
    assert ended.reductions == [{"max_num_seqs": 4}]
    assert verify(tmp_path / "output/faulty").is_sound
    workers = status(tmp_path / "output/faulty").workers
    assert sum(worker["rows"] for worker in workers) == N_ROWS
    assert sum(worker["restarts"] for worker in workers) == 0
    restarts = sum(worker["engine_restarts"] for worker in workers)
    assert restarts == ended.manifest["starts"][-1]["engine_restarts"] > 1


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_models_load_ends_the_run_at_once(
    signum: signal.Signals, ray_head: RayHead, two: list[str], tmp_path: Path, text_model: Path
) -> None:
    with running(tmp_path, text_model, question_rows({}), {}, two) as process:
        logs = "output/faulty/engine.worker-*.log"
        is_stopped_by(signum, process, lambda: list(tmp_path.glob(logs)))
    until(lambda: not ray_head.workers(), within_s=30)
    until(lambda: not printing_to(*tmp_path.glob(logs)), within_s=30)  # nothing of their engines


def at(server: ChatServer, **options: Any) -> list[str]:
    """Settings that have ``ASKS`` ask ``server``."""
    pairs = ", ".join(f"{name} = {value}" for name, value in options.items())
    return [
        f"engine.base_url={server.url}",
        f"engine.model={MODEL}",
        f"engine.options={{ {pairs} }}",
    ]


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
def settings(two: list[str]) -> list[str]:
    return [*two, f"engine.model={MODEL}"]


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
        else:  # workers.gpus = 0 would say that two models fit
            settings = [setting for setting in settings if "workers.gpus" not in setting]
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
        ("solver.py:solve", SOLVER + CHANGED, 1, ["files have changed since", "rollout.source: "]),
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
        settings = [*settings, "workers.count=1", f"engine.base_url={server.url}"]
        with running(tmp_path, tmp_path, question_rows({}), {}, settings, job=job) as process:
            _, stderr = process.communicate(timeout=120)
    assert process.returncode == exit_code
    assert all(word in stderr for word in words), stderr
    assert server.answered.total() == 0
