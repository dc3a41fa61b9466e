"""Drawing of tables in many styles, for the training and the tests of the demo model.

    python scripts/demo_styles.py FOLDER [--fonts /usr/share/fonts]     pictures to look at

A look is a choice of borders, header, stripes and font; `HELD_OUT_LOOKS` and `HELD_OUT_FONTS` are
never drawn in training. Sizes, margins, greys, alignment and the like are drawn at random for each
picture. The fonts come from Debian's packages, which FONTS names.
"""

from __future__ import annotations

import argparse
import io
from collections.abc import Iterator
from functools import cache, lru_cache
from itertools import accumulate
from pathlib import Path
from random import Random
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageDraw, ImageFilter, ImageFont

from batchkit.commands.demo_tables import (
    COLUMN_WORDS,
    ROW_WORDS,
    SIZES,
    THEMES,
    DrawnTable,
    make_table,
    texts,
)

BORDERS = ("none", "grid", "rows", "columns", "frame", "booktabs", "header_rule")
HEADERS = ("plain", "bold", "shaded", "dark")
HELD_OUT_LOOKS = {  # by name: borders, header, stripes
    "dashboard": ("grid", "dark", True),
    "striped": ("none", "bold", True),
    "report": ("rows", "dark", False),
    "paper": ("booktabs", "plain", False),
    "ledger": ("columns", "shaded", False),
    "card": ("frame", "bold", False),
    "web": ("header_rule", "bold", False),
    "minimal": ("none", "shaded", False),
    "spreadsheet": ("grid", "bold", False),
    "list": ("rows", "plain", True),
}
# By Debian's package: families as (regular, bold).
FONTS = {
    "fonts-dejavu-core": ["DejaVuSans DejaVuSans-Bold", "DejaVuSerif DejaVuSerif-Bold"],
    "fonts-dejavu-extra": ["DejaVuSansCondensed DejaVuSansCondensed-Bold"],
    "fonts-liberation": [
        "LiberationSans-Regular LiberationSans-Bold",
        "LiberationSerif-Regular LiberationSerif-Bold",
        "LiberationMono-Regular LiberationMono-Bold",
        "LiberationSansNarrow-Regular LiberationSansNarrow-Bold",
    ],
    "fonts-open-sans": ["OpenSans-Regular OpenSans-Bold"],
    "fonts-noto-core": ["NotoSans-Regular NotoSans-Bold", "NotoSerif-Regular NotoSerif-Bold"],
    "fonts-cantarell": ["Cantarell-Regular Cantarell-Bold"],
    "fonts-inconsolata": ["Inconsolata Inconsolata"],
    "fonts-firacode": ["FiraCode-Regular FiraCode-Bold"],
    "fonts-hack": ["Hack-Regular Hack-Bold"],
    "fonts-linuxlibertine": ["LinLibertine_R LinLibertine_RB", "LinBiolinum_R LinBiolinum_RB"],
    "fonts-crosextra-caladea": ["Caladea-Regular Caladea-Bold"],
    "fonts-ebgaramond": ["EBGaramond12-Regular EBGaramond12-Bold"],
    "fonts-go": ["Go-Regular Go-Bold", "Go-Mono Go-Mono-Bold"],
    "fonts-jetbrains-mono": ["JetBrainsMono-Regular JetBrainsMono-Bold"],
    "fonts-comic-neue": ["ComicNeue-Regular ComicNeue-Bold"],
    "fonts-karla": ["Karla-Regular Karla-Bold"],
    "fonts-b612": ["B612-Regular B612-Bold"],
    "fonts-oxygen": ["Oxygen-Sans Oxygen-Sans-Bold"],
    "fonts-quicksand": ["Quicksand-Regular Quicksand-Bold"],
    "fonts-vollkorn": ["Vollkorn-Regular Vollkorn-Bold"],
    "fonts-texgyre": [
        "texgyreheros-regular texgyreheros-bold",
        "texgyreschola-regular texgyreschola-bold",
        "texgyrebonum-regular texgyrebonum-bold",
        "texgyrecursor-regular texgyrecursor-bold",
    ],
    "fonts-sora": ["Sora-Regular Sora-Bold"],
    "fonts-tuffy": ["Tuffy Tuffy_Bold"],
    "fonts-agave": ["agave-r-autohinted agave-b-autohinted"],
}
HELD_OUT_FONTS = {
    "fonts-inter": ["Inter-Regular Inter-Bold"],
    "fonts-roboto-unhinted": ["Roboto-Regular Roboto-Bold"],
    "fonts-lato": ["Lato-Regular Lato-Bold"],
    "fonts-play": ["Play-Regular Play-Bold"],
    "fonts-paratype": ["PTF55F PTF75F"],
    "fonts-texgyre": ["texgyrepagella-regular texgyrepagella-bold"],
    "fonts-sil-gentiumplus": ["GentiumPlus-Regular GentiumPlus-Bold"],
    "fonts-mononoki": ["mononoki-Regular mononoki-Bold"],
}
DEFAULT_FONT = ("", "")  # Pillow's own
MIN_FONT, MAX_FONT, MIN_PITCH = 9.5, 38.0, 15.0  # in the model's pixels
CORNERS = ("", "", "Name", "Item", "Year", "Group", "No.")


class Look(NamedTuple):
    borders: str
    header: str
    stripes: bool
    font: tuple[str, str]  # files of the regular and the bold face


class Picture(NamedTuple):
    pixels: np.ndarray  # grey
    boxes: np.ndarray  # of each cell's text, line by line: left, top, right, bottom
    letters: np.ndarray  # of all texts: middle across and down, font size, character's code


class Colours(NamedTuple):
    paper: int
    ink: int
    line: int
    header: int
    header_ink: int
    stripe: int


def find_fonts(folder: Path, packages: dict[str, list[str]]) -> list[tuple[str, str]]:
    """Return the (regular, bold) files of each font family below ``folder``. Raises SystemExit if
    one is missing."""
    files = {path.stem: str(path) for path in sorted(folder.rglob("*.[ot]tf"))}
    wanted = {name for families in packages.values() for pair in families for name in pair.split()}
    if missing := sorted(wanted - files.keys()):
        raise SystemExit(f"{folder}: lacks {missing}; apt-get install {' '.join(packages)}")
    pairs = [pair.split() for families in packages.values() for pair in families]
    return [(files[regular], files[bold]) for regular, bold in pairs]


def training_look(random: Random, fonts: list[tuple[str, str]]) -> Look:
    while True:
        look = random.choice(BORDERS), random.choice(HEADERS), random.random() < 0.3
        if look not in HELD_OUT_LOOKS.values():
            return Look(*look, random.choice(fonts))


def natural_size(random: Random, table: DrawnTable, look: Look) -> tuple[int, int]:
    """Return the width and the height, in pixels, of a picture in which a person could draw the
    table."""
    size, spread = random.uniform(12, 24), random.uniform(1.0, 1.4)
    widths = _text_widths(texts(table), look)
    across, down = len(widths[0]), len(widths)
    text_width = sum(max(line[x] for line in widths) for x in range(across)) * size
    width = (text_width + across * size * random.uniform(0.6, 1.6)) * spread
    height = down * size * random.uniform(1.5, 2.6)
    return round(width + random.uniform(4, 40)), round(height + random.uniform(4, 40))


def draw_look(
    random: Random, table: DrawnTable, look: Look, size: tuple[int, int], scale: float = 1.0
) -> Picture | None:
    """Return a picture of ``size`` with the table, or None if the text would be too small to read.

    Args:
        scale: Number of pixels of the picture that become one pixel of the model's image.
    """
    lines = texts(table)
    if lines[0][0] and random.random() < 0.5:
        lines[0][0] = random.choice(CORNERS)
    layout = _lay_out(random, lines, look, size, scale)
    if layout is None:
        return None
    font_size, lefts, tops = layout
    colours = _colours(random, look)
    image = Image.new("L", size, colours.paper)
    pen = ImageDraw.Draw(image)
    _fill(pen, look, colours, lefts, tops)
    _rule(random, pen, look, colours, lefts, tops, max(1, round(scale)))
    boxes, letters = _write(random, pen, lines, look, colours, font_size, lefts, tops)
    if tops[0] > 1.8 * font_size and random.random() < 0.4:
        title = " ".join(random.choices([*THEMES, *ROW_WORDS, *COLUMN_WORDS], k=2))
        at = (lefts[0], tops[0] - font_size)
        pen.text(at, title, fill=colours.ink, font=_font(look.font[1], font_size), anchor="lm")
    return Picture(np.asarray(image), boxes, letters)


def _lay_out(
    random: Random, lines: list[list[str]], look: Look, size: tuple[int, int], scale: float
) -> tuple[float, list[int], list[int]] | None:
    """Return the font size, and the positions at which columns and lines begin, with the end of the
    last one."""
    widths = _text_widths(lines, look)
    across, down = len(widths[0]), len(widths)
    by_column = [max(line[x] for line in widths) for x in range(across)]
    if random.random() < 0.4:  # all of one width
        by_column = [max(by_column)] * across
    pad, lead = random.uniform(0.5, 1.4), random.uniform(1.3, 2.4)
    high = random.uniform(1.0, 1.5) if random.random() < 0.4 else 1.0  # the header
    edge = min(size) * random.choice((0.0, 0.01, 0.03)) + random.uniform(0, 6) * scale
    room = size[0] - edge - 1, size[1] - edge - 1
    largest = min(
        room[0] / (sum(by_column) + pad * across), room[1] / (lead * (down - 1 + high)), 90.0
    )
    font_size = largest * (
        random.uniform(0.8, 1) if random.random() < 0.7 else random.uniform(0.5, 1)
    )
    font_size = min(max(font_size, MIN_FONT * scale), largest, MAX_FONT * scale)
    if font_size < MIN_FONT * scale or font_size * lead < MIN_PITCH * scale:
        return None
    steps_x = [(width + pad) * font_size for width in by_column]
    steps_y = [font_size * lead * (high if y == 0 else 1) for y in range(down)]
    most = random.uniform(1.0, 2.5)
    lefts = _place(random, steps_x, room[0], edge, 2.0)
    tops = _place(random, steps_y, room[1], edge, most)
    return font_size, lefts, tops


def _place(random: Random, steps: list[float], room: float, edge: float, most: float) -> list[int]:
    """Return positions for ``steps``. The steps fill ``room``, or leave a part of it free before
    and after them."""
    spare = room - sum(steps)
    used = 1.0 if random.random() < 0.6 else random.random()
    used = min(spare * used, sum(steps) * (most - 1))
    factor = 1 + used / sum(steps)
    before = (spare - used) * random.choice((0.0, 0.5, 1.0, random.random()))
    start = before + edge * random.random()
    return [round(start + at * factor) for at in accumulate(steps, initial=0.0)]


def _colours(random: Random, look: Look) -> Colours:
    """Return random grays, from white paper and black ink to less contrast, sometimes light on
    dark."""
    paper = 255 if random.random() < 0.5 else random.randint(205, 255)
    ink = 0 if random.random() < 0.4 else random.randint(0, 100)
    line = random.choice((0, ink, random.randint(0, 160), random.randint(120, paper - 15)))
    header, header_ink = paper, ink
    if look.header == "shaded":
        header = paper - random.randint(10, 70)
    if look.header == "dark":
        header, header_ink = random.randint(10, 115), random.randint(225, 255)
    colours = Colours(paper, ink, line, header, header_ink, paper - random.randint(6, 40))
    if random.random() < 0.12:
        return Colours(*(255 - grey for grey in colours))
    return colours


def _fill(
    pen: ImageDraw.ImageDraw, look: Look, colours: Colours, lefts: list[int], tops: list[int]
) -> None:
    if look.header in ("shaded", "dark"):
        pen.rectangle((lefts[0], tops[0], lefts[-1], tops[1]), fill=colours.header)
    if look.stripes:
        for y in range(2, len(tops) - 1, 2):
            pen.rectangle((lefts[0], tops[y], lefts[-1], tops[y + 1]), fill=colours.stripe)


def _rule(
    random: Random,
    pen: ImageDraw.ImageDraw,
    look: Look,
    colours: Colours,
    lefts: list[int],
    tops: list[int],
    thin: int,
) -> None:
    thick = thin * random.choice((1, 1, 2))
    across: dict[int, int] = {}  # width of the line at a height
    down: dict[int, int] = {}
    if look.borders in ("grid", "rows"):
        across |= dict.fromkeys(tops, thin)
    if look.borders in ("grid", "columns"):
        down |= dict.fromkeys(lefts, thin)
    if look.borders == "rows" and random.random() < 0.5:
        del across[tops[0]]
    if look.borders == "columns" and random.random() < 0.5:
        del down[lefts[0]], down[lefts[-1]]
    if look.borders == "frame":
        across |= {tops[0]: thick, tops[-1]: thick}
        down |= {lefts[0]: thick, lefts[-1]: thick}
    if look.borders == "booktabs":
        across |= {tops[0]: 2 * thin, tops[1]: thin, tops[-1]: 2 * thin}
    if look.borders == "header_rule":
        across |= {tops[1]: thick}
    for y, width in across.items():
        pen.line((lefts[0], y, lefts[-1], y), fill=colours.line, width=width)
    for x, width in down.items():
        pen.line((x, tops[0], x, tops[-1]), fill=colours.line, width=width)


def _write(
    random: Random,
    pen: ImageDraw.ImageDraw,
    lines: list[list[str]],
    look: Look,
    colours: Colours,
    font_size: float,
    lefts: list[int],
    tops: list[int],
) -> tuple[np.ndarray, np.ndarray]:
    """Draw the texts of the table. Return the boxes and letters of the `Picture`."""
    letters: list[tuple[float, float, float, int]] = []
    regular = _font(look.font[0], font_size)
    bold = _font(look.font[1], font_size)
    of_numbers = random.choice("rrrmml")
    of_names = random.choice("llllmr")
    of_columns = random.choice((of_numbers, of_numbers, "m", "l"))
    bold_names = random.random() < 0.2
    bold_header = look.header == "bold" or (look.header != "plain" and random.random() < 0.5)
    inset = random.uniform(0.2, 0.45) * font_size
    raised = random.uniform(-0.06, 0.06) * font_size
    boxes = np.zeros((len(lines) * len(lines[0]), 4), dtype=np.float32)
    for y, line in enumerate(lines):
        middle = (tops[y] + tops[y + 1]) / 2 + raised
        for x, text in enumerate(line):
            font = bold if (y == 0 and bold_header) or (y and not x and bold_names) else regular
            anchor = of_names if x == 0 else of_columns if y == 0 else of_numbers
            left, right = lefts[x] + inset, lefts[x + 1] - inset
            at = {"l": left, "m": (left + right) / 2, "r": right}[anchor]
            if text:
                ink = colours.header_ink if y == 0 else colours.ink
                pen.text((at, middle), text, fill=ink, font=font, anchor=anchor + "m")
            face = look.font[font is bold]
            length = text_width(face, text) * font_size
            start, half = at - {"l": 0, "m": length / 2, "r": length}[anchor], 0.38 * font_size
            boxes[y * len(line) + x] = start, middle - half, start + length, middle + half
            letters += spelled(face, text, start, middle, font_size)
    return boxes, np.array(letters, dtype=np.float32)


def spelled(
    face: str, text: str, start: float, middle: float, font_size: float
) -> Iterator[tuple[float, float, float, int]]:
    """Yield the letters of a text for a `Picture`."""
    for letter in text:
        length = _word_width(face, letter) * font_size
        yield start + length / 2, middle, font_size, ord(letter)
        start += length


def _text_widths(lines: list[list[str]], look: Look) -> list[list[float]]:
    """Return the widths of the texts in bold at a font size of 1."""
    return [[text_width(look.font[1], text) for text in line] for line in lines]


def text_width(path: str, text: str) -> float:
    if text.isdigit():
        return sum(_word_width(path, digit) for digit in text)
    return _word_width(path, text)


@cache
def _word_width(path: str, word: str) -> float:
    return _font(path, 20.0).getlength(word) / 20


def _font(path: str, size: float) -> ImageFont.FreeTypeFont:
    return _load(path, round(size * 2) / 2)


@lru_cache(6000)
def _load(path: str, size: float) -> ImageFont.FreeTypeFont:
    if not path:
        return ImageFont.load_default(size)
    return ImageFont.truetype(path, size, layout_engine=ImageFont.Layout.BASIC)


def worn(random: Random, pixels: np.ndarray) -> np.ndarray:
    """Return ``pixels``, at random unchanged, with the artifacts of a JPEG, or blurred."""
    if random.random() > 0.3:
        return pixels
    image = Image.fromarray(pixels)
    if random.random() < 0.25:
        image = image.filter(ImageFilter.GaussianBlur(random.uniform(0.2, 0.7)))
    else:
        file = io.BytesIO()
        image.save(file, "jpeg", quality=random.randint(40, 95))
        image = Image.open(file)
    return np.asarray(image)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--fonts", type=Path, default=Path("/usr/share/fonts"))
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    fonts = [DEFAULT_FONT, *find_fonts(args.fonts, FONTS)]
    for number, size in enumerate(SIZES):
        random = Random(number)
        table, look = make_table(random, size), training_look(random, fonts)
        picture = draw_look(random, table, look, natural_size(random, table, look))
        if picture:
            name = f"{size[0]}x{size[1]}_{look.borders}_{look.header}.png"
            Image.fromarray(worn(random, picture.pixels)).save(args.folder / name)


if __name__ == "__main__":
    main()
