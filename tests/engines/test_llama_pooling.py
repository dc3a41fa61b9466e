"""Vectors and scores of a real llama.cpp server that the run starts, on a tiny model of random weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomlkit

from batchkit.storage.vectors import Vectors
from tests.support.llama_cpp import NONE_FOUND, kill_servers, llama_server, write_gguf
from tests.support.own_process import batchkit, begin
from tests.support.rows import read_jsonl, write_jsonl

LLAMA_SERVER = llama_server()
pytestmark = [pytest.mark.skipif(LLAMA_SERVER is None, reason=NONE_FOUND), pytest.mark.release]
TOO_LONG = "tea " * 900


@pytest.fixture(scope="module")
def model(text_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(text_model, tmp_path_factory.mktemp("gguf") / "tiny.gguf")


def write(
    folder: Path, model: Path, server: dict[str, Any], rows: list[dict[str, Any]], **tables: Any
) -> None:
    write_jsonl(folder / "rows.jsonl", rows)
    engine = {
        "kind": "openai-server",
        "model": str(model),
        "server": server,
        "options": {"max_model_len": 512, "max_num_seqs": 4},
    }
    job = {"name": "a", "input": {"path": "rows.jsonl"}, "engine": engine, **tables}
    (folder / "job.toml").write_text(tomlkit.dumps(job))


def records(folder: Path) -> list[dict[str, Any]]:
    """In the rows' order."""
    return sorted(read_jsonl(folder / "results.jsonl"), key=lambda record: int(record["index"]))


def test_each_row_has_its_vector_once_though_the_server_is_killed(
    tmp_path: Path, model: Path
) -> None:
    """The model's file does not name its pooling, so the command does."""
    command = f"{LLAMA_SERVER} -m {model} -c 2048 -np 4 --embedding --pooling last --threads 1 --port {{port}}"
    rows = [{"q": f"question {n}" + " about tea" * (n % 40)} for n in range(300)]
    rows[7]["q"] = TOO_LONG
    prompt = {"user": "{{ q }}"}
    write(tmp_path, model, {"command": command}, rows, task="embed", prompt=prompt)
    process = begin("run", "job.toml", cwd=tmp_path)
    log = tmp_path / "output/a/results.jsonl"
    killed = kill_servers(process, log, at=[20])
    _, err = process.communicate(timeout=120)
    assert process.returncode == 3, err
    assert killed
    undisturbed = batchkit("run", "job.toml", "--set", "name=b", cwd=tmp_path)
    assert undisturbed.returncode == 3, undisturbed.stderr
    found, expected = records(log.parent), records(tmp_path / "output/b")
    assert [record["index"] for record in found] == list(range(300))
    for read in (found, expected):
        assert read.pop(7)["error"]["kind"] == "prompt_too_long"
    ours, theirs = (
        np.stack([Vectors(tmp_path / "output" / name).of(record) for record in read])
        for name, read in (("a", found), ("b", expected))
    )
    assert np.abs(ours - theirs).max() < 0.005  # it rounds otherwise in another batch
    assert (ours @ theirs.T).argmax(axis=1).tolist() == list(range(299))
    checked = json.loads(batchkit("verify", "output/a", "--json", cwd=tmp_path).stdout)
    assert (checked["lost"], checked["duplicates"]) == (0, 0)


def test_a_gguf_file_ranks_documents_with_the_command_that_batchkit_makes(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert LLAMA_SERVER is not None
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "llama-server").symlink_to(LLAMA_SERVER)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=":")
    passages = ["tea is hot", "coffee keeps you awake", "some water"]
    rows: list[dict[str, Any]] = [
        {"q": "tea", "d": passages},
        {"q": "tea", "d": passages[1]},
        {"q": "tea", "d": ["fine", TOO_LONG]},
    ]
    pair = {"query": "{{ q }}", "documents": "{{ d }}"}
    write(tmp_path, model, {}, rows, task="score", pair=pair)
    ran = batchkit("run", "job.toml", cwd=tmp_path)
    assert ran.returncode == 3, ran.stderr
    folder = tmp_path / "output/a"
    several, one, long = records(folder)
    assert len(several["score"]) == 3
    assert several["order"] == sorted(range(3), key=lambda n: -several["score"][n])
    assert one["score"] == pytest.approx(several["score"][1], abs=1e-3)
    assert long["error"]["kind"] == "prompt_too_long"
    manifest = json.loads((folder / "manifest.json").read_text())
    assert "--reranking -b 512 -ub 512" in manifest["starts"][0]["engine"]["server"]
