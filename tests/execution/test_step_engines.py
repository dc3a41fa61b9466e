"""Steps and functions that ask several engines: loaded together, or one after another over all rows."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file, save_file

from batchkit.config.loading import make_job
from batchkit.config.tables import JobConfig
from batchkit.errors import JobError
from batchkit.execution.engine_turns import grouping_of
from batchkit.execution.processor import ProductionBatchProcessor
from batchkit.runs.status import status
from batchkit.storage.log import RESULTS, STEPS
from tests.support import own_process, rollouts
from tests.support.chat_server import MODEL, ChatServer, serving
from tests.support.command_line import batchkit
from tests.support.dry_runs import manifest, reductions
from tests.support.forks import Fork
from tests.support.paths import ROOT
from tests.support.rollouts import RUN, calls, errors, generations, records, run
from tests.support.rows import read_jsonl
from tests.support.small_vllm import TEXT_ONLY
from tests.support.waiting import until

pytestmark = pytest.mark.slow

N_ROWS = 30
COMMAND = f"{shlex.quote(sys.executable)} -S -m tests.support.chat_server --port {{port}}"


def own(command: str = COMMAND) -> dict[str, Any]:
    """An engine that starts its own server."""
    return {
        "kind": "openai-server",
        "model": MODEL,
        "server": {"command": command},
        "options": {"max_num_seqs": 4},
    }


OWN = own()
DRAFT = {"name": "draft", "prompt": {"user": "draft {{ q }}"}}
JUDGE = {"name": "judge", "engine": "judge", "prompt": {"user": "judge {{ steps.draft.text }}"}}
REVISE = {"name": "revise", "prompt": {"user": "revise {{ steps.judge.text }}"}}


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # for the servers


def write(solve: str | None = None, **tables: Any) -> None:
    """A job of three steps on two engines, or of the function ``solve``."""
    if solve is None:
        tables = {"steps": [DRAFT, JUDGE, REVISE], **tables}
    rollouts.write(solve, N_ROWS, **{"engine": OWN, "engines": {"judge": OWN}, **tables})


def log() -> str:
    return (RUN / "run.log").read_text()


def turns(since: int = 0) -> list[str]:
    """The engines that had a turn after the first one, as of that place in the log."""
    return re.findall(r"next engine: (\S+);", log()[since:])


def assert_each_once(steps: int = 3) -> None:
    assert calls(RUN).total() == len(calls(RUN)) == steps * N_ROWS


def answers() -> list[str]:
    assert errors() == {}
    return [record["text"] for record in records()]


def right() -> list[str]:
    nested = "0 images, asked: "
    return [f"{nested}revise {nested}judge {nested}draft q{n}" for n in range(N_ROWS)]


def assert_finishes(*args: str) -> None:
    ended = run(*args)
    assert ended.exit_code == 0, ended.stderr
    assert answers() == right()
    assert_each_once()


def test_engines_that_do_not_fit_together_have_one_turn_after_another() -> None:
    write()
    assert_finishes()
    # No barrier but that of the engines: each has all rows before the next one is loaded.
    steps = [line["step"] for line in generations()]
    assert steps == ["draft"] * N_ROWS + ["judge"] * N_ROWS + ["revise"] * N_ROWS
    assert "engines are loaded one after the other" in log()
    assert turns() == ["[engines.judge]", "[engine]"]
    assert log().count(f"rows that wait for it: {N_ROWS}\n") == 2
    assert "the steps change the engine 2 times" in log()
    assert log().count("loading model tiny") == 3
    assert manifest()["turn"] is None
    again = run()
    assert again.exit_code == 0
    assert "nothing left to run" in again.stderr


def test_a_run_that_is_killed_goes_on_with_the_engine_that_was_loaded(tmp_path: Path) -> None:
    write(engines={"judge": own(f"{COMMAND} --latency-s 0.1")})
    process = own_process.begin("run", "job.toml", cwd=tmp_path)
    lines = RUN / STEPS
    until(lambda: lines.exists() and lines.read_bytes().count(b'"judge"') >= N_ROWS + 8)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    so_far = len(log())
    changed = run("--set", "sampling.max_tokens=5")
    assert changed.exit_code != 0, "no row has a record, but all have generations"
    assert "changed since this run began" in changed.stderr
    assert manifest()["turn"] == "judge"
    assert_finishes()
    assert turns(so_far) == ["[engine]"]


def test_a_server_of_a_named_engine_prints_to_a_log_of_its_own() -> None:
    said = shlex.quote(f"echo I judge; exec {COMMAND}")
    write(engines={"judge": own(f"sh -c {said}")})
    ended = run()
    assert ended.exit_code == 0, ended.stderr
    logs = {path.name for path in RUN.glob("engine*.log") if "I judge" in path.read_text()}
    assert logs == {"engine.judge.log"}


def test_rows_that_can_be_read_only_once_are_refused_where_engines_take_turns() -> None:
    tables = {"engine": OWN, "engines": {"judge": OWN}, "steps": [DRAFT, JUDGE, REVISE]}
    processor = ProductionBatchProcessor(make_job({"name": "a", **tables}, "the test"), quiet=True)
    with pytest.raises(
        JobError, match=r"read only once, but engines are loaded one after .*; pass a list"
    ):
        processor.process({"q": f"q{n}"} for n in range(N_ROWS))
    assert not RUN.exists()


@pytest.mark.release
def test_a_retry_gives_engines_their_turns(tmp_path: Path) -> None:
    broken = own(f"{COMMAND} --dies-of q7")
    write(engines={"judge": broken}, run={"max_engine_restarts": 20})
    ended = run()
    assert ended.exit_code == 3, ended.stderr
    assert "engine judge: " in log()
    assert {*errors()} == {7}, "the step that kills its engine fails its row alone"
    assert errors()[7].startswith("engine_crash: step judge: the engine ")
    assert records()[7]["steps"]["draft"]["text"] == "0 images, asked: draft q7"
    assert calls(RUN).total() == len(calls(RUN)) == 3 * N_ROWS - 1
    again = batchkit("retry-failed", "job.toml", "--set", f"engines.judge.server.command={COMMAND}")
    assert again.exit_code == 0, again.stderr
    assert "next engine: [engines.judge]; rows that wait for it: 1\n" in log()
    newest = {record["index"]: record for record in read_jsonl(RUN / "results.jsonl")}
    assert [newest[n]["text"] for n in range(N_ROWS)] == right()


@pytest.mark.parametrize("tokens", [80, 150, 200], ids=["in a turn", "at its end", "in the next"])
def test_a_budget_ends_a_turn_and_a_start_without_it_goes_on(tokens: int) -> None:
    """Each draft has 5 tokens: all of them 150."""
    write(run={"max_in_flight": 2}, budget={"max_completion_tokens": tokens})
    ended = run()
    assert ended.exit_code == 1, ended.stderr
    assert json.loads(ended.stdout)["stopped_by"] == f"budget.max_completion_tokens = {tokens}"
    assert len(generations()) < 50
    assert_finishes("--set", "budget.max_completion_tokens=10000")


@pytest.fixture
def two() -> Iterator[tuple[ChatServer, ChatServer]]:
    with serving(latency_s=0.02) as one, serving(latency_s=0.02) as other:
        yield one, other


def at(server: ChatServer) -> dict[str, Any]:
    options = {"max_num_seqs": 4}
    return {
        "kind": "openai-server",
        "model": MODEL,
        "base_url": server.url,
        "options": options,
    }


def test_engines_that_fit_together_work_at_the_same_time(
    two: tuple[ChatServer, ChatServer],
) -> None:
    write(engine=at(two[0]), engines={"judge": at(two[1])})
    assert_finishes()
    assert "engines are loaded together" in log()
    assert two[0].answered.total() == 2 * N_ROWS
    assert two[1].answered.total() == N_ROWS
    steps = [line["step"] for line in generations()]
    assert steps.index("judge") < len(steps) - 1 - steps[::-1].index("draft"), "no barrier"


ASKS = """
import asyncio

async def solve(row, generate):
    async def judged(n):
        draft = await generate(f"draft {n} of {row['q']}", step="draft")
        return (await generate(f"judge {draft.text}", step="judge", engine="judge")).text
    texts = await asyncio.gather(*[judged(n) for n in range(3)])
    if row["q"] == "q5":
        await generate("x", engine="judeg")
    return " / ".join(texts)
"""


@pytest.mark.parametrize("is_together", [True, False], ids=["together", "in-turn"])
def test_a_function_asks_several_engines(
    is_together: bool, two: tuple[ChatServer, ChatServer]
) -> None:
    one, judge = (at(two[0]), at(two[1])) if is_together else (OWN, OWN)
    write(ASKS, engine=one, engines={"judge": judge})
    ended = run()
    assert ended.exit_code == 3, ended.stderr
    found = {record["index"]: record for record in records()}
    failed = found.pop(5)
    assert "engine is 'judeg', expected one of [engines]: judge" in failed["error"]["message"]
    nested = "0 images, asked: "
    for n, record in found.items():
        judged = [f"{nested}judge {nested}draft {k} of q{n}" for k in range(3)]
        assert record["text"] == " / ".join(judged)
    assert_each_once(steps=6)
    engines = Counter(line.get("engine", "") for line in generations())
    assert engines == {"": 3 * N_ROWS, "judge": 3 * N_ROWS}
    assert turns() == ([] if is_together else ["[engines.judge]"])


SIDE_BY_SIDE = """
import asyncio

async def solve(row, generate):
    one = generate(f"one {row['q']}", step="one")
    other = generate(f"other {row['q']}", step="other", engine="judge")
    return " / ".join([each.text for each in await asyncio.gather(one, other)])
"""


def test_a_function_that_asks_two_engines_side_by_side_gets_a_turn_of_each() -> None:
    write(SIDE_BY_SIDE, engine=own(f"{COMMAND} --latency-s 0.1"), budget={"max_seconds": 30})
    ended = run()
    assert ended.exit_code == 0, ended.stderr
    asked = "0 images, asked: "
    assert answers() == [f"{asked}one q{n} / {asked}other q{n}" for n in range(N_ROWS)]
    assert_each_once(steps=2)
    assert turns() == ["[engines.judge]"]


CATCHES = """
from pathlib import Path

async def solve(row, generate):
    try:
        await generate("long " * 5000)
    except Exception as error:
        caught = type(error).__name__
    if not Path("fixed").exists():
        raise ValueError("not yet")
    return caught + (await generate("judge", engine="judge")).text
"""


def test_a_failure_that_a_retried_function_catches_is_not_asked_again_in_each_turn() -> None:
    write(CATCHES, run={"check_rows": 0}, budget={"max_seconds": 60})
    assert run().exit_code == 3
    Path("fixed").touch()
    again = batchkit("retry-failed", "job.toml")
    assert again.exit_code == 0, again.stderr
    newest = {record["index"]: record for record in read_jsonl(RUN / "results.jsonl")}
    assert {r["text"] for r in newest.values()} == {"PromptTooLongError0 images, asked: judge"}
    assert turns() == ["[engines.judge]"]
    assert_each_once()  # the failure of each attempt, and the judge


EDITED = """
from pathlib import Path

async def solve(row, generate):
    draft = await generate(f"draft {row['q']}", step="draft")
    Path("solve.py").write_text(Path("solve.py").read_text().replace("judge of", "another of"))
    return (await generate(f"judge of {draft.text}", step="judge", engine="judge")).text
"""


def test_a_function_that_is_edited_between_two_turns_stops_the_run() -> None:
    write(EDITED)
    ended = run()
    assert ended.exit_code == 1
    assert "files have changed since the run began" in ended.stderr
    assert "rollout.source: " in ended.stderr
    assert {line["step"] for line in generations()} == {"draft"}


def grouped(workers: dict[str, Any], engine: dict[str, Any], judge: dict[str, Any]) -> JobConfig:
    tables = {"engine": engine, "engines": {"judge": judge}, "steps": [DRAFT, JUDGE]}
    return make_job({**tables, "workers": workers}, "the test")


VLLM = {"model": "m"}
ON_TWO = {"model": "m", "options": {"tensor_parallel_size": 2}}
SERVER = {"kind": "openai-server", "model": "m", "base_url": "http://localhost:1/v1"}


@pytest.mark.parametrize(
    ("workers", "engine", "judge", "groups", "devices"),
    [
        ({}, VLLM, SERVER, [["", "judge"]], {}),
        ({}, VLLM, {"kind": "dry-run"}, [["", "judge"]], {}),
        ({}, VLLM, VLLM, [[""], ["judge"]], {}),
        ({"gpus": 1}, VLLM, VLLM, [[""], ["judge"]], {}),
        ({"gpus": 2}, VLLM, VLLM, [["", "judge"]], {"": "4", "judge": "5"}),
        ({"gpus": 2}, VLLM, ON_TWO, [[""], ["judge"]], {}),
        ({"gpus": 3}, VLLM, ON_TWO, [["", "judge"]], {"": "4", "judge": "5,6"}),
        ({"gpus": 0}, VLLM, VLLM, [["", "judge"]], {}),
        ({"gpus": 0}, VLLM, {**VLLM, "in_process": True}, [[""], ["judge"]], {}),
        ({"gpus": 2}, VLLM, OWN, [[""], ["judge"]], {}),
        ({"gpus": 0}, OWN, OWN, [["", "judge"]], {}),
    ],
    ids=str,
)
def test_engines_are_loaded_together_if_they_fit(
    workers: dict[str, Any],
    engine: dict[str, Any],
    judge: dict[str, Any],
    groups: list[list[str]],
    devices: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    found = grouping_of(grouped(workers, engine, judge))
    assert list(map(list, found.groups)) == groups
    visible = {name: its["CUDA_VISIBLE_DEVICES"] for name, its in found.environments.items()}
    assert visible == devices


OPTIONS = {
    **TEXT_ONLY,
    "max_num_seqs": 8,
    "kv_cache_memory_bytes": 128 * 2**20,
    "worker_cls": "tests.support.failing_worker.FailingWorker",
}
OVER_4 = {"additional_config": {"over": 4}}  # more requests at a time run out of memory


def answers_of(run: Path) -> list[Any]:
    lines = sorted(read_jsonl(run / STEPS), key=lambda line: (line["index"], line["step"]))
    found = sorted(read_jsonl(run / RESULTS), key=lambda record: int(record["index"]))
    return [line["text"] for line in lines] + [(one["status"], one["text"]) for one in found]


@pytest.mark.vllm
@pytest.mark.release
@pytest.mark.timeout(240)
def test_two_models_have_their_turns_through_a_kill_and_answer_as_they_do_together(
    tmp_path: Path, text_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(text_model, tmp_path / "other")
    weights = load_file(text_model / "model.safetensors")
    others = {name: one[::-1].copy() if "mlp" in name else one for name, one in weights.items()}
    save_file(others, tmp_path / "other" / "model.safetensors", {"format": "pt"})
    monkeypatch.setenv("BATCHKIT_TEST_FAULTS", json.dumps({"folder": str(tmp_path)}))
    write(
        engine={"kind": "vllm", "model": str(text_model), "options": OPTIONS},
        engines={"judge": {"model": "other", "options": {**OPTIONS, **OVER_4}}},
        run={"checkpoint_interval_s": 0.1},
        sampling={"max_tokens": 12},
    )

    def judged() -> int:
        steps = RUN / STEPS
        return steps.read_bytes().count(b'"step":"judge"') if steps.exists() else 0

    with own_process.begin("run", "job.toml", cwd=tmp_path, start=Fork) as process:
        until(lambda: judged() >= 8 or process.poll() is not None, within_s=120)
        process.kill()
    assert 8 <= judged() < N_ROWS
    assert calls(RUN).total() == N_ROWS + judged()
    ended = own_process.batchkit("run", "job.toml", cwd=tmp_path, start=Fork)
    assert ended.returncode == 0, ended.stderr
    assert_each_once()
    assert log().count("next engine: [engines.judge]") == 1, "the second start begins with it"
    assert log().count("next engine: [engine];") == 1
    assert "engine judge: out of memory" in log()
    assert reductions(engine="judge") == [{"max_num_seqs": 4}]
    assert reductions() == []
    assert status(RUN).engine_settings == {"engines.judge.max_num_seqs": 4}
    assert (
        "engine judge: an earlier engine of this run ran out of memory; its reduced settings are used again: max_num_seqs = 4"
        in log()
    )
    restarts = [start.get("engine_restarts", 0) for start in manifest()["starts"]]
    assert [n > 0 for n in restarts] == [True, False]
    assert "vllm" in manifest()["starts"][-1]["engines"]["judge"]
    assert (RUN / "engine.judge.log").exists()

    fits = ["--set", "name=together", "--set", "workers.gpus=0"]
    together = own_process.batchkit("run", "job.toml", *fits, cwd=tmp_path, start=Fork)
    assert together.returncode == 0, together.stderr
    assert "engines are loaded together" in together.stderr
    assert "next engine: " not in together.stderr
    assert answers_of(Path("output/together")) == answers_of(RUN)
