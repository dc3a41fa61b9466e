"""Tiny real models, built once per test run, and the fixtures of several files."""

from __future__ import annotations

import gc
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest
from filelock import FileLock

from batchkit.config.loading import make_job
from batchkit.config.tables import JobConfig
from batchkit.engines.process.launcher import LOG, Launcher
from tests.support.forks import Fork, LightFork, offer, vllm_is_used
from tests.support.jobs import with_tables
from tests.support.own_process import batchkit
from tests.support.small_vllm import SMALL

if TYPE_CHECKING:
    from tests.support.ray_head import RayHead

# Without bytecode each process would compile vLLM, torch and Ray again: half the time of an import.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# Two engines beside each other on two cores: their OpenMP threads would spin against one another.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Ray would leave a token in the home folder, and listen on every address.
os.environ.setdefault("RAY_AUTH_TOKEN", "0" * 32)
os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

# A busy machine is no counterexample.
# The same examples each time; `pytest --hypothesis-profile explore` looks for new ones.
hypothesis.settings.register_profile("explore", deadline=None)
hypothesis.settings.register_profile("same", deadline=None, derandomize=True)
hypothesis.settings.load_profile("same")

NEEDS = ("ray", "vllm", "real", "release", "browser", "slow")  # what takes longest begins first
QUICK, USUAL, RELEASE = "not slow", "not release and not real", "release"
HEAVY = {"ray", "torch", "transformers", "vllm"}
MEMORY = Path("/dev/shm")  # for files that are fsynced again and again: 2 ms each on a disk
ROOM_GIB = {QUICK: 2, USUAL: 8}  # more than what is there at once, with some for vLLM and Ray
LEFT_OUT = {QUICK: NEEDS, USUAL: ("release", "real")}  # files with these marks


def pytest_configure(config: pytest.Config) -> None:
    Launcher.start = Fork  # for the engines that a test opens itself
    if not hasattr(config, "workerinput"):  # the process that starts pytest-xdist's
        # A shell's background job ignores it, and so would all that is started from here.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        in_memory = has_room(MEMORY, ROOM_GIB.get(config.option.markexpr))
        folder = tempfile.mkdtemp(prefix="batchkit-tests-", dir=MEMORY if in_memory else None)
        os.environ["TMPDIR"] = tempfile.tempdir = folder
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
        offer(Path(folder, "forks"))


def has_room(folder: Path, gib: int | None) -> bool:
    """Whether it is one for temporary files, with as much free; False for tests that have no such number."""
    is_there = "TMPDIR" not in os.environ and os.access(folder, os.W_OK)
    return is_there and gib is not None and shutil.disk_usage(folder).free > gib * 2**30


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """A file of which no test would run is not imported: some import torch."""
    chosen = config.option.markexpr
    needs = "|".join(LEFT_OUT.get(chosen, ()))
    if not collection_path.match("test_*.py") or not (needs or chosen == RELEASE):
        return None
    text = collection_path.read_text("utf-8")
    if chosen == RELEASE:
        return "pytest.mark.release" not in text or None
    mark = rf"^pytestmark = .*\bpytest\.mark\.({needs})\b"
    return bool(re.search(mark, text, re.MULTILINE)) or None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes longest begins first. Whatever a test needs, it counts as slow."""
    order: dict[pytest.Item, int] = {}
    for item in items:
        if {"demo_model", "text_model"} & {*getattr(item, "fixturenames", ())}:
            item.add_marker(pytest.mark.slow)
        own = [need for need in NEEDS if item.get_closest_marker(need)]
        if own:
            item.add_marker(pytest.mark.slow)
        order[item] = NEEDS.index(own[0]) if own else len(NEEDS)
    items.sort(key=order.__getitem__)


def pytest_collection_finish(session: pytest.Session) -> None:
    """What modules and collected tests hold is never freed: each full collection would go through it, a tenth of
    the time of the quick tests."""
    if session.config.option.markexpr in LEFT_OUT:
        heavy = HEAVY & sys.modules.keys()
        assert not heavy, f"a test module imports {heavy}, and each process of the tests with it"
    gc.collect()
    gc.freeze()


def pytest_runtest_teardown(item: pytest.Item) -> None:
    if item.config.option.markexpr == QUICK:
        heavy = HEAVY & sys.modules.keys()
        assert not heavy, f"imported {heavy}: mark {item.path.stem} with what it needs"
        assert not vllm_is_used(), f"started vLLM: mark {item.name} with it"


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """Qwen3-VL's architecture, random weights."""
    return built("qwen3-vl")


@pytest.fixture(scope="session")
def text_model() -> Path:
    """Qwen2's architecture, random weights."""
    return built("qwen2", "--text-only")


def built(name: str, *flags: str) -> Path:
    """The demo model, made once for all processes of the tests, by one that has imported what that takes."""
    folder = Path(tempfile.gettempdir())
    with FileLock(folder / f"{name}.lock"):
        if not (folder / name).exists():
            ended = batchkit("demo", "model", name, *flags, cwd=folder, start=Fork)
            assert ended.returncode == 0, ended.stderr
    return folder / name


@pytest.fixture(scope="session")
def calm(text_model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The texts of ``question_rows`` by one engine that nothing disturbs, made once for all processes of the tests."""
    from tests.support.faulty_runs import IN, question_rows, start

    file = Path(tempfile.gettempdir(), "calm.json")
    with FileLock(file.with_suffix(".lock")):
        if not file.exists():
            ended = start(tmp_path_factory.mktemp("calm"), text_model, question_rows({}), {}, [IN])
            assert ended.exit == 0, ended.stderr
            file.write_text(json.dumps([record["text"] for record in ended.records]))
    return list(json.loads(file.read_text()))


@pytest.fixture(scope="session")
def ray_head() -> Iterator[RayHead]:
    """One Ray, for all tests that need none of their own."""
    from tests.support.ray_head import start_head

    with start_head() as head:
        yield head


@pytest.fixture
def vllm_job(demo_model: Path, tmp_path: Path) -> Callable[..., JobConfig]:
    """A job on the demo model, 16 tokens a row, its run folder below ``tmp_path``."""

    def make(**tables: Any) -> JobConfig:
        table: dict[str, Any] = {
            "engine": {"model": str(demo_model), "options": SMALL},
            "sampling": {"max_tokens": 16},
            "media": {"root": str(tmp_path), "max_pixels": 65536},
            "output": {"dir": str(tmp_path / "output")},
        }
        return make_job(with_tables(table, tables), "test")

    return make


@pytest.fixture(scope="module")
def launcher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launcher]:
    """For one engine after another: its process imports vLLM once."""
    with closing(Launcher(tmp_path_factory.mktemp("launcher") / LOG)) as one:
        yield one


@pytest.fixture
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The working directory of the test, for ``tests/support/dry_runs.py``."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts ``batchkit`` as a process of its own; what still lives at the end is killed."""
    started: list[subprocess.Popen[str]] = []

    def start_one(*args: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "batchkit", *args]
        stderr = Path(f"stderr-{len(started)}").open("w")  # noqa: SIM115
        started.append(LightFork(command, text=True, stdout=subprocess.PIPE, stderr=stderr))
        return started[-1]

    yield start_one
    for one in started:
        one.kill()
        one.wait()
        if one.stdout is not None:
            one.stdout.close()
