"""Runs that are copied to a store (``output.store``), whose machine vanishes, and which continue elsewhere."""

from __future__ import annotations

import json
import shutil
import signal
from datetime import UTC, datetime
from pathlib import Path
from subprocess import Popen
from typing import Any

import pytest

from batchkit.storage.log import RESULTS
from batchkit.storage.score_store import SCORES
from batchkit.storage.store.objects import Objects
from batchkit.storage.store.seals import Chain, Owner, Seal
from tests.support.command_line import batchkit as in_process
from tests.support.dry_runs import write_job
from tests.support.moved_clock import clock_moved_by
from tests.support.own_process import batchkit, begin
from tests.support.rows import read_jsonl, write_jsonl
from tests.support.waiting import until

N_ROWS = 60


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine: its working directory. The store is beside it."""
    here = tmp_path / "machine"
    here.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_jsonl(here / "in.jsonl", [{"id": f"r{n}", "q": f"question {n}"} for n in range(N_ROWS)])
    job_in(tmp_path)
    return here


def job_in(folder: Path, **tables: Any) -> None:
    write_job(
        **{
            "input": {"path": "in.jsonl", "id": "id"},
            "engine": {"kind": "dry-run", "options": {"latency_s": 0.3}},
            "run": {"store_interval_s": 0.1, "checkpoint_interval_s": 0.1},
            "output": {"store": store_of(folder)},
            **tables,
        }
    )


def store_of(folder: Path) -> str:
    return f"file://{folder}/store"


def chain_of(folder: Path) -> Chain:
    return Chain(Objects(f"{store_of(folder)}/a")).catch_up()


def seals_of(folder: Path) -> list[Seal]:
    files = sorted((folder / "store/a/seals").iterdir())
    return [Seal.model_validate_json(file.read_bytes()) for file in files]


def texts(run: Path) -> dict[int, str]:
    return {record["index"]: record["text"] for record in read_jsonl(run / RESULTS)}


def half(folder: Path) -> None:
    """Answer half of the rows."""
    assert in_process("run", "job.toml", "--limit", str(N_ROWS // 2)).exit_code == 0


def test_a_run_continues_on_a_machine_without_its_files(place: Path, tmp_path: Path) -> None:
    half(tmp_path)
    before = (place / "output/a" / RESULTS).read_bytes()
    shutil.rmtree(place / "output")
    ended = in_process("run", "job.toml")
    assert ended.exit_code == 0
    assert "restored" in ended.stderr
    assert ended.json["skipped"] == N_ROWS // 2
    assert (place / "output/a" / RESULTS).read_bytes().startswith(before)
    shutil.rmtree(place / "output")
    assert in_process("run", "job.toml").json["skipped"] == N_ROWS
    assert in_process("verify", "output/a").exit_code == 0


def test_the_address_alone_continues_a_run(place: Path, tmp_path: Path) -> None:
    half(tmp_path)
    shutil.rmtree(place / "output")
    (place / "job.toml").unlink()
    ended = in_process("run", f"{store_of(tmp_path)}/a", "--set", "input.limit=40")
    assert ended.json["skipped"] == N_ROWS // 2
    assert ended.json["ok"] == 40
    assert len(texts(place / "output/a")) == 40


def test_commands_read_a_run_in_a_store(place: Path, tmp_path: Path) -> None:
    half(tmp_path)
    shutil.rmtree(place / "output")
    address = f"{store_of(tmp_path)}/a"
    assert in_process("status", address, "--json").json["ok"] == N_ROWS // 2
    assert [run["run"] for run in in_process("status", store_of(tmp_path), "--json").json["runs"]] == ["a"]  # fmt: skip
    assert in_process("export", address, "answers.csv").exit_code == 0
    assert len((place / "answers.csv").read_text().splitlines()) == 1 + N_ROWS // 2
    assert in_process("run", "job.toml").exit_code == 0
    assert (
        in_process("status", address, "--json").json["ok"] == N_ROWS
    )  # the copy is kept up to date
    missing = in_process("status", f"{store_of(tmp_path)}/b")
    assert missing.exit_code == 2
    assert "no run in this folder of the store" in missing.stderr


def test_a_copy_of_a_run_that_was_removed_is_not_shown(place: Path, tmp_path: Path) -> None:
    half(tmp_path)
    address = f"{store_of(tmp_path)}/a"
    assert in_process("status", address, "--json").json["ok"] == N_ROWS // 2
    shutil.rmtree(place / "output")
    shutil.rmtree(tmp_path / "store")
    assert in_process("run", "job.toml", "--limit", "7").exit_code == 0
    assert in_process("status", address, "--json").json["ok"] == 7


def test_a_copy_loses_the_files_that_a_new_run_does_not_have(place: Path, tmp_path: Path) -> None:
    steps = [{"name": "one", "prompt": {"user": "{{ q }}"}}]
    job_in(tmp_path, steps=steps, prompt=None)
    half(tmp_path)
    address = f"{store_of(tmp_path)}/a"
    assert in_process("verify", address, "--json").json["generations"] == N_ROWS // 2
    job_in(tmp_path)
    assert in_process("run", "job.toml", "--fresh", "--limit", "7").exit_code == 0
    found = in_process("verify", address, "--json").json
    assert (found["ok"], found["generations"]) == (7, 0)


def test_a_kill_loses_at_most_what_was_not_uploaded(place: Path, tmp_path: Path) -> None:
    slow = ["--set", "run.max_in_flight=2"]
    with begin("run", "job.toml", *slow, cwd=place) as process:
        until(lambda: len(chain_of(tmp_path).files.get(RESULTS, [])) > 2)
        process.kill()
    sealed = chain_of(tmp_path).checksum(RESULTS).end
    kept = (place / "output/a" / RESULTS).read_bytes()[:sealed]
    shutil.rmtree(place / "output")
    ended = in_process("run", "job.toml")
    assert ended.json["skipped"] == kept.count(b"\n") > 2
    assert ended.json["ok"] == N_ROWS
    assert (place / "output/a" / RESULTS).read_bytes().startswith(kept)


def test_a_signal_uploads_at_once(place: Path, tmp_path: Path) -> None:
    slow = ["--set", "run.max_in_flight=2"]
    late = ["--set", "run.store_interval_s=600"]
    with begin("run", "job.toml", *slow, *late, cwd=place) as process:
        log = place / "output/a" / RESULTS
        until(lambda: log.exists() and log.read_bytes().count(b"\n") > 5)
        process.terminate()
        assert process.wait(60) == 143
    assert chain_of(tmp_path).checksum(RESULTS).end == log.stat().st_size
    last = chain_of(tmp_path).last
    assert last is not None
    assert last.state == "closed"


def test_a_frozen_writer_is_taken_over_and_stops_when_it_wakes(place: Path, tmp_path: Path) -> None:
    """As on a machine that hangs: nobody can know whether it will go on."""
    slow = ["--set", "run.max_in_flight=1"]
    other = tmp_path / "other"
    other.mkdir()
    for name in ("job.toml", "in.jsonl"):
        shutil.copy(place / name, other)
    with begin("run", "job.toml", *slow, cwd=place) as first:
        until(lambda: len(chain_of(tmp_path).files.get(RESULTS, [])) > 1)
        refused = batchkit("run", "job.toml", cwd=other)
        assert refused.returncode == 1
        assert f"process {first.pid} on " in refused.stderr
        assert "is writing this run" in refused.stderr
        first.send_signal(signal.SIGSTOP)
        second = batchkit("run", "job.toml", cwd=other)
        assert second.returncode == 0, second.stderr
        assert "was writing this run; waiting up to 5 s" in second.stderr
        sealed = chain_of(tmp_path).checksum(RESULTS)
        first.send_signal(signal.SIGCONT)
        _, stderr = first.communicate(timeout=60)
    assert first.returncode == 1
    assert "has taken this run over" in stderr
    assert chain_of(tmp_path).checksum(RESULTS) == sealed  # nothing of the first came after
    assert json.loads(second.stdout)["ok"] == N_ROWS
    # The first machine has answers of its own; it goes on from the store's, and keeps its own aside.
    again = batchkit("run", "job.toml", cwd=place)
    assert again.returncode == 0, again.stderr
    assert "another machine has continued this run" in again.stderr
    assert texts(place / "output/a") == texts(other / "output/a")
    assert (place / "output/a.1" / RESULTS).exists()


def test_of_machines_that_begin_at_once_one_runs(place: Path, tmp_path: Path) -> None:
    machines = [tmp_path / f"machine{number}" for number in range(4)]
    for machine in machines:
        shutil.copytree(place, machine)
    runs = [begin("run", "job.toml", "--set", "run.max_in_flight=3", cwd=m) for m in machines]
    ended = [(run.communicate(timeout=60), run.returncode) for run in runs]
    assert sorted(code for _, code in ended) == [0, 1, 1, 1], ended
    assert all("is writing this run" in err for (_, err), code in ended if code)
    assert sum(seal.state == "claimed" for seal in seals_of(tmp_path)) == 1


def test_a_chain_of_hundreds_of_seals_is_read_to_its_end(tmp_path: Path) -> None:
    chain = Chain(Objects(f"{store_of(tmp_path)}/a"))
    owner = Owner(host="", pid=1, machine="", token="")
    for number in range(1, 301):
        chain.add(
            Seal(number=number, fence=1, state="open", owner=owner, timeout_s=5, written_at="")
        )
    assert chain_of(tmp_path).last == chain.last


def test_a_new_run_replaces_the_old_one_in_the_store(place: Path, tmp_path: Path) -> None:
    half(tmp_path)
    assert in_process("run", "job.toml", "--fresh", "--limit", "10").exit_code == 0
    assert in_process("status", f"{store_of(tmp_path)}/a", "--json").json["ok"] == 10
    shutil.rmtree(place / "output")
    assert in_process("run", "job.toml").json["skipped"] == 10


def test_a_new_run_without_rows_has_none_of_the_old_one(place: Path, tmp_path: Path) -> None:
    """A kill after the first upload of a new run must not leave its manifest with the old records."""
    half(tmp_path)
    job_in(tmp_path, engine={"kind": "dry-run", "options": {"latency_s": 30.0}})
    with begin("run", "job.toml", "--fresh", cwd=place) as process:
        until(lambda: chain_of(tmp_path).last.state == "open" and seals_of(tmp_path)[-1].fence > 3)
        process.kill()
    shutil.rmtree(place / "output")
    assert in_process("status", f"{store_of(tmp_path)}/a", "--json").json["ok"] == 0


def test_scores_that_were_computed_later_are_in_the_store(place: Path, tmp_path: Path) -> None:
    half(tmp_path)
    assert SCORES not in chain_of(tmp_path).files
    job_in(tmp_path, scoring={"reference": "q", "scorers": ["em"]})
    assert in_process("score", "--job", "job.toml").exit_code == 0
    assert in_process("run", "job.toml", "--limit", str(N_ROWS // 2)).exit_code == 0
    scores = (place / "output/a" / SCORES).stat().st_size
    assert chain_of(tmp_path).checksum(SCORES).end == scores


def test_vectors_and_generations_are_restored(place: Path, tmp_path: Path) -> None:
    steps = [
        {"name": "one", "prompt": {"user": "{{ q }}"}},
        {"name": "two", "prompt": {"user": "{{ steps.one.text }}"}},
    ]
    for tables in ({"task": "embed"}, {"steps": steps, "prompt": None}):
        job_in(tmp_path, **tables)
        name = f"name={'embed' if 'task' in tables else 'steps'}"
        run = place / "output" / name.removeprefix("name=")
        assert in_process("run", "job.toml", "--set", name, "--limit", "20").exit_code == 0
        shutil.rmtree(place / "output")
        ended = in_process("run", "job.toml", "--set", name)
        assert ended.json["skipped"] == 20, ended.stderr
        found = in_process("verify", run, "--json").json
        assert found["ok"] == N_ROWS
        assert found["lost"] == found["bad_vectors"] == found["generations_lost"] == 0


def test_a_requeue_is_sealed_as_a_whole(place: Path, tmp_path: Path) -> None:
    half(tmp_path)
    job_in(tmp_path, prompt={"user": "Say: {{ q }}"})
    assert in_process("run", "job.toml", "--on-change", "requeue").exit_code == 0
    here = texts(place / "output/a")
    shutil.rmtree(place / "output")
    assert in_process("run", "job.toml").json["skipped"] == N_ROWS
    assert texts(place / "output/a") == here


def test_a_damaged_segment_is_named(place: Path, tmp_path: Path) -> None:
    half(tmp_path)
    shutil.rmtree(place / "output")
    row = b"no model answered row 7"
    segments = (tmp_path / "store/a/segments").iterdir()
    (segment,) = (one for one in segments if row in one.read_bytes())
    raw = bytearray(segment.read_bytes())
    raw[raw.index(row)] ^= 1
    segment.write_bytes(raw)
    ended = in_process("run", "job.toml")
    assert ended.exit_code == 1
    assert f"segments/{segment.name}: damaged" in ended.stderr
    assert not (place / "output/a/manifest.json").exists()  # half a copy is no run


def test_a_damaged_seal_is_named(place: Path, tmp_path: Path) -> None:
    half(tmp_path)
    (tmp_path / "store/a/seals/00000002.json").write_text('{"version": 1}')
    ended = in_process("run", "job.toml")
    assert ended.exit_code == 1
    assert "seals/00000002.json: damaged at number" in ended.stderr


@pytest.mark.parametrize(
    ("store", "message"),
    [
        ("s3:/bucket", "not a folder in a store"),
        ("ftp://host/runs", "not a folder in a store"),
        ("az://container/runs", "can't be used as a store"),
    ],
)
def test_wrong_addresses(store: str, message: str, place: Path, tmp_path: Path) -> None:
    job_in(tmp_path, output={"store": store})
    ended = in_process("run", "job.toml")
    assert ended.exit_code == 2
    assert message in ended.stderr


def test_a_store_that_can_not_be_written_stops_the_run_at_its_start(
    place: Path, tmp_path: Path
) -> None:
    (tmp_path / "store").write_text("a file")
    ended = in_process("run", "job.toml")
    assert ended.exit_code in (1, 2)
    assert "store/a" in ended.stderr


@pytest.mark.parametrize("hours", [-7, 7])
def test_a_clock_that_is_hours_off_changes_nothing(hours: int, place: Path, tmp_path: Path) -> None:
    """Neither does it keep a machine from a takeover, nor let it take over a run whose writer lives."""
    wrong = clock_moved_by(hours * 3600, tmp_path)
    slow = ["--set", "run.max_in_flight=1"]
    other = tmp_path / "other"
    shutil.copytree(place, other)
    with begin("run", "job.toml", *slow, cwd=place, start=Popen) as first:
        until(lambda: len(chain_of(tmp_path).files.get(RESULTS, [])) > 1)
        refused = batchkit("run", "job.toml", cwd=other, start=Popen, **wrong)
        assert refused.returncode == 1
        assert "is writing this run" in refused.stderr
        first.kill()
    shutil.rmtree(place / "output")
    ended = batchkit("run", "job.toml", cwd=other, start=Popen, **wrong)
    assert ended.returncode == 0, ended.stderr
    assert len(texts(other / "output/a")) == N_ROWS
    last = chain_of(tmp_path).last
    assert last is not None
    off = datetime.fromisoformat(last.written_at) - datetime.now(UTC)
    assert round(off.total_seconds() / 3600) == hours  # it was off
