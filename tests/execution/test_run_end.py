"""What a run writes, says and calls at its end: records and files, its last lines, ``run.on_end``; never a secret."""

from __future__ import annotations

import json
import signal
import tomllib
from pathlib import Path
from typing import Any

import pytest

from batchkit.execution.processor import ProductionBatchProcessor
from batchkit.execution.summary import notify
from tests.support.chat_server import Refused, serving
from tests.support.command_line import batchkit
from tests.support.dry_runs import (
    RUN,
    job,
    manifest,
    n_records,
    prepare,
    process,
    records,
    rows_that_fail,
    run,
    write_job,
    write_rows,
)
from tests.support.images import PNG
from tests.support.server_runs import answering, said
from tests.support.server_runs import write_job as write_server_job
from tests.support.waiting import until

pytestmark = pytest.mark.usefixtures("in_an_empty_folder")


def test_failures_are_listed_by_kind_with_an_example() -> None:
    write_rows([{"q": "x"}, {"other": 1}, {"q": "x"}, {"q": 5}, {"other": 3}])
    write_job(prompt={"user": "{{ q }}", "images": ["{{ q }}.png"]}, media={"root": "."})
    Path("x.png").write_bytes(PNG)
    found = run()
    assert found.json["failed_by_kind"] == {"template": 2, "media": 1}
    said = [line.removeprefix("batchkit: ") for line in found.stderr.splitlines()]
    assert (
        "failed by template: 2, for example row 1 (id 1): 'q' is undefined; the row has other"
        in said
    )
    assert any(
        line.startswith("failed by media: 1, for example row 3 (id 3): 5.png: no") for line in said
    )
    assert "rows failed by template, media would fail again" in found.stderr
    assert "retry-failed" not in found.stderr
    assert f"batchkit show --failed {RUN.absolute()}" in found.stderr


def test_a_shard_without_rows_is_no_mistake() -> None:
    write_rows(1)
    write_job()
    shards = [run("--shard", f"{number}/2") for number in range(2)]
    assert sorted("in.jsonl has no rows" in ended.stderr for ended in shards) == [False, True]
    assert [ended.exit_code for ended in shards] == [0, 0]


def test_failures_of_all_starts_are_listed() -> None:
    write_rows([{"q": "x"}, {"other": 1}, {"q": "x"}])
    write_job()
    good = run("--limit", "1")
    assert good.json["failed_by_kind"] == {}
    assert "failed by" not in good.stderr
    assert "show --failed" not in good.stderr
    for args in (["--limit", "2"], []):
        assert (
            "failed by template: 1, for example row 1 (id 1): 'q' is undefined" in run(*args).stderr
        )


def test_a_long_message_is_cut_and_a_control_character_shown() -> None:
    write_rows([{"a\x1b[31m" + "b" * 900: 1}, {"q": "x"}])
    write_job()
    (line,) = (line for line in run().stderr.splitlines() if "failed by template: " in line)
    assert "a\\u001b[31mb" in line
    assert len(line) < 700


def ended(answers: list[Any], temperature: float, *args: str) -> str:
    with serving(answering(answers)) as server:
        write_server_job(
            server,
            len(answers),
            output={"parse": "json"},
            sampling={"temperature": temperature},
            retry={"attempts": 1},
        )
        for command in [("run", "job.toml"), *([args] if args else [])]:
            found = batchkit(*command)
            assert found.exit_code == 3, found.stderr
    return found.stderr


@pytest.mark.parametrize(("temperature", "is_advised"), [(0.0, False), (0.7, True)])
def test_a_retry_is_advised_where_another_answer_may_come(
    temperature: float, is_advised: bool
) -> None:
    stderr = ended([said("{}"), said("oh")], temperature)
    assert "failed by invalid_output: 1, for example row 1 (id 1): the answer is not JSON" in stderr
    assert (f"next: batchkit retry-failed {RUN.absolute()}" in stderr) == is_advised
    assert ("would fail again" in stderr) == (not is_advised)


def test_a_retry_is_advised_for_those_kinds_alone() -> None:
    broken = Refused(400, {"error": {"message": "bad row", "type": "BadRequestError"}})
    stderr = ended([said("{}"), said("oh"), broken], 0.7)
    assert f"next: batchkit retry-failed --kind invalid_output {RUN.absolute()}" in stderr
    assert "rows failed by invalid_request would fail again" in stderr


def test_a_retry_that_was_just_made_is_not_advised_again() -> None:
    stderr = ended([said("{}"), said("oh")], 0.7, "retry-failed", str(RUN))
    assert "failed by invalid_output" in stderr
    assert "next:" not in stderr


def test_from_python_the_failures_are_in_the_summary() -> None:
    summary = process([{"other": 1}, {"prompt": "x"}])
    (failure,) = summary.failures
    assert (failure.kind, failure.rows, failure.index) == ("template", 1, 0)
    assert dict(summary.failed_by_kind) == {"template": 1}


def test_run_writes_what_the_contract_promises() -> None:
    write_rows([{"q": "question 0"}, *[{"q": "x"}] * 7, *[{"other": "x"}] * 2])
    write_job()
    found = run("--set", "sampling.temperature=0.5", "--limit", "9")
    counts = {"total": 9, "ok": 8, "failed": 1, "skipped": 0, "retried": 0, "exit": 3}
    assert found.json | counts == found.json
    assert found.json.keys() >= {"seconds", "rows_per_s", "completion_tokens_per_s"}
    names = {path.name for path in RUN.iterdir() if path.name != ".lock"}
    logs = {"results.jsonl", "starts.jsonl", "metrics.jsonl", "run.log"}
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


def test_kept_fields_are_copied_to_the_record() -> None:
    rows = [{"q": "x", "kind": "Fact", "n": 3, "deep": {"a": [1, None]}}, {"q": "y"}, {"kind": "z"}]
    write_rows(rows)
    write_job(output={"keep": ["kind", "n", "deep"]})
    run()
    kept = {record["index"]: record["fields"] for record in records()}
    assert kept[0] == {"kind": "Fact", "n": 3, "deep": {"a": [1, None]}}
    assert kept[1] == {"kind": None, "n": None, "deep": None}
    assert kept[2] == {"kind": "z", "n": None, "deep": None}  # a failed row keeps them too


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


HEARD = Path("heard.json")
KEEP = "tee heard.json"


def heard() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(HEARD.read_text())
    HEARD.unlink()
    return found


def test_the_command_gets_the_last_line_of_the_run() -> None:
    prepare(3)
    found = run("--notify", KEEP)
    assert found.exit_code == 0
    assert heard() == found.json


def test_it_is_told_of_a_stop_and_of_failed_rows() -> None:
    prepare(6, run={"on_end": KEEP, "max_in_flight": 1}, budget={"max_completion_tokens": 6})
    assert run().exit_code == 1
    told = heard()
    assert (told["exit"], told["ok"], told["stopped_by"]) == (
        1,
        1,
        "budget.max_completion_tokens = 6",
    )
    rows_that_fail(6, every=3)
    write_job(run={"on_end": ["tee", "heard.json"]})
    assert run("--fresh").exit_code == 3
    assert (heard()["exit"], HEARD.exists()) == (3, False)
    assert batchkit("retry-failed", str(RUN), "--notify", "tee 'heard.json'").exit_code == 3
    assert heard()["failed"] == 2


def test_it_is_told_of_an_error_that_stops_the_run() -> None:
    rows_that_fail(4, every=2)
    write_job(run={"on_end": KEEP, "fail_on_error": True, "check_rows": 0})
    assert run().exit_code == 1
    assert heard()["exit"] == 1


@pytest.mark.parametrize("engine", [{"latency_s": 0.3}, {"latency_s": 600.0}])
def test_it_is_told_of_a_signal(start: Any, engine: dict[str, float]) -> None:
    prepare(40, engine={"options": engine}, run={"on_end": KEEP, "max_in_flight": 2})
    process = start("run", "job.toml")
    until(lambda: "generating" in Path("stderr-0").read_text())
    if engine["latency_s"] < 1:
        until(lambda: n_records() >= 2)
    process.send_signal(signal.SIGTERM)
    process.communicate()
    told = heard()
    assert (process.returncode, told["exit"], told["name"]) == (143, 143, "a")


def test_no_shell_reads_it_unless_one_is_named_and_it_changes_no_exit_code() -> None:
    prepare(2)
    run("--notify", "tee heard.json $HOME;false")
    assert Path("$HOME;false").is_file()
    heard()
    found = run("--notify", "sh -c 'cat > heard.json; exit 7'")
    assert (found.exit_code, heard()["ok"]) == (0, 2)
    assert "run.on_end: sh ended with exit code 7" in found.stderr
    found = run("--notify", "no-such-command --now")
    assert found.exit_code == 0
    assert "run.on_end: can't run no-such-command: No such file or directory" in found.stderr


def test_a_command_that_hangs_is_ended() -> None:
    said: list[str] = []
    notify("sleep 600", {}, said.append, timeout_s=0.2)
    assert said == ["run.on_end: sleep was stopped after 0.2 s"]


def test_what_it_prints_is_no_result(start: Any) -> None:
    prepare(2)
    process = start("run", "job.toml", "--notify", "echo told")
    stdout, _ = process.communicate()
    assert len(stdout.splitlines()) == 1
    assert "told" in Path("stderr-0").read_text().splitlines()


@pytest.mark.parametrize("command", ["echo 'half", "", " ", [], "cat > x", "a && b", "a | b"])
def test_a_command_without_words_is_refused(command: Any) -> None:
    prepare(2, run={"on_end": command})
    found = run()
    assert found.exit_code == 2
    assert "run.on_end" in found.stderr
    assert not RUN.exists()


def test_runs_from_python_notify_too() -> None:
    summary = ProductionBatchProcessor(job(run={"on_end": KEEP}), quiet=True).process(["x"])
    assert heard() == json.loads(json.dumps(summary.to_json()))
