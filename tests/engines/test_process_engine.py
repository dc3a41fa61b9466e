"""Real vLLM in a process of its own: what its parent sees when it dies, and what stays behind.

Where only the process and its socket matter, the dry-run engine stands in: it opens in 0.2 s.
"""

from __future__ import annotations

import getpass
import json
import os
import signal
import time
from collections.abc import Iterable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from batchkit.config.tables import JobConfig
from batchkit.engines.faults import EngineDied, StartFailed
from batchkit.engines.memory import MemoryWatch
from batchkit.engines.process.engine import ProcessEngine
from batchkit.engines.process.launcher import LOG, Launcher
from tests.support import dry_runs
from tests.support.engine_requests import Locked, collect, request, with_image
from tests.support.faulty_runs import OWN, question_rows, running, wait_for_records
from tests.support.own_process import printing_to
from tests.support.small_vllm import TEXT_ONLY
from tests.support.waiting import until

pytestmark = pytest.mark.vllm


def make_job(model: Path, folder: Path, **options: Any) -> JobConfig:
    engine = {"model": str(model), "options": {**TEXT_ONLY, **options}}
    return JobConfig(engine=engine, output={"dir": str(folder)})


def dry_run_job(folder: Path) -> JobConfig:
    return dry_runs.job(run={"stall_timeout_s": 2.0}, output={"dir": str(folder)})


@pytest.fixture
def dry_run(tmp_path: Path) -> Iterator[ProcessEngine]:
    with closing(ProcessEngine(dry_run_job(tmp_path))) as opened:
        yield opened


def poll_until_it_fails(engine: ProcessEngine) -> None:
    while True:
        engine.poll(0.1)


def test_a_killed_engine_is_noticed_at_once(text_model: Path, tmp_path: Path) -> None:
    with closing(ProcessEngine(make_job(text_model, tmp_path))) as engine:
        for index in range(20):
            engine.submit(request(index, max_tokens=400, ignore_eos=True))
        engine.poll(0.2)
        os.kill(engine.pid, signal.SIGKILL)
        with pytest.raises(EngineDied, match="SIGKILL") as raised:  # noqa: PT012
            engine.poll(2.0)
            engine.poll(2.0)  # where the first brought what had finished before
        assert raised.value.fault.kind == "engine_crash"
        assert raised.value.fault.is_unexplained_kill
        engine.submit(request(99))
        with pytest.raises(EngineDied, match="SIGKILL"):
            engine.poll(0.05)


def test_an_engine_that_is_killed_when_memory_is_short_ran_out_of_memory(tmp_path: Path) -> None:
    kills = iter([3, *[4] * 1000])
    memory = MemoryWatch(lambda: next(kills))
    with closing(ProcessEngine(dry_run_job(tmp_path), memory=memory)) as engine:
        os.kill(engine.pid, signal.SIGKILL)
        with pytest.raises(EngineDied, match="SIGKILL") as raised:
            poll_until_it_fails(engine)
    assert raised.value.fault.kind == "oom"
    assert "oom_kill 3 → 4" in raised.value.fault.message


def test_a_sign_of_life_is_no_reason_to_wait_longer(dry_run: ProcessEngine) -> None:
    began = time.monotonic()
    assert dry_run.poll(1.0) == []
    assert time.monotonic() - began < 60  # signs of life come each second, without end


def test_a_hung_engine_is_ended_while_a_large_request_is_on_its_way(
    dry_run: ProcessEngine,
) -> None:
    os.kill(dry_run.pid, signal.SIGSTOP)  # as one that hangs and holds Python's lock
    with pytest.raises(EngineDied, match="stall_timeout_s = 2"):  # noqa: PT012
        dry_run.submit(request(0, text="tea" * 1_000_000))
        poll_until_it_fails(dry_run)


def test_a_request_that_the_engine_cannot_read_is_not_lost_in_silence(
    dry_run: ProcessEngine,
) -> None:
    # Stands for one that the child can't take in, for want of memory, say.
    dry_run.submit(request(0, stop=msgspec.Raw(b"\xc1")))
    with pytest.raises(EngineDied, match="MessagePack data is malformed"):
        poll_until_it_fails(dry_run)


def test_the_engine_dies_with_its_parent(text_model: Path, tmp_path: Path) -> None:
    log = tmp_path / "output/faulty" / LOG
    told = {"VLLM_LOGGING_LEVEL": "INFO"}
    rows, slow = question_rows({}), {"step_s": 0.1}
    with running(tmp_path, text_model, rows, slow, [OWN], environment=told) as process:
        wait_for_records(tmp_path, 1)
        assert printing_to(log)
        process.kill()
    until(lambda: not printing_to(log), within_s=5)
    assert "max_model_len" in log.read_text(), "what it printed is kept"


def is_gone(pid: int) -> bool:
    """No such process any more, or a zombie, where nobody reaps orphans."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.mark.release
def test_twenty_engines_killed_or_closed_answer_alike_and_leave_nothing_behind(
    text_model: Path, tmp_path: Path
) -> None:
    (temporary := tmp_path / "temporary").mkdir()
    answers, pids, files = list[str](), list[int](), list[int]()

    def cycle(job: JobConfig, launcher: Launcher | None, *, is_killed: bool) -> None:
        engine = ProcessEngine(job, launcher)
        asked = request(0) if job.engine.kind == "vllm" else with_image((64, 64))
        engine.submit(asked)
        answers.extend(done.choices[0].text for done in collect(engine, 1))
        if is_killed:
            engine.submit(asked)
            os.kill(engine.pid, signal.SIGKILL)
            with pytest.raises(EngineDied):
                poll_until_it_fails(engine)
        engine.close()
        engine.close()
        pids.append(engine.pid)
        files.append(psutil.Process().num_fds())

    cycle(dry_run_job(tmp_path), None, is_killed=False)  # with a launcher of its own
    for job, times in ((make_job(text_model, tmp_path), 3), (dry_run_job(tmp_path), 20)):
        with closing(Launcher(job.folder / LOG, {"TMPDIR": str(temporary)})) as launcher:
            for n in range(times):
                cycle(job, launcher, is_killed=n % 2 == 0)
    assert len(set(answers[1:4])) == 1
    assert len(answers) == len(set(pids)) == 1 + 3 + 20, "each in a process of its own"
    assert all(map(is_gone, pids))
    assert len(set(files[1:4])) == len(set(files[4:])) == 1, files
    assert psutil.Process().num_fds() == files[0]
    cache = f"torchinductor_{getpass.getuser()}"  # torch's own; the same for all engines
    assert {left.name for left in temporary.iterdir()} <= {cache}


def shared_memory(pids: Iterable[int]) -> set[Path]:
    """What these processes have mapped of /dev/shm; tests in another process use it, too."""
    lines = [line for pid in pids for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
    found = {Path(word) for line in lines for word in line.split() if word.startswith("/dev/shm/")}
    return {path for path in found if path.exists()}


def test_workers_and_shared_memory_go_with_the_engine_that_started_them(
    text_model: Path, tmp_path: Path
) -> None:
    job = make_job(text_model, tmp_path, distributed_executor_backend="mp")
    with closing(Launcher(job.folder / LOG)) as launcher:
        with closing(ProcessEngine(job, launcher)) as engine:
            engine.submit(request(0))
            assert len(collect(engine, 1)) == 1
            family = psutil.Process(engine.pid).children(recursive=True)
            held = shared_memory([engine.pid, *(worker.pid for worker in family)])
            assert family
            assert held
            os.kill(engine.pid, signal.SIGKILL)
            with pytest.raises(EngineDied, match="SIGKILL"):
                poll_until_it_fails(engine)
        assert not [p for p in family if p.is_running() and p.status() != "zombie"]
        assert not [path for path in held if path.exists()]


def test_the_cause_of_an_error_in_a_worker_is_read_from_the_log(
    text_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATCHKIT_TEST_FAULTS", json.dumps({"load_over": 2}))
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "CRITICAL")  # as the run's own process sets it
    worker = "tests.support.failing_worker.FailingWorker"
    job = make_job(text_model, tmp_path, distributed_executor_backend="mp", worker_cls=worker)
    with pytest.raises(StartFailed) as raised:
        ProcessEngine(job)
    assert raised.value.fault.kind == "oom"
    assert "planted: out of memory" in raised.value.fault.message
    assert raised.value.limits["max_num_seqs"] == 16


def test_what_an_earlier_engine_printed_is_not_the_cause(tmp_path: Path) -> None:
    job = dry_run_job(tmp_path)
    job.folder.mkdir()
    (job.folder / LOG).write_text("Fatal Python error: Segmentation fault\n  File of yesterday\n")
    with closing(ProcessEngine(job)) as engine:
        os.kill(engine.pid, signal.SIGILL)
        with pytest.raises(EngineDied, match="SIGILL: Fatal Python error: Illegal instruction"):
            poll_until_it_fails(engine)


def test_a_request_that_can_not_be_sent_fails_alone(dry_run: ProcessEngine) -> None:
    dry_run.submit(request(0, stop=Locked()))
    dry_run.submit(request(1))
    failed, answered = sorted(collect(dry_run, 2), key=lambda c: c.request.row.index)
    assert failed.error is not None
    assert failed.error.kind == "invalid_request"
    assert "it holds a lock" in str(failed.error)
    assert answered.error is None


def test_a_file_beside_the_job_does_not_stand_in_for_a_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "queue.py").write_text("raise SystemExit('a file of the user')")
    monkeypatch.chdir(tmp_path)
    with closing(ProcessEngine(dry_run_job(tmp_path))) as engine:
        engine.submit(request(0))
        assert len(collect(engine, 1)) == 1
