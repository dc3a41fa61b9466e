"""Ask a model's folder about tables that its training never saw; print how many answers are exact.

    python scripts/evaluate_demo_model.py MODEL [--tables 500] [--engine transformers | vllm]

By kind of question, and for look-ups by size of the table (numbers down × across), too. The answers are
decoded greedily in float32, each in a chat of its own.
"""

from __future__ import annotations

import argparse
import json
import os
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from demo_tables import SIZES, TEST_SIZES, Question, draw, make_table, questions
from PIL import Image

MAX_TOKENS = 8


class Case(NamedTuple):
    image: Image.Image
    question: Question
    size: tuple[int, int]

    def chat(self, image: dict[str, Any]) -> list[dict[str, Any]]:
        text = {"type": "text", "text": self.question.text}
        return [{"role": "user", "content": [image, text]}]


def make_cases(tables: int, seed: int) -> list[Case]:
    """A look-up and another question about each table."""
    random = Random(f"evaluation {seed}")
    cases = []
    for number in range(tables):
        size = (SIZES + 2 * TEST_SIZES)[number % (len(SIZES) + 2 * len(TEST_SIZES))]
        table = make_table(random, size, test=True)
        image = draw(table).convert("RGB")
        cases += [Case(image, q, size) for q in islice(questions(random, table, test=True), 2)]
    return cases


def answer_with_vllm(model: str, cases: Sequence[Case]) -> list[str]:
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # it warns with every row
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=model,
        dtype="float32",
        max_model_len=1024,
        kv_cache_memory_bytes=2**30,
        enforce_eager=True,
        limit_mm_per_prompt={"image": 1, "video": 0},
    )
    sampling = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
    chats = [case.chat({"type": "image_pil", "image_pil": case.image}) for case in cases]
    outputs = llm.chat(chats, sampling)
    return [output.outputs[0].text for output in outputs]


def answer_with_transformers(model: str, cases: Sequence[Case]) -> list[str]:
    import torch
    from transformers import AutoModelForImageTextToText, AutoProcessor

    processor = AutoProcessor.from_pretrained(model)
    reader = AutoModelForImageTextToText.from_pretrained(model, dtype=torch.float32)
    answers = []
    for case in cases:
        prompt = processor.apply_chat_template(
            case.chat({"type": "image"}), add_generation_prompt=True
        )
        inputs = processor(text=[prompt], images=[case.image], return_tensors="pt")
        tokens = reader.generate(**inputs, max_new_tokens=MAX_TOKENS, do_sample=False)
        new = tokens[0, inputs["input_ids"].shape[1] :]
        answers.append(processor.decode(new, skip_special_tokens=True))
    return answers


ENGINES = {"transformers": answer_with_transformers, "vllm": answer_with_vllm}


def is_right(cases: Sequence[Case], answers: Sequence[str]) -> list[bool]:
    return [a.strip() == case.question.answer for case, a in zip(cases, answers, strict=True)]


def by_kind(cases: Sequence[Case], right: Sequence[bool]) -> dict[str, list[bool]]:
    return _groups((case.question.kind, exact) for case, exact in zip(cases, right, strict=True))


def by_size(cases: Sequence[Case], right: Sequence[bool]) -> dict[str, list[bool]]:
    """Of look-ups."""
    marks = zip(cases, right, strict=True)
    return _groups((in_words(c.size), exact) for c, exact in marks if c.question.kind == "value")


def in_words(size: tuple[int, int]) -> str:
    return f"value, {size[0]} × {size[1]}" + ", size not in training" * (size in TEST_SIZES)


def _groups(marks: Iterable[tuple[str, bool]]) -> dict[str, list[bool]]:
    groups: dict[str, list[bool]] = defaultdict(list)
    for name, exact in sorted(marks):
        groups[name].append(exact)
    return groups


def share(exact: Sequence[bool]) -> float:
    return sum(exact) / len(exact)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("--tables", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--engine", choices=ENGINES, default="transformers")
    args = parser.parse_args()
    cases = make_cases(args.tables, args.seed)
    right = is_right(cases, ENGINES[args.engine](str(args.model), cases))
    found = {**by_kind(cases, right), **by_size(cases, right)}
    for name, exact in found.items():
        print(f"{name:40}{share(exact):8.1%} of {len(exact)}")
    print(json.dumps({name: share(exact) for name, exact in found.items()}))


if __name__ == "__main__":
    main()
