"""The pages that are made from the code say what the code says."""

from __future__ import annotations

import importlib.util
import re
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

from batchkit.config.loading import parse_job
from batchkit.config.tables import JobConfig

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "job-file.md"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    path = ROOT / "scripts" / "make_job_file_doc.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_job_file_page_is_what_the_script_makes_of_the_models(script: ModuleType) -> None:
    assert PAGE.read_text(encoding="utf-8") == script.document(), (
        f"run {sys.executable} scripts/make_job_file_doc.py and commit docs/job-file.md"
    )


def test_every_key_is_described_on_the_page(script: ModuleType) -> None:
    page = script.document()
    for name, field in JobConfig.model_fields.items():
        keys = getattr(field.annotation, "model_fields", {})
        assert f"`[{name}]`" in page or f"| `{name}` |" in page
        for key, key_field in keys.items():
            assert key_field.description, f"{name}.{key} has no description"
            assert f"| `{key}` |" in page


def test_example_on_the_page_is_a_job(script: ModuleType) -> None:
    examples = re.findall(r"```toml\n(.*?)```", script.document(), re.DOTALL)
    assert len(examples) == 1
    assert parse_job(tomllib.loads(examples[0]), "example").name == "reviews"
    assert examples[0].count("\n") <= 40, "it should fit one screen"


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("input.path", "text"),
        ("input.limit", "whole number ≥ 1"),
        ("input.where", "table"),
        ("prompt.images", "list of text"),
        ("prompt.chat", "true or false"),
        ("prompt.order", '"images-first" or "text-first"'),
        ("sampling.temperature", "number ≥ 0"),
        ("run.max_in_flight", '"auto" or whole number ≥ 1'),
        ("run.fail_on_error", "true, false, whole number ≥ 0 or number ≥ 0 and < 1"),
        ("run.row_timeout_s", "number > 0"),
        ("retry.temperatures", "list of numbers ≥ 0"),
    ],
)
def test_types_are_in_plain_words(script: ModuleType, key: str, words: str) -> None:
    table, _, name = key.partition(".")
    field = JobConfig.model_fields[table].annotation.model_fields[name]  # type: ignore[union-attr]
    assert script.in_words(field.annotation, field.metadata) == words
