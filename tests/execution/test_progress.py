"""What the screen and the log show while a run loads and answers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from batchkit.runs.status import status
from tests.support import server_runs
from tests.support.chat_server import Refused, error, serving
from tests.support.command_line import batchkit as in_process
from tests.support.dry_runs import RUN, prepare, write_job, write_rows
from tests.support.own_process import batchkit
from tests.support.small_vllm import SMALL
from tests.support.terminals import on_a_terminal

pytestmark = [pytest.mark.usefixtures("in_an_empty_folder"), pytest.mark.slow]
LOG_LINE = re.compile(
    r"(?P<failed>[\d,]+) failed, (?P<rows>[\d,]+)( of [\d,]+)? rows,( [\d.]+ \w+ left,)?"
    r" (?P<tokens>[\d,]+) output tok/s, [\d.]+ rows/s, (?P<in_flight>\d+) in flight,"
    r" [\d,]+ prompt tok/s$"
)


def slow(**options: Any) -> dict[str, Any]:
    return {"kind": "dry-run", "options": {"latency_s": 0.4, "max_num_seqs": 1, **options}}


def frames(written: str) -> list[str]:
    """What was on the line at each time."""
    return [frame.strip() for frame in re.split(r"[\r\n]+", written) if frame.strip()]


@pytest.mark.parametrize("columns", [40, 60, 200])
def test_the_line_fits_the_terminal_and_failures_stand_first(columns: int) -> None:
    write_rows([{"other": 1}, *({"q": "x"} for _ in range(4))])
    write_job(engine=slow(), run={"max_in_flight": 1, "checkpoint_interval_s": 0.2})
    written = on_a_terminal("run", "job.toml", columns=columns, stderr_only=True)
    bars = [frame for frame in frames(written) if re.match(r"[\d,]+ failed, ", frame)]
    assert max(map(len, bars)) <= columns
    assert bars[-1].startswith("1 failed, 5 of 5 rows")
    if columns >= 60:
        assert any("left, " in bar and "output tok/s" in bar for bar in bars), bars
    assert ("prompt tok/s" in bars[-1]) == (columns == 200)


def test_lines_have_all_of_it_where_there_is_no_terminal() -> None:
    prepare(5, engine=slow(), run={"max_in_flight": 1, "checkpoint_interval_s": 0.2})
    ended = batchkit("run", "job.toml", cwd=Path.cwd())
    lines = [found for line in ended.stderr.splitlines() if (found := LOG_LINE.search(line))]
    assert len(lines) > 2, ended.stderr
    assert (lines[-1]["failed"], lines[-1]["rows"]) == ("0", "5")
    in_log = (RUN / "run.log").read_text().splitlines()
    assert sum(LOG_LINE.search(line) is not None for line in in_log) == len(lines)


def test_a_server_that_answers_nothing_is_named_on_the_line_and_in_status() -> None:
    words = "the server answered 503: busy\\u001b[2J; 3 requests wait, next try in"
    seen: list[bool] = []

    def before(text: str, body: dict[str, Any]) -> None:
        if (RUN / "manifest.json").exists():
            seen.append(any(words in event for event in status(RUN).engine_events))
        raise Refused(503, error("busy\x1b[2J"))

    with serving(before) as server:
        options = {"give_up_s": 1.5, "max_num_seqs": 3}
        server_runs.write_job(
            server, 3, engine={"options": options}, run={"checkpoint_interval_s": 0.2}
        )
        ended = in_process("run", "job.toml")
    assert ended.exit_code == 1
    lines = [line for line in ended.stderr.splitlines() if words in line]
    assert any("0 of 3 rows" in line for line in lines), ended.stderr
    assert (seen[0], seen[-1]) == (False, True)
    assert "\x1b" not in ended.stderr + (RUN / "run.log").read_text()


@pytest.mark.release
def test_seconds_pass_on_the_screen_while_a_model_loads(demo_model: Path) -> None:
    prepare(1, engine={"kind": "vllm", "model": str(demo_model), "options": SMALL})
    RUN.mkdir(parents=True)
    (RUN / "engine.log").write_text("BrokenPipeError: of an earlier start\n")
    written = on_a_terminal("run", "job.toml", stderr_only=True)
    assert "BrokenPipeError" not in written
    seconds = [int(n) for n in re.findall(r"loading the model, (\d+) s", written)]
    assert len(seconds) >= 2
    assert seconds == sorted(seconds)
    shown = frames(written)
    first, last = (
        (n for n, text in enumerate(shown) if "loading the model" in text),
        shown.index(next(text for text in shown if "generating; model loaded in" in text)),
    )
    assert all(n < last for n in first), "the clock ends with the loading"


@pytest.mark.release
def test_tokens_count_as_they_come(demo_model: Path) -> None:
    """One row with a long answer: long before it ends, the lines show that it is being written."""
    prepare(
        1,
        engine={
            "kind": "vllm",
            "model": str(demo_model),
            "options": {**SMALL, "max_model_len": 4096},
        },
        sampling={"max_tokens": 3000, "min_tokens": 3000},
        run={"checkpoint_interval_s": 0.05},
    )
    ended = batchkit("run", "job.toml", cwd=Path.cwd())
    assert ended.returncode == 0, ended.stderr
    log = (RUN / "run.log").read_text().splitlines()
    lines = [found for line in log if (found := LOG_LINE.search(line))]
    unfinished = [int(line["tokens"].replace(",", "")) for line in lines if line["rows"] == "0"]
    assert max(unfinished) > 0, log
    assert ended.stdout.count('"completion_tokens": 3000') == 1
