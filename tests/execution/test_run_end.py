"""How a run ends: its failures by kind, each with an example, and only advice that can help."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.chat_server import Refused, serving
from tests.support.command_line import batchkit
from tests.support.dry_runs import RUN, process, run, write_job, write_rows
from tests.support.images import PNG
from tests.support.server_runs import answering, said
from tests.support.server_runs import write_job as write_server_job

pytestmark = pytest.mark.usefixtures("in_an_empty_folder")


def test_failures_are_listed_by_kind_with_an_example() -> None:
    write_rows([{"q": "x"}, {"other": 1}, {"q": "x"}, {"q": 5}, {"other": 3}])
    write_job(prompt={"user": "{{ q }}", "images": ["{{ q }}.png"]}, media={"root": "."})
    Path("x.png").write_bytes(PNG)
    found = run()
    assert found.json["failed_by_kind"] == {"template": 2, "media": 1}
    said = [line.removeprefix("batchkit: ") for line in found.stderr.splitlines()]
    assert "failed by template: 2, as row 1 (id 1): 'q' is undefined; the row has other" in said
    assert any(line.startswith("failed by media: 1, as row 3 (id 3): 5.png: no") for line in said)
    assert "rows failed by template, media would fail again" in found.stderr
    assert "retry-failed" not in found.stderr
    assert f"batchkit show --failed {RUN.absolute()}" in found.stderr


def test_an_input_without_rows_is_named() -> None:
    """It ends as a run whose rows are all done, and a mistyped filter would look like one."""
    write_rows(1)
    write_job(input={"where": {"key": ["K0", "K1"]}})
    ended = run()
    assert "in.jsonl: no row has what input.where asks for: key = ['K0', 'K1']" in ended.stderr
    assert (ended.exit_code, ended.json["total"], ended.json["ok"]) == (0, 0, 0)
    assert "every row has a record" not in ended.stderr
    assert "loading" not in ended.stderr
    Path("in.csv").write_text("q\n")
    write_job(name="b", input={"path": "in.csv"})
    assert "in.csv: has no rows" in run().stderr
    write_job(name="c")
    shards = [run("--shard", f"{number}/2").stderr for number in range(2)]
    assert sum("in.jsonl has no rows" in said for said in shards) == 1


def test_failures_of_all_starts_are_listed() -> None:
    write_rows([{"q": "x"}, {"other": 1}, {"q": "x"}])
    write_job()
    good = run("--limit", "1")
    assert good.json["failed_by_kind"] == {}
    assert "failed by" not in good.stderr
    assert "show --failed" not in good.stderr
    for args in (["--limit", "2"], []):
        assert "failed by template: 1, as row 1 (id 1): 'q' is undefined" in run(*args).stderr


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
    assert "failed by invalid_output: 1, as row 1 (id 1): the answer is not JSON" in stderr
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
