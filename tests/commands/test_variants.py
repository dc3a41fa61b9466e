"""Variants of a job: several runs by one command, each kept, resumable and compared."""

from __future__ import annotations

import json
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from batchkit.runs.run import Run
from tests.support.chat_server import serving
from tests.support.command_line import batchkit
from tests.support.dry_runs import write_job, write_rows
from tests.support.own_process import begin
from tests.support.small_vllm import TEXT_ONLY
from tests.support.waiting import until

N_ROWS = 12
VARIANTS = [
    {"name": "short", "prompt": {"user": "{{ q }}"}},
    {"name": "long", "prompt": {"user": "Think first. {{ q }}"}, "vars": {"more": 1}},
]
TEMPERATURES = "sampling.temperature=0,0.7"


@pytest.fixture(autouse=True)
def _here(in_an_empty_folder: None) -> None:
    write_rows(N_ROWS)


def folders() -> list[str]:
    return sorted(path.parent.name for path in Path("output/a").glob("*/manifest.json"))


def test_each_variant_is_a_kept_run_and_all_are_compared() -> None:
    write_job(variant=VARIANTS)
    ended = batchkit("run", "job.toml").ok()
    assert [json.loads(line)["name"] for line in ended.stdout.splitlines()] == ["short", "long"]
    assert folders() == ["long", "short"]
    assert "## long against short" in ended.stderr
    assert "[[variant]]" not in Path("output/a/long/job.toml").read_text()
    again = batchkit("run", "job.toml")
    assert [json.loads(line)["skipped"] for line in again.stdout.splitlines()] == [N_ROWS] * 2


@pytest.mark.parametrize("target", ["job.toml", "output/a"])
def test_the_runs_of_variants_are_compared_and_listed(target: str) -> None:
    write_job(variant=VARIANTS)
    batchkit("run", "job.toml")
    found = batchkit("compare", target, "--json").json
    assert found["runs"] == ["short", "long"]
    assert found["answers"]["long"]["equal"] == N_ROWS
    assert found["rates"]["short"]["ok"] == N_ROWS
    listed = batchkit("status", "output", "--json").json["runs"]
    assert {run["run"] for run in listed} == {"a:short", "a:long"}
    below = batchkit("status", "output/a", "--json").json["runs"]
    assert {run["run"] for run in below} == {"short", "long"}


@pytest.mark.parametrize(
    ("vary", "names"),
    [
        ([TEMPERATURES], ["temperature-0", "temperature-0.7"]),
        (['prompt.user=["A {{ q }}", "B, {{ q }}"]'], ["user-A-q", "user-B-q"]),
        (['prompt.user=["{{ q }}", "{{ q }} "]'], ["user-2", "user-q"]),
        (
            [TEMPERATURES, "sampling.top_p=0.5,1"],
            [f"temperature-{t}_top_p-{p}" for t in ("0", "0.7") for p in ("0.5", "1")],
        ),
    ],
    ids=["values", "texts", "texts that give one name", "combinations"],
)
def test_a_key_varies_on_the_command_line(vary: list[str], names: list[str]) -> None:
    write_job()
    batchkit("run", "job.toml", *(word for text in vary for word in ("--vary", text))).ok()
    assert folders() == sorted(names)


def test_the_engine_stays_loaded_while_its_settings_stay() -> None:
    write_job()
    options = ("--vary", TEMPERATURES, "--vary", "engine.options.latency_s=0,0.001")
    ended = batchkit("run", "job.toml", *options)
    loaded = [line for line in ended.stderr.splitlines() if "loading model" in line]
    assert len(loaded) == 2, ended.stderr


def test_another_kind_of_engine_starts_from_its_own_settings() -> None:
    with serving(lambda text, body: f"answer to {text}") as server:
        other = {"kind": "openai-server", "base_url": server.url}
        write_job(
            engine={"kind": "dry-run", "model": "tiny", "options": {"latency_s": 0.0}},
            variant=[{"name": "dry"}, {"name": "server", "engine": other}],
        )
        ended = batchkit("run", "job.toml")
    assert ended.exit_code == 0, ended.stderr
    found = batchkit("compare", "output/a", "--json").json
    assert found["answers"]["server"]["differ"] == N_ROWS


def test_a_killed_command_continues_where_it_was() -> None:
    write_job(variant=VARIANTS, engine={"options": {"latency_s": 0.3}}, run={"max_in_flight": 2})
    process = begin("run", "job.toml", cwd=Path.cwd())
    log = Path("output/a/long/results.jsonl")
    until(lambda: log.exists() and log.stat().st_size > 0)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=30)
    ended = batchkit("run", "job.toml").ok()
    short, long = map(json.loads, ended.stdout.splitlines())
    assert short["skipped"] == N_ROWS
    assert 0 < long["skipped"] < N_ROWS
    for name in ("short", "long"):
        assert [row["index"] for row in Run(f"output/a/{name}").rows()] == [*range(N_ROWS)]


@pytest.mark.parametrize(
    ("args", "tables", "words"),
    [
        (["--vary", "sampling.temperature"], {}, "write KEY=VALUE"),
        (["--vary", "sampling.temperature=0"], {}, "one value, so nothing varies"),
        (["--vary", "prompt.usr=A,B"], {}, "variant usr-A"),
        ([], {"variant": [{"prompt": {"user": "x"}}]}, "[[variant]]: name is None"),
        ([], {"variant": [{"name": "a/b"}]}, "[[variant]]: name is 'a/b'"),
        ([], {"variant": [{"name": "a"}, {"name": "a"}]}, "two variants have the name 'a'"),
        ([], {"variant": {"name": "a"}}, "write each variant as a table [[variant]]"),
        ([], {"variant": [{"name": "a", "promt": {"user": "x"}}]}, "variant a: 1 problem"),
        (["--vary", TEMPERATURES, "--output", "a.csv"], {}, "--output is for one run"),
        (
            ["--vary", TEMPERATURES, "--temperature", "0"],
            {},
            "--vary sampling.temperature: another",
        ),
        (["--vary", TEMPERATURES, "--set", "sampling.temperature=0"], {}, "keep one"),
        (["--vary", TEMPERATURES], {"output": {"export": ["a.csv"]}}, "would write the same file"),
        (["--vary", TEMPERATURES, "--shard", "0/2"], {}, "--shard is for one run"),
    ],
)
def test_a_wrong_variant_is_refused_before_a_run(
    args: list[str], tables: Mapping[str, Any], words: str
) -> None:
    write_job(**tables)
    assert words in batchkit("run", "job.toml", *args).refused()
    assert not Path("output").exists()


def test_a_dry_run_of_variants_is_apart_from_real_answers() -> None:
    write_job(variant=VARIANTS, engine={"kind": "vllm", "model": "m"})
    batchkit("run", "job.toml", "--set", "engine.kind=dry-run").ok()
    runs = sorted(path.parent for path in Path("output").glob("*/*/manifest.json"))
    assert [str(run) for run in runs] == [
        f"output/a.dry-run/{name}.dry-run" for name in ("long", "short")
    ]


@pytest.mark.vllm
def test_two_engines_answer_alike_token_by_token(text_model: Path) -> None:
    keys = {"model": str(text_model)}
    own = {"max_model_len": 256, "dtype": "float32"}
    write_job(
        engine={**keys, "kind": "vllm", "options": {**TEXT_ONLY, **own}},
        sampling={"max_tokens": 16, "temperature": 0, "logprobs": 5},
        variant=[
            {"name": "vllm"},
            {"name": "transformers", "engine": {**keys, "kind": "transformers", "options": own}},
        ],
    )
    ended = batchkit("run", "job.toml")
    assert ended.exit_code in (0, 3), ended.stderr
    found = batchkit("compare", "output/a", "--json").json["answers"]["transformers"]
    assert found["equal"] + found["differ"] + found["failed_in_both"] == N_ROWS
    assert found["ties"] == found["differ"]
