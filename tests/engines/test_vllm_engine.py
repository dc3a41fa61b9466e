"""vLLM's own features and refusals, one engine for all: a bad request never harms its neighbours."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from batchkit.config.tables import JobConfig
from batchkit.engines.base import Engine
from batchkit.engines.process.launcher import LOG, Launcher
from batchkit.engines.registry import open_engine, open_preflight
from batchkit.engines.vllm.engine import unknown_images
from batchkit.errors import EngineError, JobError
from batchkit.types import Request, Row
from tests.support.engine_requests import ask, plain, request, with_image
from tests.support.small_vllm import SMALL

pytestmark = pytest.mark.vllm

GOOD = 1000


@pytest.fixture(scope="module")
def engine(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    options = {**SMALL, "max_logprobs": 5}
    job = JobConfig(
        engine={"model": str(demo_model), "options": options},
        run={"row_timeout_s": 600.0},
        output={"dir": str(tmp_path_factory.mktemp("output"))},
    )
    with closing(open_engine(job)) as opened:
        yield opened


@pytest.fixture(scope="module")
def launcher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launcher]:
    """For one engine after another: its process imports vLLM once."""
    with closing(Launcher(tmp_path_factory.mktemp("launcher") / LOG)) as one:
        yield one


def test_n_gives_as_many_choices(engine: Engine) -> None:
    (done,) = ask(engine, request(1, n=3, temperature=1.0, seed=1))
    assert len(done.choices) == 3
    assert done.usage is not None
    assert done.usage.completion_tokens == 24


def test_logprobs_have_openais_shape(engine: Engine) -> None:
    (done,) = ask(engine, request(1, logprobs=2))
    tokens = done.choices[0].logprobs
    assert len(tokens) == 8
    assert "".join(token["token"] for token in tokens) == done.choices[0].text
    for token in tokens:
        assert token["logprob"] <= 0
        assert len(token["top_logprobs"]) >= 2
        assert token["top_logprobs"][0]["logprob"] == token["logprob"], "greedy takes the likeliest"


def test_stop_cuts_the_text(engine: Engine) -> None:
    (whole,) = ask(engine, request(1))
    word = whole.choices[0].text.split()[2]
    (cut,) = ask(engine, request(1, stop=[word]))
    assert cut.choices[0].finish_reason == "stop"
    assert whole.choices[0].text.startswith(cut.choices[0].text)
    assert word not in cut.choices[0].text


def test_a_seed_repeats_a_sample(engine: Engine) -> None:
    sample = {"temperature": 1.0, "seed": 7, "max_tokens": 12}
    once, again, other = ask(
        engine, request(1, **sample), request(1, **sample), request(1, **{**sample, "seed": 8})
    )
    assert once.choices[0].text == again.choices[0].text != other.choices[0].text


def test_structured_outputs_hold(engine: Engine) -> None:
    schema = {
        "type": "object",
        "properties": {"yes": {"type": "boolean"}},
        "required": ["yes"],
        "additionalProperties": False,
    }
    choice, regex, as_json = ask(
        engine,
        request(1, structured_outputs={"choice": ["tea", "milk"]}),
        request(2, structured_outputs={"regex": r"[0-9]{4}"}),
        request(3, structured_outputs={"json": schema}, max_tokens=64),
    )
    assert choice.choices[0].text in ("tea", "milk")
    assert re.fullmatch(r"[0-9]{4}", regex.choices[0].text)
    assert isinstance(json.loads(as_json.choices[0].text)["yes"], bool)


def test_logit_bias_takes_the_text_keys_of_json(engine: Engine) -> None:
    (free,) = ask(engine, request(1, logprobs=0))
    (done,) = ask(engine, request(1, logit_bias={"70": 100.0}))
    assert done.error is None
    assert done.choices[0].text != free.choices[0].text


def test_runaway_repetition_is_ended_by_vllm(engine: Engine) -> None:
    pattern = {"max_pattern_size": 20, "min_count": 4}
    asked = request(0, max_tokens=200, logit_bias={"50": 100}, repetition_detection=pattern)
    [completion] = ask(engine, asked)
    assert completion.choices[0].finish_reason == "repetition"
    assert completion.usage is not None
    assert completion.usage.completion_tokens == 4


def test_a_plain_prompt_gets_no_chat_template(engine: Engine) -> None:
    (done,) = ask(engine, plain("tea"))
    assert done.usage is not None
    assert done.usage.prompt_tokens <= 3


REFUSED: list[tuple[Request, str, str]] = [
    (request(1, temperature=-1.0), "invalid_request", "temperature"),
    (request(1, temperature="hot"), "invalid_request", "temperature"),
    (request(1, top_k=-5), "invalid_request", "top_k"),
    (request(1, top_p=0.0), "invalid_request", "top_p"),
    (request(1, n=2), "invalid_request", "greedy"),
    (request(1, n=0), "invalid_request", "n must be"),
    (request(1, max_tokens=0), "invalid_request", "max_tokens"),
    (request(1, min_tokens=99), "invalid_request", "min_tokens"),
    (request(1, seed="x"), "invalid_request", "seed"),
    (request(1, seed=2**70), "invalid_request", "seed"),
    (request(1, prompt_logprobs=2), "invalid_request", "prompt_logprobs"),
    (request(1, stop=[1]), "invalid_request", "stop"),
    (request(1, logprobs=50), "invalid_request", "logprobs"),
    (request(1, temprature=1.0), "invalid_request", "did you mean 'temperature'"),
    (request(1, structured_outputs={"regex": "(("}), "invalid_request", "regex"),
    (request(1, structured_outputs={"json": "{"}), "invalid_request", "JSON"),
    (request(1, structured_outputs={"json": {"type": "nope"}}), "invalid_request", ""),
    (request(1, structured_outputs={"grammar": "root ::= ("}), "invalid_request", "grammar"),
    (request(1, structured_outputs={"choise": ["a"]}), "invalid_request", "structured"),
    (request(1, logit_bias={"99999999": 1.0}), "invalid_request", ""),
    (request(1, allowed_token_ids=[99999999]), "invalid_request", "token"),
    (request(1, bad_words=[""]), "invalid_request", ""),
    (plain(""), "invalid_request", ""),
    (plain("tea " * 4000), "prompt_too_long", "context length"),
    (request(1, "tea " * 600), "prompt_too_long", ""),
    (with_image((64, 64), n=3), "invalid_request", "image"),
    (with_image((8, 4000)), "media", "aspect ratio"),
    (with_image((2000, 2000)), "prompt_too_long", ""),
]


@pytest.mark.parametrize(
    ("bad", "kind", "word"), REFUSED, ids=[f"{n}-{kind}" for n, (_, kind, _) in enumerate(REFUSED)]
)
def test_a_refused_request_leaves_its_neighbours_alone(
    engine: Engine, bad: Request, kind: str, word: str
) -> None:
    before, refused, after = ask(engine, request(GOOD), bad, request(GOOD))
    assert refused.error is not None, refused.choices
    assert refused.error.kind == kind, refused.error
    assert word in str(refused.error)
    assert before.error is after.error is None
    assert before.choices[0].text == after.choices[0].text


def test_the_longest_prompt_that_fits_is_answered(engine: Engine) -> None:
    fits = plain(" tea" * (SMALL["max_model_len"] - 1))
    longer = plain(" tea" * SMALL["max_model_len"])
    answered, refused = ask(engine, fits, longer)
    assert answered.usage is not None
    assert answered.usage.prompt_tokens == SMALL["max_model_len"] - 1
    assert answered.choices[0].finish_reason == "length"
    assert refused.error is not None
    assert refused.error.kind == "prompt_too_long"


def test_preflight_counts_tokens_as_the_engine_does(engine: Engine, demo_model: Path) -> None:
    job = JobConfig(engine={"model": str(demo_model), "options": SMALL})
    preflight = open_preflight(job)
    for one in (request(1), plain("tea and milk"), with_image((96, 64))):
        (done,) = ask(engine, one)
        assert done.usage is not None
        assert preflight.render(one).prompt_tokens == done.usage.prompt_tokens


def test_a_row_without_a_token_in_time_is_aborted(
    vllm_job: Callable[..., JobConfig], launcher: Launcher
) -> None:
    # A step takes 0.2 s and reads 32 tokens of the prompt: the long one needs 3 s to its first.
    options = {
        **SMALL,
        "max_num_batched_tokens": 32,
        "worker_cls": "tests.support.slow_worker.SlowWorker",
    }
    job = vllm_job(run={"row_timeout_s": 1.0}, engine={"options": options})
    with closing(open_engine(job, launcher)) as opened:
        stuck, fine = ask(opened, plain(" tea" * 480, max_tokens=1), plain("milk", max_tokens=1))
    assert fine.error is None
    assert stuck.error is not None
    assert stuck.error.kind == "timeout"
    assert "no token for" in str(stuck.error)


def test_the_engine_stays_in_its_process_whatever_the_users_environment_says(
    vllm_job: Callable[..., JobConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    with closing(open_engine(vllm_job())) as engine:
        assert ask(engine, plain("milk", max_tokens=1))[0].error is None


WRONG_JOBS: list[tuple[dict[str, Any], str]] = [
    ({"engine": {"options": {"max_model_length": 5}}}, "did you mean 'max_model_len'"),
    ({"engine": {"options": {"model": "x"}}}, "set by batchkit"),
    ({"engine": {"options": {"max_model_len": "many"}}}, "max_model_len"),
    ({"engine": {"options": {"max_model_len": 10**9}}}, "max_model_len"),
    ({"engine": {"options": {"dtype": "float31"}}}, "dtype"),
    ({"engine": {"options": {"data_parallel_size": 2}}}, "set run.workers = 2"),
    ({"engine": {"options": {"chat_template": "/no/such.jinja"}}}, "chat_template"),
    ({"engine": {"model": "./nowhere"}}, "no folder"),
    ({"sampling": {"temprature": 1}}, "did you mean 'temperature'"),
    ({"sampling": {"top_p": "high"}}, "top_p"),
    ({"sampling": {"structured_outputs": {"regexp": "a"}}}, "structured"),
]


@pytest.mark.parametrize(("tables", "words"), WRONG_JOBS, ids=[w for _, w in WRONG_JOBS])
def test_a_wrong_job_is_refused_before_the_model_loads(
    vllm_job: Callable[..., JobConfig], launcher: Launcher, tables: dict[str, Any], words: str
) -> None:
    with pytest.raises(JobError, match=re.escape(words)):
        open_engine(vllm_job(**tables), launcher)


def test_a_folder_without_a_model_is_named(
    vllm_job: Callable[..., JobConfig], tmp_path: Path, launcher: Launcher
) -> None:
    with pytest.raises((JobError, EngineError), match=re.escape(str(tmp_path))):
        open_engine(vllm_job(engine={"model": str(tmp_path)}), launcher)


def test_a_lora_adapter_changes_the_answers(
    text_model: Path, tmp_path: Path, launcher: Launcher
) -> None:
    import torch
    from safetensors.torch import save_file

    config = json.loads((text_model / "config.json").read_text())
    rank, width = 8, config["hidden_size"]
    generator = torch.Generator().manual_seed(0)
    weights = {}
    for layer in range(config["num_hidden_layers"]):
        name = f"base_model.model.model.layers.{layer}.self_attn.o_proj"
        weights[f"{name}.lora_A.weight"] = torch.randn(rank, width, generator=generator)
        weights[f"{name}.lora_B.weight"] = torch.randn(width, rank, generator=generator)
    save_file(weights, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": 16, "target_modules": ["o_proj"]})
    )
    options = {name: value for name, value in SMALL.items() if name != "limit_mm_per_prompt"}

    def answer(lora: str | None) -> str:
        engine = {"model": str(text_model), "options": options, "lora": lora}
        job = JobConfig(engine=engine, output={"dir": str(tmp_path / "output")})
        with closing(open_engine(job, launcher)) as opened:
            return ask(opened, request(1))[0].choices[0].text

    assert answer(str(tmp_path)) != answer(None)


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
    oldest = AssertionError(
        "Expected a cached item for mm_hash='a'"
    )  # vLLM 0.26: of all we know of
    assert unknown_images(oldest, prompt) == ["a", "b"]
    newest = ValueError("missing")
    newest.mm_hashes = ["b"]  # type: ignore[attr-defined]
    assert unknown_images(newest, prompt) == ["b"]
    assert not unknown_images(AssertionError("another"), prompt)


def test_tokens_of_unfinished_answers_are_counted(engine: Engine) -> None:
    for n in range(16):
        engine.submit(request(n, max_tokens=450, min_tokens=450))
    counts, done = [], list[Any]()
    while len(done) < 16:
        done += engine.poll(0.1)
        counts.append(engine.load().unfinished_tokens)
    assert 0 < max(counts) < 16 * 450
    assert counts[-1] == 0, "all have ended"
