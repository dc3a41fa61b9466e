"""tune: the search without a model, with the dry-run engine, whose rate is the window's; and on real vLLM."""

from __future__ import annotations

import json
import signal
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import repeat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tomlkit

from batchkit.commands.trial import Trial, trials_of
from batchkit.commands.trial.measurement import Figures, Idle
from batchkit.commands.tuning.options import patch
from batchkit.commands.tuning.tune import SearchLimits, Tuned, tune
from batchkit.config.loading import load_job
from batchkit.config.tables import JobConfig
from batchkit.errors import JobError
from tests.support import own_process
from tests.support.command_line import batchkit
from tests.support.dry_runs import TRIED
from tests.support.forks import Fork
from tests.support.ray_head import RayHead
from tests.support.rows import write_jsonl
from tests.support.small_vllm import TEXT_ONLY

pytestmark = pytest.mark.slow

JOB = TRIED.replace("latency_s = 0.02", "latency_s = 0.1")
MEMORY = Path("output/tried/tune/trials.jsonl")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("job.toml").write_text(JOB)
    write_jsonl(tmp_path / "rows.jsonl", ({"q": f"tell me of {n}"} for n in range(64)))
    return tmp_path


def found(*args: str) -> dict[str, Any]:
    ended = batchkit("tune", "job.toml", "--json", "--seconds", "1", *args).ok()
    return ended.json


def ok(rate: float, *, idle: Idle | None = None, is_short: bool = False) -> Trial:
    """A trial of a second that answered so many rows."""
    figures = Figures(1.0, int(rate), 1000, 1000, 1.0, 1.0, not is_short, (0.9 * rate, 1.1 * rate))
    return Trial("ok", "", 1.0, 0.1, figures, idle=idle, is_short=is_short)


def searched(
    trial: Callable[[JobConfig, int, float], Trial] | None = None,
    job: JobConfig | None = None,
    **how: Any,
) -> Tuned:
    """The result of a search with the trials that ``trial`` makes up of a job, how many run at once and for how long;
    real ones without it."""

    @contextmanager
    def made_up(job: JobConfig, *given: Any) -> Iterator[Any]:
        with trials_of(job, *given) as trials:
            yield SimpleNamespace(
                rows=trials.rows, signum=None, run=lambda *given: trial(*given[:3])
            )

    if trial is not None:
        how["trials_of"] = made_up
    return tune(job or load_job(Path("job.toml")), SearchLimits(5, None, 1), **how)


def test_the_fastest_options_are_found_compared_and_written() -> None:
    tuned = found("--write")
    size = tuned["best"]["options"]["max_num_seqs"]
    assert 32 <= size <= 64, "more rows than that there are not"
    assert tuned["ratio"] == tuned["compared"]["ratio"] >= tuned["compared"]["low"] > 1.5
    assert tuned["default"]["rows_per_s"] < tuned["best"]["rows_per_s"]
    ok = [trial for trial in tuned["trials"] if trial["status"] == "ok"]
    assert all(trial["low"] <= trial["rows_per_s"] <= trial["high"] for trial in ok)
    assert [trial["options"] for trial in tuned["trials"][-6:]] == [
        {},
        {"max_num_seqs": size},
    ] * 3, "default and best in turn"
    text = Path("job.toml").read_text()
    assert text == JOB.replace("max_num_seqs = 8", f"max_num_seqs = {size}")
    assert tuned["written"] == "job.toml"
    runs = [path.parent.name for path in MEMORY.parent.glob("*/manifest.json")]
    assert {"default", f"max_num_seqs-{size}"} < {*runs}
    page = MEMORY.with_name("trials.html").read_text()
    assert page.count("<circle") == len(ok)
    assert f"max_num_seqs = {size}" in page
    # A run says so as long as the job lacks it.
    assert "tune found" not in batchkit("run", "job.toml").ok().stderr
    Path("job.toml").write_text(JOB)
    ended = batchkit("run", "job.toml", "--fresh").ok()
    assert f"tune found max_num_seqs = {size} to be" in ended.stderr


def test_a_default_that_is_best_stays() -> None:
    Path("job.toml").write_text(JOB.replace("max_num_seqs = 8", "max_num_seqs = 64"))
    tuned = found("--write")
    assert (tuned["best"]["options"], tuned["ratio"], tuned["written"]) == ({}, 1.0, None)
    assert "max_num_seqs = 64" in Path("job.toml").read_text()


@pytest.mark.release
def test_what_is_known_is_not_tried_again_and_holds_for_the_same_job_alone() -> None:
    found()
    known = len(MEMORY.read_text().splitlines())
    with MEMORY.open("a") as file:
        file.write('{"of": "cut o')
    found()
    assert len(MEMORY.read_text().splitlines()) == known + 1 + 7, "compared again, searched no more"
    tuned = found("--set", "engine.options.latency_s=0.11")
    assert len(MEMORY.read_text().splitlines()) >= known + 1 + 7 + len(tuned["trials"])


def test_trials_are_as_long_as_it_takes_to_fill_the_engine() -> None:
    """It takes 3 s; the short answers that come before that would look like speed."""
    given = list[float]()

    def trial(job: JobConfig, at_once: int, seconds: float) -> Trial:
        given.append(seconds)
        return ok(900, is_short=True) if seconds < 3 else ok(100)

    tuned = searched(trial)
    assert given[:4] == [1, 2, 4, 4]
    assert {trial.rows_per_s for trial in tuned.trials} == {100}
    assert {(trial.low, trial.high) for trial in tuned.trials} == {(90, 110)}
    assert not any(trial.is_short for trial in searched(trial).trials)


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_search_that_is_stopped_keeps_what_it_knows(signum: int, code: int) -> None:
    slow = ("--set", "engine.options.latency_s=0.5")
    process = own_process.begin(
        "tune", "job.toml", "--seconds", "1", "--write", *slow, cwd=Path.cwd()
    )
    assert process.stderr is not None
    for line in process.stderr:
        if "max_num_seqs = 32: starting" in line:
            break
    process.send_signal(signum)
    process.communicate(timeout=30)
    assert process.returncode == code
    (line,) = MEMORY.read_text().splitlines()
    assert json.loads(line)["options"] == {}
    assert Path("job.toml").read_text() == JOB


def test_a_trial_that_fails_costs_that_trial() -> None:
    """An option that the engine refuses, behind one that gains."""
    tuned = searched(options={"max_num_seqs": 8, "no_such_option": False})
    refused = [trial for trial in tuned.trials if "no_such_option" in trial.options]
    assert [trial.status.partition(":")[0] for trial in refused] == ["error"]
    assert "has no such name" in refused[0].status
    assert tuned.is_gain
    assert tuned.best.keys() == {"max_num_seqs"}
    assert "no_such_option" in tuned.to_text()


def test_options_of_the_run_are_tried_and_written() -> None:
    """Two workers on Ray answer as many rows as twice the size would."""
    rates = {(None, "auto"): 100, (2, "auto"): 180, (2, 64): 190}

    def trial(job: JobConfig, at_once: int, seconds: float) -> Trial:
        size, run, workers = job.engine.options["max_num_seqs"], job.run, job.workers
        assert at_once == size * (workers.count or 1)
        is_known = size == 8 and run.render_threads == 4
        return ok(rates.get((workers.count, run.max_in_flight), 10) if is_known else 1)

    options = {"max_num_seqs": 8, "workers.count": [2], "run.max_in_flight": [64]}
    tuned = searched(trial, options=options, write_to=Path("job.toml"))
    assert tuned.best == {"workers.count": 2, "run.max_in_flight": 64}
    written = tomllib.loads(Path("job.toml").read_text())
    assert (written["workers"], written["run"]) == ({"count": 2}, {"max_in_flight": 64})
    assert "[workers]\ncount = 2\n\n[run]\nmax_in_flight = 64" in patch(tuned.best)


@pytest.mark.parametrize(
    ("rates", "best"),
    [({1: 100, 2: 150, 4: 190}, {"workers.per_gpu": 4}), ({1: 100, 2: 100}, {})],
)
def test_engines_share_a_gpu_only_if_that_is_faster(
    rates: dict[int, float], best: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    job = load_job(Path("job.toml"), ["engine.kind=vllm", "engine.model=m", "engine.options={}"])

    def trial(job: JobConfig, at_once: int, seconds: float) -> Trial:
        engines = job.workers.per_gpu or 1
        assert at_once == job.engine.options.get("max_num_seqs", 8) * engines
        return ok(rates[engines])

    tuned = searched(trial, job=job, options={"max_num_seqs": 8})
    assert tuned.best == best
    assert [trial.options for trial in tuned.trials][1] == {"workers.per_gpu": 2}


@pytest.mark.release
@pytest.mark.ray
def test_a_trial_with_workers_is_one_on_ray(ray_head: RayHead) -> None:
    job = load_job(Path("job.toml"), [f"workers.ray_address={ray_head.address}"])
    tuned = searched(options={"workers.count": [2]}, job=job)
    on_ray = [trial.status for trial in tuned.trials if trial.options.get("workers.count") == 2]
    assert {*on_ray} == {"ok"}


FULL = Idle(0.0, 0.0, 0.6, 31.0, 14)


@pytest.mark.parametrize(
    ("idle", "are_tried"), [(FULL, True), (FULL._replace(kv_cache=0.0), False), (None, False)]
)
def test_only_what_helps_against_the_limit_is_tried(idle: Idle | None, are_tried: bool) -> None:
    of_cache = {"gpu_memory_utilization": [0.95], "block_size": [32], "kv_offloading_size": [8.0]}
    modes = {"performance_mode": ["interactivity", "throughput"]}
    tuned = searched(
        lambda *_: ok(100, idle=idle), options={"max_num_seqs": 64, **of_cache, **modes}
    )
    names = {name for trial in tuned.trials for name in trial.options}
    assert (of_cache.keys() <= names) == are_tried
    assert ("performance_mode" in names) != are_tried, "decode is the bottleneck"
    held = "31 of 64 requests ran at once, and 14% of them were preempted"
    assert (held in tuned.limit) == are_tried


def test_as_many_requests_as_the_cache_of_each_engine_held_are_tried() -> None:
    def trial(job: JobConfig, *_: float) -> Trial:
        workers = job.workers.count or 1
        return ok(100 * workers, idle=FULL._replace(running=31.0 * workers))

    options = {"max_num_seqs": 64, "workers.count": [2]}
    tried = [trial.options for trial in searched(trial, options=options).trials]
    assert {"workers.count": 2, "max_num_seqs": 31} in tried
    assert {"workers.count": 2, "max_num_seqs": 62} not in tried


def test_a_gain_within_the_noise_is_none() -> None:
    """Rates that a trial could have shown: the best was lucky once, and is no faster when measured in turn."""
    rates: dict[int, Iterator[int]] = {8: repeat(100), 32: iter([120, 101, 99, 103])}
    tuned = searched(lambda job, at_once, _: ok(next(rates.get(at_once, repeat(90)))))
    assert tuned.best == {"max_num_seqs": 32}
    assert not tuned.is_gain
    assert "may be chance; keep the default" in tuned.to_text()
    assert (tuned.to_json()["best"]["options"], tuned.to_json()["ratio"]) == ({}, 1.0)


def write_vllm_job(model: Path) -> None:
    options = TEXT_ONLY | {"max_model_len": 256, "max_num_seqs": 4}
    job = {"name": "tried", "input": {"path": "rows.jsonl"}, "prompt": {"user": "{{ q }}"}}
    job |= {"engine": {"model": str(model), "options": options}, "sampling": {"max_tokens": 4}}
    Path("job.toml").write_text(tomlkit.dumps(job))


@pytest.mark.release
@pytest.mark.vllm
def test_of_options_that_change_answers_the_changed_ones_are_counted(text_model: Path) -> None:
    """The rates are made up, for on this machine none is faster; the answers are not."""

    def trial(job: JobConfig, *_: float) -> Trial:
        if "fp8" in job.engine.options.values():
            return Trial("error: this device has none", "", 1.0)
        return ok(150 if job.engine.options["dtype"] == "bfloat16" else 100)

    write_vllm_job(text_model)
    assert searched(trial).best == {}
    tuned = searched(trial, allow_changes=True)
    assert tuned.best == {"dtype": "bfloat16"}
    assert tuned.differ is not None
    assert 0 < tuned.differ < 1, "random weights round otherwise now and then"
    assert f"{tuned.differ:.0%} of the answers differ" in tuned.to_text()
    embedded = load_job(Path("job.toml")).model_copy(update={"task": "embed"})
    with pytest.raises(JobError, match="counted only for one generated text per row"):
        searched(trial, job=embedded, allow_changes=True)


@pytest.mark.vllm
def test_without_time_to_search_the_default_is_measured_alone(text_model: Path) -> None:
    write_vllm_job(text_model)
    args = ("tune", "job.toml", "--json", "--seconds", "1", "--minutes", "0.01")
    ended = own_process.batchkit(*args, cwd=Path.cwd(), start=Fork)
    assert ended.returncode == 0, ended.stderr
    tuned = json.loads(ended.stdout)
    (trial,) = tuned["trials"]
    assert (trial["options"], trial["status"]) == ({}, "ok")
    assert tuned["serve"].startswith(f"vllm serve {text_model}")
    assert tomllib.loads(Path("job.toml").read_text())["engine"]["options"]["max_num_seqs"] == 4
