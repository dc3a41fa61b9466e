"""What happens to a run folder from outside is noticed, and costs no more than what was destroyed."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from tests.support.command_line import batchkit
from tests.support.dry_runs import (
    LOG,
    READERS,
    RUN,
    prepare,
    process,
    records,
    run,
    settled,
    verify,
    write_job,
    write_rows,
)
from tests.support.rollouts import THREE, write
from tests.support.waiting import until

pytestmark = [pytest.mark.usefixtures("in_an_empty_folder"), pytest.mark.slow]

CHECKPOINT, STEPS_LOG = RUN / "checkpoint.json", RUN / "steps.jsonl"


def lines() -> list[bytes]:
    return LOG.read_bytes().splitlines(keepends=True)


def equal_length_rows(n: int) -> None:
    write_rows([{"q": f"{number:04}"} for number in range(n)])
    write_job()


def nul_bytes() -> None:
    content = LOG.read_bytes()
    start = content.index(b'"text"', 1000)
    LOG.write_bytes(content[:start] + bytes(50) + content[start + 50 :])


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


@pytest.mark.parametrize("damage", [deleted_line, changed_answer])
def test_damage_before_the_checkpoint_stops_whoever_reads(damage: Callable[[], None]) -> None:
    equal_length_rows(20)
    run()
    damage()
    before = LOG.read_bytes()
    for command in READERS:
        assert str(LOG) in batchkit(*command).refused(1), command
    assert batchkit("verify").exit_code == 1
    assert LOG.read_bytes() == before


def test_repair_accepts_a_change_that_left_whole_records_and_says_so_before() -> None:
    equal_length_rows(20)
    run()
    changed_answer()
    assert "accept the file as it is now with `batchkit verify --repair" in run().stderr
    assert batchkit("verify", "--repair").exit_code == 0
    assert run().exit_code == 0


def cut_off_line() -> None:
    LOG.write_bytes(b"".join([*lines()[:4], lines()[4][:-40] + b"\n", *lines()[5:]]))


@pytest.mark.parametrize(
    ("damage", "n_gone", "left_out"),
    [
        (nul_bytes, 1, "broken bytes"),
        (deleted_line, 1, "2 records"),  # the two answers that are there twice
        (newline_to_space, 0, "broken bytes"),
        (cut_off_line, 1, "broken bytes"),
    ],
)
def test_repair_keeps_every_whole_record_and_leaves_the_others_pending(
    damage: Callable[[], None], n_gone: int, left_out: str
) -> None:
    equal_length_rows(20)
    run()
    texts = {record["index"]: record["text"] for record in records()}
    damage()
    before = LOG.read_bytes()
    found = batchkit("verify", "--repair", "--json")
    assert f"{20 - n_gone} records kept; left out: " in found.stderr
    assert f"{left_out}; old log: results.jsonl.before-1" in found.stderr
    assert (RUN / "results.jsonl.before-1").read_bytes() == before
    assert (found.exit_code, found.json["pending"]) == (0, n_gone)
    assert (found.json["checkpoint_matches"], found.json["torn_bytes"]) == (True, 0)
    again = run()
    assert (again.exit_code, again.json["skipped"]) == (0, 20 - n_gone)
    assert {record["index"]: record["text"] for record in records()} == texts
    assert verify()["duplicates"] == 0


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
    assert len((RUN / "results.jsonl.before-1").read_bytes().splitlines()) == 9


def test_repair_of_a_sound_run_changes_nothing() -> None:
    prepare(10)
    run()
    before = LOG.read_bytes(), CHECKPOINT.read_bytes()
    assert batchkit("verify", "--repair").exit_code == 0
    assert (LOG.read_bytes(), CHECKPOINT.read_bytes()) == before
    assert not list(RUN.glob("*.before-*"))


@pytest.mark.parametrize("broken", [b"noise", b'{"index":4294967296'])
def test_broken_line_that_no_checksum_covers_stops_whoever_reads(broken: bytes) -> None:
    prepare(10)
    run()
    found = lines()
    broken += found[4][found[4].index(b",") :] if broken.startswith(b"{") else b"\n"
    LOG.write_bytes(b"".join([*found[:4], broken, *found[5:]]))
    CHECKPOINT.unlink()
    exported, audit = batchkit("export", "--jsonl"), batchkit("verify", "--json")
    assert (exported.exit_code, audit.exit_code, run().exit_code) == (1, 1, 1)
    said = f"the record at byte {sum(map(len, found[:4]))} is damaged"
    assert said in exported.stderr
    assert said in audit.json["damage"]
    assert batchkit("verify", "--repair", "--json").json["pending"] == 1
    assert batchkit("export", "--jsonl").exit_code == 0


@pytest.mark.parametrize("log", [LOG, STEPS_LOG], ids=str)
@pytest.mark.parametrize("how", ["removed", "cut", "replaced"])
def test_log_that_is_lost_while_the_run_works_stops_it(start: Any, how: str, log: Path) -> None:
    several = {"steps": THREE} if log == STEPS_LOG else {"prompt": {"user": "{{ q }}"}}
    options = {"kind": "dry-run", "options": {"latency_s": 0.02}}
    often = {"max_in_flight": 2, "checkpoint_interval_s": 0.05}
    write(None, 300, **several, engine=options, run=often)
    first = start("run", "job.toml")
    until(lambda: log.exists() and log.read_bytes().count(b"\n") >= 20)
    if how == "removed":
        log.unlink()
    elif how == "cut":
        log.write_bytes(b"")
    else:
        log.with_name("x").write_bytes(log.read_bytes())
        log.with_name("x").replace(log)
    assert first.wait(timeout=60) == 1
    said = Path("stderr-0").read_text()
    is_gone = how == "removed" and log == LOG  # then nothing is left to repair
    how = "was removed" if is_gone else "was removed, replaced or cut"
    assert f"{log.name}: {how} while this run worked" in said
    assert ("run JOB --fresh" if is_gone else "verify --repair") in said
    assert ("verify --repair" in said) != is_gone
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


# Whether a start and ``report``, which reads it all, refuse a run whose file is a pipe: it is named then.
PIPES = {
    "results.jsonl": (True, True),
    "steps.jsonl": (True, True),
    "manifest.json": (True, True),
    "starts.jsonl": (True, True),
    "vectors/000000.arrow": (False, False),
    "scores.jsonl": (False, True),
    "job.toml": (False, True),
    "checkpoint.json": (False, False),
    "metrics.jsonl": (False, True),
    "forecast.json": (False, False),
    ".lock": (True, False),
    ".holder.json": (False, False),
    "run.log": (True, False),
}


@pytest.mark.parametrize("name", PIPES)
def test_pipe_in_a_run_folder_hangs_nobody(name: str, in_time: None) -> None:
    prepare(5, scoring={"extract": "text"})
    run()
    (RUN / name).unlink(missing_ok=True)
    (RUN / name).parent.mkdir(exist_ok=True)
    os.mkfifo(RUN / name)
    for command in (["status"], ["show", "--failed"], ["verify"]):
        assert batchkit(*command, str(RUN)).exit_code in (0, 1, 2)
    for command, is_refused in zip(
        (["report"], ["run", "job.toml"]), PIPES[name][::-1], strict=True
    ):
        found = batchkit(*command)
        assert (found.exit_code == 0) != is_refused, found.stderr
        assert not is_refused or name in found.stderr
    assert name == "results.jsonl" or len(settled()) == 5


@pytest.fixture
def in_time() -> Iterator[None]:
    """A wait for a file ends in an error."""

    def late(*_: Any) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(30)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def log_gone() -> str:
    LOG.unlink()
    return "results.jsonl: is missing; restore a copy if there is one"


def manifest_gone() -> str:
    (RUN / "manifest.json").unlink()
    return "no manifest.json"


def manifest_damaged() -> str:
    (RUN / "manifest.json").write_text('{"version": 1}')
    return "manifest.json: damaged at"


@pytest.mark.parametrize("damage", [log_gone, manifest_damaged, manifest_gone])
def test_what_is_gone_or_damaged_is_one_message(damage: Callable[[], str]) -> None:
    prepare(3)
    run()
    said = damage()
    for command in [*READERS, ["status"], ["verify"]]:
        if damage == manifest_gone and command != ["run", "job.toml"]:
            command = [*command[:1], *[str(RUN)] * ("output/a" not in command), *command[1:]]
        found = batchkit(*command)
        assert found.exit_code in (1, 2)
        assert said in found.stderr, command
