"""A real llama.cpp server that the run starts, on a tiny model of random weights: text, vectors, scores."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomlkit

from batchkit.storage.vectors import Vectors
from tests.support.jobs import with_tables
from tests.support.llama_cpp import NONE_FOUND, kill_servers, llama_server, write_gguf
from tests.support.own_process import batchkit, begin
from tests.support.rows import read_jsonl, write_jsonl

LLAMA_SERVER = llama_server()
pytestmark = [pytest.mark.skipif(LLAMA_SERVER is None, reason=NONE_FOUND), pytest.mark.release]


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


def write(folder: Path, model: Path, prompts: list[str], **tables: Any) -> Path:
    """The job file's run folder."""
    rows = [{"id": f"q{n}", "text": text, "params": {}} for n, text in enumerate(prompts)]
    return write_rows(folder, model, rows, prompt={"user": "{{ text }}"}, **tables)


def write_rows(folder: Path, model: Path, rows: list[dict[str, Any]], **tables: Any) -> Path:
    write_jsonl(folder / "rows.jsonl", rows)
    made: dict[str, Any] = {
        "name": "a",
        "input": {"path": "rows.jsonl", "id": "id"},
        "engine": {
            "kind": "openai-server",
            "model": str(model),
            "server": {},
            "options": {"max_model_len": 512, "max_num_seqs": 8},
        },
    }
    if "task" not in tables:
        made["sampling"] = {"temperature": 0.0, "max_tokens": 24}
    (folder / "job.toml").write_text(tomlkit.dumps(with_tables(made, tables)))
    return folder / "output" / "a"


def run(folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    return batchkit("run", "job.toml", *args, cwd=folder)


def records(folder: Path) -> list[dict[str, Any]]:
    """In the rows' order."""
    return sorted(read_jsonl(folder / "results.jsonl"), key=lambda record: record["index"])


def prompts(n: int) -> list[str]:
    return [f"tell me about number {k}" + " and tea" * (k % 13) for k in range(n)]


def test_eight_slots_answer_as_one_slot_does(tmp_path: Path, model: Path) -> None:
    folder = write(tmp_path, model, prompts(64))
    alone = run(tmp_path, "--set", "name=alone", "--set", "engine.options.max_num_seqs=1")
    assert alone.returncode == 0, alone.stderr
    ran = run(tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout)["ok"] == 64
    found, expected = records(folder), records(folder.with_name("alone"))
    assert [r["index"] for r in found] == list(range(64))
    assert [r["text"] for r in found] == [r["text"] for r in expected]
    # Of the prompt, each slot has another part cached.
    for tokens in ("prompt_tokens", "completion_tokens"):
        assert [r["usage"][tokens] for r in found] == [r["usage"][tokens] for r in expected]
    assert len({r["text"] for r in found}) > 48
    manifest = json.loads((folder / "manifest.json").read_text())
    command = f"llama-server -m {model} -c 4096 -np 8 --threads 1 --port {{port}}"
    assert manifest["starts"][0]["engine"] == {"server": command, "owned_by": "llamacpp"}
    assert "n_slots = 8" in (folder / "engine.log").read_text()


def test_lengths_reasons_and_usage_are_the_servers(tmp_path: Path, model: Path) -> None:
    folder = write(tmp_path, model, prompts(10))
    assert run(tmp_path).returncode == 0
    found = records(folder)
    assert {r["finish_reason"] for r in found} == {"length"}
    assert {r["usage"]["completion_tokens"] for r in found} == {24}
    short, long = found[1]["usage"], found[9]["usage"]
    assert long["prompt_tokens"] > short["prompt_tokens"] > 10
    word = found[0]["text"].split()[3]
    stopped = run(tmp_path, "--set", "name=b", "--set", f'sampling.stop=["{word}"]')
    assert stopped.returncode == 0, stopped.stderr
    first = records(folder.with_name("b"))[0]
    assert first["finish_reason"] == "stop"
    assert found[0]["text"].startswith(first["text"])
    assert first["usage"]["completion_tokens"] < 24


def test_a_prompt_that_is_too_long_says_how_long_it_is_or_is_cut(
    tmp_path: Path, model: Path
) -> None:
    folder = write(tmp_path, model, ["tell me", "tea " * 900, "about tea"])
    ran = run(tmp_path)
    assert ran.returncode == 3, ran.stderr
    ok, failed, also = records(folder)
    assert (ok["status"], also["status"]) == ("ok", "ok")
    assert failed["error"]["kind"] == "prompt_too_long"
    assert re.search(r"\(9\d\d tokens\).*\(512 tokens\)", failed["error"]["message"])
    cut = run(tmp_path, "--set", "name=b", "--set", "retry.on_too_long=truncate-middle")
    assert cut.returncode == 0, cut.stderr
    record = records(folder.with_name("b"))[1]
    assert record["truncated_tokens"] > 300
    assert 400 < record["usage"]["prompt_tokens"] < 512


def test_an_answer_has_the_shape_that_was_asked_for(tmp_path: Path, model: Path) -> None:
    schema = {
        "type": "object",
        "properties": {"good": {"type": "boolean"}},
        "required": ["good"],
        "additionalProperties": False,
    }
    sampling = {"structured_outputs": {"json": schema}, "max_tokens": 64}
    folder = write(tmp_path, model, prompts(8), sampling=sampling)
    ran = run(tmp_path)
    assert ran.returncode == 0, ran.stderr
    answers = [json.loads(r["text"]) for r in records(folder)]
    assert all(answer in ({"good": True}, {"good": False}) for answer in answers)


def test_a_context_that_does_not_fit_is_tried_smaller(tmp_path: Path, model: Path) -> None:
    wrapped = tmp_path / "bin" / "llama-server"
    wrapped.unlink()
    # One arena: each more is 64 MiB of addresses, and how many there are depends on the cores.
    limits = "export MALLOC_ARENA_MAX=1; ulimit -v 1100000"  # KiB
    wrapped.write_text(f'#!/bin/sh\n{limits}\nexec {LLAMA_SERVER} "$@"\n')
    wrapped.chmod(0o755)
    room = {"max_model_len": 2**19, "max_num_seqs": 8}  # 128 MiB for each
    folder = write(tmp_path, model, prompts(3), engine={"options": room})
    ran = run(tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert "out of memory at load" in ran.stderr
    assert "failed to allocate buffer" in ran.stderr
    assert "next try with max_num_seqs = 4" in ran.stderr
    assert len(records(folder)) == 3
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["engine_steps"][0] == {"max_num_seqs": 4}


# --- vectors and scores

TOO_LONG = "tea " * 900


def test_each_row_has_its_vector_once_though_the_server_is_killed(
    tmp_path: Path, model: Path
) -> None:
    """The model's file does not name its pooling, so the command does."""
    command = f"{LLAMA_SERVER} -m {model} -c 2048 -np 4 --embedding --pooling last --threads 1 --port {{port}}"
    texts = [f"question {n}" + " about tea" * (n % 40) for n in range(300)]
    texts[7] = TOO_LONG
    folder = write(tmp_path, model, texts, task="embed", engine={"server": {"command": command}})
    process = begin("run", "job.toml", cwd=tmp_path)
    killed = kill_servers(process, folder / "results.jsonl", at=[20])
    _, err = process.communicate(timeout=120)
    assert process.returncode == 3, err
    assert killed
    undisturbed = run(tmp_path, "--set", "name=b")
    assert undisturbed.returncode == 3, undisturbed.stderr
    found, expected = records(folder), records(folder.with_name("b"))
    assert [record["index"] for record in found] == list(range(300))
    for read in (found, expected):
        assert read.pop(7)["error"]["kind"] == "prompt_too_long"
    ours, theirs = (
        np.stack([Vectors(folder.with_name(name)).of(record) for record in read])
        for name, read in (("a", found), ("b", expected))
    )
    assert np.abs(ours - theirs).max() < 0.005  # it rounds otherwise in another batch
    assert (ours @ theirs.T).argmax(axis=1).tolist() == list(range(299))
    checked = json.loads(batchkit("verify", folder, "--json", cwd=tmp_path).stdout)
    assert (checked["lost"], checked["duplicates"]) == (0, 0)


def test_a_gguf_file_ranks_documents_with_the_command_that_batchkit_makes(
    tmp_path: Path, model: Path
) -> None:
    passages = ["tea is hot", "coffee keeps you awake", "some water"]
    documents = [passages, passages[1], ["fine", TOO_LONG]]
    rows = [{"id": f"q{n}", "q": "tea", "d": one} for n, one in enumerate(documents)]
    pair = {"query": "{{ q }}", "documents": "{{ d }}"}
    folder = write_rows(tmp_path, model, rows, task="score", pair=pair)
    ran = run(tmp_path)
    assert ran.returncode == 3, ran.stderr
    several, one, long = records(folder)
    assert len(several["score"]) == 3
    assert several["order"] == sorted(range(3), key=lambda n: -several["score"][n])
    assert one["score"] == pytest.approx(several["score"][1], abs=1e-3)
    assert long["error"]["kind"] == "prompt_too_long"
    manifest = json.loads((folder / "manifest.json").read_text())
    assert "--reranking -b 512 -ub 512" in manifest["starts"][0]["engine"]["server"]
