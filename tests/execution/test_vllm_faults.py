"""Real vLLM, its worker made to fail: every good row is answered, as in an undisturbed run."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from batchkit.storage.vectors import Vectors
from tests.support.faulty_runs import (
    IN,
    JOB,
    N_ROWS,
    OWN,
    Ended,
    assert_only_failed,
    question_rows,
    running,
    start,
)
from tests.support.pooling_models import build_embedding_model

pytestmark = pytest.mark.vllm

Run = Callable[..., Ended]


@pytest.fixture
def run(tmp_path: Path, text_model: Path) -> Run:
    def with_rows(
        *settings: str,
        poison: dict[int, str] | None = None,
        **faults: Any,
    ) -> Ended:
        rows = question_rows(poison or {})
        return start(tmp_path, text_model, rows, faults, settings)

    return with_rows


def test_too_many_at_once_is_halved_and_the_next_start_takes_the_safe_setting_unless_it_was_changed(
    run: Run, calm: list[str]
) -> None:
    ended = run(IN, "input.limit=20", over=3)
    assert_only_failed(ended, calm[:20], {})
    assert ended.reductions == [{"max_num_seqs": 4}, {"max_num_seqs": 2}]
    assert [step for step in ended.window if step[1] < step[0]] == [(12, 6), (6, 3)]
    ended = run(OWN, "input.limit=30", over=3)
    assert_only_failed(ended, calm[:30], {})
    assert ended.manifest["starts"][-1].get("engine_restarts", 0) == 0
    assert "its reduced settings are used again: max_num_seqs = 2" in ended.log
    ended = run(OWN, "engine.options.max_num_seqs=1", over=3)
    assert_only_failed(ended, calm, {})
    assert (
        "the engine options have changed, so the settings that an earlier start reduced because memory ran out are not used"
        in ended.log
    )
    assert "up to 1 requests run at the same time" in ended.log


@pytest.mark.release
def test_an_engine_that_grows_too_large_is_replaced_between_rows(run: Run, calm: list[str]) -> None:
    ended = run(OWN, "run.max_host_gb=1.5", leak_mb=32, step_s=0.05)
    assert_only_failed(ended, calm, {})
    assert "engine restart: the engine's process uses" in ended.log
    assert "engine died" not in ended.log


def test_a_row_whose_image_needs_too_much_memory_is_tried_smaller(
    tmp_path: Path, demo_model: Path
) -> None:
    """A prompt of more than 100 tokens runs out of memory: one with the large image, as it is."""
    for name, side in {"large": 350, "small": 170}.items():
        Image.new("RGB", (side, side), (200, 90, 20)).save(tmp_path / f"{name}.png")
    names = ["small"] * 3 + ["large"] + ["small"] * 3
    rows = [{"q": f"what is {n}?", "image": f"{name}.png"} for n, name in enumerate(names)]
    with_image = JOB.replace("[engine]", 'images = ["{{ image }}"]\n[engine]', 1)
    ended = start(tmp_path, demo_model, rows, {"prompt_over": 100}, [OWN], job=with_image)
    assert ended.failed == {}
    assert [record["attempt"] for record in ended.records] == [1] * 3 + [2] + [1] * 3
    assert all(record["usage"]["prompt_tokens"] <= 100 for record in ended.records)
    assert ended.log.count("row 3 (id 3) kills the engine even if it runs alone") == 1


def test_poison_rows_in_one_window_are_found_and_not_tried_again(run: Run, calm: list[str]) -> None:
    poison = dict.fromkeys((2, 5), "kill")
    ended = run(OWN, "input.limit=8", poison=poison)
    assert ended.manifest["starts"][-1]["engine_restarts"] <= 2 * 5
    assert "row 5 (id 5) kills the engine even if it runs alone" in ended.log
    assert ended.reductions == [], "the rows were the cause, not the batch"
    ended = run(OWN, poison=poison)
    assert_only_failed(ended, calm, dict.fromkeys(poison, "oom"))
    assert ended.manifest["starts"][-1].get("engine_restarts", 0) == 0, "a resume leaves them alone"


def test_an_engine_that_hangs_is_restarted(run: Run, calm: list[str]) -> None:
    ended = run(OWN, once={"hang": 4})
    assert_only_failed(ended, calm, {})
    assert "the engine finished no forward pass for" in ended.log
    assert "failing_worker.py" in ended.log, "its stacks are in run.log"
    assert "failing_worker.py" not in ended.stderr
    assert ended.manifest["starts"][-1]["engine_restarts"] == 1
    assert ended.reductions == [], "nothing says that memory ran out"


def test_a_signal_ends_the_run_while_its_engine_is_restarted(
    tmp_path: Path, text_model: Path
) -> None:
    """The next engine would take minutes; nothing is in flight that could be waited for."""
    with running(
        tmp_path, text_model, question_rows({}), {"once": {"error": 4}, "reload_s": 250}, [OWN]
    ) as process:
        log = tmp_path / "output/faulty/run.log"
        while not (log.exists() and "engine died" in log.read_text()):
            time.sleep(0.1)
        time.sleep(1)
        process.terminate()
        out, err = process.communicate(timeout=60)
    assert process.returncode == 143, err
    summary = json.loads(out)
    assert (summary["exit"], summary["total"]) == (143, N_ROWS)


def test_a_prompt_that_is_never_prepared_fails_alone(run: Run) -> None:
    """A chat template that loops on one row, as its author did not foresee."""
    loop = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    template = (
        "{% for m in messages %}{% if 'tell me of 8 ' in m.content %}" + loop + "{% endif %}"
        "{{ m.content }}{% endfor %}"
    )
    settings = [f"engine.options.chat_template={json.dumps(template)}", "run.row_timeout_s=3"]
    ended = run(OWN, *settings, "retry.attempts=1")
    assert ended.failed == {8: "timeout"}
    assert ended.manifest["starts"][-1]["engine_restarts"] == 1


EMBED = 'task = "embed"\n' + JOB.split("[sampling]")[0] + "[run]\nstall_timeout_s = 6\n"
HEAVY = "tea " * 200  # the worker runs out of memory with a prompt of more than 150 tokens


def vectors_of(folder: Path, ended: Ended) -> dict[int, list[float]]:
    vectors = Vectors(folder / "output/faulty")
    return {r["index"]: vectors.of(r).tolist() for r in ended.records if r["status"] == "ok"}


def test_a_deadly_text_fails_alone_and_every_other_row_has_its_vector(
    tmp_path: Path, text_model: Path
) -> None:
    rows = [{"q": f"tell me of {n}" + " tea" * (n % 7)} for n in range(24)]
    rows[13]["q"] += HEAVY
    calm, faulty = tmp_path / "calm", tmp_path / "faulty"
    calm.mkdir()
    faulty.mkdir()
    embedding_model = build_embedding_model(tmp_path / "embedding", text_model)
    whole = start(calm, embedding_model, rows, {}, [OWN], job=EMBED)
    assert whole.exit == 0, whole.stderr
    faults = {"prompt_over": 150, "once": {"error": 2}}
    ended = start(faulty, embedding_model, rows, faults, [OWN], job=EMBED)
    assert ended.failed == {13: "oom"}, ended.log
    assert "RuntimeError: planted: device-side assert" in ended.log
    assert "row 13 (id 13) kills the engine even if it runs alone" in ended.log
    assert ended.reductions == [], "the row was the cause, not the batch"
    expected = vectors_of(calm, whole)
    del expected[13]
    found = vectors_of(faulty, ended)
    assert found.keys() == expected.keys()
    for index, vector in expected.items():
        assert found[index] == pytest.approx(vector, abs=1e-5)
