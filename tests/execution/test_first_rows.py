"""Before the model is loaded: a job whose first rows all fail alike is wrong, and stops at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.dry_runs import (
    LOG,
    manifest,
    process,
    records,
    run,
    settled,
    write_job,
    write_rows,
)
from tests.support.images import PNG

pytestmark = pytest.mark.usefixtures("in_an_empty_folder")
NO_MODEL = {"kind": "vllm", "model": "no-such-folder/no-such-model"}  # loading it would exit with 1


def write_files(n: int, first: int = 0) -> None:
    write_rows([{"file": f"{k}.png", "q": "x"} for k in range(n)])
    for k in range(first, n):
        Path(f"{k}.png").write_bytes(PNG)


def test_a_misspelt_name_stops_the_run_before_the_model_is_loaded() -> None:
    write_rows(20)
    write_job(prompt={"user": "{{ qu }}"}, engine=NO_MODEL)
    found = run()
    assert found.exit_code == 2
    assert "All of the first 20 rows fail like this" in found.stderr
    assert "template: 'qu' is undefined; the row has key, q; did you mean 'q'?" in found.stderr
    assert "loading model" not in found.stderr
    assert not records()
    assert manifest()["starts"][-1]["exit"] == 2


def test_the_corrected_job_runs_by_the_same_command() -> None:
    write_rows(30)
    write_job(prompt={"user": "{{ qu }}"})
    assert run().exit_code == 2
    write_job()
    found = run()
    assert (found.exit_code, found.json["ok"]) == (0, 30)


def test_files_that_are_all_missing_are_one_reason() -> None:
    write_files(25, first=25)
    write_job(prompt={"images": ["{{ file }}"]}, media={"root": "."})
    found = run()
    assert found.exit_code == 2
    assert "row 0 (id 0): media: 0.png: no such file under media.root" in found.stderr


def test_lines_that_are_all_broken_are_one_reason() -> None:
    Path("in.jsonl").write_text("not JSON\n" * 20)
    write_job()
    found = run()
    assert found.exit_code == 2
    assert "invalid_request: " in found.stderr


@pytest.mark.parametrize("good", [0, 7, 19])
def test_one_good_row_is_enough(good: int) -> None:
    write_rows([{"q": "x"} if k == good else {"other": "x"} for k in range(40)])
    write_job()
    found = run()
    assert (found.exit_code, found.json["failed"]) == (3, 39)


def test_rows_that_fail_for_two_reasons_fail_alone() -> None:
    write_rows([{"q": 0 if k == 5 else None} for k in range(30)])
    write_job(prompt={"user": "{{ 1 // q }}"})
    found = run()
    assert (found.exit_code, found.json["failed_by_kind"]) == (3, {"template": 30})
    assert len({record["error"]["message"] for record in records()}) == 2


def test_fewer_rows_fail_alone() -> None:
    write_rows([{"other": "x"}] * 19)
    write_job()
    assert run().exit_code == 3


def test_the_check_can_be_left_out() -> None:
    write_rows([{"other": "x"}] * 30)
    write_job()
    found = run("--set", "run.check_rows=0")
    assert (found.exit_code, len(settled())) == (3, 30)


def test_a_run_with_answers_goes_on() -> None:
    write_files(40)
    write_job(prompt={"images": ["{{ file }}"]}, media={"root": "."})
    assert run("--limit", "10").exit_code == 0
    for k in range(10, 40):
        Path(f"{k}.png").unlink()
    found = run()
    assert (found.exit_code, found.json["failed"]) == (3, 30)


def test_no_row_is_lost_or_run_twice_by_the_look_at_them() -> None:
    write_rows([{"other": "x"} if k < 12 else {"q": f"{k}"} for k in range(50)])
    write_job()
    assert run().exit_code == 3
    assert LOG.read_bytes().count(b"\n") == len(settled()) == 50


def test_an_iterator_is_not_read_ahead() -> None:
    taken: list[int] = []

    def rows() -> Any:
        for n in range(30):
            taken.append(n)
            yield {"other": n}

    assert process(rows()).failed == 30


def test_rows_of_a_program_are_looked_at() -> None:
    from batchkit.errors import JobError

    with pytest.raises(JobError, match="All of the first 20 rows"):
        process([{"other": n} for n in range(30)])
