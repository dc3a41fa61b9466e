"""``write_report``: what is in the file, whatever became of the run, its input and its images."""

from __future__ import annotations

import base64
import hashlib
import html
import io
import json
import re
import subprocess
import sys
import zipfile
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from batchkit.commands.report import write_report
from batchkit.commands.report.figures import histogram, timeline
from batchkit.commands.report.pictures import MAX_PICTURE_BYTES
from batchkit.commands.report.rows import MAX_FAILED, MAX_ROWS
from batchkit.errors import StoreError
from tests.support.command_line import batchkit
from tests.support.made_runs import draw_tables, failure, make_run, rows
from tests.support.paths import ROOT
from tests.support.rows import read_jsonl, write_jsonl

HOSTILE = (
    "<script>window.hacked=1</script><img src=x onerror='window.hacked=2'></script><!-- \u2028"
    ' "><svg onload=alert(1)> javascript:alert(1) {{ 7 * 7 }} [Final Answer]: <b>value</b>'
)


def right(index: int, row: Mapping[str, Any]) -> str:
    return f"[Final Answer]: {row['FinalAnswer']}"


def embedded(page: str, name: str) -> Any:
    found = re.search(
        f'<script type="application/json" id="{name}">(.*?)</script>', page, re.DOTALL
    )
    assert found, name
    return json.loads(found[1])


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("report")
    draw_tables(place / "image", 3)
    table = rows(12, 4)  # every fourth row has no image

    def answer(index: int, row: Mapping[str, Any]) -> Any:
        return HOSTILE if index == 1 else failure("timeout") if index == 2 else right(index, row)

    return make_run(place, table, answer)


@pytest.fixture(scope="module")
def page(run: Path) -> str:
    return write_report(run).read_text(encoding="utf-8")


def test_page_refers_to_nothing_outside_itself(page: str) -> None:
    head = page[: page.index('<script type="application/json"')]
    assert not re.search(r"""(?:src|href)=(?!["']?#)""", head)
    assert not re.search(r"@import|url\(|https?://", head)


def test_policy_allows_exactly_the_page_s_own_script_and_style(page: str) -> None:
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)
    assert policy
    for tag in ("style", "script"):
        body = re.search(f"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        assert body
        digest = base64.b64encode(hashlib.sha256(body[1].encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in html.unescape(policy[1])
    assert "default-src" in policy[1]
    assert "unsafe" not in policy[1]


def test_model_output_is_in_the_page_as_data_only(page: str) -> None:
    assert "window.hacked" in page
    for opening in ("<script>window", "<img src=x", "<svg onload", "<b>value", "<!--"):
        assert opening not in page
    texts = [row.get("text") for row in embedded(page, "data")["rows"]]
    assert HOSTILE in texts


def test_tool_calls_are_shown_as_the_answer_and_reasoning_beside_it(tmp_path: Path) -> None:
    function = {"name": "look_up", "arguments": '{"cell": 3}'}
    call = {"id": "c", "type": "function", "function": function}

    def answer(index: int, row: Mapping[str, Any]) -> Mapping[str, Any]:
        return {"text": "", "tool_calls": [call], "reasoning": "It is <b>cell 3</b>."}

    draw_tables(tmp_path / "image", 1)
    run = make_run(tmp_path, rows(1, 1), answer)
    (row,) = embedded(write_report(run).read_text(encoding="utf-8"), "data")["rows"]
    assert (row["ok"], row["text"]) == (True, 'look_up({"cell": 3})')
    assert row["reasoning"] == "It is <b>cell 3</b>."


def test_each_image_is_embedded_once_and_small(page: str) -> None:
    pictures = embedded(page, "pictures")
    assert [picture["name"] for picture in pictures] == [f"table{n}.png" for n in range(4)]
    for picture in pictures[:3]:
        data = base64.b64decode(picture["src"].removeprefix("data:image/webp;base64,"))
        assert len(data) <= MAX_PICTURE_BYTES
    assert "src" not in pictures[3]
    assert "table3.png" in pictures[3]["problem"]
    shown = {row["id"]: row.get("images") for row in embedded(page, "data")["rows"]}
    assert (shown["q0"], shown["q4"], shown["q5"]) == ([0], [0], [1])


def test_images_can_be_left_out(run: Path, tmp_path: Path) -> None:
    page = write_report(run, tmp_path / "deep" / "r.html", images=False).read_text("utf-8")
    assert embedded(page, "pictures") == []
    assert len(embedded(page, "data")["rows"]) == 12


def test_question_reference_and_prediction_of_a_row(page: str) -> None:
    data = embedded(page, "data")
    assert data["fields"][data["question"]] == "Question"
    row = data["rows"][4]
    assert row["fields"][data["question"]] == "What is cell 4 of the table?"
    assert (row["reference"], row["prediction"]) == ("value 4", "value 4")
    assert row["scores"] == {"f1": 1.0, "em": 1.0}


def test_report_outlives_its_input_and_images(tmp_path: Path) -> None:
    draw_tables(tmp_path / "image", 1)
    run = make_run(tmp_path, rows(3, 1), right)
    (tmp_path / "qa.json").unlink()
    page = write_report(run).read_text(encoding="utf-8")
    assert "Where the input can&#39;t be read as it was" in page
    data = embedded(page, "data")
    kept = dict(zip(data["fields"], data["rows"][2]["fields"], strict=True))
    assert kept["Question"] == "What is cell 2 of the table?"


def test_changed_input_is_not_shown_as_the_row_s(tmp_path: Path) -> None:
    draw_tables(tmp_path / "image", 1)
    run = make_run(tmp_path, rows(3, 1), right)
    other = [{**row, "id": f"x{row['id']}"} for row in rows(3, 1)]
    (tmp_path / "qa.json").write_text(json.dumps({"queries": other}), encoding="utf-8")
    page = write_report(run).read_text(encoding="utf-8")
    assert "xq0" in page
    assert all(row.get("images") is None for row in embedded(page, "data")["rows"])


def test_chat_messages_of_a_row_show_their_text_and_images(tmp_path: Path) -> None:
    file = io.BytesIO()
    Image.new("RGB", (30, 20), "red").save(file, "PNG")
    uri = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
    link = {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}
    own = {"type": "image_url", "image_url": {"url": uri}}
    content = [own, {"type": "text", "text": "What colour?"}]
    chat = [{"role": "user", "content": content}]
    lines = [{"messages": chat}, {"messages": [{"role": "user", "content": [link]}]}]
    write_jsonl(tmp_path / "rows.jsonl", lines)
    job = '[input]\npath = "rows.jsonl"\n[engine]\nkind = "dry-run"\n[output]\ndir = "{}"\n'
    (tmp_path / "job.toml").write_text(job.format(tmp_path / "output"), encoding="utf-8")
    batchkit("run", tmp_path / "job.toml")
    page = write_report(tmp_path / "output" / "batch").read_text(encoding="utf-8")
    red, linked = embedded(page, "pictures")
    assert (red["w"], red["h"]) == (30, 20)
    assert "fetches nothing" in linked["problem"]
    data = embedded(page, "data")
    assert data["rows"][0]["fields"][data["question"]] == "user: [image]\nWhat colour?"


def test_chat_messages_of_a_row_show_their_tool_calls(tmp_path: Path) -> None:
    call = {"id": "a", "function": {"name": "clock", "arguments": '{"zone": "UTC"}'}}
    said = {"role": "assistant", "content": "One moment.", "tool_calls": [call]}
    silent = {"role": "assistant", "tool_calls": [call]}
    wrong = {"role": "assistant", "content": None, "tool_calls": ["clock"]}
    write_jsonl(tmp_path / "rows.jsonl", [{"messages": [said, silent]}, {"messages": [wrong]}])
    job = '[input]\npath = "rows.jsonl"\n[engine]\nkind = "dry-run"\n[output]\ndir = "{}"\n'
    (tmp_path / "job.toml").write_text(job.format(tmp_path / "output"), encoding="utf-8")
    batchkit("run", tmp_path / "job.toml")
    page = write_report(tmp_path / "output" / "batch").read_text(encoding="utf-8")
    data = embedded(page, "data")
    first, second = (row["fields"][data["question"]] for row in data["rows"])
    called = 'clock({"zone": "UTC"})'
    assert first == f"assistant: One moment.\n{called}\n\nassistant: {called}"
    assert second == 'assistant: ["clock"]'


def test_wheel_brings_the_page(tmp_path: Path) -> None:
    pytest.importorskip("hatchling.build", reason="needs hatchling")
    build = "import sys, hatchling.build as b; print(b.build_wheel(sys.argv[1]))"
    done = subprocess.run(
        [sys.executable, "-c", build, str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    page = (
        *("base.html.j2", "page.html.j2", "compare.html.j2"),
        *("elements.js", "page.js", "page.css"),
    )
    assert {f"batchkit/commands/report/{name}" for name in page} <= names


def test_image_past_pillow_s_bomb_limit_gets_its_thumbnail(tmp_path: Path) -> None:
    (tmp_path / "image").mkdir()
    Image.new("1", (18_000, 10_000), 1).save(tmp_path / "image" / "table0.png")
    run = make_run(tmp_path, rows(1, 1), right)
    (picture,) = embedded(write_report(run).read_text(encoding="utf-8"), "pictures")
    assert picture["w"] / picture["h"] == pytest.approx(1.8, rel=0.02)


def test_large_run_shows_a_sample_and_counts_everything(tmp_path: Path) -> None:
    run = make_run(tmp_path, rows(1, 1), right, prompt={"images": []})
    (line,) = (run / "results.jsonl").read_text(encoding="utf-8").splitlines()[-1:]
    record = json.loads(line)
    n, n_failed = MAX_ROWS + 600, 300
    with (run / "results.jsonl").open("w", encoding="utf-8") as file:
        for index in range(n):
            failed = failure("oom") if index % (n // n_failed) == 0 else {}
            file.write(json.dumps({**record, "index": index, "id": str(index), **failed}) + "\n")
    (run / "checkpoint.json").unlink()  # it was of the rows that were run
    page = write_report(run).read_text(encoding="utf-8")
    data = embedded(page, "data")
    failed = sum(not row["ok"] for row in data["rows"])
    assert len(data["rows"]) == MAX_ROWS
    assert n_failed <= failed <= MAX_FAILED
    assert f"The list below holds {MAX_ROWS:,} of {n:,} rows" in page
    assert f"all {failed:,} failed ones and a random sample" in page
    assert data["total"] == n
    again = write_report(run, tmp_path / "again.html").read_text(encoding="utf-8")
    assert embedded(again, "data")["rows"] == data["rows"]  # seeded


def test_run_without_scoring_has_no_score_table(tmp_path: Path) -> None:
    scoring = {"extract": "text", "reference": "", "scorers": [], "group_by": "QuestionType"}
    run = make_run(tmp_path, rows(4, 1), lambda *_: None, scoring=scoring, prompt={"images": []})
    page = write_report(run).read_text(encoding="utf-8")
    assert "Nothing is scored" in page
    assert embedded(page, "data")["scorers"] == []
    assert "Rows by QuestionType" in page


def test_run_of_which_no_row_has_a_score_has_no_score_table(tmp_path: Path) -> None:
    run = make_run(
        tmp_path,
        rows(4, 1),
        lambda *_: failure("timeout"),
        prompt={"images": []},
    )
    page = write_report(run).read_text(encoding="utf-8")
    assert "No answer has a score" in page
    assert ">Scores</h2>" not in page
    assert ">F1</th>" not in page
    assert "Rows by QuestionType" in page


def test_equal_numbers_are_one_bar_and_said_to_be_equal(tmp_path: Path) -> None:
    run = make_run(tmp_path, rows(6, 1), lambda *_: None, prompt={"images": []})
    page = write_report(run).read_text(encoding="utf-8")
    (tokens,) = {
        record["usage"]["completion_tokens"] for record in read_jsonl(run / "results.jsonl")
    }
    chart = page[page.index("Completion tokens") :].partition("</figure>")[0]
    assert f"<p>all {tokens}</p>" in chart
    assert chart.count('class="bar"') == 1
    assert f"<title>{tokens}: 6 rows</title>" in chart
    assert f'<div class="x bars" aria-hidden="true"><span>{tokens}</span></div>' in chart


def test_row_that_json_cannot_hold_is_still_shown(tmp_path: Path) -> None:
    odd = {**rows(1, 1)[0], "share": float("nan"), "picture": b"\xff", "day": date(2026, 11, 23)}
    pq.write_table(pa.Table.from_pylist([odd]), tmp_path / "odd.parquet")
    source = {"path": str(tmp_path / "odd.parquet"), "records": ""}
    tables = {"input": source, "prompt": {"images": []}, "output": {"keep": []}}
    run = make_run(tmp_path, [odd | {"picture": "", "day": ""}], right, **tables)
    data = embedded(write_report(run).read_text(encoding="utf-8"), "data")
    fields = dict(zip(data["fields"], data["rows"][0]["fields"], strict=True))
    assert fields["Question"] == odd["Question"]
    assert "2026-11-23" in str(fields["day"])


@pytest.mark.parametrize("name", ["results.jsonl", "report"])
def test_report_never_replaces_the_ledger(run: Path, name: str) -> None:
    with pytest.raises(StoreError, match="web page"):
        write_report(run, run / name)


def test_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="not a run folder"):
        write_report(tmp_path)


def test_pause_between_two_starts_is_cut_out() -> None:
    finished = [float(second) for second in (*range(1, 101), *range(5_000, 5_100))]
    line = timeline(finished, [1.0] * 200)
    assert line is not None
    assert line.seconds == pytest.approx(200, abs=2)
    assert [round(length) for _, length in line.pauses] == [4899]
    assert line.mean_rows_per_s == pytest.approx(1, rel=0.02)


def test_requests_in_flight_are_their_mean_over_each_bin() -> None:
    rng = np.random.default_rng(0)
    latency = rng.uniform(1, 9, 4_000)
    finished = rng.uniform(20, 400, 4_000) + latency
    line = timeline(finished, latency)
    assert line is not None
    mean = sum(line.in_flight) / len(line.in_flight)
    assert mean * line.seconds == pytest.approx(latency.sum(), rel=1e-6)


def test_long_tail_is_kept_in_the_last_bin() -> None:
    spread = histogram([*range(1, 1000), 1_000_000])
    assert spread is not None
    assert sum(spread.counts) == 1000
    assert spread.top <= 2_000
    assert spread.overflow == 1
    assert spread.largest == 1_000_000


@pytest.mark.parametrize(
    "values",
    [[32] * 5, [28, 32, 32], [0, 0, 1], range(1, 13), range(900, 950), [5, 1000], [10**8, 10**9]],
    ids=str,
)
def test_bins_of_whole_numbers_begin_at_whole_numbers(values: Sequence[int]) -> None:
    spread = histogram(values)
    assert spread is not None
    assert spread.is_whole
    assert spread.width == int(spread.width) >= 1
    assert spread.low == int(spread.low) <= min(values)
    assert max(values) < spread.top == spread.low + spread.width * len(spread.counts)
    assert len(spread.counts) <= 8 or (spread.top - spread.low) % 4 == 0, "labels are whole, too"
    bins = Counter(int((value - spread.low) // spread.width) for value in values)
    assert spread.counts == [bins[n] for n in range(len(spread.counts))]


def test_a_page_never_lands_on_what_a_run_lives_on(run: Path, tmp_path: Path) -> None:
    other = make_run(tmp_path, rows(3, 9), right, name="other")
    before = {path.name: path.read_bytes() for path in other.iterdir() if path.is_file()}
    for path in (other / "results.jsonl", other / "manifest.json", tmp_path / "page.txt"):
        for runs in ([run], [run, other]):
            done = batchkit("report", *runs, "--output", path)
            assert done.exit_code == 1
            assert "a report is a web page" in done.stderr
    for suffix in ("jsonl", "csv"):
        for name in ("results.jsonl", "job.toml", "scores.jsonl"):
            done = batchkit("export", run, f"--{suffix}", other / name)
            assert done.exit_code == 1
            assert "of a run; write to another file" in done.stderr
    assert {path.name: path.read_bytes() for path in other.iterdir() if path.is_file()} == before


def test_rows_are_grouped_by_a_field_that_the_run_did_not_keep(tmp_path: Path) -> None:
    made = make_run(tmp_path, rows(6, 9), right)
    done = batchkit("score", made, "--set", "scoring.group_by=FileName", "--json")
    groups = set(json.loads(done.stdout)["metrics"])
    assert len(groups) > 1
    page = write_report(made).read_text(encoding="utf-8")
    assert {row["group"] for row in embedded(page, "data")["rows"]} == groups
