"""A model of the transformers engine that fails: memory, a row at fault, a process that dies."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from batchkit.engines.base import EngineLoad
from batchkit.engines.registry import open_engine
from batchkit.types import Request
from tests.support.engine_requests import ask, request
from tests.support.forks import Fork
from tests.support.model_runs import newest, run_job
from tests.support.own_process import batchkit
from tests.support.rows import write_jsonl
from tests.support.transformers_jobs import FAULTS, N_ROWS, faulty_model, make_job, write_job

pytestmark = pytest.mark.slow

OpenFaulty = Callable[..., closing[Any]]


@pytest.fixture(scope="module")
def faulty(text_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return faulty_model(text_model, tmp_path_factory.mktemp("models") / "faulty")


@pytest.fixture
def open_faulty(faulty: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., closing[Any]]:
    def opened(faults: dict[str, Any], **options: Any) -> closing[Any]:
        monkeypatch.setenv(FAULTS, json.dumps(faults))
        return closing(open_engine(make_job(faulty, trust_remote_code=True, **options)))

    return opened


def token(model: Path, word: str) -> str:
    from transformers import AutoTokenizer

    (number,) = AutoTokenizer.from_pretrained(model).encode(word, add_special_tokens=False)
    return str(number)


def asked_of(n: int, poison: Sequence[int] = (), word: str = "", **sampling: Any) -> list[Request]:
    """Prompts of about one length; those of ``poison`` have ``word``."""
    texts = [f"the {word}" if i in poison else "the garden" for i in range(n)]
    return [request(i, text, **sampling) for i, text in enumerate(texts)]


def test_its_own_code_is_run_only_if_the_job_says_so(faulty: Path, open_faulty: OpenFaulty) -> None:
    with open_faulty({"over": 0}, max_num_seqs=1) as opened:
        assert ask(opened, request(1))[0].error is not None
    with closing(open_engine(make_job(faulty))) as opened:
        assert ask(opened, request(1))[0].error is None


def test_a_batch_that_needs_too_much_memory_is_halved(
    open_faulty: OpenFaulty, caplog: pytest.LogCaptureFixture
) -> None:
    rows = asked_of(20, temperature=0.9)  # sampled: run again they must give the same
    with open_faulty({}) as opened:
        expected = ask(opened, *rows)
    with open_faulty({"over": 2}) as opened:
        done = ask(opened, *rows)
        assert opened.max_num_seqs == 8
    assert [(c.choices, c.usage) for c in done] == [(c.choices, c.usage) for c in expected]
    assert not any(c.error for c in done)
    sizes = re.findall(
        r"out of memory.*: batches now have up to (\d) rows$", caplog.text, re.MULTILINE
    )
    assert sizes == ["4", "2"]


def test_after_a_stretch_of_success_it_grows_to_what_it_was(
    open_faulty: OpenFaulty, caplog: pytest.LogCaptureFixture
) -> None:
    with open_faulty({"over": 1, "times": 2}) as opened:
        done = ask(opened, *asked_of(240, max_tokens=2))
    assert all(completion.error is None for completion in done)
    sizes = re.findall(r"batches \w+ have up to (\d+) rows( again)?", caplog.text)
    assert sizes == [("4", ""), ("2", ""), ("4", " again"), ("8", " again")]


def test_a_row_that_needs_too_much_memory_alone_fails_alone(open_faulty: OpenFaulty) -> None:
    rows = [*asked_of(10), request(10, "tea " * 200, temperature=1.0, n=3), *asked_of(6)]
    with open_faulty({"prompt_over": 100}) as opened:
        done = ask(opened, *rows)
        again = ask(opened, *asked_of(20))
    assert [n for n, completion in enumerate(done) if completion.error is not None] == [10]
    assert done[10].error is not None
    assert done[10].error.kind == "oom"
    assert all(completion.error is None for completion in again)


def with_two_at_fault(word: str) -> list[Request]:
    """One of them is answered four times."""
    rows = asked_of(20, (3, 11), word)
    rows[11] = request(11, f"the {word}", temperature=0.8, n=4)
    return rows


def test_only_the_row_at_fault_fails(
    faulty: Path, open_faulty: OpenFaulty, caplog: pytest.LogCaptureFixture
) -> None:
    words = {"harbour": "error", "bridge": "refusal", "winter": "oom"}
    kinds = {"error": "engine_crash", "refusal": "invalid_request", "oom": "oom"}
    tokens = {token(faulty, f" {word}"): fault for word, fault in words.items()}
    with open_faulty({"tokens": tokens}) as opened:
        undisturbed = ask(opened, *asked_of(20))
        for word, fault in words.items():
            caplog.clear()
            done = ask(opened, *with_two_at_fault(word))
            assert opened.load() == EngineLoad(0, 0, 0.0, 0)
            failed = {n: c.error.kind for n, c in enumerate(done) if c.error}
            assert failed == {3: kinds[fault], 11: kinds[fault]}
            assert "planted" in str(done[3].error)
            for one, expected in zip(done, undisturbed, strict=True):
                assert one.error or one.choices == expected.choices
            assert ("running its rows one by one" in caplog.text) == (fault != "oom")


def test_a_job_is_finished_beside_all_kinds_of_faults(
    faulty: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the command line, the engine in a process of its own, which one of the rows kills."""
    rows = write_job(tmp_path, faulty)
    words = {4: (" harbour", "error"), 9: (" bridge", "oom"), 17: (" winter", "kill")}
    for n, (word, _) in words.items():
        rows[n]["q"] += word
    write_jsonl(tmp_path / "rows.jsonl", rows)
    tokens = {token(faulty, word): kind for word, kind in words.values()}
    monkeypatch.setenv(FAULTS, json.dumps({"over": 4, "tokens": tokens}))

    trusted = ["--set", "engine.options.trust_remote_code=true"]
    done = run_job(tmp_path, *trusted, exit_code=3)

    records = newest(tmp_path)
    kinds = {r["index"]: r["error"]["kind"] for r in records if r["status"] == "failed"}
    assert kinds == {4: "engine_crash", 9: "oom", 17: "oom"}  # a SIGKILL is the kernel's for memory
    assert len(records) == N_ROWS
    log = (tmp_path / "output/run/engine.log").read_text()
    assert "running its rows one by one" in log
    assert "batches now have up to 4 rows" in log
    assert "engine died" in done.stderr
    assert done.stderr.count("trust_remote_code") == 1, "however many engines it took"
    assert "trust_remote_code" in (tmp_path / "output/run/run.log").read_text()
    assert "trust_remote_code" not in log


def test_find_bs_shows_which_size_does_not_fit(
    faulty: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_job(tmp_path, faulty)
    monkeypatch.setenv(FAULTS, json.dumps({"over": 2}))
    trusted = ["--set", "engine.options.trust_remote_code=true"]
    sizes = ["--low", "2", "--high", "3", "--seconds", "30", "--json"]
    done = batchkit("find-bs", "job.toml", *sizes, *trusted, cwd=tmp_path, start=Fork)
    found = {line["batch_size"]: line["status"] for line in json.loads(done.stdout)["batch_sizes"]}
    assert found == {2: "ok", 3: "OOM"}, done.stderr
