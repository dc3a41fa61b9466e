"""Rows that fail: ``run.fail_on_error``, and ``retry-failed``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from batchkit.config.loading import load_job
from batchkit.execution.processor import ProductionBatchProcessor
from batchkit.execution.run import start_run
from batchkit.execution.start import StartOptions
from tests.support.command_line import Ended, batchkit
from tests.support.dry_runs import (
    LOG,
    RUN,
    job,
    manifest,
    n_records,
    prepare,
    records,
    rows_that_fail,
    run,
    settled,
    status,
    verify,
    write_job,
    write_rows,
)
from tests.support.waiting import until

NOTHING = {"rows": 0, "by_kind": {}, "recovered": 0}
pytestmark = [pytest.mark.usefixtures("in_an_empty_folder"), pytest.mark.slow]


def run_where_every_second_fails(n: int) -> None:
    rows_that_fail(n, every=2)
    write_job()
    assert run().exit_code == 3


def recovered(*args: str) -> Ended:
    """Failed rows lack a field, which they get now."""
    return batchkit("retry-failed", *args, "--set", "vars.q=now")


# Failures


@pytest.mark.parametrize(
    ("limit", "code"),
    [("false", 3), ("true", 1), ("0", 1), ("99", 1), ("5000", 3), ("0.1", 1), ("0.3", 3)],
)
def test_fail_on_error_stops_the_run_past_it(limit: str, code: int) -> None:
    rows_that_fail(800, every=4)
    write_job(run={"max_in_flight": 8})
    found = run("--set", f"run.fail_on_error={limit}")
    assert found.exit_code == code
    if code == 3:
        assert len(settled()) == 800
        return
    assert f"run.fail_on_error = {limit} stops the run" in found.stderr
    assert 0 < len(settled()) < 800
    assert verify()["checkpoint_matches"]
    assert run("--set", "run.fail_on_error=false").exit_code == 3
    assert len(settled()) == 800


@pytest.mark.parametrize("n", [1, 1000])
def test_fail_on_error_stops_a_run_whose_every_row_fails(n: int) -> None:
    rows_that_fail(n, every=1)
    write_job(run={"fail_on_error": True, "check_rows": 0})
    assert run().exit_code == 1
    assert 1 <= len(records()) <= max(1, n - 1)


def test_fail_on_error_sees_the_last_row() -> None:
    write_rows([{"q": "x"}] * 9 + [{"other": "x"}])
    write_job(run={"fail_on_error": True, "max_in_flight": 1})
    assert run().exit_code == 1


def test_rows_that_fail_reach_the_disk_while_the_run_goes_on() -> None:
    """Nothing but failures: no answer of an engine ever makes the loop turn."""
    seen: list[int] = []

    def rows() -> Iterator[Any]:
        for n in range(1500):
            if n == 1499:  # at most 256 rendered rows wait ahead of the loop
                seen.append(n_records())
            yield {"other": n}

    made = job(run={"check_rows": 0})
    assert ProductionBatchProcessor(made, quiet=True).process(rows()).failed == 1500
    assert seen[0] > 0


# retry-failed


def test_retry_by_a_job_file_with_another_masked_text_is_refused() -> None:
    """Rows of the run have been answered with the other one."""
    rows_that_fail(4, every=2)
    write_job(vars={"persona": "Credentials: MD"})
    run()
    before = LOG.read_bytes()
    write_job(vars={"persona": "Credentials: first-year student"})
    found = recovered("job.toml")
    assert found.exit_code == 2
    assert "vars.persona: " in found.stderr
    assert LOG.read_bytes() == before
    write_job(vars={"persona": "Credentials: MD"})
    assert recovered("job.toml").exit_code == 0


def test_retry_recovers_the_rows_that_failed_and_touches_no_other() -> None:
    run_where_every_second_fails(10)
    before = LOG.read_bytes()
    found = batchkit("retry-failed", "job.toml", "--set", "vars.q=now there")
    assert found.exit_code == 0
    assert found.stdout == "retried 5 rows (5 template): 5 recovered\n"
    assert LOG.read_bytes().startswith(before)
    again = records()[10:]
    assert [(record["index"], record["attempt"]) for record in again] == [
        (index, 2) for index in (1, 3, 5, 7, 9)
    ]
    assert verify() | {"ok": 10, "failed": 0, "duplicates": 0, "records": 15} == verify()
    assert status()["failed_by_kind"] == {}
    assert run().exit_code == 0  # --set held for that start alone, so nothing changed


def test_retry_that_recovers_nothing_says_so() -> None:
    run_where_every_second_fails(6)
    found = batchkit("retry-failed", str(RUN))
    assert found.exit_code == 3
    assert found.stdout == "retried 3 rows (3 template): 0 recovered\n"
    assert [record["attempt"] for record in records()[6:]] == [2, 2, 2]
    assert batchkit("retry-failed", str(RUN)).exit_code == 3
    assert {record["attempt"] for record in records()[9:]} == {3}


def test_retry_of_a_run_that_was_stopped_says_that_rows_remain() -> None:
    run_where_every_second_fails(10)
    LOG.write_bytes(b"".join(LOG.read_bytes().splitlines(keepends=True)[:-3]))
    (RUN / "checkpoint.json").unlink()
    found = recovered()
    assert (found.exit_code, manifest()["starts"][-1]["exit"]) == (1, 1)
    assert "rows without a record remain; next: batchkit run" in found.stderr
    assert (status()["ok"], status()["failed"]) == (7, 0)


def test_retry_says_that_rows_remain_though_others_are_done_past_the_limit() -> None:
    write_rows([{"q": "x"}] * 9 + [{"other": "x"}])
    write_job()
    run()
    write_rows([{"q": "new"}] * 5 + [{"q": "x"}] * 4 + [{"other": "x"}])
    run("--limit", "3", "--on-change", "requeue")
    lines = LOG.read_bytes().splitlines(keepends=True)
    LOG.write_bytes(b"".join(line for line in lines if b'{"index":0,' not in line))
    (RUN / "checkpoint.json").unlink()  # as after a kill before the first row was answered
    assert recovered().exit_code == 1


def test_retry_leaves_the_rows_of_another_run_to_it() -> None:
    write_rows([{"key": n, "q": "x"} for n in range(4)] + [{"key": 4}])
    write_job(input={"id": "key"})
    run("--limit", "2", "--set", "name=b")
    assert run("--skip-from", "output/b").exit_code == 3
    assert batchkit("retry-failed", str(RUN), "--set", "vars.q=now").exit_code == 0
    assert (status()["pending"], verify()["pending"]) == (0, 0)


def test_rows_left_to_another_run_are_pending_again_once_a_run_takes_them(start: Any) -> None:
    write_rows([{"key": n, "q": "x"} for n in range(6)] + [{"key": 6}])
    write_job(input={"id": "key"}, engine={"options": {"latency_s": 0.5}})
    run("--limit", "5", "--set", "name=b")
    run("--skip-from", "output/b")
    assert (status()["pending"], verify()["pending"], verify()["pending_rows"]) == (0, 0, [])
    killed = start("run", "job.toml", "--set", "run.max_in_flight=1")
    until(lambda: len(settled()) == 3)
    killed.kill()
    killed.wait()
    left = [n for n in range(5) if n not in settled()]
    assert batchkit("retry-failed", str(RUN), "--set", "vars.q=now").exit_code == 1
    assert (status()["pending"], verify()["pending"]) == (len(left), len(left))
    assert verify()["pending_rows"] == left


def test_rows_left_to_another_run_are_pending_again_once_they_changed(start: Any) -> None:
    write_rows([{"key": n, "q": "x"} for n in range(4)])
    write_job(input={"id": "key"}, engine={"options": {"latency_s": 1.0}})
    run("--limit", "3", "--set", "name=b")
    run("--skip-from", "output/b")
    write_rows([{"key": n, "q": "new" if n < 3 else "x"} for n in range(4)])
    killed = start("run", "job.toml", "--on-change", "requeue")
    until(lambda: len(manifest()["starts"]) == 2)
    killed.kill()
    killed.wait()
    assert sorted(settled()) == [3]
    assert (status()["pending"], verify()["pending"]) == (3, 3)


@pytest.mark.parametrize(("field", "n"), [("q", 2), ("other", 4)], ids=["answered", "failed again"])
def test_a_row_that_was_tried_since_a_retry_looked_for_it_stays(field: str, n: int) -> None:
    write_rows([{field: "x"}] * 2)
    write_job(run={"check_rows": 0})
    run()
    batchkit("retry-failed")
    start_run(load_job(Path("job.toml")), options=StartOptions(attempts={0: 1}))
    assert n_records() == n


def test_retry_takes_only_the_kinds_it_was_given() -> None:
    write_rows([{"q": "x"}, {"other": "x"}])
    Path("in.jsonl").write_text(Path("in.jsonl").read_text() + "not JSON\n")
    write_job()
    run()
    assert status()["failed_by_kind"] == {"template": 1, "invalid_request": 1}
    found = batchkit("retry-failed", "--kind", "template", "--set", "vars.q=now")
    assert found.stdout == "retried 1 rows (1 template): 1 recovered\n"
    assert found.exit_code == 3  # the other one is still failed
    assert status()["failed_by_kind"] == {"invalid_request": 1}
    found = batchkit("retry-failed", "--kind", "media")
    assert (found.exit_code, found.stdout) == (0, "nothing to retry: no row failed by media\n")
    assert batchkit("retry-failed", "--kind", "media", "--json").json == NOTHING
    read = recovered("--json").json
    assert read | {"rows": 1, "recovered": 0, "failed": 1} == read
    assert read["by_kind"] == {"invalid_request": 1}
    assert batchkit("retry-failed", "--kind", "weather").exit_code == 2


def test_blank_answer_is_retried_though_its_record_says_ok() -> None:
    """No record of ours is like that; one that was written by an older version may be."""
    prepare(4)
    run()
    text = LOG.read_text().replace("dry-run: no model answered row 2", " \\n\\t ")
    LOG.write_text(text)
    (RUN / "checkpoint.json").unlink()
    found = batchkit("retry-failed")
    assert found.stdout == "retried 1 rows (1 empty): 1 recovered\n"
    assert records()[-1]["text"] == "dry-run: no model answered row 2"
    assert verify()["duplicates"] == 0


def test_retry_of_a_run_that_was_moved_aside_stays_in_it() -> None:
    run_where_every_second_fails(4)
    run("--fresh")
    other = LOG.read_bytes()
    found = recovered("output/a.1")
    assert LOG.read_bytes() == other
    assert found.stdout == "retried 2 rows (2 template): 2 recovered\n"
    assert len(records(Path("output/a.1/results.jsonl"))) == 6


def test_retry_reaches_rows_past_the_limit_of_the_last_start() -> None:
    run_where_every_second_fails(10)
    run("--limit", "2")
    found = recovered()
    assert found.stdout == "retried 5 rows (5 template): 5 recovered\n"


@pytest.mark.parametrize("override", ["input.id=other", "input.format=txt", "input={id='other'}"])
def test_retry_reads_the_input_as_the_run_did(override: str) -> None:
    run_where_every_second_fails(4)
    before = LOG.read_bytes()
    found = recovered("--set", override)
    assert (found.exit_code, LOG.read_bytes()) == (2, before)
    assert f"--set {override}" in found.stderr


def test_retry_finds_the_rows_of_a_moved_input_and_refuses_another() -> None:
    run_where_every_second_fails(4)
    Path("in.jsonl").rename("moved.jsonl")
    rows_that_fail(6, every=2)
    refused = recovered()
    assert (refused.exit_code, "in.jsonl" in refused.stderr) == (2, True)
    found = recovered("--set", "input.path=moved.jsonl")
    assert found.exit_code == 0
    assert found.stderr.startswith("batchkit: output/a\n"), "the run that was started last"


def test_a_retry_by_a_job_file_that_has_changed_says_that_it_keeps_to_the_runs_job() -> None:
    rows_that_fail(8, every=4)
    write_job()
    assert run().exit_code == 3
    same = batchkit("retry-failed", "job.toml")
    assert "has changed" not in same.stderr
    write_job(prompt={"user": "{{ q | default('?') }}"})
    found = batchkit("retry-failed", "job.toml", "--json")
    assert (found.exit_code, found.json["recovered"]) == (3, 0)
    assert "job.toml has changed since the run began" in found.stderr
    assert 'prompt.user: "{{ q }}" → ' in found.stderr
    assert "--on-change requeue" in found.stderr
