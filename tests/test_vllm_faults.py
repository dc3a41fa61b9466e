"""Real vLLM, its worker made to fail: every good row is answered, as in an undisturbed run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from batchkit.ledger import RESULTS, read_newest
from tests.conftest import write_jsonl

N_ROWS = 40
OWN, IN = "engine.in_process=false", "engine.in_process=true"

JOB = """
name = "faulty"
[input]
path = "rows.jsonl"
[prompt]
user = "{{ q }}"
[engine]
model = "MODEL"
[engine.options]
dtype = "float32"
enforce_eager = true
max_model_len = 512
max_num_seqs = 8
kv_cache_memory_bytes = 134217728
worker_cls = "tests.failing_worker.FailingWorker"
[sampling]
max_tokens = 12
sampling_column = "params"
[run]
stall_timeout_s = 6
"""


class Ended(NamedTuple):
    exit: int
    stderr: str
    records: list[dict[str, Any]]
    log: str
    manifest: dict[str, Any]

    @property
    def failed(self) -> dict[int, str]:
        return {
            record["index"]: record["error"]["kind"]
            for record in self.records
            if record["status"] == "failed"
        }


Run = Callable[..., Ended]


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory, text_model: Path) -> list[str]:
    """The texts of an undisturbed run."""
    ended = _run(tmp_path_factory.mktemp("calm"), text_model, {}, {}, [IN])
    assert ended.exit == 0, ended.stderr
    return [record["text"] for record in ended.records]


@pytest.fixture
def run(tmp_path: Path, text_model: Path) -> Run:
    def start(*settings: str, poison: dict[int, str] | None = None, **faults: Any) -> Ended:
        return _run(tmp_path, text_model, poison or {}, faults, settings)

    return start


def _run(
    folder: Path,
    model: Path,
    poison: dict[int, str],
    faults: dict[str, Any],
    settings: Any,
) -> Ended:
    (folder / "job.toml").write_text(JOB.replace("MODEL", str(model)))
    (folder / "markers").mkdir(exist_ok=True)
    rows: list[dict[str, Any]] = [
        {"q": f"tell me of {n}" + " tea" * (n % 7)} for n in range(N_ROWS)
    ]
    for index, kind in poison.items():
        rows[index]["params"] = {"extra_args": {"poison": kind}}
    if "prompt_over" in faults:
        rows[17]["q"] += " milk" * faults["prompt_over"]
    write_jsonl(folder / "rows.jsonl", rows)
    root = str(Path(__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-m", "batchkit", "run", "job.toml"]
        + [part for setting in settings for part in ("--set", setting)],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=280,
        env={
            **os.environ,
            "PYTHONPATH": root,
            "BATCHKIT_TEST_FAULTS": json.dumps({"folder": str(folder / "markers"), **faults}),
        },
        check=False,
    )
    output = folder / "output/faulty"
    return Ended(
        done.returncode,
        done.stderr,
        list(read_newest(output / RESULTS)),
        (output / "run.log").read_text(),
        json.loads((output / "manifest.json").read_text()),
    )


def assert_only_failed(ended: Ended, calm: list[str], failed: dict[int, str]) -> None:
    """Exactly ``failed`` failed, and every other row has the text of the undisturbed run."""
    assert ended.failed == failed, ended.log
    assert ended.exit == (3 if failed else 0), ended.stderr
    assert "Traceback" not in ended.stderr
    texts = [record["text"] for record in ended.records]
    assert texts == [None if n in failed else text for n, text in enumerate(calm)]


def test_out_of_memory_once_halves_the_batch(run: Run, calm: list[str]) -> None:
    ended = run(OWN, once={"oom": 4})
    assert_only_failed(ended, calm, {})
    assert "engine died (oom)" in ended.log
    assert "next engine with max_num_seqs = 4" in ended.log
    assert ended.manifest["engine_steps"] == [{"max_num_seqs": 4}]
    assert ended.manifest["starts"][-1]["engine_restarts"] == 1


def test_too_many_at_once_is_halved_until_it_fits(run: Run, calm: list[str]) -> None:
    ended = run(IN, over=3)
    assert_only_failed(ended, calm, {})
    assert ended.manifest["engine_steps"] == [{"max_num_seqs": 4}, {"max_num_seqs": 2}]


def test_the_next_start_takes_the_safe_setting(run: Run, calm: list[str]) -> None:
    run(IN, "input.limit=20", over=3)
    ended = run(IN, over=3)
    assert_only_failed(ended, calm, {})
    assert ended.manifest["starts"][-1].get("engine_restarts", 0) == 0
    assert "engine settings remembered: {'max_num_seqs': 2}" in ended.log


def test_out_of_memory_at_load_is_halved_until_it_fits(run: Run, calm: list[str]) -> None:
    ended = run(IN, load_over=2)
    assert_only_failed(ended, calm, {})
    assert ended.log.count("next try with") == 2


@pytest.mark.parametrize(
    ("where", "kind", "error_kind"),
    [(IN, "oom", "oom"), (OWN, "kill", "oom")],
)
def test_a_poison_row_is_found_and_fails_alone(
    run: Run, calm: list[str], where: str, kind: str, error_kind: str
) -> None:
    ended = run(where, poison={13: kind})
    assert_only_failed(ended, calm, {13: error_kind})
    assert "row 13 (id 13) alone kills the engine" in ended.log
    assert ended.manifest["engine_steps"] == [], "the row was the cause, not the batch"
    assert ended.manifest["starts"][-1]["engine_restarts"] <= 6


def test_three_poison_rows_in_one_window_are_found_and_not_tried_again(
    run: Run, calm: list[str]
) -> None:
    poison = dict.fromkeys((2, 3, 9), "error")
    ended = run(IN, "input.limit=20", poison=poison)
    assert ended.manifest["starts"][-1]["engine_restarts"] <= 3 * 5
    ended = run(IN, poison=poison)
    assert_only_failed(ended, calm, dict.fromkeys(poison, "engine_crash"))
    assert ended.manifest["starts"][-1].get("engine_restarts", 0) == 0, "a resume leaves them alone"


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("kill", "engine died (oom) with"),
        ("error", "RuntimeError: planted: device-side assert"),
        ("hang", "no step ended for"),
    ],
)
def test_an_engine_that_dies_once_is_restarted(
    run: Run, calm: list[str], kind: str, words: str
) -> None:
    ended = run(OWN, once={kind: 4})
    assert_only_failed(ended, calm, {})
    assert words in ended.log
    assert ended.manifest["starts"][-1]["engine_restarts"] == 1


def test_an_engine_that_fails_on_every_row_stops_the_run(run: Run) -> None:
    ended = run(IN, "run.max_engine_restarts=3", poison=dict.fromkeys(range(N_ROWS), "error"))
    assert ended.exit == 1
    assert "died 4 times without one answer" in ended.stderr
    assert "planted: device-side assert" in ended.stderr
    assert "Traceback" not in ended.stderr
