"""Ask a model's folder about tables that its training never saw; print how many answers are exact.

    python scripts/evaluate_demo_model.py MODEL [--tables 500] [--engine transformers | vllm]

In the quickstart's style, in looks and fonts that training never draws, and as matplotlib draws tables;
by kind of question, and by look or font. The answers are decoded greedily in float32, each in a chat of
its own.
"""

from __future__ import annotations

import argparse
import io
import json
import os
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from demo_styles import (
    DEFAULT_FONT,
    FONTS,
    HELD_OUT_FONTS,
    HELD_OUT_LOOKS,
    Look,
    draw_look,
    find_fonts,
    natural_size,
    training_look,
    worn,
)
from PIL import Image

from batchkit.commands.demo_tables import (
    SIZES,
    TEST_SIZES,
    DrawnTable,
    Question,
    draw,
    make_table,
    questions,
    texts,
)

MAX_TOKENS = 8
STYLES = {
    "own": "the quickstart's style",
    "looks": "ten other looks",
    "fonts": "eight other fonts",
    "matplotlib": "matplotlib's tables",
}


class Case(NamedTuple):
    image: Image.Image
    question: Question
    size: tuple[int, int]
    look: str  # within its style

    def chat(self, image: dict[str, Any]) -> list[dict[str, Any]]:
        text = {"type": "text", "text": self.question.text}
        return [{"role": "user", "content": [image, text]}]


def make_cases(tables: int, seed: object, style: str, fonts: Path) -> list[Case]:
    """Return two cases for each of ``tables`` random tables: a look-up and another question."""
    random, artist = Random(f"evaluation {seed}"), Artist(style, fonts)
    cases = []
    for number in range(tables):
        size = (SIZES + 2 * TEST_SIZES)[number % (len(SIZES) + 2 * len(TEST_SIZES))]
        table = make_table(random, size, test=True)
        image, look = artist.draw(random, table, number)
        asked = islice(questions(random, table, test=True), 2)
        cases += [Case(image, question, size, look) for question in asked]
    return cases


class Artist:
    """A class that draws tables in one of STYLES, with its looks or fonts in turn."""

    def __init__(self, style: str, fonts: Path) -> None:
        self.style = style
        self.known = [DEFAULT_FONT, *find_fonts(fonts, FONTS)] if style == "looks" else []
        self.unknown = find_fonts(fonts, HELD_OUT_FONTS) if style == "fonts" else []

    def draw(self, random: Random, table: DrawnTable, number: int) -> tuple[Image.Image, str]:
        """Return the picture and the name of its look."""
        if self.style == "own":
            return draw(table).convert("RGB"), ""
        if self.style == "matplotlib":
            return draw_with_matplotlib(random, table), ""
        while True:
            look, name = self._look(random, number)
            picture = draw_look(random, table, look, natural_size(random, table, look))
            if picture:
                return Image.fromarray(worn(random, picture.pixels)).convert("RGB"), name

    def _look(self, random: Random, number: int) -> tuple[Look, str]:
        if self.style == "fonts":
            font = self.unknown[number % len(self.unknown)]
            return training_look(random, [font]), Path(font[0]).stem
        name, look = list(HELD_OUT_LOOKS.items())[number % len(HELD_OUT_LOOKS)]
        return Look(*look, random.choice(self.known)), name


def draw_with_matplotlib(random: Random, table: DrawnTable) -> Image.Image:
    from matplotlib.figure import Figure

    (_, *columns), *lines = texts(table)
    sides = (
        random.uniform(1.0, 1.5) * (1 + len(columns)),
        random.uniform(0.3, 0.4) * len(lines) + 0.6,
    )
    figure = Figure(sides, dpi=random.choice((72, 100, 150)))
    axes = figure.subplots()
    axes.axis("off")
    axes.table(
        [line[1:] for line in lines],
        rowLabels=[line[0] for line in lines],
        colLabels=columns,
        cellLoc=random.choice(("left", "center", "right")),
        loc="center",
    ).scale(1, random.uniform(1, 1.5))
    file = io.BytesIO()
    figure.savefig(file, format="png", bbox_inches="tight")
    return Image.open(file).convert("RGB")


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
Shares = dict[str, list[bool]]  # which answers are exact, by what they have in common


class Marks(NamedTuple):
    kinds: Shares
    looks: Shares


def evaluate(model: Path, engine: str, tables: int, seed: int, fonts: Path) -> dict[str, Marks]:
    """Return the results of the model by style."""
    by_style = {style: make_cases(tables, seed, style, fonts) for style in STYLES}
    cases = [case for some in by_style.values() for case in some]
    answers = iter(ENGINES[engine](str(model), cases))
    marks = {}
    for style, some in by_style.items():
        right = [next(answers).strip() == case.question.answer for case in some]
        marks[style] = Marks(
            _groups(some, right, lambda case: case.question.kind)
            | {"all": right}
            | _groups(some, right, _in_words),
            _groups(some, right, lambda case: case.look),
        )
    return marks


def _in_words(case: Case) -> str:
    return "of a size not in training" if case.size in TEST_SIZES else ""


def _groups(cases: list[Case], right: list[bool], key: Callable[[Case], str]) -> Shares:
    """Return the results by key. Cases whose key is empty are left out."""
    groups: Shares = defaultdict(list)
    for name, exact in sorted((key(case), exact) for case, exact in zip(cases, right, strict=True)):
        groups[name].append(exact)
    groups.pop("", None)
    return dict(groups)


def share(exact: Sequence[bool]) -> float:
    return sum(exact) / len(exact)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("--tables", type=int, default=500, help="of each style")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--engine", choices=ENGINES, default="transformers")
    parser.add_argument("--fonts", type=Path, default=Path("/usr/share/fonts"))
    args = parser.parse_args()
    marks = evaluate(args.model, args.engine, args.tables, args.seed, args.fonts)
    found = {
        f"{style}, {name}": exact
        for style, some in marks.items()
        for name, exact in {**some.kinds, **some.looks}.items()
    }
    for name, exact in found.items():
        print(f"{name:45}{share(exact):8.1%} of {len(exact)}")
    print(json.dumps({name: share(exact) for name, exact in found.items()}))


if __name__ == "__main__":
    main()
