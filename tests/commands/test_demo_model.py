"""The models of random weights that `batchkit demo-model` builds. The engine tests run them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from batchkit.commands.demo_model import build_demo_model
from batchkit.errors import JobError
from tests.support.paths import ROOT

pytestmark = pytest.mark.slow


def contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "demo"
    build_demo_model(path)
    return path


@pytest.mark.release
def test_the_same_seed_gives_the_same_bytes_in_another_process(tmp_path: Path) -> None:
    program = """
import sys
from pathlib import Path
from batchkit.commands.demo_model import build_demo_model
for text_only in (False, True):
    build_demo_model(Path(sys.argv[1], str(text_only)), text_only=text_only, seed=3)
"""
    subprocess.run([sys.executable, "-c", program, tmp_path / "there"], check=True, cwd=ROOT)
    for text_only in (False, True):
        build_demo_model(tmp_path / "here" / str(text_only), text_only=text_only, seed=3)
    assert (tmp_path / "here/True/config.json").exists()
    assert contents(tmp_path / "here") == contents(tmp_path / "there")


def test_another_seed_gives_other_weights(model: Path, tmp_path: Path) -> None:
    build_demo_model(tmp_path / "other", seed=1)
    changed = {
        name for name, d in contents(tmp_path / "other").items() if contents(model)[name] != d
    }
    assert changed == {"model.safetensors", "README.md", "batchkit_demo_model.json"}


def test_it_stays_under_a_megabyte_and_says_what_it_is(model: Path, tmp_path: Path) -> None:
    assert sum(f.stat().st_size for f in model.iterdir()) <= 1_000_000
    build_demo_model(tmp_path / "half", dtype="bfloat16")
    full, half = (
        (p / "model.safetensors").stat().st_size for p in (model, tmp_path / "half")
    )  # the header is the same
    assert half < 0.55 * full
    assert "answers mean nothing" in (model / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("text_only", [False, True])
def test_transformers_loads_every_weight(tmp_path: Path, text_only: bool) -> None:
    transformers = pytest.importorskip("transformers")
    build_demo_model(tmp_path / "demo", text_only=text_only)
    config = transformers.AutoConfig.from_pretrained(tmp_path / "demo")
    architecture = getattr(transformers, config.architectures[0])
    _, loaded = architecture.from_pretrained(tmp_path / "demo", output_loading_info=True)
    assert not any(
        loaded[problem] for problem in ("missing_keys", "unexpected_keys", "mismatched_keys")
    )


def test_the_processor_puts_image_tokens_where_the_template_says(model: Path) -> None:
    transformers = pytest.importorskip("transformers")
    processor = transformers.AutoProcessor.from_pretrained(model)
    image = Image.new("RGB", (640, 320), "white")
    content = [{"type": "image", "image": image}, {"type": "text", "text": "How many Äpfel? 12"}]
    text = processor.apply_chat_template(
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": content}],
        add_generation_prompt=True,
        tokenize=False,
    )
    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n"
        "<|vision_start|><|image_pad|><|vision_end|>How many Äpfel? 12<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    ids = processor(text=[text], images=[image])["input_ids"][0]
    assert list(ids).count(processor.image_token_id) == 640 * 320 // 32**2
    tokenizer = processor.tokenizer
    assert tokenizer.decode(tokenizer("Äpfel, 12 π\n")["input_ids"]) == "Äpfel, 12 π\n"
    assert tokenizer.eos_token == "<|im_end|>"


def test_greedy_answers_are_words_and_follow_the_prompt(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    build_demo_model(tmp_path / "demo", text_only=True)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "demo")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "demo")
    answers = []
    for question in ("How much bread?", "Who reads the letter?", "Name 3 birds.", "?"):
        chat = [{"role": "user", "content": question}]
        inputs = tokenizer.apply_chat_template(
            chat, add_generation_prompt=True, return_dict=True, return_tensors="pt"
        )
        output = model.generate(**inputs, max_new_tokens=16, do_sample=False)
        answers.append(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :]))
    assert len(set(answers)) == 4
    assert all(re.fullmatch(r"([ ][a-z]+|[,.])+", answer) for answer in answers), answers


def test_an_older_demo_model_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "demo"
    build_demo_model(path)
    (path / "left over").touch()
    build_demo_model(path, text_only=True)
    assert not (path / "left over").exists()
    assert json.loads((path / "config.json").read_text())["model_type"] == "qwen2"
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("kind", ["folder", "file"])
def test_anything_else_is_left_alone(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "mine"
    if kind == "folder":
        path.mkdir()
        (path / "config.json").write_text("{}")
    else:
        path.write_text("mine")
    before = contents(tmp_path)
    with pytest.raises(JobError, match=re.escape(str(path))):
        build_demo_model(path)
    assert contents(tmp_path) == before


def test_a_build_that_fails_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(JobError, match="can't be written"):
        build_demo_model(tmp_path / "file" / "demo")
    with pytest.raises(JobError, match="float32"):
        build_demo_model(tmp_path / "demo", dtype="int8")
    assert [p.name for p in tmp_path.iterdir()] == ["file"]
