"""A run that continues with another ``speculative_config``: its answers are compared before the first new row."""

from __future__ import annotations

from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
import tomlkit

from batchkit.config.loading import make_job
from batchkit.execution.parity import can_be_checked
from batchkit.execution.start import Start, StartOptions
from batchkit.storage.starts import current_manifest, read_history
from tests.support import model_runs
from tests.support.dry_runs import LOG, RUN, records, settled, write_job, write_rows
from tests.support.jobs import with_tables
from tests.support.model_runs import answered, run_job
from tests.support.own_process import batchkit
from tests.support.plugin import ENGINE, installed
from tests.support.small_vllm import TEXT_ONLY

pytestmark = [pytest.mark.usefixtures("in_an_empty_folder"), pytest.mark.slow]

KEY = "engine.options.speculative_config"
NGRAM = {"method": "ngram", "num_speculative_tokens": 4}
OTHER = {"method": "ngram", "num_speculative_tokens": 2}


def run(drafts: dict[str, Any] | None, *args: str, **tables: Any) -> CompletedProcess[str]:
    options = {} if drafts is None else {"speculative_config": drafts}
    write_job(**with_tables({"engine": {"kind": "ours", "options": options}}, tables))
    return batchkit("run", "job.toml", *args, cwd=Path.cwd(), PYTHONPATH=installed(ENGINE))


@pytest.mark.parametrize(("then", "now"), [(None, NGRAM), (NGRAM, OTHER), (NGRAM, None)])
def test_a_run_with_the_same_answers_continues_and_notes_the_option(
    then: dict[str, Any] | None, now: dict[str, Any] | None
) -> None:
    write_rows(40)
    assert run(then, "--limit", "30").returncode == 0
    done = run(now, "--limit", "35")
    assert done.returncode == 0, done.stderr
    assert "16 rows have the same answers" in done.stderr
    assert len(records(RUN / "parity" / "results.jsonl")) == 16
    assert current_manifest(RUN).identity.get(KEY) == now
    assert tomlkit.parse((RUN / "job.toml").read_text())["engine"].get("options", {}) == (
        {} if now is None else {"speculative_config": now}
    )
    again = run(now)
    assert again.returncode == 0, again.stderr
    assert "answered again" not in again.stderr
    assert settled() == dict.fromkeys(range(40), "ok")


def test_steps_are_compared_too() -> None:
    steps = [{"name": name, "prompt": {"user": "{{ q }}"}} for name in ("draft", "final")]
    write_rows(4)
    assert run(None, "--limit", "2", prompt=None, steps=steps).returncode == 0
    refused = run({**NGRAM, "wrong": [1]}, prompt=None, steps=steps)
    assert (refused.returncode, "draft answer 1, drafted" in refused.stderr) == (2, True)
    done = run({**NGRAM, "wrong": [3]}, prompt=None, steps=steps)
    assert done.returncode == 0, done.stderr
    assert settled() == dict.fromkeys(range(4), "ok")


def test_a_run_with_another_answer_is_refused_and_continues_as_before() -> None:
    write_rows(8)
    assert run(None, "--limit", "5").returncode == 0
    before = LOG.read_bytes(), (RUN / "job.toml").read_bytes()
    for _ in range(2):
        refused = run({**NGRAM, "wrong": [2]})
        assert refused.returncode == 2
        assert "row 2 (id 2)" in refused.stderr
        assert '"answer 2" → "answer 2, drafted"' in refused.stderr
        assert "--fresh" in refused.stderr
        assert (LOG.read_bytes(), (RUN / "job.toml").read_bytes()) == before
        assert read_history(RUN).checked == {}
    done = run(None)
    assert (done.returncode, "answered again" in done.stderr) == (0, False)
    assert {record["text"] for record in records()} == {f"answer {n}" for n in range(8)}


def test_a_run_without_pending_rows_is_not_checked() -> None:
    write_rows(3)
    assert run(None).returncode == 0
    done = run({**NGRAM, "wrong": [0, 1, 2]})
    assert (done.returncode, "nothing left to run" in done.stderr) == (0, True)
    assert not (RUN / "parity").exists()
    assert KEY not in current_manifest(RUN).identity.job


@pytest.mark.parametrize(
    "tables",
    [{"sampling": {"temperature": 0.5}}, {"run": {"seed": 1}}],
    ids=["drawn answers", "another change"],
)
def test_a_change_that_can_not_be_checked_is_refused_before_the_model_is_loaded(
    tables: dict[str, Any],
) -> None:
    write_rows(3)
    same = tables if "sampling" in tables else {}
    assert run(None, "--limit", "2", **same).returncode == 0
    refused = run(NGRAM, **tables)
    assert refused.returncode == 2
    assert f"  {KEY}: null → " in refused.stderr
    assert not (RUN / "parity").exists()


@pytest.mark.vllm
def test_vllm_drafts_with_ngrams_in_a_run_that_began_without(
    text_model: Path, tmp_path: Path
) -> None:
    rows = [{"q": f"tea {n} milk tea {n} milk tea"} for n in range(8)]
    job = {"prompt": {"user": "{{ q }}"}, "sampling": {"max_tokens": 24}}
    engine = {"model": str(text_model), "options": TEXT_ONLY}
    whole = answered(tmp_path, rows, name="whole", engine=engine, **job)
    model_runs.write_job(tmp_path, engine=engine, **job)
    run_job(tmp_path, "--limit", "5")
    options = TEXT_ONLY | {"speculative_config": NGRAM | {"prompt_lookup_max": 3}}
    mixed = answered(tmp_path, engine=engine | {"options": options}, **job)
    assert [record["text"] for record in mixed] == [record["text"] for record in whole]
    assert KEY in read_history(tmp_path / model_runs.OUTPUT).checked
    log = (tmp_path / model_runs.OUTPUT / "run.log").read_text()
    assert "5 rows have the same answers" in log
    assert log.count("is loaded already") == 1


STEP = {"name": "only", "prompt": {"user": "{{ q }}"}}
CHANGED = [f"{KEY}: null → {{}}"]


@pytest.mark.parametrize(
    ("tables", "changes", "expected"),
    [
        ({}, CHANGED, True),
        ({}, [*CHANGED, "run.seed: 0 → 1"], False),
        ({}, ["engines.judge.options.speculative_config: null → {}"], True),
        ({}, ["engine.options.spec_tokens: null → 2"], True),
        ({}, ["engine.options.dtype: null → 1"], False),
        ({"sampling": {"temperature": 0.1}}, CHANGED, False),
        ({"sampling": {"temperature": "{{ t }}"}}, CHANGED, False),
        ({"sampling": {"sampling_column": "own"}}, CHANGED, False),
        ({"retry": {"temperatures": [0.0, 0.7]}}, CHANGED, False),
        ({"retry": {"temperatures": [0.0]}}, CHANGED, True),
        ({"prompt": None}, CHANGED, False),  # rows may be requests with their own temperature
        ({"prompt": None, "steps": [STEP]}, CHANGED, True),
        ({"prompt": None, "steps": [STEP | {"sampling": {"temperature": 1}}]}, CHANGED, False),
        ({"prompt": None, "task": "embed"}, CHANGED, False),
    ],
)
def test_only_greedy_jobs_can_be_checked(
    tables: dict[str, Any], changes: list[str], *, expected: bool
) -> None:
    table = {"prompt": {"user": "{{ q }}"}, "engine": {"model": "m"}, "input": {"path": "in.jsonl"}}
    given = {name: of for name, of in with_tables(table, tables).items() if of is not None}
    assert can_be_checked(Start.of(make_job(given, "test")), changes) == expected


def test_a_function_that_adjusts_the_sampling_prevents_the_check() -> None:
    job = make_job({"prompt": {"user": "{{ q }}"}, "engine": {"model": "m"}}, "test")
    options = StartOptions(adjust_sampling=lambda sampling: sampling)
    assert not can_be_checked(Start.of(job, options), CHANGED)
