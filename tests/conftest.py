"""Tiny real models, built once per test run, and the fixtures of several files."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from batchkit.config.loading import make_job
from batchkit.config.tables import JobConfig
from batchkit.engines.process.launcher import Launcher
from tests.support.forks import Fork
from tests.support.small_vllm import SMALL

# Two engines beside each other on two cores: their OpenMP threads would spin against one another.
os.environ.setdefault("OMP_NUM_THREADS", "1")

HEAVY = (
    "test_cluster",
    "test_vllm_faults",
    "test_vllm_",
    "test_process_engine",
    "test_tuning_vllm",
)


def pytest_configure() -> None:
    Launcher.start = Fork  # for the engines that a test opens itself


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files first: `make test` gives whole files to two processes (pytest-xdist)."""

    def order(item: pytest.Item) -> int:
        name = item.path.name
        return next((n for n, start in enumerate(HEAVY) if name.startswith(start)), len(HEAVY))

    items.sort(key=order)


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
