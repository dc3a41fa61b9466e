"""vLLM's own features and refusals, one engine for all: a bad request never harms its neighbours."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from PIL import Image

from batchkit.config.speed_options import SPEED_OPTIONS
from batchkit.config.tables import JobConfig
from batchkit.engines.base import Engine
from batchkit.engines.faults import EngineDied
from batchkit.engines.process.launcher import Launcher
from batchkit.engines.registry import open_engine
from batchkit.engines.vllm.core import CoreWatch
from batchkit.engines.vllm.engine import unknown_images
from batchkit.engines.vllm.options import check_config, speed_options
from batchkit.types import Request, Row
from tests.support.adapters import write_adapter
from tests.support.engine_requests import ask, collect, plain, request
from tests.support.small_vllm import SMALL, TEXT_ONLY

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def engine(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    options = {**SMALL, "max_logprobs": 5}
    engine = {"model": str(demo_model), "options": options}
    output = {"dir": str(tmp_path_factory.mktemp("output"))}
    job = JobConfig(engine=engine, run={"row_timeout_s": 600.0}, output=output)
    with closing(open_engine(job)) as opened:
        yield opened


FAILING = {"worker_cls": "tests.support.failing_worker.FailingWorker"}
SCHEMA = {
    "type": "object",
    "properties": {"yes": {"type": "boolean"}},
    "required": ["yes"],
    "additionalProperties": False,
}


def test_sampling_parameters_reach_vllm(engine: Engine) -> None:
    sample = {"temperature": 1.0, "seed": 7, "max_tokens": 12}
    pattern = {"max_pattern_size": 20, "min_count": 4}
    runaway = {"max_tokens": 200, "logit_bias": {"50": 100}, "repetition_detection": pattern}
    three, once, again, other, greedy, repeated, choice, regex, as_json = ask(
        engine,
        request(1, **sample, n=3),
        request(1, **sample),
        request(1, **sample),
        request(1, **{**sample, "seed": 8}),
        request(1, logprobs=2),
        request(1, **runaway),
        request(1, structured_outputs={"choice": ["tea", "milk"]}),
        request(2, structured_outputs={"regex": r"[0-9]{4}"}),
        request(3, structured_outputs={"json": SCHEMA}, max_tokens=64),
    )
    assert len(three.choices) == 3
    assert three.usage is not None
    assert 12 < three.usage.completion_tokens <= 36
    assert once.choices[0].text == again.choices[0].text != other.choices[0].text
    tokens = greedy.choices[0].logprobs
    assert "".join(token["token"] for token in tokens) == greedy.choices[0].text
    assert all(token["top_logprobs"][0]["logprob"] == token["logprob"] for token in tokens)
    assert repeated.choices[0].finish_reason == "repetition"
    assert choice.choices[0].text in ("tea", "milk")
    assert re.fullmatch(r"[0-9]{4}", regex.choices[0].text)
    assert isinstance(json.loads(as_json.choices[0].text)["yes"], bool)
    word = greedy.choices[0].text.split()[2]
    (stopped,) = ask(engine, request(1, stop=[word]))
    assert stopped.choices[0].finish_reason == "stop"
    assert greedy.choices[0].text.startswith(stopped.choices[0].text)
    assert word not in stopped.choices[0].text


def test_a_row_without_a_token_in_time_is_aborted(
    vllm_job: Callable[..., JobConfig], launcher: Launcher
) -> None:
    # A step takes 0.2 s and reads 32 tokens of the prompt: the long one needs 3 s to its first.
    slow = {"max_num_batched_tokens": 32, "additional_config": {"step_s": 0.2}}
    options = {**SMALL, **slow, **FAILING}
    job = vllm_job(run={"row_timeout_s": 1.0}, engine={"options": options})
    with closing(open_engine(job, launcher)) as opened:
        stuck, fine = ask(opened, plain(" tea" * 480, max_tokens=1), plain("milk", max_tokens=1))
    assert fine.error is None
    assert stuck.error is not None
    assert stuck.error.kind == "timeout"
    assert "no token for" in str(stuck.error)


@pytest.fixture
def own_core(vllm_job: Callable[..., JobConfig], monkeypatch: pytest.MonkeyPatch) -> JobConfig:
    """vLLM's engine core in a process of its own, as on a GPU (with 1 the CPU's worker would have another one)."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "01")
    return vllm_job(run={"row_timeout_s": 3}, engine={"options": {**SMALL, **FAILING}})


def test_a_core_in_its_own_process_answers_as_one_here_and_its_error_keeps_its_type(
    own_core: JobConfig, vllm_job: Callable[..., JobConfig], engine: Engine
) -> None:
    asked = [plain(f"tea {n}", max_tokens=8) for n in range(40)]
    asked.append(plain("milk", structured_outputs={"choice": ["tea", "milk"]}))
    bad = plain("tea", extra_args={"poison": "oom"})
    with closing(open_engine(own_core)) as opened:
        done = ask(opened, *asked)
        opened.submit(bad)
        with pytest.raises(EngineDied) as died:
            collect(opened, 1)
    assert [d.choices[0].text for d in done] == [d.choices[0].text for d in ask(engine, *asked)]
    assert (died.value.fault.kind, died.value.fault.type) == ("oom", "OutOfMemoryError")


@pytest.mark.parametrize(("max_num_seqs", "is_apart"), [(511, False), (512, True)])
def test_a_core_with_very_many_requests_is_to_have_a_process_of_its_own(
    monkeypatch: pytest.MonkeyPatch, max_num_seqs: int, *, is_apart: bool
) -> None:
    """An engine that was loaded in this process before has set the variable."""
    for name in ("VLLM_ENABLE_V1_MULTIPROCESSING", "BATCHKIT_CORE_DIED"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    with closing(CoreWatch(max_num_seqs)):
        assert bool(int(os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"])) == is_apart


def test_a_core_in_its_own_process_that_is_killed_is_noticed(own_core: JobConfig) -> None:
    with closing(open_engine(own_core)) as opened:
        opened.submit(plain("tea", extra_args={"poison": "kill"}))
        with pytest.raises(EngineDied, match="SIGKILL") as died:
            collect(opened, 1)
    assert died.value.fault.is_unexplained_kill


def test_what_runs_at_once_by_default_is_known_before_the_model_is_loaded(
    vllm_job: Callable[..., JobConfig], launcher: Launcher
) -> None:
    """A smaller batch after out of memory begins from there."""
    unset = {name: value for name, value in SMALL.items() if name != "max_num_seqs"}
    job = vllm_job(engine={"options": unset})
    with closing(open_engine(job, launcher)) as engine:
        assert check_config(job).scheduler_config.max_num_seqs == engine.max_num_seqs


def test_tune_tries_only_options_that_a_resumed_run_may_change(
    vllm_job: Callable[..., JobConfig],
) -> None:
    found = speed_options(vllm_job())
    assert {*found} <= {*SPEED_OPTIONS}
    assert "performance_mode" not in found, "without CUDA graphs, it only doubles sizes"
    options = {**SMALL, "enforce_eager": False, "performance_mode": "throughput"}
    found = speed_options(vllm_job(engine={"options": options}))
    assert found["performance_mode"] == ["balanced", "interactivity"]
    assert "kv_offloading_size" not in found, "a CPU has no other memory to offload to"


def test_a_lora_adapter_changes_the_answers(
    text_model: Path, tmp_path: Path, launcher: Launcher
) -> None:
    write_adapter(tmp_path / "adapter", text_model)

    def answer(lora: str | None) -> str:
        engine = {"model": str(text_model), "options": TEXT_ONLY, "lora": lora}
        job = JobConfig(engine=engine, output={"dir": str(tmp_path / "output")})
        with closing(open_engine(job, launcher)) as opened:
            return ask(opened, request(1))[0].choices[0].text

    assert answer(str(tmp_path / "adapter")) != answer(None)


def test_a_refused_prompt_does_not_take_along_others_with_its_image(engine: Engine) -> None:
    """vLLM's renderer sends an image once, and takes that for done when the prompt was refused."""
    image = Image.new("RGB", (256, 256), (3, 141, 59))  # 64 tokens, too many beside that text
    sampling = {"temperature": 0.0, "max_tokens": 4}

    def about(index: int, text: str) -> Request:
        parts = [{"type": "image_pil", "image_pil": image}, {"type": "text", "text": text}]
        messages = [{"role": "user", "content": parts}]
        return Request(Row(index, str(index), {}), messages, None, sampling, "")

    first = ask(engine, about(0, "tea " * 470), *(about(n, "what is it?") for n in range(1, 6)))
    assert [done.error and done.error.kind for done in first] == ["prompt_too_long", *[None] * 5]
    again = ask(engine, *(about(n, "what is it?") for n in range(6, 9)))
    assert {done.choices[0].text for done in [*first[1:], *again]} == {first[1].choices[0].text}


def test_images_that_the_engine_lacks_are_known_by_either_error_of_vllm() -> None:
    prompt = {"mm_hashes": {"image": ["a", "b"]}}
    oldest = AssertionError("Expected a cached item for mm_hash='a'")  # vLLM 0.26
    assert unknown_images(oldest, prompt) == ["a", "b"]
    newest = ValueError("missing")
    newest.mm_hashes = ["b"]  # type: ignore[attr-defined]
    assert unknown_images(newest, prompt) == ["b"]
    assert not unknown_images(AssertionError("another"), prompt)


def test_answers_are_the_same_with_stop_strings_and_log_probabilities_beside_them(
    engine: Engine,
) -> None:
    """Those are made token by token, so they show what the others must be."""
    plain = [request(n, max_tokens=24) for n in range(6)]
    slow = [request(n, max_tokens=24, stop=["no such word"]) for n in range(6)]
    told = [request(n, max_tokens=24, logprobs=0) for n in range(6)]
    done = ask(engine, *plain, *slow, *told)
    texts = [answer.choices[0].text for answer in done]
    assert texts[:6] == texts[6:12] == texts[12:]
    assert len(set(texts)) == 6
    assert {answer.usage.completion_tokens for answer in done if answer.usage} == {24}


def test_tokens_of_unfinished_answers_are_counted(engine: Engine) -> None:
    """The engine counts now and then, so this one is given more requests until it has counted."""
    counts, n_sent, n_done = [0], 0, 0
    while max(counts) == 0 or n_done < n_sent:
        if max(counts) == 0 and n_sent - n_done < 16:
            engine.submit(request(n_sent, max_tokens=200, min_tokens=200))
            n_sent += 1
        n_done += len(engine.poll(0.01))
        counts.append(engine.load().unfinished_tokens)
    assert max(counts) < 16 * 200
    assert counts[-1] == 0, "all have ended"
