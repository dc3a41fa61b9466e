"""One processor, several runs: within ``with``, the model is loaded once."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from batchkit.config.tables import JobConfig
from batchkit.errors import ChangedError, JobError, TooManyFailuresError
from batchkit.execution.processor import ProductionBatchProcessor
from batchkit.execution.summary import RunSummary
from tests.support.dry_runs import job
from tests.support.own_process import printing_to
from tests.support.waiting import until

pytestmark = pytest.mark.vllm

PROMPTS = [f"Tell me about tea number {n}." for n in range(6)]
KEPT = "is loaded already"


@pytest.fixture
def tea(vllm_job: Callable[..., JobConfig]) -> Callable[..., JobConfig]:
    def make(**tables: Any) -> JobConfig:
        return vllm_job(name="tea", sampling={"max_tokens": 8, "temperature": 0.0}, **tables)

    return make


def texts(summary: RunSummary) -> list[str]:
    return [record["text"] for record in summary.records()]


def log(summary: RunSummary) -> str:
    return (Path(summary.folder) / "run.log").read_text()


def engines(job: JobConfig) -> set[psutil.Process]:
    """The processes that print to the log of the kept engine: its own, and those around it."""
    return printing_to(job.folder.with_name(f"{job.name}.engine") / "engine.log")


def ended(process: psutil.Process) -> bool:
    """It and all its threads have ended. Its descriptors are not listed any more shortly before: its
    sockets are closed only when its last thread ends."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE and process.num_threads() == 1
    except psutil.NoSuchProcess:
        return True


def test_one_engine_serves_all_runs_until_it_dies_or_its_files_change(
    tea: Callable[..., JobConfig], demo_model: Path, tmp_path: Path
) -> None:
    """Each engine gives the same answers."""
    model = tmp_path / "model"
    shutil.copytree(demo_model, model)
    made = tea(engine={"model": str(model)})
    with ProductionBatchProcessor(made, quiet=True) as processor:
        first = processor.process(PROMPTS[:3])
        working = engines(made)
        assert working
        second = processor.process(PROMPTS, name="more")
        assert processor.process(PROMPTS, name="more").skipped == len(PROMPTS)
        with pytest.raises(ChangedError, match="rows from Python"):
            processor.process(PROMPTS)
        once = processor.process(iter(PROMPTS[:2]), name="once")
        aside = processor.process(iter(PROMPTS[2:4]), name="once")
        assert engines(made) == working
        assert (once.ok, aside.ok, aside.skipped) == (2, 2, 0)
        assert Path(f"{once.folder}.1").is_dir()

        for process in working:
            process.kill()
        until(lambda: all(map(ended, working)))
        third = processor.process(PROMPTS, name="third")
        assert "engine died" not in log(third), "no row is suspected"

        replaced = engines(made)
        config = model / "config.json"
        config.write_text(config.read_text() + "\n")
        with pytest.raises(ChangedError, match=r"engine\.model_files"):
            processor.process(PROMPTS, name="third")
        fourth = processor.process(PROMPTS, name="fourth")
        assert replaced - engines(made), "its process has ended"
    until(lambda: not engines(made))
    expected = texts(second)
    assert len(set(expected)) > 1
    assert (texts(first), texts(third), texts(fourth)) == (expected[:3], expected, expected)
    assert [KEPT in log(run) for run in (first, second, aside)] == [False, True, True]
    assert second.folder == str(tmp_path / "output" / "more")
    assert not (Path(second.folder) / "engine.log").exists()


@pytest.mark.usefixtures("in_an_empty_folder")
def test_an_engine_with_rows_in_flight_is_not_kept() -> None:
    engine = {"kind": "dry-run", "options": {"latency_s": 0.2}}
    run = {"fail_on_error": True, "check_rows": 0}
    made = job(engine=engine, prompt={"user": "{{ q }}"}, run=run)
    rows = [{"other": "no q"}, *({"q": prompt} for prompt in PROMPTS)]
    with ProductionBatchProcessor(made, quiet=True) as processor:
        before = processor.process(rows[1:], name="before")
        kept = processor.process(rows[1:], name="kept")
        with pytest.raises(TooManyFailuresError):
            processor.process(rows)
        after = processor.process(rows[1:], name="after")
    assert [KEPT in log(run) for run in (before, kept, after)] == [False, True, False]
    assert after.ok == len(PROMPTS)


@pytest.mark.usefixtures("in_an_empty_folder")
def test_without_with_nothing_is_kept() -> None:
    processor = ProductionBatchProcessor(job(), quiet=True)
    first, second = processor.process(["a"]), processor.process(["b"], name="b")
    assert KEPT not in log(first) + log(second)
    assert sorted(path.name for path in Path("output").iterdir() if path.is_dir()) == ["a", "b"]


@pytest.mark.usefixtures("in_an_empty_folder")
def test_a_processor_may_be_called_again_after_an_interrupt() -> None:
    def rows() -> Iterator[str]:
        yield from (f"prompt {n}" for n in range(1000))
        os.kill(os.getpid(), signal.SIGINT)
        yield from (f"prompt {n}" for n in range(100_000))

    processor = ProductionBatchProcessor(job(), quiet=True)
    assert processor.process(rows()).exit == 130
    assert processor.process(["a", "b"], name="b").exit == 0


@pytest.mark.usefixtures("in_an_empty_folder")
@pytest.mark.parametrize("name", ["../up", "", "a b"])
def test_a_name_that_is_no_run_s_is_refused(name: str) -> None:
    with pytest.raises(JobError, match=r"process\(name=…\): 1 problem\n  name: "):
        ProductionBatchProcessor(job(), quiet=True).process(["a"], name=name)
    assert not Path("output").exists()
