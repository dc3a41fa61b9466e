"""Workers in a Ray that this process has joined."""

from __future__ import annotations

import logging
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from batchkit.config.installation import how_to_install
from batchkit.config.tables import JobConfig
from batchkit.errors import BrokenInputError, EngineError, JobError, TooManyFailuresError
from batchkit.execution.cluster.actor import Actor
from batchkit.execution.cluster.pool import RayPool
from batchkit.execution.cluster.session import needs
from batchkit.execution.events import EngineMessage, Event
from batchkit.execution.processor import ProductionBatchProcessor
from batchkit.execution.run import start_run
from batchkit.execution.start import Start, StartOptions
from batchkit.execution.summary import RunSummary
from batchkit.storage.log import RESULTS
from batchkit.storage.newest_lines import read_newest
from batchkit.storage.starts import read_history
from batchkit.types import Row, Task
from tests.support.chat_server import MODEL, ChatServer, serving
from tests.support.ray_head import CPUS, GPUS, RayHead
from tests.support.rows import write_jsonl
from tests.support.waiting import until

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module")
def ray_here(ray_head: RayHead) -> Iterator[Any]:
    import ray

    ray.init(address=ray_head.address, logging_level=logging.ERROR, log_to_driver=False)
    yield ray
    ray.shutdown()


@pytest.fixture
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ray_here: Any) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def job(**tables: Any) -> JobConfig:
    tables["workers"] = {"count": 2, **tables.get("workers", {})}
    return JobConfig.model_validate({"engine": {"kind": "dry-run"}, **tables})


def process(made: JobConfig, rows: Any = None) -> RunSummary:
    return ProductionBatchProcessor(made, quiet=True).process(rows)


def newest(folder: Path) -> list[dict[str, Any]]:
    return list(read_newest(folder / "output/batch" / RESULTS))


def test_vectors_of_workers_are_those_of_one_machine(in_a_folder: Path, ray_here: Any) -> None:
    tables = {"task": "embed", "pooling": {"dimensions": 64}, "output": {"vector_dtype": "float16"}}
    rows = [f"cup {n}" for n in range(3000)]
    here = process(job(**tables, name="here", workers={"count": None}), rows).to_arrow()
    there = process(job(**tables, name="there"), rows).to_arrow()
    assert there["embedding"].null_count == 0
    assert there["embedding"].equals(here["embedding"])
    assert ray_here.is_initialized()


def test_workers_stop_at_a_budget(in_a_folder: Path) -> None:
    budget = {"max_completion_tokens": 120}
    slow = {"kind": "dry-run", "options": {"latency_s": 0.02}}
    found = process(
        job(engine=slow, run={"max_in_flight": 2}, budget=budget), [f"q{n}" for n in range(400)]
    )
    assert (found.exit, found.stopped_by) == (1, "budget.max_completion_tokens = 120")
    assert 20 <= found.ok < 400


@pytest.mark.parametrize(("share", "each", "of_all"), [(2, 2, 4), (0.5, 1, 1)])
def test_each_worker_has_gpus_of_its_own(
    share: float, each: int, of_all: int, ray_here: Any
) -> None:
    """Which of them is Ray's choice: it may still hold those of a test before."""
    made = job(workers={"gpus": share})
    hire = ray_here.remote(Actor).options(**needs(made))
    start = Start.of(made).for_workers()
    actors = [hire.remote(number, start, [""], {}, []) for number in range(2)]
    reports = ray_here.get([actor.exchange.remote([], True, 0, False, 2) for actor in actors])
    gpus = [set(report.place.gpus) for report in reports]
    assert [len(its) for its in gpus] == [each, each]
    assert len(set.union(*gpus)) == of_all
    for actor in actors:
        ray_here.kill(actor)


def test_a_worker_gets_the_gpus_that_its_engine_asks_for(ray_here: Any) -> None:
    sizes = {"tensor_parallel_size": 2, "pipeline_parallel_size": 3}
    for options, gpus in (({}, 1), ({"tensor_parallel_size": 2}, 2), (sizes, 6)):
        assert needs(job(engine={"model": "m", "options": options}))["num_gpus"] == gpus
    assert needs(job(engine={"kind": "dry-run"}))["num_gpus"] == 0


def test_images_are_opened_and_answers_scored_by_the_workers(in_a_folder: Path) -> None:
    Image.new("RGB", (40, 40)).save(in_a_folder / "there.png")
    tables = {
        "prompt": {"user": "{{ q }}", "images": ["{{ image }}"]},
        "media": {"root": str(in_a_folder)},
        "scoring": {"scorers": ["f1"], "reference": "answer"},
        "output": {"keep": ["answer"]},
    }
    rows = [
        {"q": "a", "image": "there.png", "answer": "no model answered"},
        {"q": "b", "image": "missing.png", "answer": "tea"},
    ]
    assert process(job(**tables), rows).exit == 3
    found, missing = by_workers = newest(in_a_folder)
    assert found["scores"]["f1"] > 0
    assert missing["error"]["kind"] == "media"
    ProductionBatchProcessor(
        job(**tables, workers={"count": None}), quiet=True, fresh=True
    ).process(rows)
    for one, other in zip(by_workers, newest(in_a_folder), strict=True):
        for name in ("status", "prediction", "scores", "fields", "error"):
            assert one[name] == other[name]


def broken_off() -> Iterator[str]:
    yield from ("tea" for _ in range(50))
    raise BrokenInputError("rows.parquet: broken from here on")


@pytest.mark.parametrize(
    ("tables", "rows", "error", "message", "n_answered"),
    [
        ({}, broken_off, BrokenInputError, "broken from here on", 50),
        (
            {"prompt": {"user": "{{ missing }}"}, "run": {"fail_on_error": 3, "check_rows": 0}},
            lambda: [{"q": n} for n in range(500)],
            TooManyFailuresError,
            "",
            None,
        ),
        ({"engine": {"kind": "dry-run", "options": {"latency_ms": 1}}}, lambda: ["a"], JobError, "latency_ms", 0),
        (  # as on a node with an old copy of a file for all prompts: some rows would be asked otherwise
            {
                "prompt": {"user": "{{ guide }} {{ prompt }}", "texts": {"guide": "comm"}},
                "media": {"root": "/proc/self"},  # each process has its own name there
            },
            lambda: ["a", "b"],
            EngineError,
            r'files have changed .* prompt.files: {"prompt.texts.guide"',
            0,
        ),
    ],
    ids=["input breaks off", "too many failures", "unknown option", "another file"],
)  # fmt: skip
def test_what_stops_a_run_leaves_what_is_done(
    tables: dict[str, Any],
    rows: Callable[[], Any],
    error: type[Exception],
    message: str,
    n_answered: int | None,
    in_a_folder: Path,
) -> None:
    with pytest.raises(error, match=message):
        process(job(**tables), rows())
    if n_answered is not None:
        assert [record["status"] for record in newest(in_a_folder)] == ["ok"] * n_answered


def test_failed_rows_are_retried_by_the_workers(in_a_folder: Path) -> None:
    write_jsonl(in_a_folder / "rows.jsonl", [{"q": "a"}, {"other": "b"}, {"q": "c"}])
    made = job(input={"path": "rows.jsonl"}, prompt={"user": "{{ q }}"}, workers={"count": None})
    assert process(made).failed == 1
    recovered = job(input={"path": "rows.jsonl"}, prompt={"user": "{{ q | default('x') }}"})
    options = StartOptions(begun_with=made, attempts={1: 1}, quiet=True)
    summary = start_run(recovered, options=options).checked()
    assert (summary.ok, summary.failed) == (3, 0)
    assert [record["attempt"] for record in newest(in_a_folder)] == [1, 2, 1]


@pytest.mark.release
@pytest.mark.parametrize(
    ("count", "words"), [(2, "all 2 workers failed"), ("auto", "no worker is left")]
)
def test_a_worker_whose_engine_can_not_start_leaves_its_place_to_the_next_until_all_have_failed(
    count: int | str, words: str, in_a_folder: Path
) -> None:
    with serving() as server:
        wrong = server.url.removesuffix("/v1")
        engine = {"kind": "openai-server", "model": "m", "base_url": wrong}
        with pytest.raises(EngineError, match=rf"{words}.* ends in /v1"):
            process(
                job(engine=engine, workers={"count": count, "cpus": CPUS - 1}), ["a"]
            )  # a place for one


@pytest.mark.release
def test_workers_that_join_are_paid_for_from_then_on(in_a_folder: Path) -> None:
    slow = {"kind": "dry-run", "options": {"latency_s": 0.02}}
    workers = {"count": "auto", "gpus": GPUS // 2, "cpus": 1}
    budget = {"price_per_gpu_hour": 1.0}
    made = job(engine=slow, run={"max_in_flight": 2}, workers=workers, budget=budget)
    assert process(made, [f"q{n}" for n in range(600)]).ok == 600
    (start,) = read_history(in_a_folder / "output/batch").starts
    began, ended = map(datetime.fromisoformat, (start.started_at, start.ended_at or ""))
    seconds = (ended - began).total_seconds()
    assert [worker.left_at for worker in start.workers] in ([None], [None, None])
    assert GPUS // 2 * (seconds - 1) < start.gpu_seconds < GPUS * seconds


class Due:
    may_wait = False
    left = None

    def __init__(self, *texts: str) -> None:
        self._texts = texts

    def of_turn(self) -> Iterator[Task]:
        for n, text in enumerate(self._texts):
            yield Task(Row(n, str(n), {"q": text}), 1)

    def known(self, index: int) -> Sequence[Mapping[str, Any]]:
        return ()


def test_what_a_worker_answered_before_it_failed_is_handed_on(
    in_a_folder: Path, ray_here: Any
) -> None:
    def before(text: str, body: dict[str, Any]) -> None:
        if text == "hang":
            dead.wait()
        elif text == "late":
            late.wait()

    dead, late, server = threading.Event(), threading.Event(), ChatServer(before)
    options = {"give_up_s": 0.5, "max_num_seqs": 4}
    engine = {"kind": "openai-server", "model": MODEL, "base_url": server.url, "options": options}
    made = job(engine=engine, prompt={"user": "{{ q }}"}, workers={"count": 1})
    due = Due("now", "late", "hang")
    pool = RayPool(Start.of(made), due, [""], lambda event: None, {}, nullcontext)
    answered: list[int] = []

    def answer(enough: Callable[[], object]) -> None:
        while not enough():
            answered.extend(line.record.index for line in pool.fill(taking=True) + pool.poll())

    with closing(pool):
        answer(lambda: answered)
        pool.fill(taking=True)
        late.set()
        until(lambda: "late" in server.answered)
        server.kill()
        dead.set()
        time.sleep(3)  # the worker fails while the run is elsewhere
        with pytest.raises(EngineError):
            answer(lambda: False)
    assert sorted(answered) == [0, 1]


def test_rows_are_in_flight_once_they_are_sent(in_a_folder: Path, ray_here: Any) -> None:
    """A stop has to wait for their answers, also before their worker has reported them."""
    seen: list[int] = []
    with serving(lambda text, body: seen.append(pool.load.in_flight)) as server:
        engine = {"kind": "openai-server", "model": MODEL, "base_url": server.url}
        made = job(engine=engine, prompt={"user": "{{ q }}"}, workers={"count": 1})
        pool = RayPool(Start.of(made), Due("now"), [""], lambda event: None, {}, nullcontext)
        with closing(pool):
            while not seen:
                pool.fill(taking=True)
                pool.poll()
    assert seen == [1]


class Deadly:
    """Ends the process that reads it."""

    def __reduce__(self) -> tuple[Callable[[int], Any], tuple[int]]:
        return os._exit, (3,)


def test_a_worker_that_dies_before_its_first_answer_is_given_up(
    tmp_path: Path, ray_here: Any
) -> None:
    heard: list[str] = []

    def hear(event: Event) -> None:
        if isinstance(event, EngineMessage):
            heard.append(event.text)

    made = job(workers={"count": 1}, run={"max_engine_restarts": 1})
    references: Any = Deadly()
    start = replace(Start.of(made), references=references)
    with pytest.raises(EngineError, match="the worker died 2 times without an answer"):
        RayPool(start, Due(), [""], hear, {}, nullcontext)
    assert [line for line in heard if "worker 0 died with 0 rows: ActorDiedError: " in line]


def test_rows_that_come_one_by_one_are_answered_as_they_come(in_a_folder: Path) -> None:
    def rows() -> Iterator[str]:
        for n in range(6):
            yield f"cup {n}"
            deadline = time.monotonic() + 200
            while len(newest(in_a_folder)) <= n:
                assert time.monotonic() < deadline, "no answer while the next row is waited for"
                time.sleep(0.01)

    assert process(job(), rows()).ok == 6


def test_without_ray_it_is_said_how_to_get_it(
    in_a_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    remedy = re.escape(how_to_install("ray"))
    with pytest.raises(
        JobError, match=f"workers.count: ray is not installed in this Python: {remedy}"
    ):
        process(job(), ["a"])
