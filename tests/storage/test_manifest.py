"""``manifest.json``: what is read is what was written, whichever version wrote it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import orjson
import pytest

from batchkit.config.masking import learn_secret
from batchkit.errors import StoreError
from batchkit.storage.manifest import (
    MOST_EVENTS,
    FileFingerprint,
    Manifest,
    StartNote,
    forget_other_reductions,
    read_manifest,
)
from tests.support.dry_runs import job


def of_a_run() -> dict[str, Any]:
    """The manifest of a run that has begun, with keys of a later version."""
    made = Manifest.new(job(), [FileFingerprint("in.jsonl", 3, 4, "ab", 5, "jsonl")])
    start = StartNote.now("run").model_dump(exclude_unset=True) | {"of_a_later_version": [1]}
    steps = {"engine_reductions": [{"max_num_seqs": 4}], "engine_reductions_for": "abc"}
    found = made.model_dump(exclude_unset=True) | {"starts": [start]}
    more = {"scored_from": [[1, 2], [0, 0]], "merged_from": ["b"], "of_a_later_version": {"x": 1}}
    table: dict[str, Any] = orjson.loads(orjson.dumps(found | steps | more, default=str))
    return table


EVERYTHING = of_a_run()


def put(folder: Path, content: Any) -> None:
    (folder / "manifest.json").write_text(json.dumps(content))


def written(folder: Path) -> Any:
    return json.loads((folder / "manifest.json").read_text())


def test_every_key_is_kept(tmp_path: Path) -> None:
    put(tmp_path, EVERYTHING)
    read_manifest(tmp_path).write(tmp_path)
    assert written(tmp_path) == EVERYTHING


def test_key_that_nothing_has_set_is_not_written(tmp_path: Path) -> None:
    put(tmp_path, EVERYTHING)
    manifest = read_manifest(tmp_path)
    manifest.starts.append(StartNote.now("run"))
    manifest.write(tmp_path)
    assert not {"engine", "workers", "seconds"} & written(tmp_path)["starts"][-1].keys()


def test_only_the_newest_events_are_kept_and_no_secret_in_them(tmp_path: Path) -> None:
    learn_secret("correct-horse-battery")
    put(tmp_path, EVERYTHING)
    manifest = read_manifest(tmp_path)
    for number in range(MOST_EVENTS + 5):
        manifest.last_start.note_event(f"event {number} correct-horse-battery")
    manifest.write(tmp_path)
    events = written(tmp_path)["starts"][0]["engine_events"]
    assert len(events) == MOST_EVENTS
    assert events[-1].startswith(f"event {MOST_EVENTS + 4} ")
    times = written(tmp_path)["starts"][0]["engine_event_times"]
    assert len(times) == MOST_EVENTS
    assert times[-1] > manifest.created_at
    assert "correct-horse-battery" not in (tmp_path / "manifest.json").read_text()


def test_steps_of_other_engine_options_are_forgotten(tmp_path: Path) -> None:
    manifest = Manifest.model_validate_json(json.dumps(EVERYTHING))
    assert not forget_other_reductions(manifest, "abc")
    assert manifest.engine_reductions == [{"max_num_seqs": 4}]
    assert forget_other_reductions(manifest, "def")
    assert (manifest.engine_reductions, manifest.engine_reductions_for) == ([], "def")


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
