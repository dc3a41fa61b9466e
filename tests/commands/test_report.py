"""``report``: what is in the file, whatever became of the run, its input and its images."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchkit.commands.report import MAX_FAILED, MAX_ROWS, report
from batchkit.commands.view.figures import histogram
from batchkit.commands.view.media import MAX_PICTURE_BYTES
from batchkit.commands.view.overview import timeline
from batchkit.errors import StoreError
from batchkit.storage.metrics import Metrics
from tests.support.command_line import batchkit
from tests.support.made_runs import draw_tables, failure, make_run, rows
from tests.support.pages import data_in
from tests.support.view_server import viewing

pytestmark = pytest.mark.slow

HOSTILE = (
    "<script>window.hacked=1</script><img src=x onerror='window.hacked=2'></script><!-- \u2028"
    ' "><svg onload=alert(1)> javascript:alert(1) {{ 7 * 7 }} [Final Answer]: <b>value</b>'
)
CALL = {"id": "a", "function": {"name": "clock", "arguments": '{"zone": "UTC"}'}}
NO_IMAGES: dict[str, Any] = {"prompt": {"images": []}}


def right(index: int, row: Mapping[str, Any]) -> str:
    return f"[Final Answer]: {row['FinalAnswer']}"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first row calls a function; the second is hostile; the third failed; every fourth row has
    no image."""
    place = tmp_path_factory.mktemp("report")
    draw_tables(place / "image", 3)

    def answer(index: int, row: Mapping[str, Any]) -> Any:
        called = {"text": "", "tool_calls": [CALL], "reasoning": "It is <b>late</b>."}
        return {0: called, 1: HOSTILE, 2: failure("timeout")}.get(index) or right(index, row)

    return make_run(place, rows(12, 4), answer)


@pytest.fixture(scope="module")
def page(run: Path) -> Path:
    return report(run).path


@pytest.fixture(scope="module")
def data(page: Path) -> Any:
    return data_in(page)


def test_a_page_refers_to_nothing_outside_itself(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    head = text[: text.index('<script type="application/json"')]
    assert not re.search(r"""(?:src|href)=(?!["']?(?:#|data:,|/"))""", head)
    assert not re.search(r"@import|url\(|https?://", head)


def test_policy_allows_exactly_the_page_s_own_script_and_style(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text)
    assert policy
    for tag, opening in (("style", "<style>"), ("script", '<script type="module">')):
        body = re.search(f"{opening}(.*?)</{tag}>", text, re.DOTALL)
        assert body
        digest = base64.b64encode(hashlib.sha256(body[1].encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in html.unescape(policy[1])
    assert "default-src" in policy[1]
    assert "unsafe" not in policy[1]


def test_model_output_is_in_the_page_as_data_only(page: Path, data: Any) -> None:
    text = page.read_text(encoding="utf-8")
    assert "window.hacked" in text
    for opening in ("<script>window", "<img src=x", "<svg onload", "<b>value", "<!-- "):
        assert opening not in text
    called, hostile, *_ = data["rows"]
    assert hostile["record"]["text"] == HOSTILE
    assert called["answers"] == ['clock({"zone": "UTC"})']
    assert called["record"]["reasoning"] == "It is <b>late</b>."


def test_the_file_holds_what_the_server_answers(run: Path, data: Any) -> None:
    with viewing(run, cwd=run.parent) as view:
        assert data["about"] == view.get("runs/tables/about")
        assert data["metrics"] == view.get("runs/tables/metrics")
        status = view.get("runs/tables")
        assert {*status.pop("newest")} == {*data["metrics"]}
        rows = [view.get(f"runs/tables/rows/{row}") for row in range(12)]
        listed = view.rows("tables")["rows"]
    own = {"folder", "notes", "scores"}  # the file's scores are exact, and say why a row has none
    assert {**data["status"], **{name: status[name] for name in own}} == status
    assert data["status"]["scores"]["overall"]["n"] == status["scores"]["overall"]["n"]
    assert data["status"]["notes"][: len(status["notes"])] == status["notes"]
    for held, row, line in zip(data["rows"], rows, listed, strict=True):
        assert held["record"].items() <= row["record"].items()
        for name in ("kind", "group", "reference", "fields"):
            assert held[name] == row[name]
        assert held["prompt"]["messages"] == row["prompt"]["messages"]
        assert held["asked"] == line["asked"] == f"What is cell {line['index']} of the table?"


def test_the_rate_of_a_slow_run_is_not_0() -> None:
    lines = [
        Metrics(at="", start=1, seconds=7000.0 * n, rows_ok=n, rows_failed=0) for n in range(2)
    ]
    assert timeline(lines)["rows_per_s"] == [None, pytest.approx(1 / 7000, rel=1e-5)]


def test_each_image_is_embedded_once_and_small(data: Any) -> None:
    pictures = data["pictures"]
    assert [picture["name"] for picture in pictures] == [f"table{n}.png" for n in range(4)]
    for picture in pictures[:3]:
        content = base64.b64decode(picture["src"].removeprefix("data:image/webp;base64,"))
        assert len(content) <= MAX_PICTURE_BYTES
    assert "src" not in pictures[3]
    assert "table3.png" in pictures[3]["problem"]
    shown = {row["record"]["id"]: row["prompt"]["images"] for row in data["rows"]}
    assert (shown["q0"], shown["q4"], shown["q5"]) == ([0], [0], [1])
    assert "1 of 4 images are not shown" in data["status"]["notes"][-1]


def test_images_can_be_left_out(run: Path, tmp_path: Path) -> None:
    data = data_in(report(run, tmp_path / "deep" / "r.html", images=False).path)
    assert (data["pictures"], len(data["rows"])) == ([], 12)


@pytest.mark.parametrize("change", ["gone", "other rows"])
def test_an_input_that_is_not_what_it_was(tmp_path: Path, change: str) -> None:
    draw_tables(tmp_path / "image", 1)
    run, path = make_run(tmp_path, rows(3, 1), right), tmp_path / "qa.json"
    if change == "gone":
        path.unlink()
    else:
        other = [{**row, "id": f"x{row['id']}"} for row in rows(3, 1)]
        path.write_text(json.dumps({"queries": other}), encoding="utf-8")
    data = data_in(report(run).path)
    note = data["status"]["notes"][-1]
    assert note.startswith(
        "For rows whose input can't be read or has changed, only the kept fields are shown"
    )
    assert ("xq0" in note) == (change == "other rows")
    row = data["rows"][2]
    assert row["fields"]["Question"] == "What is cell 2 of the table?"
    assert row["prompt"]["images"] == []
    assert "qa.json" in row["prompt"]["error"]


def test_large_run_shows_a_sample_and_counts_everything(tmp_path: Path) -> None:
    run = make_run(tmp_path, rows(1, 1), right, **NO_IMAGES)
    (line,) = (run / "results.jsonl").read_text(encoding="utf-8").splitlines()[-1:]
    record = json.loads(line)
    n, n_failed = MAX_ROWS + 600, 300
    with (run / "results.jsonl").open("w", encoding="utf-8") as file:
        for index in range(n):
            failed = failure("oom") if index % (n // n_failed) == 0 else {}
            file.write(json.dumps({**record, "index": index, "id": str(index), **failed}) + "\n")
    (run / "checkpoint.json").unlink()  # it was of the rows that were run
    data = data_in(report(run).path)
    failed = sum(row["record"]["status"] == "failed" for row in data["rows"])
    assert len(data["rows"]) == MAX_ROWS
    assert n_failed <= failed <= MAX_FAILED
    (note,) = [note for note in data["status"]["notes"] if "The list below" in note]
    assert f"holds {MAX_ROWS:,} of {n:,} rows: all {failed:,} failed ones and a random" in note
    assert data["status"]["ok"] + data["status"]["failed"] == n
    left_out = {*range(n)} - {row["record"]["index"] for row in data["rows"]}
    assert sorted(left_out)[:3] == [24, 34, 58], "seeded"


def test_long_texts_are_cut_in_the_middle(tmp_path: Path) -> None:
    run = make_run(tmp_path, rows(400, 1), lambda *_: "x" * 60_000, **NO_IMAGES)
    data = data_in(report(run).path)
    assert "Answers longer than 36,700 characters are cut in the middle." in data["status"]["notes"]
    text = data["rows"][0]["record"]["text"]
    assert "[… 23,300 characters left out …]" in text
    assert (run / "report.html").stat().st_size < 40 * 2**20


@pytest.mark.parametrize(
    ("scoring", "answer", "note"),
    [
        ({"extract": "text", "reference": "", "scorers": []}, None, "Nothing is scored"),
        ({}, failure("timeout"), "No answer has a score"),
    ],
    ids=["no scoring", "no score"],
)
def test_a_run_without_scores_says_so(tmp_path: Path, scoring: Any, answer: Any, note: str) -> None:
    run = make_run(tmp_path, rows(4, 1), lambda *_: answer, scoring=scoring, **NO_IMAGES)
    status = data_in(report(run).path)["status"]
    assert any(note in one for one in status["notes"])
    assert status["scorers"] == []
    assert status["scores"]["scored"] == 0
    assert len(status["groups"]) == 3


def test_row_that_json_cannot_hold_is_still_shown(tmp_path: Path) -> None:
    odd = {**rows(1, 1)[0], "share": float("nan"), "picture": b"\xff", "day": date(2026, 11, 23)}
    pq.write_table(pa.Table.from_pylist([odd]), tmp_path / "odd.parquet")
    source = {"path": str(tmp_path / "odd.parquet"), "records": ""}
    tables = {"input": source, "prompt": {"images": []}, "output": {"keep": []}}
    run = make_run(tmp_path, [odd | {"picture": "", "day": ""}], right, **tables)
    fields = data_in(report(run).path)["rows"][0]["fields"]
    assert fields["Question"] == odd["Question"]
    assert fields["picture"] == "(1 bytes)"
    assert "2026-11-23" in str(fields["day"])


@pytest.mark.parametrize(
    "values",
    [
        *([32] * 5, [28, 32, 32], [0, 0, 1], range(1, 13), range(900, 950), [5, 1000]),
        *([10**8, 10**9], [0.5, 0.75, 1.25], [1e-9, 3e-9], [1.5] * 3),
        [*range(1, 1000), 1_000_000],
    ],
    ids=str,
)
def test_bins_have_readable_edges_and_count_every_row(values: Sequence[float]) -> None:
    found = histogram(*np.unique(np.array(values, np.float64), return_counts=True))
    low, top, counts = found["low"], found["top"], found["counts"]
    width = (top - low) / len(counts)
    assert sum(counts) == len(values)
    assert len(counts) % 4 == 0
    assert len(counts) <= 40
    assert f"{width:.6e}"[0] in "125"
    assert low <= min(values)
    assert found["overflow"] == sum(value >= top for value in values)
    assert [found["median"], found["p99"]] == pytest.approx(np.percentile(values, (50, 99)))
    assert not found["overflow"] or top > found["p99"]
    if found["is_whole"]:
        assert width == pytest.approx(round(width))


def test_a_page_is_never_written_over_a_log_nor_made_of_another_folder(
    run: Path, tmp_path: Path
) -> None:
    before = {path.name: path.read_bytes() for path in run.iterdir() if path.is_file()}
    for path in (run / "results.jsonl", run / "manifest.json", tmp_path / "page.txt"):
        for command in (["report", run], ["compare", run, run]):
            assert "a report is a web page" in batchkit(*command, "--output", path).refused(1)
    assert {path.name: path.read_bytes() for path in run.iterdir() if path.is_file()} == before
    with pytest.raises(StoreError, match="not a run folder"):
        report(tmp_path)
