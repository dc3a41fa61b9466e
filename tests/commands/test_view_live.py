"""``batchkit view`` over HTTP: the runs and their state, also while a run is written, killed, replaced, damaged,
gone; rows are in ``test_view_rows.py``."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.support.command_line import batchkit
from tests.support.dry_runs import (
    LOG,
    RUN,
    finished,
    prepare,
    records,
    rows_that_fail,
    run,
    write_job,
)
from tests.support.made_runs import failure
from tests.support.mounts import mounted
from tests.support.own_process import begin
from tests.support.view_server import Viewed, viewing
from tests.support.waiting import until

pytestmark = [pytest.mark.usefixtures("in_an_empty_folder"), pytest.mark.slow]

SLOW = {"options": {"latency_s": 0.1, "max_num_seqs": 4}}  # 40 rows a second


@pytest.fixture
def view(tmp_path: Path) -> Iterator[Viewed]:
    Path("output").mkdir()
    with viewing("output", cwd=tmp_path) as view:
        yield view


def test_the_list_has_all_runs_and_a_run_says_what_status_says(view: Viewed) -> None:
    prepare(10, engine={"model": "a/model"}, budget={"max_completion_tokens": 100})
    rows_that_fail(10, 5)
    assert run().exit_code == 3
    assert run("--set", "name='b'", "--limit", "4").exit_code == 0
    Path("output/b").rename("output/b c")
    found = {each["run"]: each for each in view.get("runs")}
    assert {*found} == {"a", "b c"}
    wanted = {"total": 10, "ok": 8, "failed": 2, "pending": 0, "state": "finished"}
    assert wanted.items() <= found["a"].items()
    assert (found["a"]["model"], found["a"]["kind"]) == ("a/model", "dry-run")
    assert view.get("runs/b c")["ok"] == 4
    budget = {"name": "max_completion_tokens", "spent": 48, "limit": 100}
    assert (found["a"]["budgets"], found["b c"]["eta_s"], found["a"]["score"]) == (
        [budget],
        None,
        None,
    )
    one = view.get("runs/a")
    status = batchkit("status", "output/a", "--json").json
    own = {"folder": one["folder"], "starts": one["starts"]}
    assert {**one, **status, **own} == one
    assert one["failures"][0].items() >= {"kind": "template", "count": 2, "index": 4}.items()
    (start,) = one["starts"]
    assert (start["exit"], start["number"], start["events"]) == (3, 1, [])


@pytest.mark.parametrize("host", ["::1", "localhost", "0.0.0.0"])
def test_a_single_run_is_its_own_home_page_on_any_host(tmp_path: Path, host: str) -> None:
    finished(3)
    with viewing("output/a", "--host", host, cwd=tmp_path) as view:
        home = view.client.get("/", follow_redirects=False)
        assert home.headers["location"] == "/run/a"
        assert view.get("runs")[0]["ok"] == 3
        assert view.client.get("/api/runs", headers={"host": "elsewhere"}).status_code == 403


def test_what_is_not_there_is_named(view: Viewed) -> None:
    assert "'gone'" in view.get("runs/gone", 404)["error"]
    assert view.client.post("/api/runs").status_code == 405
    assert "nothing: neither a run folder nor a job file" in batchkit("view", "nothing").refused()
    Path("output").rename("elsewhere")
    assert "output/: no such folder" in batchkit("view", "--no-browser").refused()


def test_events_of_the_engine_have_their_time(view: Viewed) -> None:
    finished(3)
    run("--set", "input.limit=3")
    time, worker = "2026-11-21T01:02:03.456Z", {"worker": 0, "state": "ready", "node": "n1"}
    counts = ("rows", "rows_per_s", "in_flight", "restarts", "engine_restarts")
    worker |= {"gpus": [0]} | dict.fromkeys(counts, 1)
    begun, *lines = (RUN / "starts.jsonl").read_text().splitlines()
    more = json.dumps({"start": {"workers": [worker]}, "events": [["died", time]]})
    (RUN / "starts.jsonl").write_text("\n".join([begun, more, *lines, ""]))
    first, second = view.get("runs/a")["starts"]
    assert first["events"] == [{"at": time, "text": "died"}]
    assert first["workers"][0]["node"] == "n1"
    assert second["events"] == []


def test_a_run_that_is_killed_and_resumed_is_followed(view: Viewed, tmp_path: Path) -> None:
    prepare(200, engine=SLOW, run={"checkpoint_interval_s": 0.2})
    assert view.get("runs") == []
    process = begin("run", "job.toml", cwd=tmp_path)
    until(lambda: view.get("runs"))
    states, counts, starts = [], [], set()
    while states[-1:] != ["finished"]:
        data = view.get("runs/a")
        if data["newest"] is not None:
            starts.add(data["newest"]["start"])
        state = data["state"]
        states += [state] if states[-1:] != [state] else []
        counts.append(data["ok"])
        if states == ["running"] and data["ok"] > 20:
            process.kill()
            process.wait(60)
        elif state == "stopped":
            assert data["ok"] < 200
            assert data["held_by"] is None
            process = begin("run", "job.toml", cwd=tmp_path)
            until(lambda: view.get("runs/a")["state"] != "stopped")
    assert process.wait(60) == 0
    assert states == ["running", "stopped", "running", "finished"]
    assert counts == sorted(counts)
    assert starts == {1, 2}
    found = view.get("runs/a")
    assert [start["exit"] for start in found["starts"]] == [None, 0]
    assert view.indexes(limit=500) == [*range(200)]
    metrics = view.get("runs/a/metrics")
    assert len({len(column) for column in metrics.values()}) == 1
    firsts = [metrics["start"].index(number) for number in (1, 2)]
    assert [metrics["rows_per_s"][first] for first in firsts] == [None, None]
    assert max(filter(None, metrics["rows_per_s"])) > 1


def test_a_run_that_can_not_start_says_so(view: Viewed) -> None:
    prepare(3, engine={"kind": "openai-server", "base_url": "http://127.0.0.1:9/v1", "model": "m"})
    assert run().exit_code == 1
    assert view.get("runs/a")["state"] == "failed to start"
    # Whoever finds the manifest, which makes the folder a run, finds its log, too.
    assert LOG.stat().st_mtime_ns <= (RUN / "manifest.json").stat().st_mtime_ns


def test_a_line_appears_once_and_when_it_is_whole_and_a_newer_one_takes_its_place(
    view: Viewed,
) -> None:
    prepare(10)
    run("--limit", "5")
    record = {**records()[-1], "index": 7, "id": "7"}
    line = json.dumps(record) + "\n"
    with LOG.open("a") as log:
        for part, more in (("", []), (line[:50], []), (line[50:-1], []), ("\n", [7]), (line, [7])):
            log.write(part)
            log.flush()
            assert view.indexes() == [0, 1, 2, 3, 4, *more]
            assert view.get("runs/a")["ok"] == 5 + len(more)
        assert batchkit("status", "output/a", "--json").json["ok"] == 6
        log.write(json.dumps(record | failure("oom")) + "\n")
    assert view.indexes(status="failed") == view.indexes(kind="oom") == [7]
    assert view.rows()["total"] == 6
    assert view.get("runs/a")["failures"][0]["message"] == "it was oom"


def test_records_of_other_programs_are_rows(view: Viewed) -> None:
    """Old and odd ones that the readers of the log accept, and lines that no reader accepts."""
    finished(3)
    whole = json.loads(LOG.read_bytes().splitlines()[0])
    plain = {**whole, "id": "x", "status": "ok", "text": "yes"}
    lines = [
        {**plain, "index": 3, "latency_s": 1e300, "scores": {"f1": 1e300, "em": None}},
        {**plain, "index": 4},
        {**plain, **failure("oom"), "index": 5},
        {**plain, "index": 6, "choices": [{"text": "a"}, {"text": "b"}], "tool_calls": None},
        {**plain, "index": 7, "text": " \n"},
        {**plain, "index": -1},
        {**plain, "index": 2**32},
        {**plain, "index": 8, "status": "fine"},
        {**plain, "index": 9, "choices": [{"text": 5}]},
        {**plain, "index": 10, "scores": {"f1": "high"}},
        {**plain, "index": 11, "id": 11},
        ["no", "record"],
    ]
    with LOG.open("a") as log:
        log.writelines(json.dumps(line) + "\n" for line in lines)
    assert view.indexes() == [0, 1, 2, 3, 4, 5, 6, 7]
    assert view.indexes(kind="empty") == [7]
    assert view.indexes(status="failed") == view.indexes(kind="oom") == [5]
    assert view.indexes(sort="latency", order="desc", limit=1) == [3]
    assert view.get("runs/a/rows/6")["answers"] == ["a", "b"]


def test_a_log_that_was_replaced_moved_aside_and_deleted(view: Viewed) -> None:
    finished(6)
    view.rows()
    write_job(prompt={"user": "Now: {{ q }}"}, output={"keep": ["q"]})
    assert run("--on-change", "requeue").exit_code == 0
    assert view.indexes() == [0, 1, 2, 3, 4, 5]
    assert view.indexes(text="question 4") == [4]
    (newest,) = (record for record in records() if record["index"] == 3)
    assert view.get("runs/a/rows/3")["record"] == newest
    assert run("--fresh", "--limit", "2").exit_code == 0
    assert view.indexes() == [0, 1]
    assert {each["run"] for each in view.get("runs")} == {"a", "a.1"}
    assert view.indexes("a.1") == [0, 1, 2, 3, 4, 5]
    shutil.rmtree("output/a.1")
    shutil.rmtree(RUN)
    assert view.get("runs") == []
    for path in ("runs/a", "runs/a/rows"):
        assert "no run 'a' here" in view.get(path, 404)["error"]
    run()
    assert view.indexes() == [0, 1, 2, 3, 4, 5]


def test_damage_is_reported_until_it_is_repaired(view: Viewed) -> None:
    finished(40)
    raw = LOG.read_bytes()
    lines = raw.splitlines(keepends=True)
    LOG.write_bytes(b"".join([*lines[:3], b"x" * (len(lines[3]) - 1) + b"\n", *lines[4:]]))
    lost = json.loads(lines[3])["index"]
    until(lambda: view.get("runs/a")["problem"])
    problem = view.get("runs/a")["problem"]
    assert f"the record at byte {sum(map(len, lines[:3]))} is damaged" in problem
    assert "batchkit verify --repair" in problem
    assert view.indexes(limit=500) == sorted({*range(40)} - {lost})
    batchkit("verify", "--repair", RUN)
    until(lambda: view.get("runs/a")["problem"] is None)
    run()
    assert view.indexes(limit=500) == [*range(40)]


def test_a_file_that_is_no_file_of_a_run(view: Viewed) -> None:
    for name in ("manifest.json", "job.toml", "results.jsonl"):
        finished(4, name=name[0])
        Path("output", name[0], name).write_bytes(b"\0\xff nothing\n")
    assert view.get("runs/r/rows")["rows"] == []
    assert "job.toml" in view.get("runs/j/rows", 409)["error"]
    assert "manifest.json" in view.get("runs/m", 409)["error"]
    assert any("manifest.json" in each.get("error", "") for each in view.get("runs"))


def test_a_run_that_can_not_be_written_is_shown(tmp_path: Path) -> None:
    finished(20)
    with mounted(RUN, "--bind", "-o", "ro", source=RUN), viewing(RUN, cwd=tmp_path) as view:
        assert view.rows()["total"] == 20
        assert view.get("runs/a")["state"] == "finished"


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_it_ends_at_once_while_a_page_is_open(tmp_path: Path, signum: signal.Signals) -> None:
    finished(5)
    process = begin("view", "output/a", "--port", "0", cwd=tmp_path)
    assert process.stdout is not None
    with httpx.Client(base_url=process.stdout.readline().strip(), trust_env=False) as client:
        assert client.get("/api/runs/a").json()["state"] == "finished"
        process.send_signal(signum)
        _, stderr = process.communicate(timeout=10)
    assert process.returncode == (0 if signum == signal.SIGINT else -signum)
    assert stderr == ""


def test_a_host_that_is_not_this_machine_or_a_port_that_is_taken(view: Viewed) -> None:
    hosts = ("203.0.113.9", "no-such-host.invalid", "2001:db8::9")
    taken = ("--port", view.url.rstrip("/").rpartition(":")[2])
    for wanted in (taken, *(("--host", host) for host in hosts)):
        refused = batchkit("view", *wanted, "--no-browser").refused()
        assert f"{' '.join(wanted)}: can't listen on this address" in refused
