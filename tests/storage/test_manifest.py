"""``manifest.json`` and ``starts.jsonl``: what is read is what was written, whichever version wrote it."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import orjson
import pytest

from batchkit.config.masking import learn_secret
from batchkit.errors import LostLockError, StoreError
from batchkit.storage.manifest import FileFingerprint, Manifest, read_manifest
from batchkit.storage.runfolder import claim
from batchkit.storage.starts import (
    MOST_EVENTS,
    History,
    StartLog,
    StartNote,
    current_manifest,
    read_history,
)
from tests.support.dry_runs import RUN, job, manifest, prepare, run, verify


def of_a_run() -> dict[str, Any]:
    """The manifest of a run that has begun, with keys of a later version."""
    made = Manifest.new(job(), [FileFingerprint("in.jsonl", 3, 4, "ab", 5, "jsonl")])
    more = {"merged_from": ["b"], "of_a_later_version": {"x": 1}}
    table: dict[str, Any] = orjson.loads(
        orjson.dumps(made.model_dump(exclude_unset=True) | more, default=str)
    )
    return table


EVERYTHING = of_a_run()


def put(folder: Path, content: Any) -> None:
    (folder / "manifest.json").write_text(json.dumps(content))


def test_every_key_is_kept(tmp_path: Path) -> None:
    put(tmp_path, EVERYTHING)
    read_manifest(tmp_path).write(tmp_path)
    assert json.loads((tmp_path / "manifest.json").read_text()) == EVERYTHING


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "can't be read"),
        ("[]", "can't be read"),
        ('{"name": "a"}', "is from another version of batchkit"),
        ('{"version": 2}', "is from another version of batchkit"),
        ('{"version": 1}', "damaged at name"),
        ('{"version": 1, "name": "a", "input": 3}', "damaged at input"),
        ({"identity": []}, "damaged at identity"),
    ],
    ids=str,
)
def test_what_is_no_manifest_is_refused(tmp_path: Path, content: Any, message: str) -> None:
    text = content if isinstance(content, str) else json.dumps(EVERYTHING | content)
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(StoreError, match=rf"manifest.json: {message}"):
        read_manifest(tmp_path)


@pytest.mark.usefixtures("in_an_empty_folder")
def test_later_starts_leave_the_manifest_as_the_first_one_wrote_it() -> None:
    prepare(6)
    run("--limit", "3")
    first = (RUN / "manifest.json").read_bytes()
    Path("in.jsonl").touch()  # no change of its content
    run()
    assert (RUN / "manifest.json").read_bytes() == first
    assert [(start["command"], start["exit"]) for start in manifest()["starts"]] == [("run", 0)] * 2
    assert manifest()["total"] == 6


# starts.jsonl


def test_a_history_is_read_as_it_was_noted(tmp_path: Path) -> None:
    with claim(tmp_path) as lock:
        starts = StartLog(tmp_path, lock)
        starts.begin(StartNote.now("run"))
        starts.learn(total=5, found={"engine.commits": {"m": "abc"}})
        starts.save()
        starts.note(exit=1, engine={"vllm": "0.32"})
        starts.add_event("died")
        starts.save()
        starts.begin(StartNote.now("retry"))
        starts.learn(total=None, turn="judge")
        starts.save()
        again = StartLog(tmp_path, lock)
    assert again.history == starts.history == read_history(tmp_path)
    assert [start.command for start in again.history.starts] == ["run", "retry"]
    assert (again.history.starts[0].exit, again.history.starts[0].engine_events) == (1, ["died"])
    assert (again.history.total, again.history.turn) == (None, "judge")
    assert not {"engine", "workers", "seconds"} & again.last.model_fields_set
    put(tmp_path, EVERYTHING)
    found = current_manifest(tmp_path).identity
    assert asdict(found) == EVERYTHING["identity"] | {"found": {"engine.commits": {"m": "abc"}}}


def test_what_has_not_changed_is_not_written_again(tmp_path: Path) -> None:
    with claim(tmp_path) as lock:
        starts = StartLog(tmp_path, lock)
        starts.begin(StartNote.now("run"))
        starts.note(exit=1)
        starts.save()
        before = (tmp_path / "starts.jsonl").read_bytes()
        starts.note(exit=1)
        starts.learn(total=None)
        starts.save()
    assert (tmp_path / "starts.jsonl").read_bytes() == before


def test_a_history_that_is_written_as_a_whole_is_the_same(tmp_path: Path) -> None:
    file = FileFingerprint("in.jsonl", 3, 4, "ab", 5, "jsonl", ("q",))
    notes = [StartNote.now("run"), StartNote.now("score")]
    made = History(starts=notes, total=3, judged=["good"], input=[file])
    made.write(tmp_path)
    assert read_history(tmp_path) == made


def test_only_the_newest_events_are_kept_and_no_secret_in_them(tmp_path: Path) -> None:
    learn_secret("correct-horse-battery")
    with claim(tmp_path) as lock:
        starts = StartLog(tmp_path, lock)
        starts.begin(StartNote.now("run"))
        for number in range(MOST_EVENTS + 5):
            starts.add_event(f"event {number} correct-horse-battery")
        starts.save()
    last = read_history(tmp_path).starts[-1]
    assert len(last.engine_events) == len(last.engine_event_times) == MOST_EVENTS
    assert last.engine_events[-1].startswith(f"event {MOST_EVENTS + 4} ")
    assert last.engine_event_times[-1] >= last.started_at
    assert "correct-horse-battery" not in (tmp_path / "starts.jsonl").read_text()


def test_line_that_a_kill_has_cut_off_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "starts.jsonl"
    with claim(tmp_path) as lock:
        starts = StartLog(tmp_path, lock)
        starts.begin(StartNote.now("run"))
        starts.save()
        whole = path.read_bytes()
        path.write_bytes(whole + b'{"run":{"total":' + b"1" * 5000)
        again = StartLog(tmp_path, lock)
        assert again.history.total is None
        again.learn(total=7)
        again.save()
    assert read_history(tmp_path).total == 7
    assert path.read_bytes().startswith(whole)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{}\nbroken\n{}\n", "line 2 is damaged; restore a copy of the file, or remove it"),
        ("[]\n", "line 1 is damaged"),
        ('{"run":{"total":"x"}}\n', "damaged at total"),
        ('{"begun":{}}\n', "damaged at starts.0.started_at"),
        ('{"begun":3}\n', "line 1 is damaged"),
        ('{"begun":{},"events":[3]}\n', "line 1 is damaged"),
    ],
    ids=str,
)
def test_damaged_history_is_refused(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "starts.jsonl").write_text(content)
    with pytest.raises(StoreError, match=rf"starts.jsonl: {message}"):
        read_history(tmp_path)


def test_process_that_lost_its_lock_notes_nothing(tmp_path: Path) -> None:
    with claim(tmp_path) as lock:
        starts = StartLog(tmp_path, lock)
        starts.begin(StartNote.now("run"))
        (tmp_path / ".lock").unlink()
        with pytest.raises(LostLockError):
            starts.save()
    assert not (tmp_path / "starts.jsonl").exists()


@pytest.mark.usefixtures("in_an_empty_folder")
def test_a_run_without_its_history_goes_on() -> None:
    prepare(6)
    run("--limit", "4")
    (RUN / "starts.jsonl").unlink()
    assert run().json["skipped"] == 4
    assert verify()["ok"] == 6
    assert len(manifest()["starts"]) == 1
