"""find-bs without a model: the search, the measuring, the job file, the command line.

The dry-run engine answers each request ``latency_s`` after it came, so its rate is the window's.
``tests/commands/test_tuning_vllm.py`` has real engines.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import threading
import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from batchkit.commands.trial import OOM, Trial
from batchkit.commands.trial.measurement import Figures, Idle
from batchkit.commands.tuning.find import bottleneck_of, search
from batchkit.commands.tuning.options import write_patch
from batchkit.commands.tuning.table import Line, line_of
from tests.support.chat_server import serving
from tests.support.command_line import Ended, batchkit
from tests.support.dry_runs import TRIED as JOB
from tests.support.own_process import begin
from tests.support.rows import write_jsonl

pytestmark = pytest.mark.slow

RATES = {"rows_per_s", "prompt_tokens_per_s", "completion_tokens_per_s"}
KEYS = RATES | {"batch_size", "status", "seconds", "p50_ms", "p99_ms", "memory_gb"}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.toml").write_text(JOB)
    write_jsonl(tmp_path / "rows.jsonl", ({"q": f"tell me of {n}"} for n in range(400)))
    return tmp_path


def size(
    at_once: int, rate: float, *, prompt: int = 100, output: int = 100, idle: Idle | None = None
) -> Line:
    """A size that was tried for ten seconds."""
    rows = int(rate * 10)
    figures = Figures(10.0, rows, rows * prompt, rows * output, 100.0, 200.0, True)
    return line_of(at_once, Trial("ok", "", 12.0, 2.0, figures, rows, idle=idle))


@pytest.mark.parametrize(
    ("tried", "resource"),
    [
        pytest.param([size(4, 10), size(8, 19)], "decode", id="twice the batch, twice the rate"),
        ([size(4, 18, prompt=900), size(8, 19, prompt=900)], "prefill"),
        pytest.param([size(4, 18), size(8, 19, output=300)], "decode", id="most are answers'"),
        ([size(8, 19, idle=Idle(0.4, 0, 0, 5, 0))], "rendering"),
        ([size(8, 19, idle=Idle(0, 0.4, 0, 5, 0))], "preprocessing"),
        ([size(8, 19, idle=Idle(0, 0, 0.9, 5, 3))], "kv-cache"),
        ([size(8, 19, prompt=0, output=0)], "unknown"),
        pytest.param([size(8, 19) | {"typical": False}], "unknown", id="never full"),
        pytest.param([size(4, 10, output=0), size(8, 19, output=0)], "prefill", id="pooling"),
    ],
)
def test_what_binds(tried: list[Line], resource: str) -> None:
    assert bottleneck_of(tried, tried[-1], with_images=False).resource == resource


class CountingTrials:
    """No engine: sizes up to ``threshold`` fit, and ``rate`` gives their throughput."""

    def __init__(
        self, threshold: int, rate: Callable[[int], float] = float, *, is_typical: bool = True
    ) -> None:
        self.threshold, self.rate, self.is_typical = threshold, rate, is_typical
        self.tried: list[int] = []

    def __call__(self, size: int) -> Line:
        self.tried.append(size)
        if size > self.threshold:
            return line_of(size, Trial(OOM, "full", 3.0))
        figures = Figures(1 / self.rate(size), 1, 0, 0, 0.0, 0.0, self.is_typical)
        return line_of(size, Trial("ok", "", 12.0, 2.0, figures))


@given(low=st.integers(1, 64), span=st.integers(0, 4000), threshold=st.integers(0, 5000))
def test_search_finds_the_largest_that_fits(low: int, span: int, threshold: int) -> None:
    trials = CountingTrials(threshold)
    assert not search(low, low + span, trials)
    expected = min(threshold, low + span)
    largest = max((size for size in trials.tried if size <= threshold), default=0)
    assert largest == (expected if expected >= low else 0)
    assert len(set(trials.tried)) == len(trials.tried), "no size is tried twice"
    assert all(low <= size <= low + span for size in trials.tried)
    assert len(trials.tried) <= 2 * (low + span).bit_length() + 1


@given(low=st.integers(1, 16), flat_from=st.integers(1, 500))
def test_search_stops_where_throughput_has_flattened(low: int, flat_from: int) -> None:
    trials = CountingTrials(10**6, lambda size: float(min(size, flat_from)))
    assert search(low, 10**5, trials)
    *_, before, last = trials.tried
    assert last == 2 * before
    assert flat_from < 2.07 * before, "the last doubling was one too many at most"


def test_few_rows_are_no_reason_to_stop() -> None:
    trials = CountingTrials(40, lambda size: 1.0, is_typical=False)
    assert not search(1, 1024, trials)
    assert 40 in trials.tried


ENGINES = {
    "table": '[engine]\nkind = "dry-run"\n[engine.options] # o\nlatency_s = 0.1 # l\n',
    "replaced": "[engine]\n[engine.options]\nmax_num_seqs = 7 # seven\n[run] # r\nseed = 1\n",
    "none": '# top\nname = "a"\n\n[engine]\nkind = "dry-run" # k\n\n[run]\nseed = 1\n',
    "inline": "[engine]\noptions = { latency_s = 0.1 } # o\n[run]\nseed = 2\n",
    "dotted": 'engine.kind = "dry-run" # e\nengine.options.latency_s = 0.1\n',
    "crlf and bom": '\ufeff# top\r\n[engine] # e\r\nkind = "dry-run"\r\n',
    "no newline at the end": '[engine]\nkind = "dry-run"',
    "nothing": "# empty\n",
}


@pytest.mark.parametrize("text", ENGINES.values(), ids=ENGINES.keys())
def test_one_key_is_written_and_all_else_kept(text: str) -> None:
    path = Path("job.toml")
    path.write_bytes(text.encode())
    path.chmod(0o640)
    write_patch(path, {"max_num_seqs": 48})
    after = path.read_bytes().decode()
    wanted = tomllib.loads(text.removeprefix("\ufeff"))
    wanted.setdefault("engine", {}).setdefault("options", {})["max_num_seqs"] = 48
    assert tomllib.loads(after) == wanted
    for comment in re.findall(r"#[^\r\n]*", text):
        assert comment in after
    lines = [line for line in text.strip("\ufeff").splitlines() if "max_num_seqs" not in line]
    kept = [line for line in lines if line in after.splitlines()]
    assert len(lines) - len(kept) <= 1, "an inline table changes its one line"
    assert path.stat().st_mode & 0o777 == 0o640
    assert no_leftovers()


def test_a_link_to_a_job_file_stays_one() -> None:
    link = Path("link.toml")
    link.symlink_to("job.toml")
    write_patch(link, {"max_num_seqs": 9})
    assert link.is_symlink()
    assert "max_num_seqs = 9  # by hand" in Path("job.toml").read_text()


def tried(command: str) -> Ended:
    return batchkit(*shlex.split(command))


def no_leftovers() -> bool:
    return {path.name for path in Path().iterdir()} <= {"job.toml", "rows.jsonl", "output"}


def test_trials_are_kept_as_runs_and_not_measured_again() -> None:
    command = "find-bs job.toml --low 2 --seconds 0.5 --json --high"
    first = tried(f"{command} 4").json["batch_sizes"]
    ended = tried(f"{command} 8")
    assert ended.json["batch_sizes"][:2] == first
    assert ended.stderr.count("starting an engine") == 1
    assert ended.stderr.count("measured before") == 2
    longer = tried("find-bs job.toml --low 2 --high 2 --seconds 0.6")
    assert "measured before" not in longer.stderr, "another limit is another measurement"
    runs = sorted(path.parent.name for path in Path("output").glob("*/find-bs/*/manifest.json"))
    assert runs == [f"max_num_seqs-{size}" for size in ("2", "2.1", "4", "8")]
    assert all(run in tried("status output").stdout for run in runs)
    assert tried("compare output/tried/find-bs").exit_code == 0


def test_find_bs_prints_a_table_and_a_patch_or_json_and_writes_the_best() -> None:
    command = "find-bs job.toml --low 4 --high 12 --seconds 0.5"
    ended = tried(command).ok()
    head, _, *rows = ended.stdout.splitlines()
    assert head.startswith("| batch size | status |")
    assert [row.split()[1:4:2] for row in rows[:3]] == [["4", "ok"], ["8", "ok"], ["12", "ok"]]
    assert "best: 12" in ended.stdout
    assert "the whole job, 400 rows" in ended.stdout
    assert "[engine.options]\nmax_num_seqs = 12" in ended.stdout
    assert "how many requests the engine runs at once" in ended.stderr
    found = tried(f"{command} --json --write").ok().json
    assert [line["batch_size"] for line in found["batch_sizes"]] == [4, 8, 12]
    assert all(line.keys() >= KEYS for line in found["batch_sizes"])
    assert (found["best"], found["largest"], found["rows"]) == (12, 12, 400)
    assert found["estimated_seconds"] > 0
    assert found["bottleneck"].keys() == {"resource", "reason"}
    assert Path("job.toml").read_text() == JOB.replace("seqs = 8", "seqs = 12")
    assert no_leftovers()


@pytest.mark.parametrize(
    ("limit", "why", "sizes"),
    [
        ("--rows 5", "there are 5 rows", [1, 2, 4, 5]),
        ("--low 5 --set run.max_in_flight=5", "run.max_in_flight = 5 limits", [5]),
    ],
)
def test_find_bs_tries_no_more_than_can_run_at_once(limit: str, why: str, sizes: list[int]) -> None:
    ended = tried(f"find-bs job.toml {limit} --seconds 0.3 --json")
    assert [line["batch_size"] for line in ended.json["batch_sizes"]] == sizes
    assert f"batch sizes up to 5 are tried: {why}" in ended.stderr


@pytest.mark.release
def test_find_bs_stops_early_where_the_server_is_slow() -> None:
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
        Path("job.toml").write_text(table.replace("latency_s = 0.02  # of each request", ""))
        ended = tried("find-bs job.toml --low 2 --seconds 3 --json")
    assert ended.exit_code == 0, ended.stderr
    assert ended.json["stopped_early"]
    assert ended.json["largest"] <= 16
    assert all(line["memory_gb"] is None for line in ended.json["batch_sizes"])
    assert "keeps its cache" in ended.stderr


def test_find_bs_of_a_task_without_output_tokens() -> None:
    ended = tried("find-bs job.toml --set task=embed --low 8 --high 16 --seconds 0.5 --json").ok()
    found = ended.json
    assert (found["best"], found["bottleneck"]["resource"]) == (16, "prefill")
    assert [line["failed"] for line in found["batch_sizes"]] == [{}, {}]
    assert found["batch_sizes"][0]["prompt_tokens_per_s"] > 0


def test_rows_that_fail_are_counted_and_fail_no_trial() -> None:
    write_jsonl(Path("rows.jsonl"), [{"q": f"{n}"} if n % 4 else {"other": n} for n in range(100)])
    (line,) = tried("find-bs job.toml --low 4 --high 4 --json").json["batch_sizes"]
    assert (line["status"], line["failed"], line["rows"]) == ("ok", {"template": 25}, 75)


def test_rendering_that_can_not_keep_up_is_what_binds() -> None:
    Image.effect_noise((800, 600), 50).convert("RGB").save("photo.jpg")
    for n in range(500):
        os.link("photo.jpg", f"{n}.jpg")
    write_jsonl(Path("rows.jsonl"), ({"q": f"{n}", "n": n} for n in range(500)))
    images = '"{{ q }}"\nimages = ["{{ n }}.jpg"]\n[media]\nmax_pixels = 65536'
    Path("job.toml").write_text(JOB.replace('"{{ q }}"', images))
    found = tried("find-bs job.toml --low 32 --high 32 --seconds 4 --json").json
    assert found["bottleneck"]["resource"] == "rendering", found
    assert "images are opened" in found["bottleneck"]["reason"]


def test_a_job_whose_rows_all_fail_has_no_best() -> None:
    write_jsonl(Path("rows.jsonl"), [{"other": n} for n in range(9)])
    ended = tried("find-bs job.toml --json")
    assert ended.exit_code == 1
    assert [ended.json[key] for key in ("best", "largest", "patch")] == [None] * 3
    status = ended.json["batch_sizes"][0]["status"]
    assert status.startswith("error: all 9 rows failed; the first error: template: ")


def test_an_engine_that_is_too_slow_says_so() -> None:
    ended = tried("find-bs job.toml --set engine.options.latency_s=60 --seconds 0.3")
    assert ended.exit_code == 1
    assert "no row was answered within 0.3 s; raise --seconds" in ended.stdout


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--low 9 --high 3", "--low 9 is over --high 3"),
        ("--seconds 0", "--seconds"),
        ("--set engine.options.seqs=1", "engine.options.seqs"),
        ("--set 'input.where={ q = \"none\" }'", "input.where"),
    ],
)
def test_bad_command_lines(options: str, message: str) -> None:
    ended = tried(f"find-bs job.toml {options}")
    assert message in ended.refused()
    assert not ended.stdout
    assert no_leftovers()


def test_a_job_file_that_can_not_be_written_is_known_before_the_first_trial(folder: Path) -> None:
    (folder / "job.toml").write_text(
        'engine = { kind = "dry-run" }\n[input]\npath = "rows.jsonl"\n'
    )
    folder.chmod(0o500)
    try:
        ended = tried("find-bs job.toml --write")
    finally:
        folder.chmod(0o700)
    if os.geteuid() != 0:  # root may write anywhere
        assert ended.exit_code == 2
        assert "starting an engine" not in ended.stderr


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_what_is_known_is_printed_when_it_is_stopped(
    tmp_path_factory: pytest.TempPathFactory, signum: int, code: int
) -> None:
    scratch = tmp_path_factory.mktemp("tmp")
    args = ["find-bs", "job.toml", "--low", "2", "--seconds", "3", "--write"]
    process = begin(*args, cwd=Path.cwd(), TMPDIR=str(scratch))
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
    assert Path("job.toml").read_text() == JOB, "a search that was cut short writes nothing"
    assert no_leftovers()
    assert not list(scratch.iterdir())
