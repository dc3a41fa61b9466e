"""find-bs and bench without a model: the search, the measuring, the job file, the command line.

The dry-run engine answers each request ``latency_s`` after it came, so its rate is the window's.
``tests/commands/test_tuning_vllm.py`` has real engines.
"""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
import tomllib
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from batchkit.commands.trial import Answer
from batchkit.commands.tuning.batch_size_option import (
    BatchSizeOption,
    batch_size_option,
    patch,
    write_patch,
)
from batchkit.commands.tuning.bench import sizes_in
from batchkit.commands.tuning.bottleneck import Rendered, bottleneck_of, idle_of
from batchkit.commands.tuning.rounds import Budget, Round, Rounds
from batchkit.commands.tuning.table import OOM, Idle, SizeResult, SizeTable
from batchkit.config.loading import make_job
from batchkit.errors import JobError
from batchkit.storage.metrics import Metrics
from tests.support.chat_server import serving
from tests.support.own_process import batchkit, begin
from tests.support.rows import write_jsonl

pytestmark = pytest.mark.slow

SEQS = BatchSizeOption("engine.options.max_num_seqs", "")
JOB = """# a job
name = "tried"   # its name
[input]
path = "rows.jsonl"
[prompt]
user = "{{ q }}"
[engine]
kind = "dry-run"
[engine.options]
latency_s = 0.02  # of each request
max_num_seqs = 8  # by hand
"""
KEYS = {
    "batch_size",
    "status",
    "seconds",
    "rows_per_s",
    "prompt_tokens_per_s",
    "completion_tokens_per_s",
    "p50_ms",
    "p99_ms",
    "memory_gb",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "job.toml").write_text(JOB)
    write_jsonl(tmp_path / "rows.jsonl", ({"q": f"tell me of {n}"} for n in range(400)))
    return tmp_path


def answers(*ends: float, latency_s: float = 0.5) -> list[Answer]:
    return [Answer(n, end - latency_s, end, 10, 4, 4) for n, end in enumerate(ends)]


def steady(rate: float, n: int, *, since: float = 0.0) -> list[Answer]:
    return answers(*(since + (k + 1) / rate for k in range(n)))


def rounds_of(
    found: list[Answer], batch_size: int, budget: Budget, *, rows: int, first: int | None = None
) -> Rounds:
    """What a trial does as its records come, until it is over. ``first``: the last one of those that
    were submitted first."""
    submitted = range(batch_size) if first is None else [*range(batch_size - 1), first]
    rounds = Rounds(batch_size, budget, total=rows, first=submitted)
    for each in found:
        if rounds.is_over(0.0, each.ended):
            break
        rounds.add(each)
    return rounds


SLOW_START = answers(*(3.0 + k / 10 for k in range(40)))


def test_a_round_begins_when_the_engine_is_full_and_ends_with_the_rows() -> None:
    (found,) = rounds_of(SLOW_START, 8, Budget(60), rows=40).cut(6.9, is_sample=True)
    assert found.is_typical
    assert found.rows_per_s == pytest.approx(10, rel=0.1), "the first three seconds do not count"
    assert found.prompt_tokens_per_s == pytest.approx(100, rel=0.1)
    assert found.completion_tokens_per_s == pytest.approx(40, rel=0.1)


def test_a_whole_job_is_measured_as_a_whole() -> None:
    (found,) = rounds_of(SLOW_START, 8, Budget(60), rows=40).cut(20.0, is_sample=False)
    assert found.is_typical
    assert (found.rows, found.seconds) == (40, pytest.approx(4.4)), "from the first row on"


def test_few_rows_are_measured_and_said_to_be_few() -> None:
    (found,) = rounds_of(steady(10, 5), 8, Budget(60), rows=5).cut(0.5, is_sample=True)
    assert not found.is_typical
    assert found.rows == 5


def test_rows_that_end_within_one_millisecond_are_a_round() -> None:
    (found,) = rounds_of(answers(*[1.0] * 40), 8, Budget(60), rows=40).cut(1.0, is_sample=True)
    assert found.rows == 24, "after the first eight, until eight are left"
    assert found.rows_per_s == 24_000, "in one millisecond"


def test_nothing_answered_is_no_round() -> None:
    assert not Rounds(4, Budget(1), total=9, first=range(4)).cut(1.0, is_sample=False)


@pytest.mark.parametrize(
    ("full_at", "over_at"), [(None, 2.0), (1.5, 7.5)], ids=["it never became full", "three rounds"]
)
def test_time_is_up(full_at: float | None, over_at: float) -> None:
    rounds = Rounds(4, Budget(2, 3), total=1000, first=range(4))
    for each in answers(*([full_at] * 4 if full_at else [])):
        rounds.add(each)
    assert not rounds.is_over(0.0, over_at - 0.1)
    assert rounds.is_over(0.0, over_at)


def test_short_answers_come_first_and_do_not_count() -> None:
    """Of the first eight, one takes 6 s; the short ones that pass meanwhile would look like speed."""
    short, long = [k / 20 for k in range(1, 120)], [6.0 + k / 10 for k in range(200)]
    found = answers(*short, *long)
    (each,) = rounds_of(found, 8, Budget(9), rows=10**6, first=119).cut(15, is_sample=False)
    assert each.is_typical
    assert each.rows_per_s == pytest.approx(10, rel=0.1)


@settings(deadline=None, max_examples=50)
@given(
    rate=st.floats(5, 100),
    batch_size=st.integers(1, 16),
    wanted=st.integers(1, 4),
    seconds=st.floats(4, 20),
)
def test_rounds_of_a_steady_trial_have_its_rate(
    rate: float, batch_size: int, wanted: int, seconds: float
) -> None:
    found = steady(rate, int(rate * seconds * (wanted + 1)) + batch_size + 1)
    rounds = rounds_of(found, batch_size, Budget(seconds, wanted), rows=10**6)
    cut = rounds.cut(found[-1].ended, is_sample=False)
    assert 1 <= len(cut) <= wanted
    assert sum(each.seconds for each in cut) <= (seconds + 1 / rate) * wanted
    assert all(each.is_typical for each in cut)
    for each in cut:
        tolerance = 2 / each.rows  # a row more or less at either end
        assert each.rows_per_s == pytest.approx(rate, rel=tolerance)


def test_percentiles_are_of_latency() -> None:
    found = [Answer(k, k / 10 - k / 1000, k / 10, 1, 1, 1) for k in range(1, 101)]
    rounds = rounds_of(found, 1, Budget(60), rows=100)
    (each,) = rounds.cut(10.0, is_sample=False)
    assert (each.p50_ms, each.p99_ms) == (pytest.approx(50.0), pytest.approx(99.0))


def at(seconds: float, **figures: Any) -> Metrics:
    time = datetime.fromtimestamp(seconds, UTC).isoformat()
    return Metrics(time, 1, seconds, 0, 0, **figures)


@pytest.mark.parametrize(
    ("latency_s", "figures", "shares"),
    [
        (0.5, {"in_flight": 5, "running": 5}, (3 / 8, 0, 0)),
        (0.5, {"in_flight": 12, "running": 5}, (0, 3 / 8, 0)),
        (0.5, {"in_flight": 6, "running": 5}, (2 / 8, 1 / 8, 0)),
        (1.2, {"in_flight": 12, "running": 3, "kv_cache_usage": 0.99}, (0, 0, 1)),
        (0.8, {"in_flight": 8, "running": 8}, (0, 0, 0)),
        (1.2, {"in_flight": 12, "running": 8}, (0, 0, 0)),
    ],
)
def test_what_the_engine_waits_for(
    latency_s: float, figures: dict[str, Any], shares: tuple[float, ...]
) -> None:
    """Ten rows a second, each of which takes so long, hold so many of its eight places."""
    found = answers(*(k / 10 for k in range(1, 101)), latency_s=latency_s)
    rounds = rounds_of(found, 8, Budget(60), rows=10**6)
    lines = [at(0.5, preemptions=1), *(at(s, preemptions=2 * s, **figures) for s in range(2, 9))]
    idle = idle_of(rounds, lines)
    assert idle is not None
    assert idle[:3] == pytest.approx(shares, abs=0.02)
    assert idle.running == figures["running"]
    assert idle.preempted == 6, "in the five seconds of its round"
    assert idle_of(rounds, lines[:1]) is None, "it was not full yet"


def trial(
    size: int, rate: float, *, prompt: int = 100, output: int = 100, **fields: Any
) -> SizeResult:
    rows = int(rate * 10)
    found = Round(10.0, rows, rows * prompt, rows * output, 100.0, 200.0, True)
    return SizeResult(size, "ok", 12.0, 2.0, (found,), rows, **fields)


def bottleneck(*trials: SizeResult, rendered: float = 10_000, with_images: bool = False) -> str:
    table = SizeTable.of(trials)
    assert table.best is not None
    return bottleneck_of(table.lines, table.best, Rendered(rendered, with_images)).resource


def test_what_binds() -> None:
    free = Idle(0, 0, 0, 8, 0)
    assert bottleneck(trial(4, 10), trial(8, 19)) == "decode", "twice the batch, twice the rate"
    assert bottleneck(trial(4, 18, prompt=900), trial(8, 19, prompt=900)) == "prefill"
    assert bottleneck(trial(4, 18), trial(8, 19, output=300)) == "decode", (
        "most tokens are answers'"
    )
    assert bottleneck(trial(8, 19, idle=free), rendered=18) == "rendering"
    assert bottleneck(trial(8, 19, idle=Idle(0.4, 0, 0, 5, 0))) == "rendering"
    assert bottleneck(trial(8, 19, idle=Idle(0, 0.4, 0, 5, 0))) == "preprocessing"
    assert bottleneck(trial(8, 19, idle=Idle(0, 0, 0.9, 5, 3))) == "kv-cache"
    assert bottleneck(trial(8, 19, prompt=0, output=0)) == "unknown"
    assert bottleneck(trial(4, 10, output=0), trial(8, 19, output=0)) == "prefill", "a pooling task"


def test_rounds_of_one_size_become_one_line() -> None:
    table = SizeTable.of([trial(4, 10), trial(8, 20), trial(4, 12), trial(4, 30), trial(8, 22)])
    small, large = table.lines
    assert small.rows_per_s == 12
    assert small.spread == pytest.approx(20 / 2 / 12)
    assert large.to_json()["rounds"][1]["rows_per_s"] == 22
    assert (table.best, table.largest) == (large, large)


def test_a_size_that_failed_once_has_no_rate() -> None:
    table = SizeTable.of([trial(4, 10), trial(8, 20), SizeResult(8, OOM, 3.0)])
    assert table.best is not None
    assert table.best.batch_size == 4
    shape = table.lines[1].to_json()
    assert (shape["status"], shape["rows_per_s"], shape["p99_ms"]) == (OOM, None, None)


def job_with(window: int | str, options: dict[str, Any]) -> Any:
    engine = {"kind": "dry-run", "options": options}
    return make_job({"engine": engine, "run": {"max_in_flight": window}}, "test")


@pytest.mark.parametrize(
    ("window", "seqs", "key", "most"),
    [
        ("auto", 8, "engine.options.max_num_seqs", None),
        (4, 8, "run.max_in_flight", 12),
        (8, 8, "engine.options.max_num_seqs", 8),
        (64, None, "run.max_in_flight", 384),
        (300, None, "engine.options.max_num_seqs", 300),
    ],
)
def test_the_knob_is_the_one_that_binds(
    window: int | str, seqs: int | None, key: str, most: int | None
) -> None:
    option = batch_size_option(job_with(window, {} if seqs is None else {"max_num_seqs": seqs}))
    assert (option.key, option.most) == (key, most)


ENGINES = {
    "table": '[engine]\nkind = "dry-run"\n[engine.options] # o\nlatency_s = 0.1 # l\n',
    "replaced": "[engine]\n[engine.options]\nmax_num_seqs = 7 # seven\n[run] # r\nseed = 1\n",
    "none": '# top\nname = "a"\n\n[engine]\nkind = "dry-run" # k\n\n[run]\nseed = 1\n',
    "inline": "[engine]\noptions = { latency_s = 0.1 } # o\n[run]\nseed = 2\n",
    "dotted": 'engine.kind = "dry-run" # e\nengine.options.latency_s = 0.1\n',
    "crlf": '# top\r\n[engine] # e\r\nkind = "dry-run"\r\n',
    "no newline at the end": '[engine]\nkind = "dry-run"',
    "nothing": "# empty\n",
}


@pytest.mark.parametrize("text", ENGINES.values(), ids=ENGINES.keys())
@pytest.mark.parametrize("key", ["engine.options.max_num_seqs", "run.max_in_flight"])
def test_one_key_is_written_and_all_else_kept(tmp_path: Path, text: str, key: str) -> None:
    path = tmp_path / "job.toml"
    path.write_bytes(text.encode())
    path.chmod(0o640)
    write_patch(path, BatchSizeOption(key, ""), 48)
    after = path.read_bytes().decode()
    wanted = tomllib.loads(text)
    *tables, name = key.split(".")
    inner = wanted
    for table in tables:
        inner = inner.setdefault(table, {})
    inner[name] = 48
    assert tomllib.loads(after) == wanted
    for comment in re.findall(r"#[^\r\n]*", text):
        assert comment in after
    if "\r\n" in text:
        assert after.count("\r\n") == after.count("\n")
    lines = [line for line in text.splitlines() if "max_num_seqs" not in line]
    kept = [line for line in lines if line in after.splitlines()]
    assert len(lines) - len(kept) <= 1, "an inline table changes its one line"
    assert path.stat().st_mode & 0o777 == 0o640
    assert [each.name for each in tmp_path.iterdir()] == ["job.toml"]


def test_a_patch_is_toml() -> None:
    assert tomllib.loads(patch(SEQS, 6)) == {"engine": {"options": {"max_num_seqs": 6}}}


def test_a_link_to_a_job_file_stays_one(folder: Path) -> None:
    link = folder / "link.toml"
    link.symlink_to("job.toml")
    write_patch(link, SEQS, 9)
    assert link.is_symlink()
    assert "max_num_seqs = 9  # by hand" in (folder / "job.toml").read_text()


@pytest.mark.parametrize("text", ["", "0", "1,,2", "a", "-1", "1.5"])
def test_bad_sizes(text: str) -> None:
    with pytest.raises(JobError, match="whole numbers"):
        sizes_in(text)


def test_sizes() -> None:
    assert sizes_in("8, 1,8,4") == [8, 1, 4]


def no_leftovers(folder: Path, *made: str) -> bool:
    return {path.name for path in folder.iterdir()} == {"job.toml", "rows.jsonl", *made}


def test_find_bs_prints_a_table_and_a_patch(folder: Path) -> None:
    ended = batchkit("find-bs", "job.toml", "--low", "2", "--high", "8", "--seconds", "0.5",
                     cwd=folder)  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    head, *rows = ended.stdout.splitlines()
    assert head.split()[:3] == ["batch", "size", "status"]
    assert [row.split()[:2] for row in rows[:3]] == [["2", "ok"], ["4", "ok"], ["8", "ok"]]
    assert "best: 8" in ended.stdout
    assert "the whole job, 400 rows" in ended.stdout
    assert "[engine.options]\nmax_num_seqs = 8" in ended.stdout
    assert "how many requests the engine runs at once" in ended.stderr
    assert no_leftovers(folder)


def test_find_bs_json_and_write(folder: Path) -> None:
    ended = batchkit("find-bs", "job.toml", "--low", "8", "--high", "24", "--seconds", "0.5",
                     "--json", "--write", cwd=folder)  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    assert [line["batch_size"] for line in found["batch_sizes"]] == [8, 16, 24]
    assert all(line.keys() >= KEYS for line in found["batch_sizes"])
    assert (found["best"], found["largest"], found["rows"]) == (24, 24, 400)
    assert found["estimated_seconds"] > 0
    assert found["bottleneck"].keys() == {"resource", "reason"}
    assert (folder / "job.toml").read_text() == JOB.replace("seqs = 8", "seqs = 24")
    assert no_leftovers(folder)


def test_find_bs_of_a_window_that_binds(folder: Path) -> None:
    ended = batchkit("find-bs", "job.toml", "--set", "run.max_in_flight=4", "--high", "64",
                     "--low", "4", "--seconds", "1", "--json", "--write", cwd=folder)  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    assert found["option"] == "run.max_in_flight"
    assert found["largest"] == 12, "what the adaptive window would start with"
    assert "the window is the bottleneck" in ended.stderr
    written = tomllib.loads((folder / "job.toml").read_text())
    assert written["run"] == {"max_in_flight": 12}
    assert written["engine"]["options"]["max_num_seqs"] == 8


def test_find_bs_tries_no_more_than_there_are_rows(folder: Path) -> None:
    ended = batchkit("find-bs", "job.toml", "--rows", "5", "--seconds", "0.3", "--json", cwd=folder)
    found = json.loads(ended.stdout)
    assert [line["batch_size"] for line in found["batch_sizes"]] == [1, 2, 4, 5]
    assert "there are 5 rows" in ended.stderr


def test_find_bs_stops_early_where_the_server_is_slow(folder: Path) -> None:
    """A server that serves four at a time, however many it is sent, and slows down with over eight.

    Of eight, a busy machine may measure 3 % more than of four. Of sixteen it can't: they take twice
    as long.
    """
    turns = threading.BoundedSemaphore(4)

    def before(text: str, body: dict[str, Any]) -> None:
        with turns:
            time.sleep(0.1 if server.inside <= 8 else 0.2)

    with serving(before) as server:
        table = JOB.replace(
            '"dry-run"', f'"openai-server"\nmodel = "tiny"\nbase_url = "{server.url}"'
        )
        (folder / "job.toml").write_text(table.replace("latency_s = 0.02  # of each request", ""))
        ended = batchkit(
            "find-bs", "job.toml", "--low", "2", "--seconds", "3", "--json", cwd=folder
        )
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    assert found["stopped_early"]
    assert found["largest"] <= 16
    assert all(line["memory_gb"] is None for line in found["batch_sizes"])
    assert "keeps what it has cached" in ended.stderr


def test_find_bs_of_a_task_without_output_tokens(folder: Path) -> None:
    ended = batchkit("find-bs", "job.toml", "--set", "task=embed", "--low", "8", "--high", "16",
                     "--seconds", "0.5", "--json", cwd=folder)  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    assert (found["best"], found["bottleneck"]["resource"]) == (16, "prefill")
    assert [line["failed"] for line in found["batch_sizes"]] == [{}, {}]
    assert found["batch_sizes"][0]["prompt_tokens_per_s"] > 0


def test_rows_that_fail_are_counted_and_fail_no_trial(folder: Path) -> None:
    rows = [{"q": f"{n}"} if n % 4 else {"other": n} for n in range(100)]
    write_jsonl(folder / "rows.jsonl", rows)
    ended = batchkit("find-bs", "job.toml", "--low", "4", "--high", "4", "--json", cwd=folder)
    found = json.loads(ended.stdout)
    (line,) = found["batch_sizes"]
    assert line["status"] == "ok"
    assert line["failed"] == {"template": 25}
    assert line["rows"] == 75


def test_rendering_that_can_not_keep_up_is_what_binds(folder: Path) -> None:
    for n in range(4):
        Image.effect_noise((3200, 2400), 50 + n).convert("RGB").save(folder / f"{n}.jpg")
    write_jsonl(folder / "rows.jsonl", ({"q": f"{n}", "n": n % 4} for n in range(2000)))
    images = '"{{ q }}"\nimages = ["{{ n }}.jpg"]\n[media]\nmax_pixels = 65536'
    (folder / "job.toml").write_text(JOB.replace('"{{ q }}"', images))
    ended = batchkit("find-bs", "job.toml", "--low", "32", "--high", "32", "--seconds", "1", "--json",
                     cwd=folder)  # fmt: skip
    found = json.loads(ended.stdout)
    assert found["bottleneck"]["resource"] == "rendering", found
    assert "images are opened" in found["bottleneck"]["reason"]
    assert found["render_rows_per_s"] > 0


def test_a_job_whose_rows_all_fail_has_no_best(folder: Path) -> None:
    write_jsonl(folder / "rows.jsonl", [{"other": n} for n in range(9)])
    ended = batchkit("find-bs", "job.toml", "--json", cwd=folder)
    assert ended.returncode == 1
    found = json.loads(ended.stdout)
    assert (found["best"], found["largest"], found["patch"]) == (None, None, None)
    assert found["batch_sizes"][0]["status"].startswith("error: all 9 rows failed; template: ")


def test_an_engine_that_is_too_slow_says_so(folder: Path) -> None:
    ended = batchkit("find-bs", "job.toml", "--set", "engine.options.latency_s=60", "--seconds",
                     "0.3", cwd=folder)  # fmt: skip
    assert ended.returncode == 1
    assert "no row was answered within 0.3 s (--seconds)" in ended.stdout


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["find-bs", "job.toml", "--low", "9", "--high", "3"], "--low 9 is over --high 3"),
        (["find-bs", "none.toml"], "no such job file"),
        (["find-bs", "job.toml", "--low", "0"], "--low"),
        (["find-bs", "job.toml", "--seconds", "0"], "--seconds"),
        (["find-bs", "job.toml", "--set", "engine.options.seqs=1"], "engine.options.seqs"),
        (["find-bs", "job.toml", "--set", "input.path=none.jsonl"], "none.jsonl"),
        (["bench", "job.toml", "--batch-sizes", "1,x"], "--batch-sizes 1,x"),
        (["bench", "job.toml", "--rounds", "0"], "--rounds"),
        (["bench", "job.toml", "--html", "no/such/curve.html"], "no folder"),
        (["bench", "job.toml", "--set", "engine.options.seqs=1"], "engine.options.seqs"),
    ],
)
def test_bad_command_lines(folder: Path, args: list[str], message: str) -> None:
    ended = batchkit(*args, cwd=folder)
    assert ended.returncode == 2, ended.stderr
    assert message in ended.stderr
    assert not ended.stdout
    assert no_leftovers(folder)


def test_an_input_without_rows_is_refused(folder: Path) -> None:
    ended = batchkit("find-bs", "job.toml", "--set", 'input.where={ q = "none" }', cwd=folder)
    assert ended.returncode == 2
    assert "no rows" in ended.stderr


def test_a_job_file_that_can_not_be_written_is_known_before_the_first_trial(folder: Path) -> None:
    (folder / "job.toml").write_text(
        'engine = { kind = "dry-run" }\n[input]\npath = "rows.jsonl"\n'
    )
    folder.chmod(0o500)
    try:
        ended = batchkit("find-bs", "job.toml", "--write", cwd=folder)
    finally:
        folder.chmod(0o700)
    if os.geteuid() != 0:  # root may write anywhere
        assert ended.returncode == 2
        assert "starting an engine" not in ended.stderr


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_what_is_known_is_printed_when_it_is_stopped(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, signum: int, code: int
) -> None:
    scratch = tmp_path_factory.mktemp("tmp")
    args = ["find-bs", "job.toml", "--low", "2", "--seconds", "1", "--write"]
    process = begin(*args, cwd=folder, TMPDIR=str(scratch))
    assert process.stderr is not None
    assert process.stdout is not None
    for line in process.stderr:
        if "batch size 4" in line:
            break
    process.send_signal(signum)
    stdout, _ = process.communicate(timeout=30)
    assert process.returncode == code
    assert "largest that fits: 2 so far; the search was interrupted" in stdout
    assert "max_num_seqs = 2" in stdout
    assert (folder / "job.toml").read_text() == JOB, "a search that was cut short writes nothing"
    assert no_leftovers(folder)
    assert not list(scratch.iterdir())


def test_bench_prints_a_table_and_one_line_of_json(folder: Path) -> None:
    ended = batchkit("bench", "job.toml", "--batch-sizes", "8,2", "--rounds", "2", "--seconds",
                     "0.5", "--html", "curve.html", cwd=folder)  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    *table, last = ended.stdout.splitlines()
    assert [row.split()[0] for row in table[1:]] == ["2", "8"]
    found = json.loads(last)
    assert (found["best"], found["largest"]) == (8, 8)
    assert all(line.keys() >= KEYS for line in found["batch_sizes"])
    assert [len(line["rounds"]) for line in found["batch_sizes"]] == [2, 2]
    sizes = re.findall(r"batch size (\d+): starting", ended.stderr)
    assert sizes == ["8", "2", "8", "2"], "rounds are interleaved"
    assert no_leftovers(folder, "curve.html")
    page = (folder / "curve.html").read_text()
    assert page.count('<circle class="dot"') == 2
    assert ">rows/s</text>" in page
    assert f">batch size ({found['option']})</text>" in page
    assert "only 2 rounds for each batch size" in page
    assert "only 2 rounds for each batch size" in ended.stderr
    assert not re.search(r"https?://|<script|src=|@import|url\(", page)


def test_bench_json_alone(folder: Path) -> None:
    ended = batchkit("bench", "job.toml", "--batch-sizes", "500", "--rounds", "1", "--json",
                     "--seconds", "0.3", cwd=folder)  # fmt: skip
    assert json.loads(ended.stdout)["best"] == 500
    assert "more than the 400 rows" in ended.stderr
