"""A model that does not load: one paragraph, the cause and the remedy. Real vLLM, real causes."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from batchkit.config.tables import JobConfig
from batchkit.engines.process.startup import explain
from batchkit.engines.registry import load_engine
from batchkit.errors import BatchkitError, EngineError

pytestmark = pytest.mark.vllm

SMALL = {"enforce_eager": True, "dtype": "float32", "max_model_len": 512}


def refusal(model: Path | str, **options: Any) -> BatchkitError:
    with pytest.raises(BatchkitError) as caught:
        load_engine(JobConfig(engine={"model": str(model), "options": {**SMALL, **options}}))
    return caught.value


def test_too_little_memory_for_the_context_names_the_length_that_fits(demo_model: Path) -> None:
    error = refusal(demo_model, max_model_len=32768, kv_cache_memory_bytes=2**20)
    assert isinstance(error, EngineError)
    fits = re.search(r"max_model_len = (\d+) or less", str(error))
    assert fits is not None
    assert 0 < int(fits[1]) < 32768


@pytest.mark.parametrize(
    ("options", "remedy"),
    [
        ({"quantization": "fp9"}, "leave engine.options.quantization out"),
        ({"quantization": "awq"}, "leave engine.options.quantization out"),
        ({"quantization": "fp8"}, "leave engine.options.quantization out"),
        ({"tensor_parallel_size": 3}, "must divide its number of attention heads"),
    ],
)
def test_quantization_or_split_that_the_model_does_not_allow_has_a_remedy(
    text_model: Path, options: dict[str, Any], remedy: str
) -> None:
    message = str(refusal(text_model, **options))
    assert remedy in message
    assert "pydantic" not in message
    assert "input_value" not in message


def _cut_off(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:1000])


NONSENSE = {"model_type": "nonsense", "architectures": ["NonsenseForCausalLM"]}
BROKEN: dict[str, tuple[str, Callable[[Path], object], list[str]]] = {
    "an unknown architecture": (
        "config.json",
        lambda path: path.write_text(json.dumps({**json.loads(path.read_text()), **NONSENSE})),
        ["nonsense", "upgrade"],
    ),
    "weights that are cut off": ("*.safetensors", _cut_off, ["damaged"]),
    "no weights": ("*.safetensors", Path.unlink, ["has no weights"]),
    "an empty config": ("config.json", lambda path: path.write_text("{}"), []),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_model_is_named_in_one_paragraph(
    kind: str, text_model: Path, tmp_path: Path
) -> None:
    name, breaks, words = BROKEN[kind]
    copy = Path(shutil.copytree(text_model, tmp_path / "model"))
    (file,) = copy.glob(name)
    breaks(file)
    message = str(refusal(copy))
    for word in (str(copy), *words):
        assert word in message
    assert len(message.splitlines()) <= 2


@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        ("You are trying to access a gated repo.", "HF_TOKEN"),
        ("We couldn't connect to the hub", "give its folder"),
        ("files in the disk cache and outgoing traffic has been disabled", "HF_HUB_OFFLINE for"),
        ("operator torchvision::nms does not exist", "batchkit doctor"),
        ("The NVIDIA driver on your system is too old", "batchkit doctor"),
        ("Free memory on device is less than desired GPU memory utilization", "end them"),
        ("World size is larger than the number of available GPUs (1)", "tensor_parallel_size ×"),
        ("The quantization method awq is not supported for the current GPU.", "in another quant"),
        ("awq quantization is currently not supported in cpu.", "in another quantization"),
        ("Not enough allowed NUMA nodes to bind threads of 2", "lower tensor_parallel_size"),
        ("Available memory on node 0 (1/2 GiB) is less than desired CPU", "Other programs use"),
        ("NUMA binding was requested, but vLLM could not detect", "leave engine.options.numa_bind"),
    ],
)
def test_what_can_not_be_caused_here_is_recognised_by_its_words(words: str, remedy: str) -> None:
    assert remedy in explain(RuntimeError(words), "org/model")


def test_the_variable_that_decides_the_cache_s_size_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    error = ValueError("Available memory on node 0 (9/23 GiB) is less than requested memory for kv")
    assert "VLLM_CPU_KVCACHE_SPACE" not in explain(error, "m")
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "400")
    assert "lower the variable VLLM_CPU_KVCACHE_SPACE (400 GiB)" in explain(error, "m")


def test_what_is_not_recognised_is_shown_as_it_is() -> None:
    assert explain(RuntimeError("odd"), "m") == "m can't be loaded: RuntimeError: odd"
