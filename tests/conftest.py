"""Tiny real models, built once per test run, and the fixtures of several files."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest

from batchkit.config.loading import make_job
from batchkit.config.tables import JobConfig
from batchkit.engines.process.launcher import Launcher
from tests.support.forks import Fork, LightFork
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

# These start first: pytest-xdist gives whole files to its processes, and a long one at the end
# would keep one of them busy while the other has nothing left.
LONGEST = (
    "test_cluster",
    "test_cluster_in_process",
    "test_own_ray",
    "test_vllm_faults",
    "test_benchmarks",
    "test_vllm_engine",
    "test_storms",
    "test_process_engine",
    "test_engine_contract",
    "test_transformers_engine",
    "test_transformers_faults",
    "test_vllm_equality",
    "test_vllm_parsers",
    "test_vllm_pooling",
    "test_vllm_pooling_server",
    "test_vllm_pooling_faults",
    "test_tuning_vllm",
    "test_vllm_server",
    "test_tuning",
    "test_parity",
    "test_setup",
    "test_own_server",
    "test_server_mixups",
    "test_chart_sandbox",
)
# Files that start an engine, Ray, a browser, or many processes. `make test-quick` leaves them out.
SLOW = {
    *LONGEST,
    "test_bad_rows",
    "test_changed_input",
    "test_changed_job",
    "test_cluster_steps",
    "test_cookbook",
    "test_damage",
    "test_demo_model",
    "test_demo_training",
    "test_distribution",
    "test_export_hub",
    "test_export_parquet",
    "test_export_realhit",
    "test_failed_rows",
    "test_hostile_answers",
    "test_interrupt",
    "test_jobs",
    "test_judge",
    "test_kept_engine",
    "test_llama_build",
    "test_llama_pooling",
    "test_llama_server",
    "test_media",
    "test_media_pixels",
    "test_media_urls",
    "test_merge",
    "test_merge_refusals",
    "test_merge_scores",
    "test_missing_packages",
    "test_openai_server",
    "test_page_browser",
    "test_parquet_memory",
    "test_parsed_answers",
    "test_pdf",
    "test_plan_vllm",
    "test_quickstart",
    "test_reask",
    "test_rollout_faults",
    "test_rollouts_vllm",
    "test_steps",
    "test_progress",
    "test_report",
    "test_report_steps",
    "test_requeue",
    "test_select",
    "test_select_engines",
    "test_resume",
    "test_run_files",
    "test_run_folder",
    "test_score",
    "test_score_predictions",
    "test_scoring_bounds",
    "test_secrets",
    "test_server_outages",
    "test_show",
    "test_server_refusals",
    "test_signals",
    "test_startup",
    "test_replay_property",
    "test_steps_ledger",
    "test_steps_log",
    "test_templates",
    "test_terminal",
    "test_engine_tools",
    "test_verify",
    "test_view",
    "test_view_browser",
    "test_view_live",
    "test_view_rows",
    "test_embed_runs",
    "test_step_engines_vllm",
    "test_tool_loop",
    "test_vllm_stepper",
    "test_vllm_truncation",
}
QUICK = "not slow"


def pytest_configure(config: pytest.Config) -> None:
    Launcher.start = Fork  # for the engines that a test opens itself


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the slow ones, and sorts: the longest first."""

    def order(item: pytest.Item) -> int:
        name = item.path.stem
        return LONGEST.index(name) if name in LONGEST else len(LONGEST)

    for item in items:
        name = item.path.stem
        if name in SLOW:
            item.add_marker(pytest.mark.slow)
    items.sort(key=order)


def pytest_runtest_teardown(item: pytest.Item) -> None:
    if item.config.option.markexpr == QUICK:
        heavy = {"ray", "vllm"} & sys.modules.keys()
        assert not heavy, f"imported {heavy}: add {item.path.stem} to SLOW in tests/conftest.py"


@pytest.fixture(scope="session")
def demo_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Qwen3-VL's architecture, random weights."""
    from batchkit.commands.demo_model import build_demo_model

    path = tmp_path_factory.mktemp("models") / "qwen3-vl"
    build_demo_model(path)
    return path


@pytest.fixture(scope="session")
def text_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Qwen2's architecture, random weights."""
    from batchkit.commands.demo_model import build_demo_model

    path = tmp_path_factory.mktemp("models") / "qwen2"
    build_demo_model(path, text_only=True)
    return path


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
        for name, value in tables.items():
            table[name] = {**table[name], **value} if isinstance(table.get(name), dict) else value
        return make_job(table, "test")

    return make


@pytest.fixture
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The working directory of the test, for ``tests/support/dry_runs.py``."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that did not answer is asked again ten times as soon."""
    monkeypatch.setattr("batchkit.engines.openai.rate_limiter.FIRST_PAUSE_S", 0.05)


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
