"""Engines of another package that lose requests or return them twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support import own_process
from tests.support.dry_runs import prepare, records
from tests.support.plugin import ENGINE, installed

pytestmark = [pytest.mark.usefixtures("in_an_empty_folder"), pytest.mark.slow]


def run(n: int, **options: Any) -> Any:
    prepare(n, engine={"kind": "ours", "options": options})
    path = installed(ENGINE)
    return own_process.batchkit("run", "job.toml", cwd=Path(), timeout_s=60, PYTHONPATH=path)


@pytest.mark.parametrize(
    ("mistake", "said"),
    [
        ("loses", 'engine.kind = "ours": row 3 (id 3) never came back'),
        ("repeats", 'engine.kind = "ours": row 3 (id 3) came back twice'),
    ],
)
def test_a_request_that_an_engine_loses_or_repeats_stops_the_run(mistake: str, said: str) -> None:
    ended = run(20, mistake=mistake)
    assert ended.returncode == 1
    assert said in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_slow_engine_loses_nothing() -> None:
    ended = run(3, latency_s=0.7)
    assert ended.returncode == 0, ended.stderr
    assert len(records()) == 3
