"""Draw the image pairs that the reward jobs score, and write their rows: jobs/data/reward.

    python scripts/make_reward_data.py [FOLDER]

Ten edits of simple pictures, two for each category. Some do what was asked and some don't, so that
a model that sees images can distinguish them. The last one's edited picture is missing on purpose:
its row fails, and the others are scored.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from PIL import Image, ImageDraw

FOLDER = Path(__file__).parents[1] / "jobs" / "data" / "reward"
WIDTH, HEIGHT, GROUND = 256, 192, 150
SKY, NIGHT, GRASS, DARK_GRASS = "#bfe0f5", "#101a38", "#7cb662", "#27472b"
RED, BLUE, GREEN, YELLOW, BROWN, BLACK = (
    "#d23b30",
    "#2f5fc4",
    "#3d9a4a",
    "#f2c92e",
    "#7a5230",
    "#222",
)

Pen = ImageDraw.ImageDraw
Scene = Callable[[Pen], None]


@dataclass(frozen=True)
class Edit:
    """A picture, what was asked of its editor, and what came back; None: nothing did."""

    category: str
    description: str
    instruction: str
    before: Scene
    after: Scene | None


def edits() -> Iterator[Edit]:
    yield Edit(
        "physical",
        "A red ball hangs in the air above a meadow.",
        "Show the ball a moment later, when nothing holds it.",
        partial(ball, height=60),
        partial(ball, height=GROUND - 18),
    )
    yield Edit(
        "physical",
        "A glass half full of water stands upright on a table.",
        "Fill the glass to its brim.",
        partial(glass, level=0.5),
        partial(glass, level=0.0),  # emptied instead
    )
    yield Edit(
        "environmental",
        "A house on a meadow, at noon.",
        "Show the same house at midnight.",
        partial(house, night=False),
        partial(house, night=True),
    )
    yield Edit(
        "environmental",
        "A tree with green leaves in summer.",
        "Show the same tree in late autumn.",
        partial(tree, leaves=GREEN),
        partial(tree, leaves="#d9822b"),
    )
    yield Edit(
        "social",
        "Two people stand far apart and do not know each other.",
        "Show them as they greet each other by shaking hands.",
        partial(people, places=[60, 196]),
        partial(people, places=[104, 150]),
    )
    yield Edit(
        "social",
        "Three guests sit at a table, and two of them have a plate.",
        "Let no guest be left out.",
        partial(dinner, plates=[60, 128]),
        partial(dinner, plates=[60]),  # one plate taken away instead
    )
    yield Edit(
        "causal",
        "A row of dominoes stands upright, and a finger is about to push the first.",
        "Show what the push leads to.",
        partial(dominoes, fallen=False),
        partial(dominoes, fallen=True),
    )
    yield Edit(
        "causal",
        "A candle burns on a table.",
        "Show the candle after a gust of wind.",
        partial(candle, burns=True),
        partial(candle, burns=False),
    )
    yield Edit(
        "referential",
        "A red circle, a blue square and a green triangle, from left to right.",
        "Paint the shape to the right of the circle yellow.",
        partial(shapes, colors=[RED, BLUE, GREEN]),
        partial(shapes, colors=[RED, BLUE, YELLOW]),  # the wrong one
    )
    yield Edit(
        "referential",
        "A large red ball and a small one lie on a meadow.",
        "Remove the smaller ball.",
        partial(two_balls),
        None,
    )


def meadow(pen: Pen, sky: str = SKY, grass: str = GRASS) -> None:
    pen.rectangle((0, 0, WIDTH, HEIGHT), fill=sky)
    pen.rectangle((0, GROUND, WIDTH, HEIGHT), fill=grass)


def table(pen: Pen) -> None:
    pen.rectangle((0, 0, WIDTH, HEIGHT), fill="#efe6d8")
    pen.rectangle((0, GROUND, WIDTH, HEIGHT), fill=BROWN)


def disc(pen: Pen, x: float, y: float, radius: float, fill: str) -> None:
    pen.ellipse((x - radius, y - radius, x + radius, y + radius), fill=fill, outline=BLACK)


def ball(pen: Pen, *, height: float) -> None:
    meadow(pen)
    pen.ellipse((104, GROUND + 6, 152, GROUND + 16), fill=DARK_GRASS)
    disc(pen, 128, height, 24, RED)


def two_balls(pen: Pen) -> None:
    meadow(pen)
    disc(pen, 90, GROUND - 24, 34, RED)
    disc(pen, 186, GROUND - 4, 14, RED)


def glass(pen: Pen, *, level: float) -> None:
    table(pen)
    top, bottom = 50, GROUND - 2
    pen.rectangle((98, bottom - level * (bottom - top), 158, bottom), fill="#6fb1e0")
    pen.line((98, top, 98, bottom, 158, bottom, 158, top), fill=BLACK, width=3)


def house(pen: Pen, *, night: bool) -> None:
    meadow(pen, *((NIGHT, DARK_GRASS) if night else (SKY, GRASS)))
    disc(pen, 40, 36, 18, "#f4f1d8" if night else YELLOW)
    pen.rectangle((90, 80, 180, GROUND + 10), fill="#8b8078" if night else "#e6d3b3", outline=BLACK)
    pen.polygon([(80, 80), (135, 36), (190, 80)], fill="#5a2a22" if night else RED, outline=BLACK)
    pen.rectangle((106, 98, 130, 122), fill=YELLOW if night else "#dff1fb", outline=BLACK)
    pen.rectangle((146, 108, 168, GROUND + 10), fill=BROWN, outline=BLACK)


def tree(pen: Pen, *, leaves: str) -> None:
    meadow(pen)
    pen.rectangle((118, 96, 138, GROUND + 12), fill=BROWN, outline=BLACK)
    for x, y in ((100, 78), (156, 78), (128, 52)):
        disc(pen, x, y, 34, leaves)


def people(pen: Pen, *, places: list[int]) -> None:
    meadow(pen)
    for x, color in zip(places, (BLUE, RED), strict=True):
        inward = 1 if x < WIDTH / 2 else -1
        disc(pen, x, 66, 14, "#e8b48c")
        pen.line((x, 80, x, 128), fill=color, width=8)
        pen.line((x, 128, x - 12, 168), fill=color, width=5)
        pen.line((x, 128, x + 12, 168), fill=color, width=5)
        pen.line((x, 94, x + 24 * inward, 108), fill=color, width=5)


def dinner(pen: Pen, *, plates: list[int]) -> None:
    table(pen)
    for x, color in zip((60, 128, 196), (BLUE, RED, GREEN), strict=True):
        disc(pen, x, 78, 18, "#e8b48c")
        pen.rectangle((x - 22, 98, x + 22, GROUND), fill=color, outline=BLACK)
    for x in plates:
        pen.ellipse((x - 24, GROUND + 10, x + 24, GROUND + 26), fill="white", outline=BLACK)


def dominoes(pen: Pen, *, fallen: bool) -> None:
    table(pen)
    for x in range(60, 200, 30):
        lean = 44 if fallen else 0
        top = GROUND - (32 if fallen else 56)
        pen.polygon(
            [(x, GROUND), (x + 10, GROUND), (x + 10 + lean, top), (x + lean, top)],
            fill="white",
            outline=BLACK,
        )
    pen.line((4, 100, 46, 104), fill="#e8b48c", width=10)


def candle(pen: Pen, *, burns: bool) -> None:
    table(pen)
    pen.rectangle((114, 84, 142, GROUND + 8), fill="#f6efdf", outline=BLACK)
    pen.line((128, 72, 128, 84), fill=BLACK, width=2)
    if burns:
        pen.polygon([(128, 36), (138, 64), (128, 74), (118, 64)], fill=YELLOW, outline=RED)
    else:
        pen.line((128, 68, 122, 54, 134, 42, 126, 28), fill="#9a9a9a", width=3)


def shapes(pen: Pen, *, colors: list[str]) -> None:
    pen.rectangle((0, 0, WIDTH, HEIGHT), fill="white")
    disc(pen, 52, 96, 30, colors[0])
    pen.rectangle((100, 66, 160, 126), fill=colors[1], outline=BLACK)
    pen.polygon([(176, 126), (206, 66), (236, 126)], fill=colors[2], outline=BLACK)


def draw(scene: Scene, path: Path) -> None:
    image = Image.new("RGB", (WIDTH, HEIGHT))
    scene(ImageDraw.Draw(image))
    image.quantize(16, dither=Image.Dither.NONE).save(path, optimize=True)


def write(folder: Path) -> None:
    for name in ("original", "edited"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    lines = []
    for number, edit in enumerate(edits(), start=1):
        file = f"{edit.category}{number:02}.png"
        draw(edit.before, folder / "original" / file)
        if edit.after is not None:
            draw(edit.after, folder / "edited" / file)
        row = {
            "id": f"edit{number:02}",
            "category": edit.category,
            "original_description": edit.description,
            "edit_instruction": edit.instruction,
            "original": f"original/{file}",
            "edited": f"edited/{file}",
        }
        lines.append(json.dumps(row, ensure_ascii=False) + "\n")
    (folder / "edits.jsonl").write_text("".join(lines), encoding="utf-8", newline="\n")


if __name__ == "__main__":
    write(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER)
