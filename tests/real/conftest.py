"""SmolLM2 as an engine, and what vLLM itself answers with it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.real_models import OPTIONS, QUESTIONS, real_model
from tests.support.vllm_reference import reference


@pytest.fixture(scope="session")
def engine() -> dict[str, Any]:
    return {"model": str(real_model("smollm2-135m-instruct")), "options": OPTIONS}


@pytest.fixture(scope="session")
def expected(engine: dict[str, Any]) -> list[Any]:
    """The answers of ``LLM.chat`` to ``QUESTIONS``, one call for all."""
    conversations = [[{"role": "user", "content": question}] for question in QUESTIONS]
    return reference({**OPTIONS, "model": engine["model"]}, conversations, max_tokens=48)
