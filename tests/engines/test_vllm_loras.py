"""An adapter for each row: each answers as ``vllm.LLM`` does with that adapter alone."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections import ChainMap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from batchkit.config.loading import make_job
from batchkit.engines.registry import open_preflight
from batchkit.engines.vllm.adapters import CONFIG, WEIGHTS, adapters_of
from batchkit.errors import JobError
from batchkit.storage.identity import differences, identity
from tests.support.adapters import write_adapter
from tests.support.hub_server import COMMIT
from tests.support.jobs import with_tables
from tests.support.model_runs import newest, run_job, write_job
from tests.support.small_vllm import TEXT_ONLY
from tests.support.vllm_reference import with_loras

pytestmark = pytest.mark.vllm

RANKS = {"a": 8, "b": 16, "c": 4, "d": 64, "e": 1}
TEXTS = [f"{'tea and ' * (n % 5)}question {n}: what is {7 * n}?" for n in range(12)]
LONG = "a child reads a letter from her friend near the harbour. " * 20  # several blocks
SHARING = [f"{LONG}question {n}" for n in range(7)]


@pytest.fixture(scope="module")
def adapters(text_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapters")
    for seed, (name, rank) in enumerate(RANKS.items()):
        write_adapter(folder / name, text_model, rank=rank, seed=seed)
    return folder


@pytest.fixture(scope="module")
def alone(text_model: Path, adapters: Path) -> dict[tuple[str | None, str], str]:
    """What ``vllm.LLM`` answers to each text with each adapter, one after the other."""
    texts = {None: TEXTS + SHARING, **dict.fromkeys(RANKS, TEXTS)}
    texts["a"] = texts["b"] = TEXTS + SHARING
    calls = [
        {"lora": name and str(adapters / name), "texts": asked} for name, asked in texts.items()
    ]
    found = with_loras({**TEXT_ONLY, "model": str(text_model)}, calls)
    return {
        (name, text): answer
        for (name, asked), answers in zip(texts.items(), found, strict=True)
        for text, answer in zip(asked, answers, strict=True)
    }


@pytest.fixture
def job(text_model: Path, adapters: Path, tmp_path: Path) -> Callable[..., None]:
    def write(rows: list[dict[str, Any]], names: str = "abcde", **tables: Any) -> None:
        loras = {name: str(adapters / name) for name in names}
        found = {
            "prompt": {"user": "{{ q }}", "lora": "{{ adapter }}"},
            "engine": {"model": str(text_model), "options": TEXT_ONLY, "loras": loras},
            "sampling": {"max_tokens": 12},
        }
        write_job(tmp_path, rows, **with_tables(found, tables))

    return write


def run(folder: Path, exit_code: int = 0) -> list[dict[str, Any]]:
    run_job(folder, exit_code=exit_code)
    return newest(folder)


def test_rows_answer_as_with_their_adapter_alone(
    job: Callable[..., None],
    alone: dict[tuple[str | None, str], str],
    tmp_path: Path,
) -> None:
    """A third of the rows has none; in the order of the input, so that each batch has all kinds, and adapters have to
    make room for others."""
    rows = [{"q": q, "adapter": name} for q in TEXTS for name in (*RANKS, None, "", None)]
    random.Random(0).shuffle(rows)
    options = {**TEXT_ONLY, "max_loras": 2, "enable_prefix_caching": True}
    job(rows, engine={"options": options}, run={"look_ahead": 1})
    for row, record in zip(rows, run(tmp_path), strict=True):
        assert record["text"] == alone[row["adapter"] or None, row["q"]], row
        assert record["lora"] == (row["adapter"] or "")
    assert len({answer for (_, text), answer in alone.items() if text in TEXTS}) > 5 * len(TEXTS)


def test_adapters_by_turns_share_no_cache_over_a_long_prefix_and_an_unknown_one_fails_its_row(
    job: Callable[..., None], alone: dict[tuple[str | None, str], str], tmp_path: Path
) -> None:
    names = ["a", "b", "a", None, "b", "a", None]
    rows = [{"q": q, "adapter": name} for q, name in zip(SHARING, names, strict=True)]
    options = {**TEXT_ONLY, "enable_prefix_caching": True, "max_num_seqs": 1}
    unknown = [{"q": "tea", "adapter": name} for name in ("B", "z9")]
    job(rows + unknown, "ab", engine={"options": options}, run={"look_ahead": 1})
    *found, near, far = run(tmp_path, 3)
    assert [one["text"] for one in found] == [alone[row["adapter"], row["q"]] for row in rows]
    assert (near["error"]["kind"], near["error"]["retryable"]) == ("invalid_request", False)
    unknown = "prompt.lora: 'B' is not in [engine.loras]; did you mean 'b'?"
    assert near["error"]["message"] == unknown
    assert "known: a, b" in far["error"]["message"]


def _change(folder: Path, **keys: Any) -> None:
    path = folder / CONFIG
    path.write_text(json.dumps({**json.loads(path.read_text()), **keys}))


def _of_other_model(
    weights_of: Callable[[str, np.ndarray], dict[str, np.ndarray]],
) -> Callable[[Path], object]:
    """Makes an adapter of a model that has these weights in place of each of ours."""

    def make(folder: Path) -> None:
        model = folder / "other"
        model.mkdir()
        weights = load_file(folder / "model" / "model.safetensors")
        others = [weights_of(name, one) for name, one in weights.items() if "self_attn" in name]
        save_file(dict(ChainMap(*others)), model / "model.safetensors")
        write_adapter(folder, model)

    return make


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "gone": (shutil.rmtree, "no such folder"),
    "no config": (lambda at: (at / CONFIG).unlink(), f"{CONFIG}: No such file or directory"),
    "no JSON": (lambda at: (at / CONFIG).write_text("{"), "is not JSON"),
    "other kind": (lambda at: _change(at, peft_type="IA3"), "peft_type is 'IA3', expected"),
    "rank": (lambda at: _change(at, r="8"), "r is '8', expected a rank from 1 to 512"),
    "no weights": (lambda at: (at / WEIGHTS).unlink(), f"{WEIGHTS}: No such file or directory"),
    "a pickle": (
        lambda at: (at / WEIGHTS).rename((at / WEIGHTS).with_suffix(".bin")),
        "is a pickle, which is never read: save it as safetensors",
    ),
    "cut off": (
        lambda at: os.truncate(at / WEIGHTS, 9_000),
        "is damaged: Error while deserializing",
    ),
    "no weights in it": (lambda at: (at / WEIGHTS).write_bytes(b"x" * 99), "header too large"),
    "another model's": (
        _of_other_model(lambda name, of: {name: of[..., :32].copy()}),
        "for another base model",
    ),
    "a narrow model's": (
        _of_other_model(lambda name, of: {name: of[:16] if "k_proj" in name else of}),
        "k_proj.lora_B.weight has a side of 16, but the model's weights have 32",
    ),
    "a larger model's": (
        _of_other_model(lambda name, of: {name: of, name.replace("s.1.", "s.2."): of}),
        "has 2 layers",
    ),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_adapter_is_named_before_the_model_is_loaded(
    kind: str, text_model: Path, adapters: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "legal"
    shutil.copytree(adapters / "a", folder)
    if kind.endswith("model's"):
        (folder / "model").symlink_to(text_model)
    breaks, words = BROKEN[kind]
    breaks(folder)
    engine = {"model": str(text_model), "options": TEXT_ONLY, "loras": {"legal": str(folder)}}
    with pytest.raises(JobError) as refused:
        open_preflight(make_job({"engine": engine, "prompt": {"lora": "legal"}}, "job.toml"))
    assert str(refused.value).startswith(f"engine.loras.legal: {folder}")
    assert words in str(refused.value)


def test_an_adapter_on_the_hub_is_found_by_its_name(
    text_model: Path, adapters: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    cached = tmp_path / "models--some--legal"
    shutil.copytree(adapters / "a", cached / "snapshots" / COMMIT)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text(COMMIT)
    engine = {"model": str(text_model), "options": TEXT_ONLY, "loras": {"legal": "some/legal"}}
    job = make_job({"engine": engine, "prompt": {"lora": "legal"}}, "job.toml")
    open_preflight(job)
    (adapter,) = adapters_of(job)
    assert adapter.folder == cached / "snapshots" / COMMIT
    assert identity(job).found["engine.commits"] == {"some/legal": COMMIT}
    engine["loras"] = {"gone": "some/gone"}
    with pytest.raises(JobError, match=r"engine\.loras\.gone: some/gone: .* not found on the hub"):
        open_preflight(make_job({"engine": engine, "prompt": {"lora": "gone"}}, "job.toml"))


def test_too_high_a_rank_for_the_users_limit_is_named(text_model: Path, adapters: Path) -> None:
    options = {**TEXT_ONLY, "max_lora_rank": 8}
    engine = {"model": str(text_model), "options": options, "loras": {"d": str(adapters / "d")}}
    with pytest.raises(JobError, match=r"has rank 64, but engine\.options\.max_lora_rank is 8"):
        open_preflight(make_job({"engine": engine, "prompt": {"lora": "d"}}, "job.toml"))


def _with_unknown_modules(folder: Path) -> None:
    data = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(data.replace(b"q_proj", b"z_proj"))


@pytest.mark.parametrize(
    ("breaks", "words"),
    [
        (lambda at: _change(at, use_dora=True), "ValueError: vLLM does not yet support DoRA"),
        (_with_unknown_modules, "expected target modules"),
    ],
)
def test_an_adapter_that_vllm_refuses_is_named_before_the_first_row(
    breaks: Callable[[Path], None],
    words: str,
    job: Callable[..., None],
    text_model: Path,
    tmp_path: Path,
) -> None:
    good, bad = tmp_path / "good", tmp_path / "bad"
    write_adapter(good, text_model)
    breaks(write_adapter(bad, text_model))
    job([{"q": "tea", "adapter": "good"}], engine={"loras": {"good": str(good), "bad": str(bad)}})
    done = run_job(tmp_path, exit_code=1)
    assert f"engine.loras.bad: {bad}: vLLM can't load this adapter: ValueError: " in done.stderr
    assert words in done.stderr
    assert not (tmp_path / "output/run/results.jsonl").read_text()


@pytest.mark.release
def test_an_adapter_that_kills_the_engine_is_named(
    job: Callable[..., None], adapters: Path, tmp_path: Path
) -> None:
    worker = "tests.support.failing_worker.FailingWorker"
    options = {**TEXT_ONLY, "worker_cls": worker, "additional_config": {"lora": "b"}}
    job([{"q": "tea", "adapter": "a"}], "abc", engine={"options": options})
    done = run_job(tmp_path, exit_code=1)
    assert f"died while it loaded engine.loras.b: {adapters / 'b'} (SIGKILL" in done.stderr


def test_an_adapter_whose_files_were_replaced_is_another_job(
    text_model: Path, tmp_path: Path
) -> None:
    write_adapter(tmp_path / "own", text_model, seed=1)
    engine = {"model": str(text_model), "loras": {"own": str(tmp_path / "own")}}
    job = make_job({"engine": engine, "prompt": {"lora": "own"}}, "job.toml")
    begun = identity(job)
    write_adapter(tmp_path / "own", text_model, seed=2)
    (message,) = differences(begun, identity(job))
    assert message.startswith("engine.loras")
