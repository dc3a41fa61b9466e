"""``metrics.jsonl``: how a run went over time, bounded, and never a reason to stop."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from batchkit.storage.metrics import METRICS, MOST_LINES, Metrics, MetricsLog, read_metrics
from tests.support.command_line import batchkit
from tests.support.dry_runs import RUN, prepare, run, shard, verify
from tests.support.full_disk import full_disk

pytestmark = pytest.mark.usefixtures("in_an_empty_folder")

WEEK_S = 7 * 24 * 3600


def at(seconds: float, **more: Any) -> Metrics:
    return Metrics("2026-11-21T01:02:03.456Z", 1, seconds, round(seconds), 0, **more)


def log(folder: Path, said: list[str] | None = None, *, is_lost: bool = False) -> MetricsLog:
    folder.mkdir(exist_ok=True)
    said = [] if said is None else said
    return MetricsLog(folder, is_lost=lambda: is_lost, say=said.append)


@pytest.mark.slow
def test_a_run_keeps_its_metrics_and_a_resume_adds_to_them() -> None:
    prepare(8, engine={"options": {"latency_s": 1.2}}, run={"max_in_flight": 4})
    assert run("--set", "budget.max_completion_tokens=1").exit_code == 1
    first = read_metrics(RUN)
    assert {line.start for line in first} == {1}
    assert (first[-1].rows_ok, first[-1].rows_total, first[-1].in_flight) == (4, 8, 0)
    assert any(line.in_flight == line.running == line.window == 4 for line in first)
    assert first[-1].host_bytes is not None
    assert first[-1].host_bytes > 2**20

    assert run("--set", "run.max_in_flight=2").exit_code == 0
    both = read_metrics(RUN)
    assert both[: len(first)] == first
    assert {line.start for line in both} == {1, 2}
    assert [line.seconds for line in both] == sorted(line.seconds for line in both)
    assert (both[-1].rows_ok, both[-1].window) == (8, 2)
    assert both[-1].completion_tokens == 48  # of the whole run


def test_a_week_of_seconds_is_bounded_and_its_newest_part_is_whole() -> None:
    folder = RUN
    folder.mkdir(parents=True)
    lines = log(folder)
    seconds = 0.0
    while seconds < WEEK_S:
        seconds += 1.0 if seconds > WEEK_S - 10_000 else 60.0  # a line a second would take long
        lines.append(at(seconds))
    lines.close()
    found = read_metrics(folder)
    assert len(found) < MOST_LINES
    assert (folder / METRICS).stat().st_size < 400 * MOST_LINES
    assert found[0].seconds == 60.0
    newest = found[-1].seconds
    assert [newest - line.seconds for line in found[-400:]] == [*range(399, -1, -1)]
    for older, newer in pairwise(found):
        assert newer.seconds - older.seconds <= max(60.0, (newest - older.seconds) / 100)


def test_a_torn_line_is_passed_over_and_the_next_one_is_whole() -> None:
    RUN.mkdir(parents=True)
    assert read_metrics(RUN) == []
    later = {"at": "x", "start": 1, "seconds": 1, "rows_ok": 3, "rows_failed": 0, "new": [1]}
    (RUN / METRICS).write_text(json.dumps(later) + '\n{"at":"2026-11-2')
    again = log(RUN)
    assert again.seconds_before == 1
    again.append(at(2))
    again.close()
    assert [line.seconds for line in read_metrics(RUN)] == [1, 2]


def test_a_full_disk_is_said_once_and_no_reason_to_stop(tmp_path: Path) -> None:
    said: list[str] = []
    lines = log(tmp_path, said)
    with full_disk(1000):
        for n in range(100):
            lines.append(at(n))
    lines.close()
    assert len(said) == 1
    assert "File too large; the run continues without metrics" in said[0]


def test_a_file_that_can_not_be_written_is_no_reason_to_stop() -> None:
    prepare(5)
    (RUN / METRICS).mkdir(parents=True)
    found = run()
    assert (found.exit_code, found.json["ok"]) == (0, 5)
    assert (
        f"{RUN / METRICS}: can't write: Is a directory; the run continues without metrics"
        in found.stderr
    )


def test_nothing_is_written_to_a_folder_whose_lock_was_lost(tmp_path: Path) -> None:
    lines = log(tmp_path, is_lost=True)
    lines.append(at(1))
    lines.close()
    assert read_metrics(tmp_path) == []


def test_a_merged_run_has_no_metrics_of_its_parts() -> None:
    prepare(6)
    for n in range(2):
        assert run("--shard", f"{n}/2").exit_code == 0
        assert read_metrics(shard(n, 2))
    assert batchkit("merge", shard(0, 2), shard(1, 2), "--into", RUN).exit_code == 0
    assert not (RUN / METRICS).exists()  # they are of other runs
    assert verify() | {"ok": 6, "lost": 0} == verify()
