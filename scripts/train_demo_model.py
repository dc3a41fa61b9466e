"""Train the demo model, a small Qwen3-VL that reads the pictures of `demo_styles.py`.

    python scripts/train_demo_model.py FOLDER [--seconds 640] [--fonts /usr/share/fonts]

Meant for one GPU with a dozen processes that draw beside it; without a GPU it runs, too slowly for
more than a test. First the vision part learns to read; then all learns to answer, on tables of one
row or one column, then on all sizes, and is shown the cells to look at (`_pointing`). At first all
pictures are in the quickstart's style, then more and more of others.

FOLDER gets `log.jsonl` (losses, and the share of exact answers on tables of the test), `last.pt`, from
which the same command continues, and `model`, the latest in the hub's layout. The time spent decides
what is trained on and how fast: the learning rate falls to zero at the end of `--seconds`, which may be
changed when it continues. `--stop-after` ends a part of it.

A sequence is one picture with several questions. Each question sees the picture and itself alone, at
the positions of a chat of its own. So one pass over the picture serves them all.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import islice
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from queue import Queue
from random import Random
from threading import Thread
from typing import NamedTuple

import numpy as np
import torch
from demo_reader import (
    LETTERS,
    MAX_SEEN,
    MERGE,
    NOTHING,
    PATCH,
    PLACES,
    READ_COLUMNS,
    READ_DIGITS,
    READ_ROWS,
    READERS,
    SIDE,
    DemoReader,
    make_tokenizer,
    write_folder,
)
from demo_styles import (
    DEFAULT_FONT,
    FONTS,
    Picture,
    draw_look,
    find_fonts,
    spelled,
    text_width,
    training_look,
    worn,
)
from evaluate_demo_model import STYLES, Case, make_cases
from PIL import Image
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset

from batchkit.commands.demo_tables import (
    CELL_HEIGHT,
    CELL_WIDTH,
    SIZES,
    TEST_SIZES,
    Cells,
    DrawnTable,
    Question,
    draw,
    make_table,
    questions,
    texts,
)

# Parts of the time: reading alone until the first, tables of one row or one column until the second.
READING, LINES = 0.36, 0.42
OWN_STYLE_ALONE, OWN_STYLE_LESS = 0.03, 0.12  # until the one, and ever less until the other
OWN_SIZES, OWN_STYLE = 0.33, 0.5  # pictures of that style's sizes, and of those the style's own
SEEN_TOKENS, TOKENS = 40_000, 60_000  # in a step, of reading alone and of answering
MAX_PICTURES, MIN_SEEN, QUESTIONS = 320, 24, 8
READING_WEIGHT, POINTING_WEIGHT = 0.5, 0.5
PEAK, WARM_UP, FALLING = 2e-3, 150, 0.5  # the learning rate falls from that part of the time on
LOG_STEPS, SAVE_S, TEST_S, TEST_TABLES = 50, 45, 90, 60
POINTERS = len(Cells._fields)
AFTER_WORD = len(["Bread", "?", "<|im_end|>", "\n", "<|im_start|>", "assistant", "\n"])
IGNORE = -100
LETTER_NUMBERS = np.array([LETTERS.find(chr(code)) for code in range(128)], dtype=np.int16)
LETTER_NUMBERS[LETTER_NUMBERS < 0] = IGNORE
KEPT_BATCHES = 300


# ---- batches ----------------------------------------------------------------------------------


class Pictures(NamedTuple):
    """Pictures of one size."""

    height: int  # in visual tokens
    width: int
    pixels: Tensor  # picture, line, column: grey
    cells: Tensor  # picture, visual token: the cell whose text is there, or IGNORE
    words: Tensor  # picture, visual token: its row's word, its column's, four digits, its place
    letters: Tensor  # picture, patch: which of LETTERS is in its middle, or IGNORE

    def patches(self, *, worn: bool = False) -> Tensor:
        """Return the patches in Qwen's order, with pixels from -1 to 1 (shape: picture, patch,
        pixel). ``worn``: with noise and other grays."""
        scaled = self.pixels.float() / 127.5 - 1
        if worn:
            shape = len(scaled), 1, 1
            random = torch.rand(4, *shape, device=scaled.device)
            some = (random[0] < 0.5).float()
            noise = torch.randn_like(scaled) * random[1] ** 2 * 0.12
            greys = (1 - 0.35 * random[2]) * scaled + 0.3 * (random[3] - 0.5)
            scaled = torch.lerp(scaled, (greys + noise).clamp(-1, 1), some)
        split = scaled.view(-1, self.height, MERGE, PATCH, self.width, MERGE, PATCH)
        return split.permute(0, 1, 4, 2, 5, 3, 6).reshape(len(scaled), -1, PATCH * PATCH)


class Chats(NamedTuple):
    """Sequences, each with one picture and several questions. All have the same picture size and
    number of questions."""

    ids: Tensor  # picture, token
    labels: Tensor  # picture, question, token: the next token where it is of an answer
    answers: Tensor  # the places of those
    cells: Tensor  # picture, question: the cells that it is about, else IGNORE
    points: Tensor  # picture, question, token: whether it must attend to those cells
    mask: Tensor  # of attention, for every sequence the same
    positions: Tensor  # time, height and width of each token, likewise
    image_start: int
    image_end: int


class Batch(NamedTuple):
    pictures: Pictures
    chats: Chats | None

    def to(self, device: torch.device) -> Batch:
        return Batch(*(part and _moved(part, device) for part in self))


def _moved(part: Pictures | Chats, device: torch.device) -> Pictures | Chats:
    move = (v.to(device, non_blocking=True) if isinstance(v, Tensor) else v for v in part)
    return type(part)(*move)


def make_pictures(tables: Sequence[DrawnTable], drawn: Sequence[Picture]) -> Pictures:
    """Return ``drawn`` pictures of equal size, with the targets for training."""
    height, width = drawn[0].pixels.shape[0] // SIDE, drawn[0].pixels.shape[1] // SIDE
    cells = np.stack([_cells(picture.boxes, height, width) for picture in drawn])
    words = np.full((*cells.shape, READERS), IGNORE, dtype=np.int16)
    for some, where, table in zip(words, cells, tables, strict=True):
        some[where >= 0] = _words(table)[where[where >= 0]]
    letters = np.stack([_letters(picture.letters, height, width) for picture in drawn])
    arrays = np.stack([picture.pixels for picture in drawn]), cells, words, letters
    return Pictures(height, width, *map(torch.from_numpy, arrays))


def _letters(letters: np.ndarray, height: int, width: int) -> np.ndarray:
    """Return the letter in the middle of each patch, in Qwen's order."""
    x, y, size, code = letters.T
    near = np.argsort(-np.abs(x % PATCH - PATCH / 2), kind="stable")  # the nearest comes last
    grid = np.full((height * MERGE + 1, width * MERGE + 1), IGNORE, dtype=np.int16)
    columns = np.clip(x[near] // PATCH, 0, width * MERGE).astype(int)
    for part in (-0.25, 0.25, 0.0):
        lines = np.clip((y + part * size)[near] // PATCH, 0, height * MERGE).astype(int)
        grid[lines, columns] = LETTER_NUMBERS[code[near].astype(int)]
    split = grid[:-1, :-1].reshape(height, MERGE, width, MERGE)
    return split.transpose(0, 2, 1, 3).reshape(-1)


def _cells(boxes: np.ndarray, height: int, width: int) -> np.ndarray:
    """Return, for each visual token, the cell whose text covers most of the token."""
    covers = [
        np.clip(
            np.minimum(boxes[:, side + 2, None], edges + SIDE)
            - np.maximum(boxes[:, side, None], edges),
            0,
            SIDE,
        )
        for side, edges in enumerate((np.arange(width) * SIDE, np.arange(height) * SIDE))
    ]
    covered = covers[1][:, :, None] * covers[0][:, None]
    covered = covered.reshape(len(boxes), -1)
    return np.where(covered.max(0) > 20, covered.argmax(0), IGNORE).astype(np.int16)


def _words(table: DrawnTable) -> np.ndarray:
    """Return, for each cell, the words and digits to read in it."""
    places = range(len(table.columns) + 1)
    grid = [("", "", "", "", "")]
    grid += [("", c, "", "", str(x)) for x, c in enumerate(table.columns, 1)]
    for y, (row, values) in enumerate(zip(table.rows, table.values, strict=True), 1):
        grid.append((row, "", "", str(y), ""))
        cells = zip(places[1:], table.columns, values, strict=True)
        grid += [(row, column, str(value), str(y), str(x)) for x, column, value in cells]
    return np.array(
        [
            [
                READ_ROWS.index(f"Ġ{row}") if row else READ_ROWS.index(NOTHING),
                READ_COLUMNS.index(f"Ġ{column}") if column else READ_COLUMNS.index(NOTHING),
                *(READ_DIGITS.index(digit.strip() or NOTHING) for digit in number.rjust(PLACES)),
                *(READ_DIGITS.index(place or NOTHING) for place in (y, x)),
            ]
            for row, column, number, y, x in grid
        ]
    )


def own_picture(table: DrawnTable) -> Picture:
    """Return a picture in the quickstart's style, with approximate boxes and letters."""
    boxes, letters, size = [], [], table.font_size
    for y, line in enumerate(texts(table)):
        for x, text in enumerate(line):
            length = text_width("", text) * size
            left = x * CELL_WIDTH + (CELL_WIDTH - 5 - length if text.isdigit() else 5)
            middle = (y + 0.5) * CELL_HEIGHT
            boxes.append((left, middle - 6, left + length, middle + 6))
            letters += spelled("", text, left, middle, size)
    return Picture(np.asarray(draw(table)), *(np.array(a, np.float32) for a in (boxes, letters)))


def make_chats(tokenizer: Tokenizer, pictures: Pictures, asked: list[list[Question]]) -> Chats:
    opening = tokenizer.encode("<|im_start|>user\n<|vision_start|>").ids
    image = [tokenizer.token_to_id("<|image_pad|>")] * (pictures.height * pictures.width)
    prefix = [*opening, *image, tokenizer.token_to_id("<|vision_end|>")]
    flat = [question for some in asked for question in some]
    prompts = tokenizer.encode_batch_fast(
        [f"{question.text}<|im_end|>\n<|im_start|>assistant\n" for question in flat]
    )
    answers = tokenizer.encode_batch_fast([f"{question.answer}<|im_end|>" for question in flat])
    length = max(len(p.ids) + len(a.ids) for p, a in zip(prompts, answers, strict=True)) - 1
    ids = np.zeros((len(flat), length), dtype=np.int64)
    labels = np.full((len(flat), length), IGNORE, dtype=np.int64)
    points = np.zeros((len(flat), length), dtype=bool)
    for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        tokens, last = prompt.ids + answer.ids[:-1], len(prompt.ids) - 1
        ids[i, : len(tokens)] = tokens
        labels[i, last : last + len(answer.ids)] = answer.ids
        points[i, len(prompt.ids) - AFTER_WORD : len(tokens)] = True
    n, count = len(asked), len(asked[0])
    cells = [[IGNORE if cell is None else cell for cell in question.cells] for question in flat]
    first = torch.tensor(prefix).expand(n, -1)
    return Chats(
        ids=torch.cat([first, torch.from_numpy(ids).view(n, -1)], dim=1),
        labels=torch.from_numpy(labels).view(n, count, length),
        answers=torch.from_numpy(np.flatnonzero(labels != IGNORE)),
        points=torch.from_numpy(points).view(n, count, length),
        cells=torch.tensor(cells).view(n, count, POINTERS),
        mask=_mask(len(prefix), count, length),
        positions=_positions(len(opening), pictures.height, pictures.width, count, length),
        image_start=len(opening),
        image_end=len(opening) + len(image),
    )


def _mask(prefix: int, count: int, length: int) -> Tensor:
    """Return a causal attention mask in which no question sees another question."""
    part = torch.zeros(prefix + count * length, dtype=torch.long)
    part[prefix:] = torch.arange(count).repeat_interleave(length) + 1
    visible = (part[:, None] == part) | (part == 0)
    return visible.tril()[None, None]


def _positions(start: int, height: int, width: int, count: int, length: int) -> Tensor:
    """Return Qwen's positions. Lines and columns of a picture count from the start of the picture;
    the text after it continues from the larger of the two."""
    line, column = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    picture = torch.stack([torch.zeros_like(line), line, column]).view(3, -1) + start
    after = start + max(height, width)
    chats = (torch.arange(length) + after + 1).repeat(count).expand(3, -1)
    before, end = torch.arange(start).expand(3, -1), torch.full((3, 1), after)
    return torch.cat([before, picture, end, chats], dim=1)


class TrainingBatches(IterableDataset):
    """An endless stream of training batches. ``progress``: the fraction of the training time that
    is over."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        fonts: list[tuple[str, str]],
        progress: Synchronized[float],
        seed: str,
    ) -> None:
        self.tokenizer, self.fonts, self.progress, self.seed = tokenizer, fonts, progress, seed

    def __iter__(self) -> Iterator[Batch]:
        torch.set_num_threads(1)
        worker = torch.utils.data.get_worker_info()
        random = Random(f"{self.seed} {worker.id if worker else 0}")
        while True:
            yield self.batch(random, self.progress.value)

    def batch(self, random: Random, progress: float) -> Batch:
        lines = READING <= progress < LINES
        sizes = [size for size in SIZES if size not in TEST_SIZES and (min(size) == 1 or not lines)]
        others = min(1.0, max(0.0, progress - OWN_STYLE_ALONE) / OWN_STYLE_LESS)
        own, (height, width) = None, _canvas(random)
        if random.random() < 1 - (1 - OWN_SIZES) * others:
            own = random.choices(sizes, [rows * columns for rows, columns in sizes])[0]
            height, width = (own[0] + 1) * CELL_HEIGHT, (own[1] + 1) * CELL_WIDTH
        seen = height * width // SIDE**2
        reading = progress < READING
        n = SEEN_TOKENS // seen if reading else TOKENS // (seen + 20 * QUESTIONS)
        tables, drawn = [], []
        for _ in range(min(n, MAX_PICTURES)):
            if own and random.random() < 1 - (1 - OWN_STYLE) * others:
                table = make_table(random, own)
                picture = own_picture(table)
            else:
                table, picture = self._styled(random, sizes, height, width)
            tables.append(table)
            drawn.append(picture)
        pictures = make_pictures(tables, drawn)
        if reading:
            return Batch(pictures, None)
        asked = [list(islice(questions(random, table), QUESTIONS)) for table in tables]
        return Batch(pictures, make_chats(self.tokenizer, pictures, asked))

    def _styled(
        self, random: Random, sizes: list[tuple[int, int]], height: int, width: int
    ) -> tuple[DrawnTable, Picture]:
        """Return a random table, and its picture as the processor scales it to ``height`` and
        ``width``."""
        fitting = [s for s in sizes if (s[0] + 1) * 18 <= height and (s[1] + 1) * 38 <= width]
        weights = [rows * columns for rows, columns in fitting or [(1, 1)]]
        while True:
            table = make_table(random, random.choices(fitting or [(1, 1)], weights)[0])
            look = training_look(random, self.fonts)
            scale, kind = 1.0, random.random()
            size = width, height
            if kind < 0.4:  # the sides are rounded
                size = tuple(side + random.randint(-8, 7) for side in size)
            elif kind < 0.6:  # scaled down
                scale = random.uniform(1, 2.2)
                size = tuple(round(side * scale) for side in size)
            picture = draw_look(random, table, look, size, scale)
            if picture is None:
                continue
            pixels, boxes, letters = worn(random, picture.pixels), picture.boxes, picture.letters
            if size != (width, height):
                image = Image.fromarray(pixels).resize((width, height), Image.Resampling.BICUBIC)
                factors = width / size[0], height / size[1]
                boxes = boxes * np.tile(factors, 2)
                letters = letters * np.array([*factors, factors[1], 1])
                pixels = np.asarray(image)
            return table, Picture(pixels, boxes, letters)


def _canvas(random: Random) -> tuple[int, int]:
    """Return a random height and width in pixels, in whole visual tokens."""
    while True:
        area = MIN_SEEN * (MAX_SEEN / MIN_SEEN) ** random.random() ** 0.7
        aspect = 0.6 * (3.2 / 0.6) ** random.random()  # width by height
        height, width = round(math.sqrt(area / aspect)), round(math.sqrt(area * aspect))
        if height >= 3 and width >= 5 and height * width <= MAX_SEEN:
            return height * SIDE, width * SIDE


class Test(NamedTuple):
    kind: str
    batch: Batch


def make_tests(tokenizer: Tokenizer, style: str, tables: int, fonts: Path) -> list[Test]:
    return [
        Test(case.question.kind, _alone(tokenizer, case))
        for case in make_cases(tables, "training", style, fonts)
    ]


def _alone(tokenizer: Tokenizer, case: Case) -> Batch:
    """Return a batch of one case, with the picture scaled as by the model's processor."""
    pixels = np.asarray(_scaled(case.image.convert("RGB"))).mean(-1)
    height, width = (side // SIDE for side in pixels.shape)
    words = torch.zeros(1, height * width, READERS, dtype=torch.long)
    nothing = torch.zeros(1, height * width * MERGE**2, dtype=torch.long)
    pictures = Pictures(
        height, width, torch.from_numpy(pixels)[None], words[..., 0], words, nothing
    )
    return Batch(pictures, make_chats(tokenizer, pictures, [[case.question]]))


def _scaled(image: Image.Image) -> Image.Image:
    factor, sides = 1.0, [max(SIDE, round(side / SIDE) * SIDE) for side in image.size]
    if sides[0] * sides[1] > MAX_SEEN * SIDE**2:
        factor = math.sqrt(MAX_SEEN * SIDE**2 / (image.width * image.height))
        sides = [max(SIDE, math.floor(side * factor / SIDE) * SIDE) for side in image.size]
    return image.resize(tuple(sides), Image.Resampling.BICUBIC)


# ---- training ---------------------------------------------------------------------------------


class Losses(NamedTuple):
    letters: Tensor
    reading: Tensor
    answering: Tensor
    pointing: Tensor


def losses(
    model: DemoReader, pictures: Pictures, chats: Chats | None, *, worn: bool = False
) -> tuple[Losses, Tensor | None]:
    """Return the losses, and the logits of the answers' tokens (None without ``chats``)."""
    seen, letter = model.see(pictures.patches(worn=worn), pictures.height, pictures.width)
    spelling = _loss(letter, pictures.letters)
    read = zip(model.read(seen), pictures.words.unbind(-1), strict=True)
    reading = torch.stack([_loss(logits, words) for logits, words in read]).sum()
    if chats is None:
        nothing = torch.zeros((), device=reading.device)
        return Losses(spelling, reading, nothing, nothing), None
    hidden, attended = model.think(chats.ids, seen, chats.image_start, chats.mask, chats.positions)
    hidden = hidden[:, chats.image_end + 1 :].reshape(-1, hidden.shape[-1])[chats.answers]
    logits = model.logits(hidden)
    answering = _loss(logits, chats.labels.flatten()[chats.answers])
    return Losses(spelling, reading, answering, _pointing(attended, pictures, chats)), logits


def _pointing(attended: Tensor, pictures: Pictures, chats: Chats) -> Tensor:
    """Return a loss that is high if the heads, from the last word of a question on, attend little
    to the cells that the question asks for."""
    seen = attended[:, :POINTERS, chats.image_end + 1 :, chats.image_start : chats.image_end]
    seen = seen.unflatten(2, chats.labels.shape[1:])  # picture, head, question, token, seen
    wanted = (
        pictures.cells[:, None, None] == chats.cells[..., None]
    )  # picture, question, head, seen
    wanted &= chats.cells[..., None] >= 0
    share = torch.einsum("bhqts,bqhs->bqht", seen, wanted.to(seen.dtype)).float()
    counted = (wanted.any(-1)[..., None] & chats.points[:, :, None]).float()
    return -(share.clamp_min(1e-4).log() * counted).sum() / counted.sum().clamp_min(1)


def _loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.float().flatten(0, -2), labels.flatten().long())


@torch.no_grad()
def accuracy(model: DemoReader, tests: list[Test], device: torch.device) -> dict[str, float]:
    """Return, by kind of question, the fraction of answers that greedy decoding gives exactly: each
    token of the answer is the most likely one."""
    hits: list[Tensor] = []
    with model.uncompiled():
        for test in tests:
            batch = test.batch.to(device)
            _, logits = losses(model, *batch)
            labels = batch.chats.labels.flatten()[batch.chats.answers]
            hits.append((logits.argmax(-1) == labels).all())
    right: dict[str, list[bool]] = {}
    for test, hit in zip(tests, torch.stack(hits).tolist(), strict=True):
        right.setdefault(test.kind, []).append(hit)
    by_kind = {kind: round(sum(some) / len(some), 4) for kind, some in sorted(right.items())}
    return {"all": round(sum(map(sum, right.values())) / len(tests), 4), **by_kind}


def learning_rate(progress: float, since: int) -> float:
    """Args: since: steps of this part of the training."""
    falling = min(1.0, max(0.0, 1 - progress) / (1 - FALLING))
    return PEAK * min(1.0, (since + 1) / WARM_UP) * falling


class Batches:
    """A source of batches. It returns new batches as they are drawn; while none is ready, it
    returns one of the last ones again, with new noise."""

    def __init__(self, loader: DataLoader, device: torch.device) -> None:
        self.device, self.kept = device, deque(maxlen=KEPT_BATCHES)
        self.random, self.drawn = Random(0), 0
        self.ready: Queue[Batch] = Queue(maxsize=6)
        self.kept.append(next(iterator := iter(loader)).to(device))  # the processes have started
        Thread(target=self._fetch, args=(iterator,), daemon=True).start()

    def _fetch(self, iterator: Iterator[Batch]) -> None:
        for batch in iterator:
            self.ready.put(batch)

    def next(self) -> Batch:
        """Return the next batch. Kept batches of an earlier stage of the training are dropped."""
        if self.ready.empty() and self.kept:
            return self.random.choice(self.kept)
        batch = self.ready.get().to(self.device)
        self.drawn += 1
        if (batch.chats is None) != (self.kept and self.kept[-1].chats is None):
            self.kept.clear()
        self.kept.append(batch)
        return batch


class State:
    """The state from which a stopped training continues."""

    def __init__(self, folder: Path, model: DemoReader, optimizer: torch.optim.Optimizer) -> None:
        self.file, self.model, self.optimizer = folder / "last.pt", model, optimizer
        self.step, self.spent_s, self.answering_since = 0, 0.0, -1
        if self.file.exists():
            saved = torch.load(self.file)
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            self.step, self.spent_s = saved["step"], saved["spent_s"]
            self.answering_since = saved["answering_since"]

    def save(self) -> None:
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        counts = {name: getattr(self, name) for name in ("step", "spent_s", "answering_since")}
        torch.save(state | counts, f"{self.file}.new")
        Path(f"{self.file}.new").replace(self.file)


def train(args: argparse.Namespace) -> None:
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tokenizer = make_tokenizer()
    model = DemoReader(tokenizer).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.05)
    state = State(args.folder, model, optimizer)
    if args.compile:
        model.compile_layers()
    progress = torch.multiprocessing.Value("d", state.spent_s / args.seconds)
    batches = _drawing(args, tokenizer, progress, state.step, device)
    tests = {style: make_tests(tokenizer, style, args.tests, args.fonts) for style in STYLES}
    begun, first = time.monotonic() - state.spent_s, state.spent_s
    sums = torch.zeros(len(Losses._fields), device=device)
    saved_s = tested_s = state.spent_s
    while state.spent_s < min(args.seconds, first + args.stop_after):
        batch = batches.next()
        rate = learning_rate(progress.value, state.step - max(0, state.answering_since))
        sums += _step(model, optimizer, batch, rate, device)
        if batch.chats and state.answering_since < 0:
            state.answering_since = state.step
        state.step += 1
        state.spent_s = time.monotonic() - begun
        progress.value = state.spent_s / args.seconds
        if state.step % LOG_STEPS:
            continue
        means = dict(zip(Losses._fields, (sums / LOG_STEPS).tolist(), strict=True))
        sums.zero_()
        entry = {**means, "rate": rate, "batches": batches.drawn}
        if state.answering_since >= 0 and state.spent_s - tested_s > TEST_S:
            entry["exact"] = {s: accuracy(model, some[:80], device) for s, some in tests.items()}
            tested_s = state.spent_s
        if state.spent_s - saved_s > SAVE_S:
            state.save()
            saved_s = state.spent_s
        _log(args.folder, state, entry)
    state.save()
    exact = {style: accuracy(model, some, device) for style, some in tests.items()}
    _log(args.folder, state, {"exact": exact})
    write_folder(args.folder / "model", tokenizer, model)


def _drawing(
    args: argparse.Namespace,
    tokenizer: Tokenizer,
    progress: Synchronized[float],
    step: int,
    device: torch.device,
) -> Batches:
    fonts = [DEFAULT_FONT, *find_fonts(args.fonts, FONTS)]
    loader = DataLoader(
        TrainingBatches(tokenizer, fonts, progress, f"{args.seed} {step}"),
        batch_size=None,
        num_workers=args.processes,
        pin_memory=device.type == "cuda",
        prefetch_factor=2,
    )
    return Batches(loader, device)


def _step(
    model: DemoReader,
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    rate: float,
    device: torch.device,
) -> Tensor:
    with torch.autocast(device.type, torch.bfloat16):
        parts, _ = losses(model, *batch, worn=True)
    loss = parts.letters + parts.reading
    if batch.chats:
        loss = READING_WEIGHT * loss + parts.answering + POINTING_WEIGHT * parts.pointing
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.param_groups[0]["lr"] = rate
    optimizer.step()
    optimizer.zero_grad()
    return torch.stack(parts).detach()


def _log(folder: Path, state: State, entry: dict[str, object]) -> None:
    line = json.dumps({"step": state.step, "spent_s": round(state.spent_s), **entry})
    print(line, flush=True)
    with (folder / "log.jsonl").open("a") as log:
        log.write(line + "\n")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seconds", type=float, default=640)
    parser.add_argument("--stop-after", type=float, default=math.inf, help="seconds of this part")
    parser.add_argument("--fonts", type=Path, default=Path("/usr/share/fonts"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=14, help="that draw")
    parser.add_argument("--compile", action="store_true", help="the layers, for a GPU")
    parser.add_argument("--tests", type=int, default=TEST_TABLES, help="tables of each style")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    train(args)


if __name__ == "__main__":
    main()
