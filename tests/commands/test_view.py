"""``batchkit view`` over HTTP: the runs, their state, and what protects them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.command_line import batchkit
from tests.support.dry_runs import LOG, RUN, manifest, prepare, records, rows_that_fail, run
from tests.support.view_server import viewing

pytestmark = [pytest.mark.usefixtures("in_an_empty_folder"), pytest.mark.slow]


def test_the_list_has_all_runs_and_a_run_says_what_status_says(tmp_path: Path) -> None:
    prepare(10, engine={"model": "a/model"})
    rows_that_fail(10, 5)
    assert run().exit_code == 3
    assert run("--set", "name='b'", "--limit", "4").exit_code == 0
    Path("output/b").rename("output/b c")
    with viewing(cwd=tmp_path) as view:
        found = {Path(each["folder"]).name: each for each in view.get("runs")}
        assert {*found} == {"a", "b c"}
        wanted = {"total": 10, "ok": 8, "failed": 2, "pending": 0, "state": "finished"}
        assert wanted.items() <= found["a"].items()
        assert found["a"]["model"] == "a/model"
        assert found["a"]["kind"] == "dry-run"
        assert view.get(f"runs/{found['b c']['run']}")["ok"] == 4
        one = view.get(f"runs/{found['a']['run']}")
    status = batchkit("status", "output/a", "--json").json
    own = {"folder": one["folder"], "starts": one["starts"]}
    assert {**one, **status, **own} == one
    assert one["failures"][0].items() >= {"kind": "template", "count": 2, "index": 4}.items()
    (start,) = one["starts"]
    assert (start["exit"], start["number"], start["events"]) == (3, 1, [])


def test_a_single_run_is_its_own_home_page(tmp_path: Path) -> None:
    prepare(3)
    run()
    with viewing("output/a", cwd=tmp_path) as view:
        home = view.client.get("/", follow_redirects=False)
        assert home.headers["location"] == "/run/a"


def test_what_is_not_there_and_what_is_wrong_are_named(tmp_path: Path) -> None:
    prepare(3)
    run()
    with viewing("output", cwd=tmp_path) as view:
        assert "'gone'" in view.get("runs/gone", 404)["error"]
        assert "limit=x" in view.get("runs/a/rows", 400, limit="x")["error"]
        assert "offset=-1" in view.get("runs/a/rows", 400, offset="-1")["error"]
        assert view.client.post("/api/runs").status_code == 405
    ended = batchkit("view", "nothing")
    assert ended.exit_code == 2
    assert "nothing: neither a run folder nor a job file" in ended.stderr


def test_events_of_the_engine_have_their_time(tmp_path: Path) -> None:
    prepare(3)
    run()
    run("--set", "input.limit=3")
    noted = manifest()
    time, worker = "2026-11-21T01:02:03.456Z", {"worker": 0, "state": "ready", "node": "n1"}
    counts = ("rows", "rows_per_s", "in_flight", "restarts", "engine_restarts")
    worker |= {"gpus": [0]} | dict.fromkeys(counts, 1)
    noted["starts"][0] |= {"engine_events": ["died"], "engine_event_times": [time]}
    noted["starts"][0] |= {"workers": [worker]}
    (RUN / "manifest.json").write_text(json.dumps(noted))
    with viewing("output/a", cwd=tmp_path) as view:
        first, second = view.get("runs/a")["starts"]
    assert first["events"] == [{"at": time, "text": "died"}]
    assert first["workers"][0]["node"] == "n1"
    assert second["events"] == []


@pytest.mark.parametrize("host", ["::1", "localhost", "0.0.0.0"])
def test_another_host(tmp_path: Path, host: str) -> None:
    prepare(3)
    run()
    with viewing("output/a", "--host", host, cwd=tmp_path) as view:
        assert view.get("runs")[0]["ok"] == 3
        assert view.client.get("/api/runs", headers={"host": "elsewhere"}).status_code == 403


def test_output_is_shown_if_nothing_is_named(tmp_path: Path) -> None:
    ended = batchkit("view", "--no-browser")
    assert ended.exit_code == 2
    assert "output/: no such folder" in ended.stderr
    prepare(3)
    run()
    with viewing(cwd=tmp_path) as view:
        assert [each["run"] for each in view.get("runs")] == ["a"]


def test_a_line_that_is_written_in_two_parts_counts_once(tmp_path: Path) -> None:
    prepare(10)
    run("--limit", "5")
    record = {**records()[-1], "index": 5, "id": "5"}
    line = json.dumps(record) + "\n"
    with viewing("output/a", cwd=tmp_path) as view, LOG.open("a") as log:
        assert view.get("runs/a")["ok"] == 5
        for part, ok in ((line[:40], 5), (line[40:], 6), (line, 6)):
            log.write(part)
            log.flush()
            assert view.get("runs/a")["ok"] == ok
    assert batchkit("status", "output/a", "--json").json["ok"] == 6
