"""A real llama.cpp server that the run starts, on a tiny model of random weights: text, vectors, scores."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from batchkit.storage.vectors import Vectors
from tests.support.command_line import Ended, batchkit
from tests.support.dry_runs import LOG, RUN, manifest, reductions
from tests.support.jobs import with_tables
from tests.support.llama_cpp import NONE_FOUND, kill_servers, llama_server, write_gguf
from tests.support.own_process import begin
from tests.support.server_runs import records, write_job

LLAMA_SERVER = llama_server()
pytestmark = [
    pytest.mark.skipif(LLAMA_SERVER is None, reason=NONE_FOUND),
    pytest.mark.usefixtures("in_an_empty_folder"),
    pytest.mark.release,
]


@pytest.fixture(scope="module")
def model(text_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(text_model, tmp_path_factory.mktemp("gguf") / "tiny.gguf")


@pytest.fixture(autouse=True)
def _found_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert LLAMA_SERVER is not None
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "llama-server").symlink_to(LLAMA_SERVER)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def write(model: Path, rows: list[Any], **tables: Any) -> None:
    """A row that is a text is a prompt."""
    made: dict[str, Any] = {
        "engine": {
            "model": str(model),
            "server": {},
            "options": {"max_model_len": 512, "max_num_seqs": 8},
        },
        **({} if "pair" in tables else {"prompt": {"user": "{{ text }}"}}),
        **({} if "task" in tables else {"sampling": {"temperature": 0.0, "max_tokens": 24}}),
    }
    rows = [{"text": row} if isinstance(row, str) else row for row in rows]
    write_job("", rows, **with_tables(made, tables))


def run(*settings: str, exit_code: int = 0) -> Ended:
    ended = batchkit("run", "job.toml", *(word for one in settings for word in ("--set", one)))
    assert ended.exit_code == exit_code, ended.stderr
    return ended


def prompts(n: int) -> list[str]:
    return [f"tell me about number {k}" + " and tea" * (k % 13) for k in range(n)]


def test_eight_slots_answer_as_one_slot_does(model: Path) -> None:
    write(model, prompts(64))
    run("name=alone", "engine.options.max_num_seqs=1")
    assert run().json["ok"] == 64
    found, expected = records(), records(RUN.with_name("alone"))
    assert [r["index"] for r in found] == list(range(64))
    assert [r["text"] for r in found] == [r["text"] for r in expected]
    # Of the prompt, each slot has another part cached.
    for tokens in ("prompt_tokens", "completion_tokens"):
        assert [r["usage"][tokens] for r in found] == [r["usage"][tokens] for r in expected]
    assert len({r["text"] for r in found}) > 48
    command = f"llama-server -m {model} -c 4096 -np 8 --threads 1 --port {{port}}"
    assert manifest()["starts"][0]["engine"] == {"server": command, "owned_by": "llamacpp"}
    assert "n_slots = 8" in (RUN / "engine.log").read_text()


def test_answers_of_eight_slots_pass_the_self_check(model: Path) -> None:
    write(model, prompts(32), self_check={"rows": 6})
    run()
    checked = batchkit("status", RUN, "--json").json["checked"]
    assert (checked["rows"], checked["different"]) == (6, 0), checked


def test_lengths_reasons_and_usage_are_the_servers(model: Path) -> None:
    write(model, prompts(10))
    run()
    found = records()
    assert {r["finish_reason"] for r in found} == {"length"}
    assert {r["usage"]["completion_tokens"] for r in found} == {24}
    short, long = found[1]["usage"], found[9]["usage"]
    assert long["prompt_tokens"] > short["prompt_tokens"] > 10
    word = found[0]["text"].split()[3]
    run("name=b", f'sampling.stop=["{word}"]')
    first = records(RUN.with_name("b"))[0]
    assert first["finish_reason"] == "stop"
    assert found[0]["text"].startswith(first["text"])
    assert first["usage"]["completion_tokens"] < 24


def test_a_prompt_that_is_too_long_says_how_long_it_is_or_is_cut(model: Path) -> None:
    write(model, ["tell me", "tea " * 900, "about tea"])
    run(exit_code=3)
    ok, failed, also = records()
    assert (ok["status"], also["status"]) == ("ok", "ok")
    assert failed["error"]["kind"] == "prompt_too_long"
    assert re.search(r"\(9\d\d tokens\).*\(512 tokens\)", failed["error"]["message"])
    run("name=b", "retry.on_too_long=truncate-middle")
    record = records(RUN.with_name("b"))[1]
    assert record["truncated_tokens"] > 300
    assert 400 < record["usage"]["prompt_tokens"] < 512


def test_an_answer_has_the_shape_that_was_asked_for(model: Path) -> None:
    schema = {"type": "object", "properties": {"good": {"type": "boolean"}}, "required": ["good"]}
    schema["additionalProperties"] = False
    sampling = {"structured_outputs": {"json": schema}, "max_tokens": 64}
    write(model, prompts(8), sampling=sampling)
    run()
    answers = [json.loads(r["text"]) for r in records()]
    assert all(answer in ({"good": True}, {"good": False}) for answer in answers)


def test_a_context_that_does_not_fit_is_tried_smaller(tmp_path: Path, model: Path) -> None:
    wrapped = tmp_path / "bin" / "llama-server"
    wrapped.unlink()
    # One arena: each more is 64 MiB of addresses, and how many there are depends on the cores.
    limits = "export MALLOC_ARENA_MAX=1; ulimit -v 1100000"  # KiB
    wrapped.write_text(f'#!/bin/sh\n{limits}\nexec {LLAMA_SERVER} "$@"\n')
    wrapped.chmod(0o755)
    room = {"max_model_len": 2**19, "max_num_seqs": 8}  # 128 MiB for each
    write(model, prompts(3), engine={"options": room})
    ran = run()
    assert "out of memory at load" in ran.stderr
    assert "failed to allocate buffer" in ran.stderr
    assert "next try with max_num_seqs = 4" in ran.stderr
    assert len(records()) == 3
    assert reductions()[0] == {"max_num_seqs": 4}


# --- vectors and scores

TOO_LONG = "tea " * 900


def test_each_row_has_its_vector_once_though_the_server_is_killed(model: Path) -> None:
    """The model's file does not name its pooling, so the command does."""
    command = f"{LLAMA_SERVER} -m {model} -c 2048 -np 4 --embedding --pooling last --threads 1 --port {{port}}"
    texts = [f"question {n}" + " about tea" * (n % 40) for n in range(300)]
    texts[7] = TOO_LONG
    write(model, texts, task="embed", engine={"server": {"command": command}})
    process = begin("run", "job.toml", cwd=Path.cwd())
    killed = kill_servers(process, LOG, at=[20])
    _, err = process.communicate(timeout=120)
    assert process.returncode == 3, err
    assert killed
    run("name=b", exit_code=3)
    found, expected = records(), records(RUN.with_name("b"))
    assert [record["index"] for record in found] == list(range(300))
    for read in (found, expected):
        assert read.pop(7)["error"]["kind"] == "prompt_too_long"
    ours, theirs = (
        np.stack([Vectors(RUN.with_name(name)).of(record) for record in read])
        for name, read in (("a", found), ("b", expected))
    )
    assert np.abs(ours - theirs).max() < 0.005  # it rounds otherwise in another batch
    assert (ours @ theirs.T).argmax(axis=1).tolist() == list(range(299))
    checked = batchkit("verify", RUN, "--json").json
    assert (checked["lost"], checked["duplicates"]) == (0, 0)


def test_a_gguf_file_ranks_documents_with_the_command_that_batchkit_makes(model: Path) -> None:
    passages = ["tea is hot", "coffee keeps you awake", "some water"]
    documents = [passages, passages[1], ["fine", TOO_LONG]]
    rows = [{"q": "tea", "d": one} for one in documents]
    pair = {"query": "{{ q }}", "documents": "{{ d }}"}
    write(model, rows, task="score", pair=pair)
    run(exit_code=3)
    several, one, long = records()
    assert len(several["score"]) == 3
    assert several["order"] == sorted(range(3), key=lambda n: -several["score"][n])
    assert one["score"] == pytest.approx(several["score"][1], abs=1e-3)
    assert long["error"]["kind"] == "prompt_too_long"
    assert "--reranking -b 512 -ub 512" in manifest()["starts"][0]["engine"]["server"]
