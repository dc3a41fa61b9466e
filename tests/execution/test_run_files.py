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


def test_run_writes_what_the_contract_promises() -> None:
    write_rows([{"q": "question 0"}, *[{"q": "x"}] * 7, *[{"other": "x"}] * 2])
    write_job()
    found = run("--set", "sampling.temperature=0.5", "--limit", "9")
    counts = {"total": 9, "ok": 8, "failed": 1, "skipped": 0, "retried": 0, "exit": 3}
    assert found.json | counts == found.json
    assert found.json.keys() >= {"seconds", "rows_per_s", "completion_tokens_per_s"}
    names = {path.name for path in RUN.iterdir() if path.name != ".lock"}
    logs = {"results.jsonl", "metrics.jsonl", "run.log"}
    assert names == logs | {"job.toml", "manifest.json", "checkpoint.json"}

    (first,) = (record for record in records() if record["index"] == 0)
    expected = {
        "index": 0,
        "id": "0",
        "status": "ok",
        "attempt": 1,
        "finish_reason": "stop",
        "text": "dry-run: no model answered row 0",
        "usage": {"prompt_tokens": 3, "completion_tokens": 6},
        "error": None,
        "fields": {},
    }
    assert first | expected == first
    assert first["latency_s"] >= 0
    assert first["finished_at"].endswith("Z")

    kept, path = tomllib.loads((RUN / "job.toml").read_text()), str(Path("in.jsonl").resolve())
    assert kept["sampling"]["temperature"] == 0.5
    assert (kept["input"]["limit"], kept["input"]["path"]) == (9, path)
    again = batchkit("run", str(RUN / "job.toml"))
    assert (again.exit_code, again.json["skipped"]) == (3, 9)

    made = manifest()
    assert [(start["command"], start["exit"]) for start in made["starts"]] == [("run", 3)] * 2
    assert all(start["ended_at"] for start in made["starts"])
    assert (made["input"][0]["path"], made["total"], made["seed"]) == (path, 9, 0)
    assert {"prompt", "sampling"} <= made["fingerprints"].keys()


def test_kept_fields_are_copied_to_the_record() -> None:
    rows = [{"q": "x", "kind": "Fact", "n": 3, "deep": {"a": [1, None]}}, {"q": "y"}, {"kind": "z"}]
    write_rows(rows)
    write_job(output={"keep": ["kind", "n", "deep"]})
    run()
    kept = {record["index"]: record["fields"] for record in records()}
    assert kept[0] == {"kind": "Fact", "n": 3, "deep": {"a": [1, None]}}
    assert kept[1] == {"kind": None, "n": None, "deep": None}
    assert kept[2] == {"kind": "z", "n": None, "deep": None}  # a failed row keeps them too


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
    found = run("--set", "vars.api_key=sk-another")
    assert SECRET not in found.stderr
    assert "sk-another" not in found.stderr


@pytest.mark.parametrize(
    ("variables", "given"),
    [({}, ["--set", f"vars.api_key={SECRET}"]), ({"api_key": SECRET}, [])],
    ids=["given to the retry", "of the run, and masked"],
)
def test_a_retry_with_a_secret_does_not_write_it(
    variables: dict[str, str], given: list[str]
) -> None:
    rows_that_fail(4, every=2)
    write_job(vars=variables)
    run()
    found = batchkit("retry-failed", *given, "--set", "vars.q=now")
    assert found.exit_code == 0, found.stderr
    assert files_that_hold(SECRET) == []
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
