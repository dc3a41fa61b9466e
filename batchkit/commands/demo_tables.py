"""Pictures of tables for the demo model, with questions and answers.

All words and numbers are generated. The model was not trained on the tables for tests and users. These tables combine
names of rows and columns that training never combines. None of their numbers and only some of their sizes occur in
training.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import cycle
from pathlib import Path
from random import Random
from typing import NamedTuple
from zlib import crc32

from PIL import Image, ImageDraw, ImageFont
from PIL.ImageFont import FreeTypeFont
from PIL.ImageFont import ImageFont as OldFont

from batchkit.errors import JobError

ROWS = {  # by the theme, which is the picture's first word
    "City": "Paris Rome Berlin Madrid Lisbon Vienna Prague Oslo Athens Dublin Turin Geneva Milan Porto Lyon Ghent",
    "Food": "Bread Milk Rice Cheese Apples Eggs Butter Sugar Salt Tea Coffee Honey Onions Beans Pasta Fish",
    "Animal": "Horse Cow Sheep Goat Dog Cat Duck Goose Rabbit Fox Wolf Bear Deer Otter Eagle Owl",
    "Person": "Anna Ben Clara David Emma Frank Grace Henry Iris Jack Karl Laura Maria Nora Oscar Paula",
    "Plant": "Rose Tulip Oak Pine Maple Fern Lily Daisy Ivy Birch Willow Clover Cactus Moss Palm Elm",
    "Tool": "Pliers Saw Drill Wrench Axe Spade Rake Ladder Brush Knife Nail Screw Rope Chisel File Lamp",
}
COLUMNS = (
    "Price Stock Weight Sales Profit Cost Orders Visits Height Width Length Age Score Points",
    "Speed Rating Total Count Area Depth Tax Rent Debt Loans Staff Hours Days Rooms Seats Trains",
    "Buses Cars Ships Roads Rain Snow Wind Sun North South East West",
)
ASKED = "What is the value of for Which row has largest smallest Is larger than How many rows columns are there Yes No"
THEMES, ROW_WORDS = list(ROWS), [word for line in ROWS.values() for word in line.split()]
COLUMN_WORDS = [word for line in COLUMNS for word in line.split()]
WORDS = [*ASKED.split(), *THEMES, *ROW_WORDS, *COLUMN_WORDS]

SIZES = [(rows, columns) for columns in (1, 2, 3, 4) for rows in range(1, 9)]
TEST_SIZES = [(4, 3), (6, 2), (7, 4)]  # rows and columns; training has all other sizes
CELL_WIDTH, CELL_HEIGHT = 64, 32
FONT_SIZES = (12, 14, 16)
SHADES = (200, 220, 240)  # gray values of the header cells


# Kinds of the questions that users get, and the number of rows that they need.
KINDS = (*["value"] * 6, "compare", "largest", "smallest", "count")
MIN_ROWS = 2


@dataclass(frozen=True)
class DrawnTable:
    theme: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    values: tuple[tuple[int, ...], ...]  # by row, then by column
    font_size: int = 14
    shade: int = 220


class Cells(NamedTuple):
    """The cells of the picture that a question is about. They are counted line by line, from 0 for the top left
    cell."""

    named: int | None = None  # the cell in the named column and in the row that is named last
    other: int | None = None  # in a comparison, the cell in the row that is named first
    best: int | None = None  # the largest or smallest cell


class Question(NamedTuple):
    kind: str
    text: str
    answer: str
    cells: Cells = Cells()


def build_demo_tables(folder: Path, *, count: int = 40, seed: int = 0) -> None:
    """Write ``count`` pictures and ``questions.jsonl`` to ``folder`` (see ``write_demo_tables``).

    Raises:
        JobError: ``folder`` is not empty, or can't be written.
    """
    with filling(folder):
        write_demo_tables(folder, count, str(seed))


@contextmanager
def filling(folder: Path) -> Iterator[None]:
    """Check that ``folder`` is empty or missing, then let the caller fill it. Raise JobError if it is not empty or
    writing fails."""
    try:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise JobError(f"{folder}: exists already and is not empty; give a new or empty folder")
        yield
    except OSError as error:
        raise JobError(f"{folder}: can't be written: {error}") from error


def write_demo_tables(folder: Path, count: int, seed: str) -> list[DrawnTable]:
    """Write ``count`` pictures to ``folder/image``, and a question about each to ``questions.jsonl``.

    The same arguments give the same files.
    """
    random = Random(seed)
    (folder / "image").mkdir(parents=True, exist_ok=True)
    pool = [size for size in SIZES if size[0] >= MIN_ROWS]
    sizes = random.sample(pool * max(2, -(-count // len(pool))), count)
    tables, lines = [], []
    for number, size, kind in zip(range(1, count + 1), sizes, cycle(KINDS), strict=False):
        table = make_table(random, size, test=True)
        asked = next(q for q in questions(random, table, test=True) if q.kind == kind)
        image = f"image/{number:02}.png"
        draw(table).save(folder / image, optimize=True)
        row = {"id": number, "image": image, "question": asked.text, "answer": asked.answer}
        lines.append(json.dumps({**row, "kind": kind}) + "\n")
        tables.append(table)
    (folder / "questions.jsonl").write_text("".join(lines), encoding="utf-8")
    return tables


def is_test_pair(row: str, column: str) -> bool:
    return crc32(f"{row} {column}".encode()) % 25 == 0


def is_test_number(number: int) -> bool:
    return number % 13 == 6


def make_table(random: Random, size: tuple[int, int], *, test: bool = False) -> DrawnTable:
    """Return a random table of ``size`` (rows, columns). Its numbers have one to four digits, equally often, and don't
    repeat within a column. With ``test``, it differs from all tables of the training."""
    n_rows, n_columns = size
    while True:
        theme = random.choice(THEMES)
        rows = random.sample(ROWS[theme].split(), n_rows)
        columns = random.sample(COLUMN_WORDS, n_columns)
        if test == any(is_test_pair(row, column) for row in rows for column in columns):
            break
    by_column = [_numbers(random, n_rows, test) for _ in columns]
    values = tuple(zip(*by_column, strict=True))
    look = random.choice(FONT_SIZES), random.choice(SHADES)
    return DrawnTable(theme, tuple(rows), tuple(columns), values, *look)


def _numbers(random: Random, count: int, test: bool) -> list[int]:
    numbers: dict[int, None] = {}
    while len(numbers) < count:
        digits = random.randint(1, 4)
        number = random.randrange(10 ** (digits - 1), 10**digits)
        if is_test_number(number) == test:
            numbers[number] = None
    return list(numbers)


def questions(random: Random, table: DrawnTable, *, test: bool = False) -> Iterator[Question]:
    """Yield questions about ``table`` without end: look-ups of a cell in random order, and on average one question of
    another kind after two of them. With ``test``, a question of another kind follows every look-up, and look-ups use
    only cells whose row and column training never combines."""
    cells = [
        (y, x)
        for y, row in enumerate(table.rows)
        for x, column in enumerate(table.columns)
        if not test or is_test_pair(row, column)
    ]
    while True:
        for y, x in random.sample(cells, len(cells)):
            text = f"What is the value of {table.columns[x]} for {table.rows[y]}?"
            yield Question("value", text, str(table.values[y][x]), Cells(_place(table, y, x)))
            if test or random.random() < 0.5:
                yield _other_question(random, table)


def _place(table: DrawnTable, y: int, x: int) -> int:
    return (y + 1) * (len(table.columns) + 1) + x + 1


def _other_question(random: Random, table: DrawnTable) -> Question:
    kind = random.choice(["largest", "smallest", "compare", "compare", "count"])
    x = random.randrange(len(table.columns))
    column, numbers = table.columns[x], [values[x] for values in table.values]
    if kind == "count":
        what = random.choice(["row", "column"])
        count = len(table.rows if what == "row" else table.columns)
        return Question(kind, f"How many {what}s are there?", str(count))
    if kind == "compare" and len(numbers) > 1:
        a, b = random.sample(range(len(numbers)), 2)
        text = f"Is {column} larger for {table.rows[a]} than for {table.rows[b]}?"
        answer = "Yes" if numbers[a] > numbers[b] else "No"
        return Question(kind, text, answer, Cells(_place(table, b, x), _place(table, a, x)))
    kind = random.choice(["largest", "smallest"])
    best = numbers.index(max(numbers) if kind == "largest" else min(numbers))
    text = f"Which row has the {kind} {column}?"
    return Question(kind, text, table.rows[best], Cells(best=_place(table, best, x)))


def texts(table: DrawnTable) -> list[list[str]]:
    """Return the table's cells line by line: first the theme and the column names, then each row's name and values."""
    lines = [[table.theme, *table.columns]]
    lines += [
        [row, *map(str, values)] for row, values in zip(table.rows, table.values, strict=True)
    ]
    return lines


def draw(table: DrawnTable) -> Image.Image:
    """Return a gray picture of the table, with a line around each cell and shaded headers."""
    lines = texts(table)
    size = len(lines[0]) * CELL_WIDTH, len(lines) * CELL_HEIGHT
    picture = Image.new("L", size)
    for y, line in enumerate(lines):
        for x, text in enumerate(line):
            cell = _cell(text, table.font_size, 255 if x and y else table.shade)
            picture.paste(cell, (x * CELL_WIDTH, y * CELL_HEIGHT))
    picture.paste(0, (0, size[1] - 1, *size))
    picture.paste(0, (size[0] - 1, 0, *size))
    return picture


@lru_cache(20_000)
def _cell(text: str, font_size: int, shade: int) -> Image.Image:
    cell = Image.new("L", (CELL_WIDTH, CELL_HEIGHT), 255)
    pen, font = ImageDraw.Draw(cell), _font(font_size)
    pen.line((0, CELL_HEIGHT, 0, 0, CELL_WIDTH, 0), fill=0)
    x, anchor = (CELL_WIDTH - 5, "rm") if text.isdigit() else (5, "lm")
    pen.text((x, CELL_HEIGHT // 2), text, fill=0, font=font, anchor=anchor)
    return cell.point([min(grey, shade) for grey in range(256)])


@cache
def _font(size: int) -> FreeTypeFont | OldFont:
    return ImageFont.load_default(size)
