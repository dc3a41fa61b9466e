"""What happens to a run folder from outside is noticed, and costs no more than what was destroyed."""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest

from batchkit.execution.processor import ProductionBatchProcessor
from batchkit.sources.rowhash import input_hash
from batchkit.storage.ledger import REQUEUE
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

CHECKPOINT = RUN / "checkpoint.json"
READERS = [
    ["export", "--parquet"],
    ["export", "--jsonl"],
    ["retry-failed"],
    ["report"],
    ["report", "output/a", "output/a"],
    ["merge", "output/a", "--into", "output/b"],
    ["run", "job.toml"],
]


def lines() -> list[bytes]:
    return LOG.read_bytes().splitlines(keepends=True)


def equal_length_rows(n: int) -> None:
    write_rows([{"q": f"{number:04}"} for number in range(n)])
    write_job()


def nul_bytes() -> None:
    content = LOG.read_bytes()
    LOG.write_bytes(content[:1000] + bytes(50) + content[1050:])


def newline_to_space() -> None:
    LOG.write_bytes(LOG.read_bytes().replace(b"\n", b" ", 1))


def deleted_line() -> None:
    """Further lines hide that the log is shorter than it was."""
    found = lines()
    LOG.write_bytes(b"".join([*found[:3], *found[4:], *found[-2:]]))


def changed_answer() -> None:
    content = LOG.read_bytes()
    start = content.index(b'"text":"') + len(b'"text":"')
    LOG.write_bytes(content[:start] + b"WRONG" + content[start + 5 :])


DAMAGE = [nul_bytes, newline_to_space, deleted_line, changed_answer]


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("command", READERS, ids=lambda args: " ".join(args[:2]))
def test_damage_before_the_checkpoint_stops_whoever_reads(
    damage: Callable[[], None], command: list[str]
) -> None:
    equal_length_rows(20)
    run()
    damage()
    before = LOG.read_bytes()
    found = batchkit(*command)
    assert found.exit_code == 1
    assert str(LOG) in found.stderr
    assert "byte" in found.stderr
    assert "batchkit verify --repair" in found.stderr
    assert LOG.read_bytes() == before
    assert batchkit("verify").exit_code == 1


def test_repair_finds_both_records_where_the_newline_between_them_was_lost() -> None:
    equal_length_rows(20)
    run()
    newline_to_space()
    found = batchkit("verify", "--repair", "--json")
    assert "20 records kept, 1 lines set aside" in found.stderr
    assert (found.exit_code, found.json["pending"]) == (0, 0)


def test_repair_accepts_a_change_that_left_whole_records_and_says_so_before() -> None:
    equal_length_rows(20)
    run()
    changed_answer()
    assert "accept the file as it is now with `batchkit verify --repair" in run().stderr
    assert batchkit("verify", "--repair").exit_code == 0
    assert run().exit_code == 0


@pytest.mark.parametrize("damage", [nul_bytes, deleted_line])
def test_repair_keeps_every_whole_record_and_leaves_the_others_pending(
    damage: Callable[[], None],
) -> None:
    equal_length_rows(20)
    run()
    texts = {record["index"]: record["text"] for record in records()}
    damage()
    found = batchkit("verify", "--repair", "--json")
    assert found.exit_code == 0
    gone = found.json["pending_rows"]
    assert 1 <= found.json["pending"] == len(gone) <= 2
    assert (found.json["checkpoint_matches"], found.json["torn_bytes"]) == (True, 0)
    again = run()
    assert (again.exit_code, again.json["skipped"]) == (0, 20 - len(gone))
    assert {record["index"]: record["text"] for record in records()} == texts
    assert verify()["duplicates"] == 0


def test_repair_sets_aside_what_it_takes_out() -> None:
    prepare(10)
    run()
    broken = lines()[4][:-40] + b"\n"
    LOG.write_bytes(b"".join([*lines()[:4], broken, *lines()[5:]]))
    found = batchkit("verify", "--repair")
    assert "9 records kept, 1 lines set aside in" in found.stderr
    assert (RUN / "results.jsonl.broken-1").read_bytes() == broken


def test_repair_keeps_a_rows_own_answer_where_another_rows_came_after_it() -> None:
    prepare(5)
    run()
    own = LOG.read_bytes()
    write_rows([{"q": f"other {n}"} for n in range(4)])
    run("--set", "name=b")
    LOG.write_bytes(own + Path("output/b/results.jsonl").read_bytes())
    prepare(5)
    assert verify()["mixed"] == 4
    assert batchkit("verify", "--repair", str(RUN)).exit_code == 0
    assert LOG.read_bytes() == own
    assert len((RUN / "results.jsonl.broken-1").read_bytes().splitlines()) == 4


def test_repair_of_a_sound_run_changes_nothing() -> None:
    prepare(10)
    run()
    before = LOG.read_bytes(), CHECKPOINT.read_bytes()
    assert batchkit("verify", "--repair").exit_code == 0
    assert (LOG.read_bytes(), CHECKPOINT.read_bytes()) == before
    assert not list(RUN.glob("*.broken-*"))


def test_status_says_that_it_did_not_check() -> None:
    prepare(3)
    run()
    assert "was not checked" in batchkit("status").stdout


@pytest.mark.parametrize(
    "changes",
    [
        {"completed": [[0, 9], [5000, 4_000_000_000]]},
        {"completed": [[1, 10]]},
        {"offset": 0},
        {
            "counts": {
                "records": 7,
                "ok": 7,
                "failed": 0,
                "prompt_tokens": 1,
                "completion_tokens": 1,
            }
        },
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_checkpoint_that_was_changed_is_believed_by_nobody(changes: dict[str, Any]) -> None:
    prepare(10)
    run("--limit", "8")
    CHECKPOINT.write_bytes(orjson.dumps(orjson.loads(CHECKPOINT.read_bytes()) | changes))
    assert (status()["ok"], status()["pending"]) == (8, 0)
    assert verify()["checkpoint_matches"] is False
    assert batchkit("export", "--jsonl").exit_code == 0
    assert run().json["skipped"] == 8
    assert settled() == dict.fromkeys(range(10), "ok")
    assert verify()["checkpoint_matches"]


def test_line_that_no_checksum_covers_is_named_where_it_is_passed_over() -> None:
    prepare(10)
    run()
    found = lines()
    LOG.write_bytes(b"".join([*found[:4], b"noise\n", *found[5:]]))
    CHECKPOINT.unlink()
    exported = batchkit("export", "--jsonl")
    assert exported.exit_code == 0
    assert f"the line at byte {sum(map(len, found[:4]))} is not a record" in exported.stderr
    assert batchkit("verify", "--repair", "--json").json["pending"] == 1
    assert "is not a record" not in batchkit("export", "--jsonl").stderr


def test_checkpoint_of_an_older_version_is_sound_and_not_relied_on() -> None:
    prepare(10)
    run("--limit", "8")
    older = orjson.loads(CHECKPOINT.read_bytes())
    del older["crc32"], older["seal"]
    CHECKPOINT.write_bytes(orjson.dumps(older))
    assert batchkit("verify").exit_code == 0
    assert run().json["skipped"] == 8


@pytest.mark.parametrize("how", ["removed", "cut", "replaced"])
def test_log_that_is_lost_while_the_run_works_stops_it(how: str) -> None:
    options = {"kind": "dry-run", "options": {"latency_s": 0.02}}
    prepare(500, engine=options, run={"max_in_flight": 4, "checkpoint_interval_s": 0.1})
    first = start()
    wait_for_records(20)
    if how == "removed":
        LOG.unlink()
    elif how == "cut":
        LOG.write_bytes(b"")
    else:
        LOG.with_name("x").write_bytes(LOG.read_bytes())
        LOG.with_name("x").replace(LOG)
    said = first.communicate(timeout=60)[1]
    assert first.returncode == 1
    assert "was removed, replaced or cut while this run worked" in said
    assert "Traceback" not in said


# Records and rows


def rewrite(change: Callable[[dict[str, Any]], None], index: int = 3) -> None:
    """Change one record, and let a new checkpoint cover it."""
    found = records()
    change(found[index])
    LOG.write_bytes(b"".join(orjson.dumps(one, option=orjson.OPT_APPEND_NEWLINE) for one in found))
    CHECKPOINT.unlink()


def test_verify_names_records_that_no_row_has() -> None:
    prepare(20)
    run()
    rewrite(lambda record: record.update(index=5000))
    found = batchkit("verify", "--json")
    assert found.exit_code == 1
    assert (found.json["unknown"], found.json["unknown_rows"]) == (1, [5000])
    assert (found.json["pending"], found.json["pending_rows"]) == (1, [3])
    assert "unknown: 1 (rows 5000)" in batchkit("verify").stdout
    assert batchkit("verify", "--repair").exit_code == 0
    run()
    assert settled() == dict.fromkeys(range(20), "ok")


@pytest.mark.parametrize("change", [{"input_hash": "0" * 16}, {"id": "another"}], ids=str)
def test_verify_names_records_of_another_row(change: dict[str, str]) -> None:
    prepare(20, input={"id": "key"})
    run()
    rewrite(lambda record: record.update(change))
    found = verify()
    assert (found["mixed"], found["mixed_rows"]) == (1, [3])
    assert batchkit("verify", "--repair", "--json").json["pending_rows"] == [3]


def test_verify_names_the_rows_without_a_record_up_to_the_limit() -> None:
    write_rows(20)
    write_job(input={"where": {"q": [f"question {n}" for n in range(0, 20, 2)]}})
    run("--limit", "3")
    found = verify()
    assert (found["pending"], found["pending_rows"], found["unknown"]) == (0, [], 0)
    assert found["not_compared"] is None
    job = RUN / "job.toml"
    job.write_text(job.read_text().replace("limit = 3", ""))
    assert verify()["pending_rows"] == [6, 8, 10, 12, 14]


@pytest.mark.parametrize("older_id", ["3", "no-id:7"])
def test_ids_that_older_versions_gave_are_no_mixture(older_id: str) -> None:
    write_rows([{"key": None if n == 3 else f"k{n}", "q": "x"} for n in range(6)])
    write_job(input={"id": "key"})
    run()
    at = next(n for n, record in enumerate(records()) if record["index"] == 3)
    rewrite(lambda record: record.update(id=older_id), at)
    found = batchkit("verify", "--json")
    assert (found.exit_code, found.json["mixed"]) == (0, 0)


def test_verify_looks_at_the_limit_as_a_run_does() -> None:
    prepare(40)
    assert run("--shard", "0/2", "--limit", "10").exit_code == 0
    found = verify(Path("output/a.shard-0-of-2"))
    assert (found["pending"], found["pending_rows"]) == (0, [])


def test_rows_from_python_are_audited_and_repaired() -> None:
    process([f"question {n}" for n in range(10)])
    found = batchkit("verify", "--json")
    assert (found.exit_code, found.json["pending"], found.json["unknown"]) == (0, 0, 0)
    rewrite(lambda record: record.update(index=10))
    found = verify()
    assert (found["unknown_rows"], found["pending_rows"]) == ([10], [3])
    assert batchkit("verify", "--repair").exit_code == 0


def test_verify_says_why_it_did_not_look_at_the_rows() -> None:
    prepare(5)
    run()
    with Path("in.jsonl").open("a") as file:
        file.write('{"q": "one more"}\n')
    found = batchkit("verify", "--json")
    assert (found.exit_code, found.json["unknown"]) == (0, 0)
    assert "in.jsonl" in found.json["not_compared"]
    Path("in.jsonl").unlink()
    assert "in.jsonl" in verify()["not_compared"]


# Manifest


def test_records_without_their_manifest_are_not_carried_on() -> None:
    prepare(5)
    run("--limit", "3")
    (RUN / "manifest.json").unlink()
    write_job(prompt={"user": "Another prompt: {{ q }}"})
    before = LOG.read_bytes()
    found = run()
    assert found.exit_code == 1
    assert "manifest.json" in found.stderr
    assert "--fresh" in found.stderr
    assert LOG.read_bytes() == before
    assert run("--fresh").exit_code == 0
    assert settled() == dict.fromkeys(range(5), "ok")
    assert Path("output/a.1/results.jsonl").read_bytes() == before


def test_checkpoint_that_is_a_pipe_hangs_nobody() -> None:
    prepare(5)
    run()
    CHECKPOINT.unlink()
    os.mkfifo(CHECKPOINT)
    for command in (["status", "--json"], ["verify"], ["run", "job.toml"]):
        done = subprocess.run(
            [sys.executable, "-m", "batchkit", *command], capture_output=True, timeout=60
        )
        assert b"Traceback" not in done.stderr
    assert len(settled()) == 5
    assert CHECKPOINT.is_file()


@pytest.mark.parametrize("fresh", [False, True])
def test_checkpoint_that_is_left_alone_stands_in_no_way(fresh: bool) -> None:
    prepare(5)
    run()
    LOG.unlink()
    (RUN / "manifest.json").unlink()
    found = run(*["--fresh"] * fresh)
    assert found.exit_code == (0 if fresh else 1)
    assert fresh or "--fresh" in found.stderr


def test_log_that_is_gone_is_no_case_for_repair() -> None:
    prepare(5)
    run()
    LOG.unlink()
    assert "results.jsonl: is missing" in run().stderr


@pytest.mark.parametrize("command", [["run", "job.toml"], ["status"]])
def test_manifest_that_is_a_pipe_hangs_nobody(command: list[str]) -> None:
    prepare(3)
    run()
    (RUN / "manifest.json").unlink()
    os.mkfifo(RUN / "manifest.json")
    done = subprocess.run(
        [sys.executable, "-m", "batchkit", *command], capture_output=True, text=True, timeout=60
    )
    assert done.returncode in (1, 2)
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "content",
    [
        {"version": 1},
        {"version": 1, "name": "a", "input": 3},
        {"version": 1, "name": "a", "input": [], "identity": [], "model": None, "starts": {}},
    ],
    ids=["version alone", "input is a number", "wrong types"],
)
@pytest.mark.parametrize("command", [*READERS, ["status"], ["verify"]], ids=str)
def test_damaged_manifest_is_one_message(content: dict[str, Any], command: list[str]) -> None:
    prepare(3)
    run()
    (RUN / "manifest.json").write_text(json.dumps(content))
    found = batchkit(*command)
    assert found.exit_code in (1, 2)
    assert "manifest.json: damaged at" in found.stderr


@pytest.mark.parametrize(
    "suspects",
    [
        None,
        [],
        {"of": "x"},
        {"of": "x", "groups": [{"rows": ["1"], "deaths": [], "is_quarantined": False}]},
        {"of": "x", "groups": [{"rows": {"-1": "h"}, "deaths": [], "is_quarantined": False}]},
    ],
    ids=str,
)
def test_damaged_suspects_are_one_message(suspects: Any) -> None:
    prepare(3)
    run("--limit", "2")
    (RUN / "manifest.json").write_text(json.dumps(manifest() | {"suspects": suspects}))
    found = run()
    assert found.exit_code == 1
    assert "manifest.json: damaged at suspects" in found.stderr


# Requeue


def requeue_script(stop_at: str, number: int) -> str:
    """``run --on-change requeue``, killed at the n-th call of a function of ``os`` or ``pathlib``."""
    return f"""
import os, pathlib, shutil, signal, sys
owner, name = {stop_at!r}.split(".")
owner = {{"os": os, "Path": pathlib.Path, "shutil": shutil}}[owner]
real, calls = getattr(owner, name), 0
def killed(*args, **kwargs):
    global calls
    if any(".requeue" in str(arg) or "results.jsonl" in str(arg) or "manifest" in str(arg) for arg in args):
        calls += 1
        if calls == {number}:
            os.kill(os.getpid(), signal.SIGKILL)
    return real(*args, **kwargs)
setattr(owner, name, killed)
from batchkit.cli import cli
cli(["run", "job.toml", "--on-change", "requeue"], prog_name="batchkit")
"""


@pytest.mark.parametrize("undone", [False, True], ids=["carried on", "change undone"])
@pytest.mark.parametrize(
    ("stop_at", "number"),
    [
        ("Path.mkdir", 1),
        ("Path.rename", 1),
        ("Path.rename", 2),
        ("Path.replace", 4),
        ("Path.replace", 5),
        ("Path.replace", 6),
        ("shutil.rmtree", 3),
    ],
    ids=str,
)
def test_requeue_killed_at_any_instant_mixes_no_rows(
    stop_at: str, number: int, undone: bool
) -> None:
    rows = [{"key": f"k{n}", "q": f"question {n}"} for n in range(30)]
    write_rows(rows)
    write_job(input={"id": "key"})
    run()
    write_rows([{"key": "new", "q": "first"}, *rows[:20]])
    killed = subprocess.run(
        [sys.executable, "-c", requeue_script(stop_at, number)], capture_output=True, text=True
    )
    assert killed.returncode == -9, killed.stderr
    if undone:
        write_rows(rows)
    found = run()
    while found.exit_code != 0:
        assert found.exit_code == 2, found.stderr  # refused: the change is to be named again
        found = run("--on-change", "requeue")
    now = [json.loads(line) for line in Path("in.jsonl").read_text().splitlines()]
    newest = {record["index"]: record for record in records()}
    assert {index: record["id"] for index, record in newest.items()} == {
        index: row["key"] for index, row in enumerate(now)
    }
    assert all(newest[index]["input_hash"] == input_hash(row) for index, row in enumerate(now))
    assert len(newest) == len(records())
    audit = verify()
    assert (audit["mixed"], audit["unknown"], audit["duplicates"], audit["ok"]) == (
        0,
        0,
        0,
        len(now),
    )
    assert not list(RUN.glob(".requeue*"))


def test_requeue_needs_no_hard_links(monkeypatch: pytest.MonkeyPatch) -> None:
    """exFAT, and many FUSE and network filesystems, have none."""

    def link(*args: Any, **kwargs: Any) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    prepare(5)
    run()
    before = LOG.read_bytes()
    write_rows(6)
    monkeypatch.setattr(os, "link", link)
    assert run("--on-change", "requeue").exit_code == 0
    assert settled() == dict.fromkeys(range(6), "ok")
    assert (RUN / "results.jsonl.before-1").read_bytes() == before


def test_nobody_reads_a_run_whose_requeue_was_interrupted() -> None:
    prepare(5)
    run()
    (RUN / REQUEUE).mkdir()
    for command in (*READERS[:-1], ["status"], ["verify"]):
        found = batchkit(*command)
        assert found.exit_code == 1
        assert "run the job again to finish it" in found.stderr


def test_planted_requeue_takes_nothing_from_another_run() -> None:
    prepare(5)
    run()
    run("--set", "name=b")
    (RUN / REQUEUE).symlink_to("../b")
    found = run()
    assert (found.exit_code, "is not the folder that a requeue makes" in found.stderr) == (1, True)
    assert len(records(Path("output/b/results.jsonl"))) == 5


def test_requeue_reads_the_new_log_only_to_check_it() -> None:
    """Its checkpoint is made with it."""
    prepare(50)
    run()
    write_rows(40)
    assert run("--on-change", "requeue", "--set", "run.checkpoint_interval_s=1000").exit_code == 0
    assert len(records()) == 40
    assert orjson.loads(CHECKPOINT.read_bytes())["offset"] == LOG.stat().st_size


def test_requeue_on_a_full_disk_leaves_the_run_as_it_was() -> None:
    prepare(300, input={"id": "key"})
    run()
    before = LOG.read_bytes()
    write_rows(299)
    script = (
        "import resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, 30_000));"
        "from batchkit.cli import cli; cli(['run', 'job.toml', '--on-change', 'requeue'])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, "Traceback" in done.stderr) == (1, False)
    assert "can't requeue, and the run is as it was" in done.stderr
    assert LOG.read_bytes() == before
    assert not list(RUN.glob(".requeue*"))
    assert run("--on-change", "requeue").exit_code == 0
    assert verify()["mixed"] == 0


# The lock


def start(*args: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "batchkit", "run", "job.toml", *args]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def wait_for_records(n: int) -> None:
    deadline = time.monotonic() + 60
    while not LOG.exists() or len(lines()) < n:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_run_that_lost_its_lock_stops_and_writes_nothing_more() -> None:
    options = {"kind": "dry-run", "options": {"latency_s": 0.02}}
    prepare(1000, engine=options, run={"max_in_flight": 4, "checkpoint_interval_s": 0.1})
    first = start()
    wait_for_records(20)
    (RUN / ".lock").unlink()
    second = start()
    said = first.communicate(timeout=60)[1]
    assert first.returncode == 1
    assert "Traceback" not in said
    assert "another process may be working" in said
    assert second.wait(timeout=120) == 0
    second.communicate()
    assert settled() == dict.fromkeys(range(1000), "ok")
    assert manifest()["starts"][-1]["exit"] == 0
    assert verify()["checkpoint_matches"]


def test_run_that_lost_its_lock_leaves_the_other_ones_manifest() -> None:
    options = {"kind": "dry-run", "options": {"latency_s": 60}}
    prepare(5, engine=options, run={"checkpoint_interval_s": 2})
    first = start()
    deadline = time.monotonic() + 60
    while "generating" not in ((RUN / "run.log").read_text() if (RUN / "run.log").exists() else ""):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    (RUN / ".lock").unlink()
    write_job(prompt={"user": "another {{ q }}"})
    assert run("--fresh").exit_code == 0
    ours = manifest()
    said = first.communicate(timeout=60)[1]
    assert first.returncode == 1
    assert "another process may be working" in said
    assert manifest() == ours


def test_two_retries_at_once_answer_no_row_twice() -> None:
    write_rows([{"q": "x"}, *[{"other": "x"}] * 30])
    write_job()
    assert run().json["failed"] == 30
    command = [sys.executable, "-m", "batchkit", "retry-failed", "output/a"]
    changes = ["--set", "prompt.user=fine", "--set", "engine.options.latency_s=0.05"]
    both = [
        subprocess.Popen([*command, *changes], stderr=subprocess.PIPE, text=True) for _ in range(3)
    ]
    for one in both:
        one.communicate(timeout=60)
    assert 0 in [one.returncode for one in both]
    assert verify()["duplicates"] == 0


def test_retry_that_waited_for_a_requeue_answers_no_row_twice() -> None:
    """Its rows were found by the indexes that they had before."""
    rows = [{"key": "a", "q": "x"}, {"key": "b"}, {"key": "c", "q": "x"}]
    write_rows(rows)
    write_job(input={"id": "key"})
    run()
    before = ProductionBatchProcessor("job.toml", quiet=True)
    write_rows([{"key": "new", "q": "x"}, *rows])
    assert run("--on-change", "requeue").exit_code == 3
    before.retry({1: 1})
    assert (verify()["duplicates"], len(records())) == (0, 4)


# Links and mounts


@pytest.mark.parametrize(
    "name",
    ["results.jsonl", "run.log", "checkpoint.json.tmp", "manifest.json.tmp", ".holder.json"],
)
def test_nothing_is_written_through_a_planted_link(name: str) -> None:
    prepare(3)
    RUN.mkdir(parents=True)
    target = Path("precious.txt")
    target.touch()
    (RUN / name).symlink_to(target.resolve())
    found = run()
    assert target.read_text() == ""
    assert found.exit_code in (0, 1)
    if found.exit_code == 1:
        assert f"{name}: " in found.stderr
        assert "symbolic link" in found.stderr


def test_no_engine_prints_through_a_planted_link(tmp_path: Path) -> None:
    write_rows(1)
    write_job(engine={"kind": "vllm", "model": "nowhere"})
    RUN.mkdir(parents=True)
    (RUN / "engine.log").symlink_to(tmp_path / "precious.txt")
    found = run()
    assert found.exit_code == 1
    assert "engine.log: can't write: is a symbolic link" in found.stderr
    assert not (tmp_path / "precious.txt").exists()


def test_status_works_where_nothing_can_be_written() -> None:
    prepare(3)
    run()
    mount = ["mount", "--bind", "-o", "ro", str(RUN), str(RUN)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting is not allowed here")
    try:
        assert status()["ok"] == 3
        assert batchkit("verify").exit_code == 0
    finally:
        subprocess.run(["umount", "-l", str(RUN)], check=True)


def test_run_folder_that_is_a_mount_is_not_moved_aside_and_told_so() -> None:
    prepare(3)
    run()
    mount = ["mount", "--bind", str(RUN), str(RUN)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting is not allowed here")
    try:
        found = run("--fresh")
        assert (found.exit_code, "can't be moved aside" in found.stderr) == (1, True)
        assert len(settled()) == 3
    finally:
        subprocess.run(["umount", "-l", str(RUN)], check=True)


def test_folder_that_can_not_be_synced_can_be_a_run_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.fsync

    def fsync(opened: int) -> None:
        if stat.S_ISDIR(os.fstat(opened).st_mode):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        real(opened)

    monkeypatch.setattr(os, "fsync", fsync)
    prepare(3)
    assert run().exit_code == 0
    assert len(settled()) == 3


# A full disk


def test_full_disk_is_told_with_its_remedy() -> None:
    disk = Path("output")
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(disk)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a tmpfs is not allowed here")
    try:
        prepare(600, run={"max_in_flight": 10, "checkpoint_interval_s": 0.02})
        (disk / "ballast").write_bytes(bytes(150_000))
        command = [sys.executable, "-m", "batchkit", "run", "job.toml"]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 1
        assert "Make room, then run the same command again" in done.stderr
        assert "Traceback" not in done.stderr
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def test_run_folder_can_be_a_link_itself() -> None:
    """Only what is planted inside is not followed: people put run folders on larger disks."""
    prepare(3)
    large = Path("large-disk")
    large.mkdir()
    Path("output").symlink_to(large.resolve())
    assert run().exit_code == 0
    assert len(settled()) == 3
    shutil.rmtree(large)
