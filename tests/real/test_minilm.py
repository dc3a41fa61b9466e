"""all-MiniLM-L6-v2: an embedding model with real weights, against transformers. sentence-transformers is not in the
locked environment, so its pooling is computed here: mean over the attention mask, then L2 normalization."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from batchkit.storage.vectors import Vectors
from tests.support.model_runs import OUTPUT, answered
from tests.support.prose import sentences
from tests.support.real_models import OPTIONS, real_model, reviews

pytestmark = pytest.mark.real

LEAST_COSINE = 0.99999
N_TEXTS, N_QUERIES = 60, 12
TEXTS = [review["review"] for review in reviews()[:20]]
TEXTS += [" ".join(sentences(1 + n % 11, first=7 * n)) for n in range(N_TEXTS - len(TEXTS))]
MAX_TOKENS = 256  # ``max_seq_length`` in the model's sentence_bert_config.json
TOO_LONG = "tea " * (MAX_TOKENS + 44)
ROWS = [{"text": text} for text in [*TEXTS, TOO_LONG]]
PROMPT = {"user": "{{ text }}"}
Array = np.ndarray[Any, Any]


class Reference(NamedTuple):
    """What transformers computes from a text: a vector per token, and one for the text."""

    tokens: Array  # [tokens, 384], not normalized
    vector: Array  # [384], normalized


@pytest.fixture(scope="module")
def model() -> Path:
    return real_model("all-minilm-l6-v2")


@pytest.fixture(scope="module")
def references(model: Path) -> list[Reference]:
    """One for each of ``TEXTS``. They are computed in padded batches, as in sentence-transformers."""
    import torch
    from transformers import AutoModel, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    network = AutoModel.from_pretrained(model, dtype=torch.float32).eval()
    found = []
    for first in range(0, N_TEXTS, 16):
        inputs = tokenizer(TEXTS[first : first + 16], padding=True, return_tensors="pt")
        with torch.inference_mode():
            hidden = network(**inputs).last_hidden_state
        mask = inputs["attention_mask"].unsqueeze(-1).float()
        mean = (hidden * mask).sum(1) / mask.sum(1)
        vectors = torch.nn.functional.normalize(mean, dim=-1)
        for tokens, is_token, vector in zip(hidden, mask.bool(), vectors, strict=True):
            found.append(Reference(tokens[is_token[:, 0]].numpy(), vector.numpy()))
    return found


@pytest.fixture(scope="module")
def engine(model: Path) -> dict[str, Any]:
    # Without max_model_len, vLLM reads it from the model's files.
    options = {name: value for name, value in OPTIONS.items() if name != "max_model_len"}
    return {"model": str(model), "options": options}


def cosines(ours: Array, theirs: Array) -> Array:
    products = (ours * theirs).sum(-1)
    found: Array = products / np.linalg.norm(ours, axis=-1) / np.linalg.norm(theirs, axis=-1)
    return found


def test_vectors_equal_those_of_sentence_transformers(
    engine: dict[str, Any], references: list[Reference], tmp_path: Path
) -> None:
    """A text with too many tokens fails alone."""
    records = answered(tmp_path, ROWS, 3, task="embed", prompt=PROMPT, engine=engine)
    lengths = [record["usage"]["prompt_tokens"] for record in records[:-1]]
    assert lengths == [len(reference.tokens) for reference in references]
    assert min(lengths) < 16
    assert max(lengths) > 200
    vectors = Vectors(tmp_path / OUTPUT)
    ours = np.array([vectors.of(record) for record in records[:-1]])
    theirs = np.array([reference.vector for reference in references])
    print(
        f"smallest cosine {cosines(ours, theirs).min():.9f}; {min(lengths)}-{max(lengths)} tokens"
    )
    assert cosines(ours, theirs).min() >= LEAST_COSINE
    np.testing.assert_allclose(np.linalg.norm(ours, axis=-1), 1, atol=1e-5)
    assert records[-1]["error"]["kind"] == "prompt_too_long"
    assert str(MAX_TOKENS) in records[-1]["error"]["message"]


def test_a_text_over_the_limit_is_cut_in_its_middle_when_asked(
    engine: dict[str, Any], tmp_path: Path
) -> None:
    retry = {"on_too_long": "truncate-middle"}
    tables: dict[str, Any] = {"task": "embed", "prompt": PROMPT, "retry": retry}
    short, cut = answered(tmp_path, [ROWS[0], ROWS[-1]], engine=engine, **tables)
    assert cut["truncated_tokens"] >= 44
    assert cut["usage"]["prompt_tokens"] <= MAX_TOKENS
    assert "truncated_tokens" not in short


def test_scores_of_pairs_are_cosines(
    engine: dict[str, Any], references: list[Reference], tmp_path: Path
) -> None:
    rows = [{"q": TEXTS[n], "d": TEXTS[n + 1 :: 5]} for n in range(N_QUERIES)]
    pair = {"query": "{{ q }}", "documents": "{{ d }}"}
    records = answered(tmp_path, rows, task="score", pair=pair, engine=engine)
    vectors = np.array([reference.vector for reference in references])
    for n, record in enumerate(records):
        expected = vectors[n + 1 :: 5] @ vectors[n]
        np.testing.assert_allclose(record["score"], expected, atol=1e-4)
        scores = np.array(record["score"])[record["order"]]
        assert (np.diff(scores) <= 0).all()


@pytest.mark.parametrize("use_activation", [None, False])
def test_token_vectors_are_the_last_hidden_states(
    use_activation: bool | None,
    engine: dict[str, Any],
    references: list[Reference],
    tmp_path: Path,
) -> None:
    """vLLM normalizes them by default; with ``use_activation = false`` it does not."""
    pooling = {} if use_activation is None else {"use_activation": use_activation}
    tables: dict[str, Any] = {"task": "token_embed", "prompt": PROMPT, "pooling": pooling}
    *records, too_long = answered(tmp_path, ROWS, 3, engine=engine, **tables)
    found = [Vectors(tmp_path / OUTPUT).of(record) for record in records]
    least = 1.0
    for ours, (theirs, _) in zip(found, references, strict=True):
        assert ours.shape == theirs.shape
        least = min(least, cosines(ours, theirs).min())
        expected = np.linalg.norm(theirs, axis=-1) if use_activation is False else 1
        np.testing.assert_allclose(np.linalg.norm(ours, axis=-1), expected, rtol=1e-4)
    print(f"smallest cosine {least:.9f}")
    assert least >= LEAST_COSINE
    assert too_long["error"]["kind"] == "prompt_too_long"
