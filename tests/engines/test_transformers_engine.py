"""The transformers engine on tiny real models: a batch answers what its rows answer alone."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from msgspec.structs import replace
from PIL import Image

from batchkit.config.tables import JobConfig
from batchkit.engines.base import Engine
from batchkit.engines.faults import StartFailed
from batchkit.engines.registry import open_engine, open_preflight
from batchkit.engines.transformers.batch import BatchAnswer, next_batch
from batchkit.engines.transformers.options import Sampling
from batchkit.engines.transformers.rendering import PreparedPrompt
from batchkit.errors import JobError
from batchkit.rendering.media.pixels import LARGEST_ASPECT, smart_size
from batchkit.storage.identity import identity
from batchkit.types import Completion, Request, Row
from tests.support import model_runs
from tests.support.engine_requests import ask, plain, request, with_image
from tests.support.forks import Fork
from tests.support.own_process import batchkit
from tests.support.small_vllm import SMALL
from tests.support.transformers_jobs import N_ROWS, make_job, write_job

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def engine(demo_model: Path) -> Iterator[Engine]:
    with closing(open_engine(make_job(demo_model))) as opened:
        yield opened


@pytest.fixture(scope="module")
def vllm(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    job = JobConfig(
        engine={"model": str(demo_model), "options": {**SMALL, "max_logprobs": 5}},
        output={"dir": str(tmp_path_factory.mktemp("output"))},
    )
    with closing(open_engine(job)) as opened:
        yield opened


def about(index: int, words: int, *sizes: tuple[int, int], **sampling: Any) -> Request:
    """A prompt of that many words and images."""
    pictures = [Image.new("RGB", size, (index * 37 % 256, 80, 140)) for size in sizes]
    for picture in pictures:
        picture.paste((255, 255, 200 - index), (index, 5, index + 40, 60))
    parts: list[dict[str, Any]] = [{"type": "image_pil", "image_pil": p} for p in pictures]
    words_of = ["tea", "milk", "snow", "bread", "river", "north"]
    text = f"{index} " + " ".join(words_of[n * (index + 1) % 6] for n in range(words))
    content = [*parts, {"type": "text", "text": text}] if parts else text
    sampling = {"temperature": 0.0, "max_tokens": 12 + index % 9, **sampling}
    messages = [{"role": "user", "content": content}]
    row = Row(index, str(index), {})
    return Request(row, messages, None, sampling, "", media_bytes=len(parts))


LENGTHS = [1, 280, 2, 150, 40, 7, 300, 3, 90, 15, 60, 220]
TEXTS = [about(n, words) for n, words in enumerate(LENGTHS)]
SIZES = [(256, 256), (320, 256), (512, 256), (128, 640)]
PICTURES = [about(n, (1, 120, 3, 40)[n % 4], *SIZES[n % 4 : n % 4 + n % 3]) for n in range(12)]


@pytest.mark.parametrize("images", [False, True], ids=["text", "images"])
def test_a_batch_answers_what_its_rows_answer_alone(
    text_model: Path, demo_model: Path, images: bool
) -> None:
    asked = [plain("tea", max_tokens=20), *(PICTURES if images else TEXTS)]
    model = demo_model if images else text_model
    with closing(open_engine(make_job(model, max_num_seqs=len(asked)))) as batched:
        for one in asked:
            batched.submit(one)
        most = 0
        together: list[Completion] = []
        while len(together) < len(asked):
            together += batched.poll(0.0)
            most = max(most, batched.load().running)
    assert most >= len(asked) - 1, "they did not run as one batch"
    lengths = [done.usage.prompt_tokens for done in together if done.usage is not None]
    assert min(lengths) <= 3
    assert max(lengths) >= 300
    with closing(open_engine(make_job(model, max_num_seqs=1))) as single:
        alone = {id(one): ask(single, one)[0] for one in asked}
    for completion in together:
        assert completion.error is None
        other = alone[id(completion.request)]
        assert completion.choices == other.choices
        assert completion.usage == other.usage
        assert completion.usage is not None
        assert completion.usage.completion_tokens == completion.request.sampling["max_tokens"]
    assert len({completion.choices[0].text for completion in together}) > len(asked) // 2


def test_rows_of_a_batch_are_handed_on_one_by_one(engine: Engine) -> None:
    asked = [request(n, max_tokens=4 + 8 * n) for n in range(6)]
    for one in asked:
        engine.submit(one)
    turns: list[list[int]] = []
    while sum(map(len, turns)) < len(asked):
        turns.append([completion.request.row.index for completion in engine.poll(0.0)])
    assert [turn for turn in turns if turn] == [[n] for n in range(6)]


def answer_of(prompt_tokens: int, max_tokens: int) -> BatchAnswer:
    import torch

    inputs = {"input_ids": torch.zeros(1, prompt_tokens)}
    prepared = PreparedPrompt(request(0), Sampling(), "", inputs, max_tokens)
    return BatchAnswer(prepared, 0, None, frozenset())


@pytest.mark.parametrize(
    ("waiting", "size", "expected"),
    [
        ([(5, 1), (300, 1), (6, 1), (290, 1), (7, 1)], 3, [5, 6, 7]),
        ([(300, 1), (5, 1), (6, 1), (290, 1), (7, 1)], 2, [290, 300]),
        ([(100, 1), (1, 1), (2, 1), (3, 1)], 2, [3, 100]),
        ([(3, 1), (1, 1)], 5, [1, 3]),
        # Answers that may get about as long come before prompts.
        ([(50, 9), (51, 90), (300, 8), (52, 80), (290, 9)], 2, [300, 50]),
        ([(51, 90), (300, 8), (52, 80), (290, 9)], 2, [52, 51]),
        # The one that waits longest is always chosen.
        ([(50, 7), *((tokens, 7) for tokens in range(200, 240))], 1, [50]),
    ],
)
def test_rows_of_about_one_length_begin_together(
    waiting: list[tuple[int, int]], size: int, expected: list[int]
) -> None:
    chosen = next_batch([answer_of(*lengths) for lengths in waiting], size)
    assert [answer.prepared.prompt_tokens for answer in chosen] == expected


# What vLLM can be held against: greedy, so that nothing is left to chance.
BYTES_OF_END = {"631": 100.0}  # <|im_end|>
PARAMETERS: list[dict[str, Any]] = [
    {},
    {"logprobs": 0},
    {"logprobs": 3},
    {"repetition_penalty": 1.3},
    {"presence_penalty": 1.5, "frequency_penalty": 0.5},
    {"logit_bias": {"70": 100.0}},
    {"logit_bias": BYTES_OF_END},
    {"logit_bias": {"629": 100.0}},  # <|endoftext|>
    {"logit_bias": BYTES_OF_END, "ignore_eos": True, "skip_special_tokens": False},
    {"logit_bias": BYTES_OF_END, "min_tokens": 5},
    {"logit_bias": BYTES_OF_END, "include_stop_str_in_output": True, "skip_special_tokens": False},
    {"allowed_token_ids": [450, 451, 452, 453]},
    {"allowed_token_ids": [450, 451, 452], "stop_token_ids": [451]},
    {"stop": " "},
    {"stop": ["e", "o"], "min_tokens": 6},
    {"stop": ["e"], "include_stop_str_in_output": True},
    {"max_tokens": 1000},
    {"repetition_penalty": 0.7, "logprobs": 2, "min_tokens": 3},
]


@pytest.fixture(scope="module")
def answers(engine: Engine, vllm: Engine) -> list[tuple[Completion, Completion]]:
    """For each of PARAMETERS, of a text and of an image: ours and vLLM's."""
    asked = [
        one
        for parameters in PARAMETERS
        for one in (about(7, 12, **parameters), about(3, 4, (256, 256), **parameters))
    ]
    return list(zip(ask(engine, *asked), ask(vllm, *asked), strict=True))


@pytest.mark.parametrize("n", range(len(PARAMETERS)), ids=[json.dumps(p) for p in PARAMETERS])
def test_a_parameter_means_what_it_means_to_vllm(
    answers: list[tuple[Completion, Completion]], n: int
) -> None:
    for ours, theirs in answers[2 * n : 2 * n + 2]:
        assert ours.error is theirs.error is None
        assert ours.usage == theirs.usage
        for our, their in zip(ours.choices, theirs.choices, strict=True):
            assert our.text == their.text
            assert our.finish_reason == their.finish_reason
            assert_same_logprobs(our.logprobs, their.logprobs)


def assert_same_logprobs(ours: Any, theirs: Any) -> None:
    if theirs is None:
        assert ours is None
        return
    assert [token["token"] for token in ours] == [token["token"] for token in theirs]
    for our, their in zip(ours, theirs, strict=True):
        assert our.keys() == their.keys()
        assert our["logprob"] == pytest.approx(their["logprob"], abs=1e-3)
        tops = our["top_logprobs"], their["top_logprobs"]
        assert [t["token"] for t in tops[0]] == [t["token"] for t in tops[1]]
        logprobs = [[t["logprob"] for t in top] for top in tops]
        assert logprobs[0] == pytest.approx(logprobs[1], abs=1e-3)


def texts(done: Completion) -> list[str]:
    return [choice.text for choice in done.choices]


def test_what_is_sampled_depends_on_the_row_and_its_seed_alone(
    engine: Engine, demo_model: Path
) -> None:
    sampled = {"temperature": 1.0, "top_p": 0.95, "top_k": 50, "min_p": 0.01, "n": 3}
    (alone,) = ask(engine, about(1, 5, **sampled, seed=7))
    again, other, *_ = ask(
        engine,
        about(1, 5, **sampled, seed=7),
        about(1, 5, **sampled, seed=8),
        *(about(n, 50 * n, temperature=1.0) for n in range(2, 5)),
    )
    assert texts(alone) == texts(again) != texts(other)
    assert len(set(texts(alone))) == 3
    assert alone.usage is not None
    assert alone.usage.completion_tokens == 3 * 13

    (unseeded,) = ask(engine, about(1, 5, **sampled))
    for seed, is_same in ((0, True), (1, False)):  # run.seed
        job = make_job(demo_model)
        job = job.model_copy(update={"run": job.run.model_copy(update={"seed": seed})})
        with closing(open_engine(job)) as opened:
            (found,) = ask(opened, about(1, 5, **sampled))
        assert (texts(found) == texts(unseeded)) == is_same


def test_a_narrow_choice_is_greedy(engine: Engine) -> None:
    (greedy,) = ask(engine, about(1, 5))
    for narrow in ({"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}, {"temperature": 1e-6}):
        (done,) = ask(engine, about(1, 5, **{"temperature": 1.0, **narrow}))
        assert texts(done) == texts(greedy), narrow


SIDES = st.integers(1, 20_000)
LIMITS_OF_MODELS = st.sampled_from([(200704, 1605632), (65536, 16777216)])


@given(SIDES, SIDES, st.sampled_from([28, 32]), LIMITS_OF_MODELS)
def test_images_are_resized_as_the_processor_would(
    width: int, height: int, factor: int, limits: tuple[int, int]
) -> None:
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize

    assume(max(width, height) <= LARGEST_ASPECT * min(width, height))
    size = smart_size(width, height, factor=factor, min_pixels=limits[0], max_pixels=limits[1])
    assert size[::-1] == smart_resize(height, width, factor, *limits)
    assume(max(size) <= LARGEST_ASPECT * min(size))
    assert size[::-1] == smart_resize(*size[::-1], factor, *limits)  # and is left as it is


def test_an_image_for_a_model_without_eyes_is_refused(text_model: Path) -> None:
    with closing(open_engine(make_job(text_model))) as opened:
        refused, answered = ask(opened, with_image((64, 64)), request(1))
    assert refused.error is not None
    assert "takes only text" in str(refused.error)
    assert answered.error is None


TEMPLATE = """\
{% for m in messages %}{{ m.role }}: {{ m.reasoning }} {{ m.reasoning_content }} \
{% if m.content is string %}{{ m.content }}{% else %}\
{% for part in m.content %}<{{ part.text }}>{% endfor %}{% endif %}
{% endfor %}"""
TALK = [
    {"role": "developer", "content": "be kind"},
    {"role": "user", "content": "What time is it?"},
    {"role": "assistant", "content": None, "reasoning": "a clock would say"},
    {"role": "tool", "tool_call_id": "a", "content": [{"type": "text", "text": "noon"}]},
    {"role": "assistant", "content": "noon", "reasoning_content": "it said"},
]


def test_a_chat_template_of_a_model_with_images_gets_what_vllm_gives_it(
    demo_model: Path, tmp_path: Path
) -> None:
    job = make_job(demo_model, chat_template=TEMPLATE)
    ours = open_preflight(job).render(replace(request(3), messages=TALK)).text
    engine = {"model": str(demo_model), "options": {**SMALL, "chat_template": TEMPLATE}}
    model_runs.write_job(tmp_path, [{"messages": TALK}], engine=engine)
    assert ours in model_runs.run_job(tmp_path, "--dry-run").stdout
    assert "tool:   noon" in ours
    assert ours.startswith("system: "), "which its template has in place of a developer"


@pytest.mark.parametrize(
    ("key", "package", "engine"),
    [
        ("engine.lora", "peft", {"lora": "adapter"}),
        ("engine.options.device_map", "accelerate", {"options": {"device_map": "auto"}}),
    ],
)
def test_what_needs_another_package_says_so(
    demo_model: Path, key: str, package: str, engine: dict[str, Any]
) -> None:
    if find_spec(package) is not None:
        pytest.skip(f"{package} is installed")
    engine = {"kind": "transformers", "model": str(demo_model), "in_process": True, **engine}
    with pytest.raises(JobError, match=f"{re.escape(key)} needs .*pip install {package}"):
        open_engine(JobConfig(engine=engine))


def test_flash_attention_that_is_not_there_is_no_reason_to_stop(
    text_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    job = make_job(text_model, attn_implementation="flash_attention_2", dtype="bfloat16")
    with closing(open_engine(job)) as opened:
        (done,) = ask(opened, request(1))
    assert done.error is None
    assert "using the default" in caplog.text


def test_speed_is_no_part_of_what_decides_the_answers(demo_model: Path) -> None:
    plain_job, faster = make_job(demo_model), make_job(demo_model, max_num_seqs=2, device_map="cpu")
    assert identity(plain_job) == identity(faster)
    assert identity(plain_job) != identity(make_job(demo_model, dtype="bfloat16"))
    assert identity(plain_job) != identity(make_job(demo_model, attn_implementation="eager"))


def test_validate_and_dry_run_need_no_weights(text_model: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    with pytest.raises(JobError, match=re.escape(str(model))):
        open_engine(make_job(model))
    model.mkdir()
    for path in text_model.iterdir():
        if path.suffix != ".safetensors":
            (model / path.name).write_bytes(path.read_bytes())
    with pytest.raises(StartFailed, match=re.escape(str(model))):
        open_engine(make_job(model))
    write_job(tmp_path, model)
    checked = batchkit("validate", "job.toml", "--json", cwd=tmp_path, start=Fork)
    assert (checked.returncode, json.loads(checked.stdout)["ok"]) == (0, N_ROWS), checked.stderr
    assert "<|im_start|>user" in model_runs.run_job(tmp_path, "--dry-run").stdout
