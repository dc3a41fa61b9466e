"""What a run writes: its last line, its records and its files; never a secret."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from tests.support.command_line import batchkit
from tests.support.dry_runs import (
    RUN,
    manifest,
    prepare,
    records,
    rows_that_fail,
    run,
    write_job,
    write_rows,
)

pytestmark = [pytest.mark.usefixtures("in_an_empty_folder"), pytest.mark.slow]


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
    expected = {"job.toml", "manifest.json", "results.jsonl", "checkpoint.json", "run.log"}
    assert names == expected | {"metrics.jsonl"}


def test_manifest_says_what_the_run_was_made_from() -> None:
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
