"""``--notify`` and ``run.on_end``: a command that hears of the end of a run."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from batchkit.execution.notify import notify
from batchkit.execution.processor import ProductionBatchProcessor
from tests.support.command_line import batchkit
from tests.support.dry_runs import RUN, job, n_records, prepare, rows_that_fail, run, write_job
from tests.support.waiting import until

pytestmark = pytest.mark.usefixtures("in_an_empty_folder")

HEARD = Path("heard.json")
KEEP = "tee heard.json"


def heard() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(HEARD.read_text())
    HEARD.unlink()
    return found


def test_the_command_gets_the_last_line_of_the_run() -> None:
    prepare(3)
    found = run("--notify", KEEP)
    assert found.exit_code == 0
    assert heard() == found.json


def test_it_is_told_of_a_stop_and_of_failed_rows() -> None:
    prepare(6, run={"on_end": KEEP, "max_in_flight": 1, "max_completion_tokens": 6})
    assert run().exit_code == 1
    told = heard()
    assert (told["exit"], told["ok"], told["stopped_by"]) == (1, 1, "run.max_completion_tokens = 6")
    rows_that_fail(6, every=3)
    write_job(run={"on_end": ["tee", "heard.json"]})
    assert run("--fresh").exit_code == 3
    assert (heard()["exit"], HEARD.exists()) == (3, False)
    assert batchkit("retry-failed", str(RUN), "--notify", "tee 'heard.json'").exit_code == 3
    assert heard()["failed"] == 2


def test_it_is_told_of_an_error_that_stops_the_run() -> None:
    rows_that_fail(4, every=2)
    write_job(run={"on_end": KEEP, "fail_on_error": True, "check_rows": 0})
    assert run().exit_code == 1
    assert heard()["exit"] == 1


@pytest.mark.parametrize("engine", [{"latency_s": 0.3}, {"latency_s": 600.0}])
def test_it_is_told_of_a_signal(start: Any, engine: dict[str, float]) -> None:
    prepare(40, engine={"options": engine}, run={"on_end": KEEP, "max_in_flight": 2})
    process = start("run", "job.toml")
    until(lambda: "generating" in Path("stderr-0").read_text())
    if engine["latency_s"] < 1:
        until(lambda: n_records() >= 2)
    process.send_signal(signal.SIGTERM)
    process.communicate()
    told = heard()
    assert (process.returncode, told["exit"], told["name"]) == (143, 143, "a")


def test_no_shell_reads_it_unless_one_is_named_and_it_changes_no_exit_code() -> None:
    prepare(2)
    run("--notify", "tee heard.json $HOME;false")
    assert Path("$HOME;false").is_file()
    heard()
    found = run("--notify", "sh -c 'cat > heard.json; exit 7'")
    assert (found.exit_code, heard()["ok"]) == (0, 2)
    assert "run.on_end: sh ended with exit code 7" in found.stderr
    found = run("--notify", "no-such-command --now")
    assert found.exit_code == 0
    assert "run.on_end: can't run no-such-command: No such file or directory" in found.stderr


def test_a_command_that_hangs_is_ended() -> None:
    said: list[str] = []
    notify("sleep 600", {}, said.append, timeout_s=0.2)
    assert said == ["run.on_end: sleep was ended after 0.2 s"]


def test_what_it_prints_is_no_result(start: Any) -> None:
    prepare(2)
    process = start("run", "job.toml", "--notify", "echo told")
    stdout, _ = process.communicate()
    assert len(stdout.splitlines()) == 1
    assert "told" in Path("stderr-0").read_text().splitlines()


@pytest.mark.parametrize("command", ["echo 'half", "", " ", []])
def test_a_command_without_words_is_refused(command: Any) -> None:
    prepare(2, run={"on_end": command})
    found = run()
    assert found.exit_code == 2
    assert "run.on_end" in found.stderr
    assert not RUN.exists()


def test_runs_from_python_notify_too() -> None:
    summary = ProductionBatchProcessor(job(run={"on_end": KEEP}), quiet=True).process(["x"])
    assert heard() == json.loads(json.dumps(summary.to_json()))
