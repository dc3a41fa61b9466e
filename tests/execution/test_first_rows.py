"""Before the model is loaded: a job whose first rows all fail alike is wrong, and stops at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from batchkit.errors import JobError
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


FIELD = {"user": "{{ qu }}"}
FILES = [{"file": f"{n}.png", "q": "x"} for n in range(25)]
OF_FILES = {"prompt": {"images": ["{{ file }}"]}, "media": {"root": "."}}


@pytest.mark.parametrize(
    ("rows", "tables", "message"),
    [
        (
            [{"key": f"k{n}", "q": "x"} for n in range(20)],
            {"prompt": FIELD, "engine": NO_MODEL},
            "template: 'qu' is undefined; the row has key, q; did you mean 'q'?",
        ),
        (FILES, OF_FILES, "row 0 (id 0): media: 0.png: no such file under media.root"),
        ("not JSON\n" * 20, {}, "invalid_request: "),
    ],
    ids=["misspelt name", "missing files", "broken lines"],
)
def test_a_job_whose_first_rows_fail_alike_stops_before_the_model_is_loaded(
    rows: list[dict[str, Any]] | str, tables: dict[str, Any], message: str
) -> None:
    if isinstance(rows, str):
        Path("in.jsonl").write_text(rows)
    else:
        write_rows(rows)
    write_job(**tables)
    found = run()
    assert found.exit_code == 2
    assert "All of the first 20 rows fail like this" in found.stderr
    assert message in found.stderr
    assert "loading model" not in found.stderr
    assert not records()
    assert manifest()["starts"][-1]["exit"] == 2
    if "prompt" in tables and not isinstance(rows, str):
        write_job()  # the corrected job runs by the same command
        found = run()
        assert (found.exit_code, found.json["ok"]) == (0, len(rows))


def rows_of(n: int, *good: int) -> list[dict[str, Any]]:
    return [{"q": f"{k}"} if k in good else {"other": "x"} for k in range(n)]


@pytest.mark.parametrize(
    ("rows", "prompt", "failed"),
    [
        (rows_of(40, 0), "{{ q }}", 39),
        (rows_of(40, 7), "{{ q }}", 39),
        (rows_of(50, *range(12, 50)), "{{ q }}", 12),
        (rows_of(40, 19), "{{ q }}", 39),
        ([{"q": 0 if k == 5 else None} for k in range(30)], "{{ 1 // q }}", 30),
        (rows_of(2), "{{ q }}", 2),
    ],
    ids=["first is good", "8th is", "13th is", "20th is", "two reasons", "fewer rows"],
)
def test_rows_fail_alone_if_one_of_the_first_is_good_or_fails_otherwise(
    rows: list[dict[str, Any]], prompt: str, failed: int
) -> None:
    write_rows(rows)
    write_job(prompt={"user": prompt})
    found = run()
    assert (found.exit_code, found.json["failed"]) == (3, failed)
    assert LOG.read_bytes().count(b"\n") == len(settled()) == len(rows), "none is lost or run twice"


def test_the_check_can_be_left_out() -> None:
    write_rows(rows_of(30))
    write_job()
    found = run("--set", "run.check_rows=0")
    assert (found.exit_code, len(settled())) == (3, 30)


def test_a_run_with_answers_goes_on() -> None:
    write_rows(FILES)
    write_job(**OF_FILES)
    for n in range(3):
        Path(f"{n}.png").write_bytes(PNG)
    assert run("--limit", "3").exit_code == 0
    found = run()
    assert (found.exit_code, found.json["failed"]) == (3, 22)


def test_rows_of_a_program_are_looked_at_but_an_iterator_is_not_read_ahead() -> None:
    rows = rows_of(30)
    for given in (rows, rows[:3], iter(rows)):
        with pytest.raises(JobError, match=r"All of the first \d+ rows"):
            process(given)
