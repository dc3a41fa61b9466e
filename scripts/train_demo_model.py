"""Train the demo model, a small Qwen3-VL that reads the tables of `demo_tables.py`, on CPUs.

    python scripts/train_demo_model.py FOLDER [--steps 8000] [--processes 2]

First the vision part learns to read; then all learns to answer, on tables of one row or one column,
then on all sizes, and is shown the cells to look at (`_pointing`). Without that, after 850 steps it
still mixed the digits of all cells; with it, it found rows after 300.

FOLDER gets `log.jsonl` (losses, and the share of exact answers on tables of the test), `last.pt`, from
which the same command continues, and `model`, the best so far in the hub's layout. `--steps` may be
changed when it continues; the learning rate falls to zero over the last third.

A sequence is one picture with several questions. Each question sees the picture and itself alone, at
the positions of a chat of its own. So one pass over the picture serves them all.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from datetime import timedelta
from itertools import islice
from pathlib import Path
from random import Random
from typing import NamedTuple

import numpy as np
import torch
from demo_reader import (
    MERGE,
    NOTHING,
    PATCH,
    PLACES,
    READ_COLUMNS,
    READ_DIGITS,
    READ_ROWS,
    SIDE,
    DemoReader,
    make_tokenizer,
    write_folder,
)
from demo_tables import (
    CELL_WIDTH,
    SIZES,
    TEST_SIZES,
    Cells,
    Question,
    Table,
    draw,
    make_table,
    questions,
)
from tokenizers import Tokenizer
from torch import Tensor, distributed, nn
from torch.nn import functional as F

# Reading alone until the first step, tables of one row or one column until the second.
READING_STEPS, LINES_STEPS = 1200, 2200
VISUAL_TOKENS, TOKENS = 700, 2000  # in a step, of reading alone and of answering
READING_WEIGHT, POINTING_WEIGHT = 0.5, 0.5
PEAK, WARM_UP = 1.5e-3, 100
LOG_STEPS, TEST_STEPS, TEST_TABLES = 50, 250, 70
POINTERS = len(Cells._fields)
AFTER_WORD = len(["Bread", "?", "<|im_end|>", "\n", "<|im_start|>", "assistant", "\n"])
IGNORE = -100


# ---- batches ----------------------------------------------------------------------------------


class Pictures(NamedTuple):
    """Of one size."""

    height: int  # in visual tokens
    width: int
    patches: Tensor  # in Qwen's order, the four of a visual token together
    cells: Tensor  # picture, visual token: row's word, column's word, four digits


class Chats(NamedTuple):
    """Sequences of pictures of one size, each with as many questions."""

    ids: Tensor  # picture, token
    labels: Tensor  # picture, question, token: the next token where it is of an answer
    cells: Tensor  # picture, question: the cells that it is about, else IGNORE
    points: Tensor  # picture, question, token: whether it must attend to those cells
    mask: Tensor  # of attention, for every sequence the same
    positions: Tensor  # time, height and width of each token, likewise
    image_start: int
    image_end: int
    asked: list[Question]


def make_pictures(tables: Sequence[Table]) -> Pictures:
    pixels = np.stack([np.asarray(draw(table)) for table in tables])
    height, width = pixels.shape[1] // SIDE, pixels.shape[2] // SIDE
    split = pixels.reshape(-1, height, MERGE, PATCH, width, MERGE, PATCH)
    patches = split.transpose(0, 1, 4, 2, 5, 3, 6).reshape(-1, PATCH * PATCH)
    scaled = torch.from_numpy(patches.astype(np.float32)) / 127.5 - 1
    cells = torch.tensor([_cells(table) for table in tables]).view(len(tables), -1, 2 + PLACES)
    return Pictures(height, width, scaled, cells)


def _cells(table: Table) -> list[list[int]]:
    grid = [("", "", "")] + [("", column, "") for column in table.columns]
    for row, values in zip(table.rows, table.values, strict=True):
        grid.append((row, "", ""))
        grid += [(row, c, str(v)) for c, v in zip(table.columns, values, strict=True)]
    read = [
        [
            READ_ROWS.index(f"Ġ{row}") if row else READ_ROWS.index(NOTHING),
            READ_COLUMNS.index(f"Ġ{column}") if column else READ_COLUMNS.index(NOTHING),
            *(READ_DIGITS.index(digit.strip() or NOTHING) for digit in number.rjust(PLACES)),
        ]
        for row, column, number in grid
    ]
    return [cell for cell in read for _ in range(CELL_WIDTH // SIDE)]


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
        points=torch.from_numpy(points).view(n, count, length),
        cells=torch.tensor(cells).view(n, count, POINTERS),
        mask=_mask(len(prefix), count, length),
        positions=_positions(len(opening), pictures.height, pictures.width, count, length),
        image_start=len(opening),
        image_end=len(opening) + len(image),
        asked=flat,
    )


def _mask(prefix: int, count: int, length: int) -> Tensor:
    """Causal, and no question sees another."""
    part = torch.zeros(prefix + count * length, dtype=torch.long)
    part[prefix:] = torch.arange(count).repeat_interleave(length) + 1
    visible = (part[:, None] == part) | (part == 0)
    return visible.tril()[None, None]


def _positions(start: int, height: int, width: int, count: int, length: int) -> Tensor:
    """Qwen's: a picture's lines and columns count from its start, text goes on after the longer."""
    line, column = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    picture = torch.stack([torch.zeros_like(line), line, column]).view(3, -1) + start
    after = start + max(height, width)
    chats = (torch.arange(length) + after + 1).repeat(count).expand(3, -1)
    before, end = torch.arange(start).expand(3, -1), torch.full((3, 1), after)
    return torch.cat([before, picture, end, chats], dim=1)


def training_batch(
    tokenizer: Tokenizer, random: Random, step: int
) -> tuple[Pictures, Chats | None]:
    lines = READING_STEPS <= step < LINES_STEPS
    sizes = [size for size in SIZES if size not in TEST_SIZES and (min(size) == 1 or not lines)]
    rows, columns = random.choices(sizes, [rows * columns for rows, columns in sizes])[0]
    seen, count = 2 * (rows + 1) * (columns + 1), min(6 + rows * columns // 2, 12)
    n = VISUAL_TOKENS // seen if step < READING_STEPS else TOKENS // (seen + 20 * count)
    tables = [make_table(random, (rows, columns)) for _ in range(n)]
    pictures = make_pictures(tables)
    if step < READING_STEPS:
        return pictures, None
    asked = [list(islice(questions(random, table), count)) for table in tables]
    return pictures, make_chats(tokenizer, pictures, asked)


def test_batches(tokenizer: Tokenizer, count: int) -> list[tuple[Pictures, Chats]]:
    """``count`` tables of all sizes in turn, those that training lacks thrice as often."""
    random = Random("test")
    sizes = ((SIZES + 2 * TEST_SIZES) * count)[:count]
    batches = []
    for size in dict.fromkeys(sizes):
        tables = [make_table(random, size, test=True) for _ in range(sizes.count(size))]
        asked = [list(islice(questions(random, table, test=True), 4)) for table in tables]
        pictures = make_pictures(tables)
        batches.append((pictures, make_chats(tokenizer, pictures, asked)))
    return batches


# ---- training ---------------------------------------------------------------------------------


class Losses(NamedTuple):
    reading: Tensor
    answering: Tensor
    pointing: Tensor


def losses(
    model: DemoReader, pictures: Pictures, chats: Chats | None
) -> tuple[Losses, Tensor | None]:
    """And the logits of the answers' tokens."""
    seen = model.see(pictures.patches, pictures.height, pictures.width)
    read = zip(model.read(seen), pictures.cells.unbind(-1), strict=True)
    reading = torch.stack([_loss(logits, cell) for logits, cell in read]).sum()
    if chats is None:
        return Losses(reading, torch.zeros(()), torch.zeros(())), None
    hidden = model.think(chats.ids, seen, chats.image_start, chats.mask, chats.positions)
    hidden = hidden[:, chats.image_end + 1 :].reshape(*chats.labels.shape, -1)
    answers = chats.labels != IGNORE
    logits = model.logits(hidden[answers])
    answering = _loss(logits, chats.labels[answers])
    return Losses(reading, answering, _pointing(model.pointing.attended, chats)), logits


def _pointing(attended: Tensor, chats: Chats) -> Tensor:
    """How little, from a question's last word on, the heads attend to the cells in question."""
    seen = attended[:, :POINTERS, chats.image_end + 1 :, chats.image_start : chats.image_end]
    by_cell = seen.unflatten(-1, (-1, CELL_WIDTH // SIDE)).sum(-1)  # picture, head, token, cell
    by_cell = by_cell.unflatten(2, chats.labels.shape[1:]).permute(0, 2, 3, 1, 4)
    cells = chats.cells[:, :, None].expand(by_cell.shape[:-1])
    asked = chats.points[..., None] & (cells != IGNORE)
    share = by_cell[asked].float().gather(-1, cells[asked][:, None])
    return -share.clamp_min(1e-4).log().mean()


def _loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.float().flatten(0, -2), labels.flatten())


@torch.no_grad()
def accuracy(model: DemoReader, batches: list[tuple[Pictures, Chats]]) -> dict[str, float]:
    """By kind, the share of answers whose tokens are all the likeliest: what greedy decoding gives."""
    right: dict[str, list[bool]] = {}
    for pictures, chats in batches:
        _, logits = losses(model, pictures, chats)
        hits = torch.ones_like(chats.labels, dtype=torch.bool)
        answers = chats.labels != IGNORE
        hits[answers] = logits.argmax(-1) == chats.labels[answers]
        for question, hit in zip(chats.asked, hits.all(-1).flatten().tolist(), strict=True):
            right.setdefault(question.kind, []).append(hit)
    return {kind: round(sum(some) / len(some), 4) for kind, some in sorted(right.items())}


def learning_rate(step: int, steps: int) -> float:
    since = step if step < READING_STEPS else step - READING_STEPS
    return PEAK * min(1.0, (since + 1) / WARM_UP, 3 * (steps - step) / steps)


def train(rank: int, args: argparse.Namespace) -> None:
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)
    meeting = f"file://{(args.folder / 'rendezvous').resolve()}"
    distributed.init_process_group(
        "gloo", meeting, timedelta(days=1), rank=rank, world_size=args.processes
    )
    tokenizer = make_tokenizer()
    model = DemoReader(tokenizer)
    weights = list(model.parameters())
    optimizer = torch.optim.AdamW(weights, betas=(0.9, 0.98), weight_decay=0.05)
    step, best, spent_s = 0, 0.0, 0.0
    last = args.folder / "last.pt"
    if last.exists():
        saved = torch.load(last)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        step, best, spent_s = saved["step"], saved["best"], saved["spent_s"]
    tests = test_batches(tokenizer, TEST_TABLES)
    sums, begun = torch.zeros(3), time.monotonic() - spent_s
    while step < args.steps:
        batch = training_batch(tokenizer, Random(f"{args.seed} {step} {rank}"), step)
        with torch.autocast("cpu", torch.bfloat16):
            parts, _ = losses(model, *batch)
        loss = parts.reading
        if step >= READING_STEPS:
            loss = (
                READING_WEIGHT * parts.reading + parts.answering + POINTING_WEIGHT * parts.pointing
            )
        loss.backward()
        _average(weights)
        nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.param_groups[0]["lr"] = learning_rate(step, args.steps)
        optimizer.step()
        optimizer.zero_grad()
        sums += torch.stack(parts).detach()
        step += 1
        if step % LOG_STEPS:
            continue
        if rank == 0:
            spent_s = time.monotonic() - begun
            means = (sums / LOG_STEPS).tolist()
            entry = {"step": step, "spent_s": round(spent_s)}
            entry |= dict(zip(Losses._fields, means, strict=True))
            if step % TEST_STEPS == 0 and step > READING_STEPS:
                entry["exact"] = exact = accuracy(model, tests)
                if sum(exact.values()) >= best:
                    best = sum(exact.values())
                    write_folder(args.folder / "model", tokenizer, model)
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({**state, "step": step, "best": best, "spent_s": spent_s}, f"{last}.new")
            Path(f"{last}.new").replace(last)
            with (args.folder / "log.jsonl").open("a") as log:
                log.write(json.dumps(entry) + "\n")
        sums.zero_()


def _average(weights: list[nn.Parameter]) -> None:
    """The gradients, over all processes; those of weights that had no part are 0."""
    gradients = [torch.zeros_like(w) if w.grad is None else w.grad for w in weights]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    distributed.all_reduce(flat)
    flat /= distributed.get_world_size()
    for weight, part in zip(weights, flat.split([w.numel() for w in weights]), strict=True):
        weight.grad = part.view_as(weight) if weight.grad is not None else None


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=8000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=2, help="each with one thread")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    (args.folder / "rendezvous").unlink(missing_ok=True)
    torch.multiprocessing.spawn(train, (args,), nprocs=args.processes)


if __name__ == "__main__":
    main()
