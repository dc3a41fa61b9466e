"""``batchkit show``: rows with prompt, images, answer and error; ``status --watch``."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from batchkit.storage.lines import answers_in_words
from tests.support.command_line import batchkit
from tests.support.dry_runs import RUN, finished, prepare, process, run, write_job, write_rows
from tests.support.images import png
from tests.support.own_process import begin
from tests.support.waiting import until

pytestmark = [pytest.mark.usefixtures("in_an_empty_folder"), pytest.mark.slow]


def run_with_pictures(n: int = 8) -> None:
    """Row 1 lacks the template's field, row 2 its picture."""
    rows = [{"key": f"k{k}", "q": f"question {k}", "file": f"{k}.png"} for k in range(n)]
    del rows[1]["q"]
    write_rows(rows)
    for k in range(n):
        if k != 2:
            Path(f"{k}.png").write_bytes(png(size=(40, 20)))
    write_job(
        input={"id": "key"},
        prompt={"system": "Be brief.", "user": "{{ q }}", "images": ["{{ file }}"]},
        media={"root": "."},
    )
    assert run().exit_code == 3


def test_rows_are_shown_with_prompt_answer_and_error() -> None:
    """The first five, all that failed, by id, or a number of them; as text or as JSON."""
    run_with_pictures()
    found = batchkit("show").ok()
    first, second, *_ = found.stdout.split("--- ")[1:]
    assert first.splitlines() == [
        "row 0 (id k0), ok",
        "image 0.png, 40 × 20",
        "system: Be brief.",
        "user: [image]question 0",
        "→ dry-run: no model answered row 0",
        "(6 prompt tokens, 6 completion tokens, finish_reason stop, attempt 1)",
    ]
    assert second.splitlines()[:1] == ["row 1 (id k1), failed"]
    assert "file = '1.png'" in second  # its fields, since it has no prompt
    assert "error template: 'q' is undefined; the row has key, file" in second
    assert found.stdout.count("--- ") == 5
    found = batchkit("show", "--failed", RUN)
    assert re.findall(r"^--- .*", found.stdout, re.MULTILINE) == [
        "--- row 1 (id k1), failed",
        "--- row 2 (id k2), failed",
    ]
    assert "image 2.png: no such file under media.root" in found.stdout
    assert "error media: 2.png: no such file" in found.stdout
    by_id = batchkit("show", "--id", "k6", "--id", "k3").stdout
    assert re.findall(r"id (k\d)", by_id) == ["k3", "k6"]
    assert batchkit("show", "-n", "2").stdout.count("--- ") == 2
    found = batchkit("show", "--id", "k3", "--id", "k9")
    assert (found.exit_code, found.stdout) == (2, "")
    assert "no record with the id k9" in found.stderr
    found = json.loads(batchkit("show", "--json", "-n", "3").stdout)
    first, _, third = found["rows"]
    assert first["prompt"] == "system: Be brief.\nuser: [image]question 0"
    assert first["images"] == [{"name": "0.png", "width": 40, "height": 20}]
    assert (first["text"], first["id"]) == ("dry-run: no model answered row 0", "k0")
    assert third["images"][0]["problem"].startswith("2.png: no such file")


def test_rows_are_shown_when_the_input_is_gone_or_came_from_a_program() -> None:
    finished(3, output={"keep": ["q"]})
    found = batchkit("show", "--failed")
    assert (found.exit_code, found.stdout) == (0, "")
    assert "no row failed" in found.stderr
    Path("in.jsonl").unlink()
    found = batchkit("show", "-n", "1")
    assert "q = 'question 0'" in found.stdout
    assert "→ dry-run: no model answered row 0" in found.stdout
    assert "in.jsonl" in found.stderr
    process(["tea?"], fresh=True)
    assert "the rows came from Python" in batchkit("show").stderr


def test_watch_shows_the_state_until_the_run_has_ended() -> None:
    prepare(40, engine={"options": {"latency_s": 0.1, "max_num_seqs": 1}}, run={"max_in_flight": 1})
    with begin("run", "job.toml", cwd=Path.cwd()) as running:
        until(lambda: (RUN / "results.jsonl").exists() and (RUN / "results.jsonl").stat().st_size)
        shown = begin("status", str(RUN), "--watch", cwd=Path.cwd())
        with begin("status", str(RUN), "--watch", "--json", cwd=Path.cwd()) as watching:
            stdout, stderr = watching.communicate(timeout=120)
        bar, *_ = shown.communicate(timeout=120)[0].splitlines()
        running.communicate(timeout=120)
    assert watching.returncode == 0, stderr
    assert re.fullmatch("▕[█▏▎▍▌▋▊▉ ]{40}▏ [0-9]+ %(, .* left)?", bar)
    states = [json.loads(line) for line in stdout.splitlines()]
    assert len(states) > 1
    assert states[0]["held_by"] is not None
    assert (states[-1]["ok"], states[-1]["held_by"]) == (40, None)
    assert states[0]["ok"] < 40


CALL = {"function": {"name": "f", "arguments": '{"x": 1}'}}


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({"label": "good", "probabilities": [0.25, 0.75]}, ["good (0.75)"]),
        ({"score": 0.123456}, ["0.1235"]),
        ({"score": [0.1, 0.9], "order": [1, 0]}, ["document 1: 0.9, document 0: 0.1"]),
        ({"embedding": {"dimensions": 1024}}, ["embedding of 1,024 dimensions"]),
        ({"text": "a"}, ["a"]),
        ({"text": "a", "choices": [{"text": "a"}, {"text": "b"}]}, ["a", "b"]),
        ({"text": "", "tool_calls": [CALL]}, ['f({"x": 1})']),
        ({"text": None}, [""]),
    ],
)
def test_an_answer_in_words(record: dict[str, Any], expected: list[str]) -> None:
    assert answers_in_words(record) == expected


def test_the_best_of_many_documents_are_named() -> None:
    scores = [n / 1000 for n in range(1000)]
    (found,) = answers_in_words({"score": scores, "order": [*range(999, -1, -1)]})
    assert found.startswith("document 999: 0.999, ")
    assert found.endswith(", … and 980 more")
