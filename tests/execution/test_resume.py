"""A run carries on where it stopped, with the job and the input it began with, and with no other.

The dry-run engine stands in for a model wherever only the counting matters.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from batchkit.errors import ChangedError, JobError
from batchkit.execution.processor import ProductionBatchProcessor
from tests.support.command_line import batchkit
from tests.support.dry_runs import (
    LOG,
    RUN,
    manifest,
    prepare,
    process,
    records,
    run,
    settled,
    status,
    verify,
    write_job,
    write_rows,
)

pytestmark = pytest.mark.usefixtures("in_an_empty_folder")

KEYS_OF_THE_LAST_LINE = {
    "total",
    "ok",
    "failed",
    "skipped",
    "retried",
    "seconds",
    "rows_per_s",
    "completion_tokens_per_s",
    "exit",
}


# Carrying on


def test_resume_runs_only_what_is_missing() -> None:
    prepare()
    first = run("--limit", "4")
    before = LOG.read_bytes()
    second = run()
    assert (first.exit_code, second.exit_code) == (0, 0)
    assert LOG.read_bytes().startswith(before)
    assert settled() == dict.fromkeys(range(10), "ok")
    expected = {"total": 10, "ok": 10, "failed": 0, "skipped": 4, "exit": 0}
    assert second.json | expected == second.json
    assert "resumed 4" in second.stderr


def test_torn_run_is_recovered_and_finished() -> None:
    prepare()
    run()
    lines = LOG.read_bytes().splitlines(keepends=True)
    LOG.write_bytes(b"".join(lines[:3]) + lines[3][:50])
    (RUN / "checkpoint.json").unlink()  # a killed run has none that is ahead of its log
    found = run()
    assert "broken bytes" in found.stderr
    assert found.json["skipped"] == 3
    assert settled() == dict.fromkeys(range(10), "ok")
    assert (RUN / "results.jsonl.torn-1").read_bytes() == lines[3][:50]
    assert verify()["checkpoint_matches"]


def test_nothing_left_starts_no_engine() -> None:
    prepare()
    run()
    before = LOG.read_bytes()
    again = run()
    assert (again.exit_code, again.json["ok"], again.json["skipped"]) == (0, 10, 10)
    assert "nothing left to run" in again.stderr
    assert "loading" not in again.stderr
    assert "engine" not in manifest()["starts"][-1]
    assert LOG.read_bytes() == before


def test_nothing_left_still_says_that_rows_failed() -> None:
    write_rows([{"q": "x"}, {"other": "x"}])
    write_job()
    assert [run().exit_code, run().exit_code] == [3, 3]
    assert len(records()) == 2


def test_job_without_rows_is_a_finished_run() -> None:
    prepare(3, input={"where": {"q": "nobody asks this"}})
    found = run()
    assert (found.exit_code, found.json["total"], found.json["ok"]) == (0, 0, 0)
    assert "loading" not in found.stderr


def test_limit_smaller_than_what_is_done_runs_nothing() -> None:
    prepare()
    run()
    found = run("--limit", "3")
    assert (found.exit_code, len(records())) == (0, 10)
    assert found.json["total"] >= found.json["ok"]


def test_filter_keeps_the_index_of_the_unfiltered_input() -> None:
    write_rows([{"q": str(n), "kind": "odd" if n % 2 else "even"} for n in range(10)])
    write_job(input={"where": {"kind": "odd"}})
    found = run("--limit", "2")
    assert (found.json["total"], sorted(settled())) == (2, [1, 3])
    found = run()
    assert (found.json["total"], found.json["skipped"]) == (5, 2)
    assert sorted(settled()) == [1, 3, 5, 7, 9]
    both = 'input.where={kind=["odd", "even"]}'
    assert run("--set", both).exit_code == 2, "a table that mixes two filters is not one table"
    found = run("--set", both, "--on-change", "requeue")
    assert (found.json["total"], found.json["skipped"]) == (10, 5)
    assert sorted(settled()) == list(range(10))
    found = run("--on-change", "requeue")
    assert (found.json["total"], found.json["ok"]) == (5, 5)


def test_rows_done_in_another_run_are_skipped_by_id() -> None:
    prepare(10, input={"id": "key"})
    run("--limit", "6", "--set", "name=other")
    found = run("--skip-from", "output/other")
    assert found.exit_code == 0
    assert sorted(settled()) == [6, 7, 8, 9]
    assert len(records(Path("output/other/results.jsonl"))) == 6


def test_rows_that_failed_in_another_run_are_not_skipped() -> None:
    rows = [{"q": "x"}, {"other": "x"}, {"q": "y"}]
    write_rows(rows)
    write_job()
    run("--set", "name=other")
    run("--skip-from", "output/other")
    assert settled() == {1: "failed"}


@pytest.mark.parametrize("who_has_ids", ["nobody", "this run", "the other run"])
def test_row_without_an_id_is_not_skipped_for_another_row_at_its_place(who_has_ids: str) -> None:
    ids = {"input": {"id": "key"}}
    write_rows([{"key": n, "q": f"other {n}" if n < 3 else "same"} for n in range(5)])
    write_job(**ids if who_has_ids == "the other run" else {})
    run("--set", "name=other")
    write_rows([{"key": n, "q": f"this {n}" if n < 3 else "same"} for n in range(5)])
    write_job(**ids if who_has_ids == "this run" else {})
    found = run("--skip-from", "output/other")
    assert found.json | {"exit": 0, "ok": 3, "skipped": 2} == found.json
    assert sorted(settled()) == [0, 1, 2]


def test_skipping_from_what_is_no_run_is_refused() -> None:
    prepare()
    found = run("--skip-from", "nowhere")
    assert found.exit_code == 2
    assert "nowhere: not a run folder" in found.stderr


# From Python


def test_list_of_prompts_resumes_like_a_file() -> None:
    prompts = [f"prompt {n}" for n in range(5)]
    assert process(prompts).ok == 5
    again = process(prompts)
    assert (again.skipped, again.total, len(list(again.records()))) == (5, 5, 5)
    with pytest.raises(ChangedError, match="rows from Python"):
        process([*prompts, "one more"])
    assert process([*prompts, "one more"], on_change="requeue").ok == 6
    assert len(records()) == 6


def test_iterator_begins_a_new_run_each_time() -> None:
    assert process(iter(["a", "b"])).ok == 2
    assert process(iter(["a", "c"])).skipped == 0
    assert len(records()) == len(records(Path("output/a.1/results.jsonl"))) == 2


def test_prompts_chat_messages_and_dicts_are_rows() -> None:
    chat = [{"role": "user", "content": "hi"}]
    summary = process(["hi", chat, {"prompt": "hi"}, {"messages": chat}, 7])
    assert (summary.ok, summary.failed, summary.exit) == (4, 1, 3)
    (failed,) = (record for record in records() if record["status"] == "failed")
    assert (failed["index"], failed["error"]["kind"]) == (4, "invalid_request")
    assert "row 4 is int" in failed["error"]["message"]


@pytest.mark.parametrize("value", [2**70, "a\ud800", {"a\ud800": 1}, {(1, 2): 3}], ids=ascii)
def test_field_that_json_has_no_word_for_does_not_stop_the_run(value: Any) -> None:
    summary = process([{"prompt": "hi", "odd": value}, {"prompt": "hi"}])
    assert summary.ok + summary.failed == 2
    assert settled()[1] == "ok"


# What changed since


CHANGES = [
    ("sampling.temperature=0.5", "sampling.temperature: 0.0 → 0.5"),
    ("sampling.top_k=3", "sampling.top_k: null → 3"),
    ("prompt.user=Say {{ q }}", 'prompt.user: "{{ q }}" → "Say {{ q }}"'),
    ("prompt.system=Be brief", 'prompt.system: null → "Be brief"'),
    ("vars.mode=mix", 'vars.mode: null → "mix"'),
    ("run.seed=1", "run.seed: 0 → 1"),
    ("engine.options.latency_s=0.001", "engine.options.latency_s: null → 0.001"),
    ("engine.model=other", 'engine.model: "" → "other"'),
    ("media.max_pixels=1000", "media.max_pixels: 1605632 → 1000"),
    ("retry.temperatures=[0.5]", "retry.temperatures: null → [0.5]"),
    ("input.id=key", 'input.id: null → "key"'),
]


@pytest.mark.parametrize(("override", "line"), CHANGES, ids=[line for _, line in CHANGES])
def test_changed_job_is_refused_with_a_diff(override: str, line: str) -> None:
    prepare(3)
    run()
    before = LOG.read_bytes(), manifest()
    found = run("--set", override)
    assert found.exit_code == 2
    assert line in found.stderr
    assert "--fresh" in found.stderr
    assert found.stdout == ""
    assert (LOG.read_bytes(), manifest()) == before
    assert run().exit_code == 0  # as it was, it goes on


def test_all_changes_are_told_at_once() -> None:
    prepare(3)
    run()
    write_rows(4)
    found = run("--set", "sampling.temperature=1", "--set", "vars.x=1")
    assert found.exit_code == 2
    assert all(key in found.stderr for key in ("sampling.temperature", "vars.x", "in.jsonl"))


def test_changed_template_file_is_refused() -> None:
    Path("user.j2").write_text("one {{ q }}")
    prepare(3)
    write_job(prompt={"user": "{{ q }}"})
    text = Path("job.toml").read_text().replace('user = "{{ q }}"', 'user_file = "user.j2"')
    Path("job.toml").write_text(text)
    assert run().exit_code == 0
    Path("user.j2").write_text("two {{ q }}")
    found = run()
    assert found.exit_code == 2
    assert 'prompt.user: "one {{ q }}" → "two {{ q }}"' in found.stderr


def test_changed_model_folder_is_refused() -> None:
    model = Path("model")
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "weights").write_bytes(bytes(3 * 2**20))
    prepare(3, engine={"model": str(model.resolve())})
    assert run().exit_code == 0
    assert run().exit_code == 0
    (model / "weights").write_bytes(bytes(3 * 2**20 - 1) + b"x")
    found = run()
    assert found.exit_code == 2
    assert "engine.model_files" in found.stderr


@pytest.mark.parametrize("change", ["edit", "append", "truncate"])
def test_changed_input_is_refused_by_the_name_of_its_file(change: str) -> None:
    rows = write_rows(5)
    write_job()
    run()
    write_rows(
        {"edit": [*rows[:4], {"q": "edited"}], "append": [*rows, rows[0]]}.get(change, rows[:4])
    )
    found = run()
    assert found.exit_code == 2
    assert f"input {Path('in.jsonl').resolve()}" in found.stderr
    assert len(records()) == 5


def test_second_input_file_is_a_change() -> None:
    prepare(3, input={"path": "in*.jsonl"})
    run()
    Path("in2.jsonl").write_text('{"q": "more"}\n')
    found = run()
    assert found.exit_code == 2
    assert "in2.jsonl: none →" in found.stderr


def test_touched_or_moved_input_is_no_change() -> None:
    prepare(5)
    run("--limit", "2")
    os.utime("in.jsonl", (1, 1))
    assert run("--limit", "3").exit_code == 0
    Path("elsewhere").mkdir()
    Path("in.jsonl").rename("elsewhere/rows.jsonl")
    assert run("--set", "input.path=elsewhere/rows.jsonl").exit_code == 0
    assert settled() == dict.fromkeys(range(5), "ok")


@pytest.mark.parametrize(
    "override",
    [
        "engine.options.max_num_seqs=2",
        "run.max_in_flight=3",
        "run.checkpoint_interval_s=0.1",
        "run.render_threads=1",
        "run.fail_on_error=0.5",
        "media.max_bytes=100",
        "retry.attempts=5",
    ],
)
def test_what_changes_only_the_speed_is_no_change(override: str) -> None:
    prepare(5)
    run("--limit", "2")
    assert run("--set", override).exit_code == 0
    assert len(settled()) == 5


def test_changes_before_the_first_record_are_no_change() -> None:
    prepare(3)
    refused = run("--set", "engine.options.nonsense=1")
    assert refused.exit_code == 2
    assert "engine.options.nonsense" in refused.stderr
    assert RUN.exists()
    write_rows(4)
    assert run("--set", "sampling.temperature=1").exit_code == 0
    assert len(settled()) == 4
    assert run().exit_code == 2  # by now the run stands for temperature 1


# On change


def test_on_change_new_moves_the_old_run_aside() -> None:
    prepare(3)
    run()
    old = LOG.read_bytes()
    found = run("--on-change", "new", "--set", "vars.x=1")
    assert (found.exit_code, found.json["skipped"]) == (0, 0)
    assert "vars.x: null → 1" in found.stderr
    assert "output/a.1" in found.stderr
    assert Path("output/a.1/results.jsonl").read_bytes() == old
    assert len(settled()) == 3
    assert len(manifest()["starts"]) == 1


@pytest.mark.parametrize("on_change", ["new", "requeue"])
def test_on_change_does_nothing_without_a_change(on_change: str) -> None:
    prepare(3)
    run()
    assert run("--on-change", on_change).json["skipped"] == 3
    assert not Path("output/a.1").exists()


def test_requeue_keeps_the_records_of_unchanged_rows() -> None:
    rows = write_rows(6)
    write_job(input={"id": "key"})
    run()
    old = LOG.read_bytes()
    rows[3] = rows[3] | {"q": "edited"}
    del rows[5]
    rows.insert(0, {"key": "new", "q": "inserted"})
    write_rows(rows)

    found = run("--on-change", "requeue")
    assert (found.exit_code, found.json["skipped"], found.json["total"]) == (0, 4, 6)
    assert "4 records kept, 2 rows to run again" in found.stderr
    # The dry-run engine answers with the index that the row had when it was run.
    answered = {record["id"]: (record["index"], record["text"][-1]) for record in records()}
    assert answered == {
        "new": (0, "0"),
        "k0": (1, "0"),
        "k1": (2, "1"),
        "k2": (3, "2"),
        "k3": (4, "4"),
        "k4": (5, "4"),
    }
    assert len(records()) == 6
    assert (RUN / "results.jsonl.before-1").read_bytes() == old
    assert run().json["skipped"] == 6  # the changed input is the run's own now
    assert verify() | {"ok": 6, "lost": 0, "duplicates": 0, "pending": 0} == verify()


def test_requeue_without_ids_compares_rows_in_place() -> None:
    rows = write_rows(4)
    write_job()
    run()
    write_rows([rows[0], {"q": "edited"}, rows[2], rows[3], {"q": "new"}])
    assert run("--on-change", "requeue").json["skipped"] == 3
    assert sorted(settled()) == [0, 1, 2, 3, 4]


def test_requeue_keeps_failed_records_of_unchanged_rows_failed() -> None:
    rows = [{"key": "a", "q": "x"}, {"key": "b"}, {"key": "c", "q": "x"}]
    write_rows(rows)
    write_job(input={"id": "key"})
    run()
    write_rows(rows[1:])
    found = run("--on-change", "requeue")
    assert (found.exit_code, found.json["skipped"]) == (3, 2)
    assert settled() == {0: "failed", 1: "ok"}


def test_requeue_runs_all_again_when_the_job_changed() -> None:
    prepare(4)
    run()
    found = run("--on-change", "requeue", "--set", "sampling.temperature=1")
    assert (found.exit_code, found.json["skipped"]) == (0, 0)
    assert "0 records kept, 4 rows to run again" in found.stderr
    assert len(settled()) == 4
    assert len(records(RUN / "results.jsonl.before-1")) == 4


def test_requeue_of_rows_that_share_an_id_leaves_one_record_each() -> None:
    same = {"key": "twin", "q": "x"}
    write_rows([same, same, {"key": "c", "q": "x"}])
    write_job(input={"id": "key"})
    run()
    write_rows([same, same, {"key": "c", "q": "edited"}])
    assert run("--on-change", "requeue").exit_code == 0
    assert settled() == dict.fromkeys(range(3), "ok")
    assert verify()["duplicates"] == 0


def test_requeue_under_a_limit_keeps_the_records_past_it() -> None:
    rows = write_rows(6)
    write_job()
    run()
    write_rows([{"q": "edited"}, *rows[1:]])
    run("--limit", "2", "--on-change", "requeue")
    assert settled() == dict.fromkeys(range(6), "ok")


def test_another_folder_of_images_is_pointed_out() -> None:
    prepare()
    for folder in ("then", "now"):
        Path(folder).mkdir()
    run("--limit", "4", "--set", "media.root=then")
    said = run("--set", "media.root=now").stderr
    assert f"media.root was {Path('then').absolute()} and is {Path('now').absolute()} now" in said
    assert "media.root" not in run("--set", "media.root=now").stderr


def test_fresh_moves_each_earlier_run_aside() -> None:
    prepare(3)
    for _ in range(3):
        assert run("--fresh").json["skipped"] == 0
    assert sorted(path.name for path in Path("output").iterdir()) == ["a", "a.1", "a.2"]
    assert all(len(settled(path / "results.jsonl")) == 3 for path in Path("output").iterdir())


def test_fresh_does_not_ask_what_changed() -> None:
    prepare(3)
    run()
    assert run("--fresh", "--set", "sampling.temperature=1").exit_code == 0


# Real processes and signals


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts ``batchkit`` as a process of its own; what still lives at the end is killed."""
    started: list[subprocess.Popen[str]] = []

    def start_one(*args: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "batchkit", *args]
        stderr = Path(f"stderr-{len(started)}").open("w")  # noqa: SIM115
        started.append(subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stderr=stderr))
        return started[-1]

    yield start_one
    for one in started:
        one.kill()
        one.wait()
        if one.stdout is not None:
            one.stdout.close()


def await_that(what: str, is_so: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline, f"waited in vain until {what}"
        time.sleep(0.02)


def n_records() -> int:
    return LOG.read_bytes().count(b"\n") if LOG.exists() else 0


def test_second_process_is_refused_and_told_who_holds_the_run(start: Any) -> None:
    prepare(40, engine={"options": {"latency_s": 600.0}})
    first = start("run", "job.toml")
    await_that("the run is held", lambda: RUN.exists() and (RUN / "manifest.json").exists())
    found = run()
    assert found.exit_code == 1
    assert f"process {first.pid} on " in found.stderr
    assert "is working in this run folder" in found.stderr
    assert status()["held_by"]["pid"] == first.pid
    assert batchkit("retry-failed", str(RUN)).exit_code == 0  # it finds nothing to do

    first.kill()
    first.wait()
    assert status()["held_by"] is None


def test_fresh_does_not_move_a_run_that_is_at_work(start: Any) -> None:
    prepare(4, engine={"options": {"latency_s": 600.0}})
    start("run", "job.toml")
    await_that("the run is held", lambda: (RUN / "manifest.json").exists())
    assert run("--fresh").exit_code == 1
    assert not Path("output/a.1").exists()


def test_status_of_a_run_at_work_counts_the_whole_job(start: Any) -> None:
    """Its last start was limited, this one is not."""
    prepare(24, engine={"options": {"latency_s": 1.0}}, run={"max_in_flight": 4})
    run("--limit", "4")
    start("run", "job.toml")
    await_that("a second wave is done", lambda: n_records() >= 8)
    found = status()
    assert found["held_by"] is not None
    assert found["total"] == 24
    assert found["pending"] == 24 - found["ok"]


SLOW = {"engine": {"options": {"latency_s": 3.0}}, "run": {"max_in_flight": 12}}


def test_sigint_finishes_what_is_in_flight(start: Any) -> None:
    prepare(40, **SLOW)
    process = start("run", "job.toml")
    await_that("rows are in flight", lambda: "generating" in Path("stderr-0").read_text())
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    stdout, _ = process.communicate()
    assert process.returncode == 130
    assert settled() == dict.fromkeys(range(12), "ok")
    summary = json.loads(stdout)
    assert (summary["exit"], summary["ok"], summary["total"]) == (130, 12, 40)
    assert "run the same command to go on" in Path("stderr-0").read_text()
    assert manifest()["starts"][-1]["exit"] == 130
    assert verify() | {"ok": 12, "lost": 0, "pending": 28, "checkpoint_matches": True} == verify()


def test_second_sigint_stops_now(start: Any) -> None:
    """Draining would have finished 12 rows."""
    prepare(40, **SLOW)
    process = start("run", "job.toml")
    await_that("rows are in flight", lambda: "generating" in Path("stderr-0").read_text())
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    process.communicate()
    assert process.returncode == 130
    assert records() == []


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_everything_finished_before_a_signal_is_on_disk(start: Any, signum: int) -> None:
    prepare(60, engine={"options": {"latency_s": 0.3}}, run={"max_in_flight": 12})
    process = start("run", "job.toml")
    await_that("two waves are done", lambda: n_records() >= 24)
    process.send_signal(signum)
    stdout, _ = process.communicate()
    assert process.returncode == 128 + signum
    summary = json.loads(stdout)
    done = settled()
    assert 24 <= len(done) == summary["ok"] < 60
    assert verify() | {"ok": len(done), "checkpoint_matches": True, "torn_bytes": 0} == verify()

    again = run()
    assert (again.exit_code, again.json["skipped"]) == (0, len(done))
    assert settled() == dict.fromkeys(range(60), "ok")


def test_disk_that_fills_up_stops_the_run_in_good_order() -> None:
    prepare(300, run={"max_in_flight": 10, "checkpoint_interval_s": 0.01})
    script = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, 30_000));"
        "from batchkit.cli import cli; cli(sys.argv[1:], prog_name='batchkit')"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, "run", "job.toml"], capture_output=True, text=True
    )
    assert done.returncode == 1
    assert "batchkit: error:" in done.stderr
    assert "File too large" in done.stderr
    assert "Traceback" not in done.stderr
    assert 0 < len(settled()) < 300
    assert verify()["lost"] == verify()["torn_bytes"] == 0

    assert run().exit_code == 0
    assert settled() == dict.fromkeys(range(300), "ok")


@pytest.mark.parametrize("room", ["some", "none"])
def test_run_on_a_full_disk_says_so_and_resumes(tmp_path: Path, room: str) -> None:
    """Everything in the run folder meets the full disk here: log, checkpoint, manifest, run.log."""
    disk = tmp_path / "output"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(disk)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a tmpfs is not allowed here")
    try:
        prepare(600, run={"max_in_flight": 10, "checkpoint_interval_s": 0.02})
        ballast = disk / "ballast"
        ballast.write_bytes(bytes({"some": 150_000, "none": 256 * 1024}[room]))
        # Its own process: what is raised while closing must not reach this one.
        command = [sys.executable, "-m", "batchkit", "run", "job.toml"]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 1
        assert "No space left" in done.stderr
        assert "Traceback" not in done.stderr
        if room == "some":
            assert 0 < len(settled()) < 600

        ballast.unlink()
        assert run("--limit", "500").exit_code == 0
        assert settled() == dict.fromkeys(range(500), "ok")
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def test_run_log_that_can_not_be_written_costs_no_answer() -> None:
    """Its disk is full while that of the ledger is not."""
    prepare(3)
    RUN.mkdir(parents=True)
    (RUN / "run.log").symlink_to("/dev/full")
    assert run().exit_code in (0, 1)  # going on is as good as a clear stop; a traceback is neither
    (RUN / "run.log").unlink()
    assert run().exit_code == 0
    assert settled() == dict.fromkeys(range(3), "ok")


# Failures


def rows_that_fail(n: int, every: int) -> None:
    """Every ``every``-th row lacks the field that the template asks for."""
    write_rows([{"other": "x"} if k % every == every - 1 else {"q": "x"} for k in range(n)])


def test_failed_rows_do_not_stop_the_run() -> None:
    rows_that_fail(20, every=4)
    write_job()
    found = run()
    assert (found.exit_code, found.json["ok"], found.json["failed"]) == (3, 15, 5)
    failed = [record for record in records() if record["status"] == "failed"]
    assert {record["error"]["kind"] for record in failed} == {"template"}
    assert {record["text"] for record in failed} == {None}
    assert "'q' is undefined" in failed[0]["error"]["message"]


@pytest.mark.parametrize(
    ("limit", "code"),
    [
        ("false", 3),
        ("true", 1),
        ("0", 1),
        ("99", 1),
        ("5000", 3),
        ("0.1", 1),
        ("0.3", 3),
    ],
)
def test_fail_on_error_stops_the_run_past_it(limit: str, code: int) -> None:
    rows_that_fail(3000, every=4)
    write_job(run={"max_in_flight": 8})
    found = run("--set", f"run.fail_on_error={limit}")
    assert found.exit_code == code
    if code == 3:
        assert len(settled()) == 3000
        return
    assert f"run.fail_on_error = {limit} stops the run" in found.stderr
    assert 0 < len(settled()) < 3000
    assert verify()["checkpoint_matches"]
    assert run("--set", "run.fail_on_error=false").exit_code == 3
    assert len(settled()) == 3000


@pytest.mark.parametrize("n", [1, 5000])
def test_fail_on_error_stops_a_run_whose_every_row_fails(n: int) -> None:
    rows_that_fail(n, every=1)
    write_job(run={"fail_on_error": True})
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
        for n in range(5000):
            if n == 4999:  # at most 256 rendered rows wait ahead of the loop
                seen.append(n_records())
            yield {"other": n}

    assert process(rows()).failed == 5000
    assert seen[0] > 0


# What is written


def test_last_line_on_stdout_is_the_promised_json() -> None:
    rows_that_fail(10, every=5)
    write_job()
    found = run()
    assert found.json.keys() >= KEYS_OF_THE_LAST_LINE
    expected = {"total": 10, "ok": 8, "failed": 2, "skipped": 0, "retried": 0, "exit": 3}
    assert found.json | expected == found.json


def test_kept_fields_are_copied_to_the_record() -> None:
    rows = [{"q": "x", "kind": "Fact", "n": 3, "deep": {"a": [1, None]}}, {"q": "y"}, {"kind": "z"}]
    write_rows(rows)
    write_job(output={"keep": ["kind", "n", "deep"]})
    run()
    kept = {record["index"]: record["fields"] for record in records()}
    assert kept[0] == {"kind": "Fact", "n": 3, "deep": {"a": [1, None]}}
    assert kept[1] == {"kind": None, "n": None, "deep": None}
    assert kept[2] == {"kind": "z", "n": None, "deep": None}  # a failed row keeps them too


def test_record_holds_what_the_contract_promises() -> None:
    prepare(1)
    run()
    (record,) = records()
    expected = {
        "index": 0,
        "id": "0",
        "status": "ok",
        "attempt": 1,
        "text": "dry-run: no model answered row 0",
        "finish_reason": "stop",
        "usage": {"prompt_tokens": 3, "completion_tokens": 6},
        "error": None,
        "fields": {},
    }
    assert record | expected == record
    assert record["latency_s"] >= 0
    assert record["finished_at"].endswith("Z")


def test_run_folder_holds_its_files_and_nothing_else() -> None:
    prepare(3)
    run()
    names = {path.name for path in RUN.iterdir() if path.name != ".lock"}
    assert names == {"job.toml", "manifest.json", "results.jsonl", "checkpoint.json", "run.log"}


def test_manifest_tells_what_the_run_was_made_from() -> None:
    prepare(3)
    run("--limit", "2")
    run()
    found = manifest()
    assert len(found["starts"]) == 2
    assert [start["command"] for start in found["starts"]] == ["run", "run"]
    assert all(start["exit"] == 0 and start["ended_at"] for start in found["starts"])
    assert found["input"][0]["path"] == str(Path("in.jsonl").resolve())
    assert found["total"] == 3
    assert found["seed"] == 0
    assert {"prompt", "sampling"} <= found["fingerprints"].keys()


def test_job_of_the_run_is_kept_as_resolved() -> None:
    prepare(3)
    run("--set", "sampling.temperature=0.5", "--limit", "2")
    kept = tomllib.loads((RUN / "job.toml").read_text())
    assert kept["sampling"]["temperature"] == 0.5
    assert kept["input"]["limit"] == 2
    assert kept["input"]["path"] == str(Path("in.jsonl").resolve())
    again = batchkit("run", str(RUN / "job.toml"))
    assert (again.exit_code, again.json["skipped"]) == (0, 2)


SECRET = "sk-123-not-for-the-disk"


def files_that_hold(text: str) -> list[str]:
    files = [path for path in Path("output").rglob("*") if path.is_file()]
    return sorted(path.name for path in files if text.encode() in path.read_bytes())


def test_secrets_are_masked_wherever_written() -> None:
    prepare(3, vars={"api_key": SECRET, "login": {"password": SECRET}, "topic": "x"})
    assert run().exit_code == 0
    kept = tomllib.loads((RUN / "job.toml").read_text())
    assert kept["vars"] == {"api_key": "***", "login": {"password": "***"}, "topic": "x"}
    assert files_that_hold(SECRET) == []


def test_changed_secret_is_not_printed() -> None:
    prepare(3, vars={"api_key": SECRET})
    run()
    found = run("--set", "vars.api_key=sk-another")
    assert SECRET not in found.stderr
    assert "sk-another" not in found.stderr


def test_secret_given_to_a_retry_is_not_written() -> None:
    rows_that_fail(4, every=2)
    write_job()
    run()
    batchkit("retry-failed", "--set", f"vars.api_key={SECRET}", "--set", "vars.q=now")
    assert files_that_hold(SECRET) == []


def test_run_with_a_masked_secret_can_be_retried() -> None:
    rows_that_fail(4, every=2)
    write_job(vars={"api_key": SECRET})
    run()
    found = batchkit("retry-failed", "--set", "vars.q=now")
    assert found.exit_code == 0, found.stderr
    assert run().exit_code == 0


# retry-failed


def test_retry_recovers_the_rows_that_failed_and_touches_no_other() -> None:
    rows_that_fail(10, every=2)
    write_job()
    assert run().exit_code == 3
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
    rows_that_fail(6, every=2)
    write_job()
    run()
    found = batchkit("retry-failed", str(RUN))
    assert found.exit_code == 3
    assert found.stdout == "retried 3 rows (3 template): 0 recovered\n"
    assert [record["attempt"] for record in records()[6:]] == [2, 2, 2]
    assert batchkit("retry-failed", str(RUN)).exit_code == 3
    assert {record["attempt"] for record in records()[9:]} == {3}


def test_retry_of_the_last_run_names_it() -> None:
    rows_that_fail(4, every=2)
    write_job()
    run()
    found = batchkit("retry-failed", "--set", "vars.q=now")
    assert found.exit_code == 0
    assert found.stderr.startswith("batchkit: output/a\n")


def test_retry_of_a_run_that_was_stopped_says_that_rows_remain() -> None:
    rows_that_fail(10, every=2)
    write_job()
    run()
    LOG.write_bytes(b"".join(LOG.read_bytes().splitlines(keepends=True)[:-3]))
    (RUN / "checkpoint.json").unlink()
    found = batchkit("retry-failed", "--set", "vars.q=now")
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
    assert batchkit("retry-failed", "--set", "vars.q=now").exit_code == 1


def test_retry_leaves_the_rows_of_another_run_to_it() -> None:
    write_rows([{"key": n, "q": "x"} for n in range(4)] + [{"key": 4}])
    write_job(input={"id": "key"})
    run("--limit", "2", "--set", "name=b")
    assert run("--skip-from", "output/b").exit_code == 3
    assert batchkit("retry-failed", str(RUN), "--set", "vars.q=now").exit_code == 0
    assert (status()["pending"], verify()["pending"]) == (0, 0)


def test_rows_left_to_another_run_are_pending_again_once_they_changed(start: Any) -> None:
    write_rows([{"key": n, "q": "x"} for n in range(4)])
    write_job(input={"id": "key"}, engine={"options": {"latency_s": 1.0}})
    run("--limit", "3", "--set", "name=b")
    run("--skip-from", "output/b")
    write_rows([{"key": n, "q": "new" if n < 3 else "x"} for n in range(4)])
    killed = start("run", "job.toml", "--on-change", "requeue")
    await_that("the run goes on", lambda: len(manifest()["starts"]) == 2)
    killed.kill()
    killed.wait()
    assert sorted(settled()) == [3]
    assert (status()["pending"], verify()["pending"]) == (3, 3)


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
    assert batchkit("retry-failed", "--kind", "weather").exit_code == 2


def test_retry_as_json_tells_rows_kinds_and_what_it_recovered() -> None:
    rows_that_fail(4, every=2)
    write_job()
    run()
    found = batchkit("retry-failed", "--json", "--set", "vars.q=now").json
    assert found | {"rows": 2, "by_kind": {"template": 2}, "recovered": 2, "failed": 0} == found
    assert batchkit("retry-failed", "--json").json == {"rows": 0, "by_kind": {}, "recovered": 0}


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
    rows_that_fail(4, every=2)
    write_job()
    run()
    run("--fresh")
    other = LOG.read_bytes()
    found = batchkit("retry-failed", "output/a.1", "--set", "vars.q=now")
    assert LOG.read_bytes() == other
    assert found.stdout == "retried 2 rows (2 template): 2 recovered\n"
    assert len(records(Path("output/a.1/results.jsonl"))) == 6


def test_retry_reaches_rows_past_the_limit_of_the_last_start() -> None:
    rows_that_fail(10, every=2)
    write_job()
    run()
    run("--limit", "2")
    found = batchkit("retry-failed", "--set", "vars.q=now")
    assert found.stdout == "retried 5 rows (5 template): 5 recovered\n"


@pytest.mark.parametrize("override", ["input.id=other", "input.format=txt", "input={id='other'}"])
def test_retry_reads_the_input_as_the_run_did(override: str) -> None:
    rows_that_fail(4, every=2)
    write_job()
    run()
    before = LOG.read_bytes()
    found = batchkit("retry-failed", "--set", "vars.q=now", "--set", override)
    assert (found.exit_code, LOG.read_bytes()) == (2, before)
    assert f"--set {override}" in found.stderr


def test_retry_of_an_input_that_was_moved_finds_its_rows() -> None:
    rows_that_fail(4, every=2)
    write_job()
    run()
    Path("in.jsonl").rename("moved.jsonl")
    moved = ["--set", "input.path=moved.jsonl"]
    assert batchkit("retry-failed", "--set", "vars.q=now", *moved).exit_code == 0


def test_retry_of_a_changed_input_is_refused() -> None:
    rows_that_fail(4, every=2)
    write_job()
    run()
    rows_that_fail(6, every=2)
    found = batchkit("retry-failed", "--set", "vars.q=now")
    assert found.exit_code == 2
    assert "in.jsonl" in found.stderr


# status and verify

STATUS_KEYS = {
    "name",
    "total",
    "ok",
    "failed",
    "pending",
    "failed_by_kind",
    "prompt_tokens",
    "completion_tokens",
    "engine_restarts",
    "held_by",
}
VERIFY_KEYS = {
    "rows",
    "records",
    "ok",
    "failed",
    "pending",
    "lost",
    "duplicates",
    "checkpoint_matches",
    "torn_bytes",
}


def test_status_tells_where_the_run_stands() -> None:
    rows_that_fail(10, every=5)
    write_job()
    run()
    found = status()
    assert found.keys() >= STATUS_KEYS
    expected = {
        "name": "a",
        "total": 10,
        "ok": 8,
        "failed": 2,
        "pending": 0,
        "failed_by_kind": {"template": 2},
        "prompt_tokens": 16,
        "completion_tokens": 48,
        "engine_restarts": 0,
        "held_by": None,
    }
    assert found | expected == found
    assert "a: 8 ok, 2 failed, 0 of 10 to do" in batchkit("status", "job.toml").stdout


def test_status_of_what_is_no_run_is_refused() -> None:
    Path("empty").mkdir()
    for target in ("empty", "nowhere"):
        found = batchkit("status", target)
        assert found.exit_code == 2
        assert target in found.stderr
    assert batchkit("status").exit_code == 2
    with pytest.raises(JobError):
        ProductionBatchProcessor("job.toml")


@pytest.mark.parametrize("command", ["status", "verify"])
def test_run_whose_log_is_gone_is_told_so(command: str) -> None:
    prepare(3)
    run()
    LOG.unlink()
    found = batchkit(command, str(RUN))
    assert found.exit_code == 1
    assert "results.jsonl" in found.stderr


def test_verify_accounts_for_every_row() -> None:
    rows_that_fail(10, every=5)
    write_job()
    run("--limit", "5")
    found = batchkit("verify", "--json")
    assert found.exit_code == 0
    assert found.json.keys() >= VERIFY_KEYS
    expected = {
        "rows": 5,
        "records": 5,
        "ok": 4,
        "failed": 1,
        "pending": 0,
        "lost": 0,
        "duplicates": 0,
        "checkpoint_matches": True,
        "torn_bytes": 0,
    }
    assert found.json | expected == found.json
    assert batchkit("verify").stdout.splitlines()[-1] == "sound"


def change_checkpoint(**changes: Any) -> None:
    path = RUN / "checkpoint.json"
    path.write_bytes(orjson.dumps(orjson.loads(path.read_bytes()) | changes))


def plant_second_answer() -> None:
    with LOG.open("ab") as log:
        log.write(LOG.read_bytes().splitlines(keepends=True)[3])


def plant_lost_row() -> None:
    change_checkpoint(completed=[[0, 9], [11, 12]])


def plant_forgotten_row() -> None:
    change_checkpoint(completed=[[0, 8]])


def plant_short_log() -> None:
    LOG.write_bytes(b"".join(LOG.read_bytes().splitlines(keepends=True)[:-1]))


def plant_wrong_counts() -> None:
    counts = orjson.loads((RUN / "checkpoint.json").read_bytes())["counts"]
    change_checkpoint(counts=counts | {"ok": 11, "records": 11})


@pytest.mark.parametrize(
    ("plant", "found_out"),
    [
        (plant_second_answer, {"duplicates": 1, "ok": 10, "records": 11}),
        (plant_lost_row, {"lost": 2, "checkpoint_matches": False}),
        (plant_forgotten_row, {"lost": 0, "checkpoint_matches": False}),
        (plant_short_log, {"lost": 1, "checkpoint_matches": False, "ok": 9, "pending": 1}),
        (plant_wrong_counts, {"checkpoint_matches": False}),
    ],
)
def test_verify_finds_a_planted_fault(plant: Callable[[], None], found_out: dict[str, Any]) -> None:
    prepare(10)
    run()
    plant()
    found = batchkit("verify", "--json")
    assert found.json | found_out == found.json
    assert found.exit_code == 1
    assert batchkit("verify").stdout.splitlines()[-1] == "NOT SOUND"


def test_verify_counts_torn_bytes_and_calls_the_rest_sound() -> None:
    """The next start cuts them off; no finished row is in them."""
    prepare(10)
    run()
    with LOG.open("ab") as log:
        log.write(b'{"index":10,"id":"1')
    found = batchkit("verify", "--json")
    assert (found.exit_code, found.json["torn_bytes"], found.json["ok"]) == (0, 19, 10)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"version": 7}', "null"])
def test_verify_outlives_a_damaged_checkpoint(content: str) -> None:
    prepare(10)
    run()
    (RUN / "checkpoint.json").write_text(content)
    assert batchkit("verify", "--json").json["ok"] == 10


# what a review found


def test_rows_before_a_broken_place_are_answered_once_and_the_run_can_be_carried_on() -> None:
    good = "".join(f'{{"q": "{n}"}},' for n in range(40))
    Path("rows.json").write_text(f'[{good} {{"q": ')
    write_job(
        input={"path": "rows.json"},
        run={"max_in_flight": 16},
        engine={"kind": "dry-run", "options": {"latency_s": 0.05}},
    )
    found = run()
    assert found.exit_code == 1
    assert len(settled()) == 40, "what was in flight is paid for"
    assert run().exit_code == 1
    assert len(records()) == 40
    Path("rows.json").write_text(f'[{good} {{"q": "last"}}]')
    assert run("--on-change", "requeue").exit_code == 0
    assert len(settled()) == 41


def test_rows_left_to_another_run_are_counted_as_skipped() -> None:
    prepare(10, input={"id": "key"})
    run("--limit", "6", "--set", "name=other")
    found = run("--skip-from", "output/other")
    assert found.json | {"total": 10, "ok": 4, "skipped": 6} == found.json
    assert batchkit("status", "--json").json["pending"] == 0


def test_secret_looking_variable_is_never_rendered_masked() -> None:
    write_rows([{"q": "a"}, {"q": "b", "bad": 1}])
    write_job(
        vars={"image_token": "one two three"},
        prompt={"user": "{{ image_token }} {{ q }}{% if bad is defined %}{{ nowhere }}{% endif %}"},
        output={"prompt": True},
    )
    assert run().exit_code == 3
    found = batchkit("retry-failed", "--set", "vars.nowhere=here")
    assert found.exit_code == 3
    assert "image_token" in records()[-1]["error"]["message"], "it says what is missing"
    given = batchkit(
        "retry-failed", "--set", "vars.nowhere=here", "--set", "vars.image_token=one two three"
    )
    assert given.exit_code == 0
    found = run("--set", "vars.image_token=four")
    assert found.exit_code == 2
    assert "vars.image_token" in found.stderr


def test_mistyped_option_does_not_cost_the_folder_its_place() -> None:
    prepare(3)
    run()
    found = run("--fresh", "--set", "engine.options.lateny_s=1")
    assert found.exit_code == 2
    assert not Path("output/a.1").exists()
    assert len(settled()) == 3


def test_fresh_outlives_a_damaged_manifest() -> None:
    prepare(3)
    run()
    (RUN / "manifest.json").write_text("")
    assert "--fresh" in run().stderr
    assert run("--fresh").exit_code == 0


def test_run_outlives_a_reader_that_hangs_up() -> None:
    prepare(3000, run={"max_in_flight": 8, "checkpoint_interval_s": 0.01})
    command = f"{sys.executable} -m batchkit run job.toml 2>&1 | head -1"
    subprocess.run(["bash", "-c", command], check=True, capture_output=True, timeout=60)
    assert len(settled()) == 3000


def test_interrupt_from_python_writes_no_row_twice() -> None:
    prepare(200, run={"max_in_flight": 10})
    script = (
        "import sys; from batchkit import ProductionBatchProcessor as P;"
        "s = P('job.toml').process(); print(s.exit); sys.exit(s.exit)"
    )
    write_job(engine={"kind": "dry-run", "options": {"latency_s": 0.2}}, run={"max_in_flight": 10})
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    deadline = time.monotonic() + 60
    while not (LOG.exists() and LOG.stat().st_size) and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == 130
    found = verify()
    assert found["duplicates"] == found["lost"] == 0
    assert run().exit_code == 0
    assert verify()["ok"] == 200
