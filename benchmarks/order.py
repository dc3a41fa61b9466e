"""The gain from ordering the rows: batchkit's order against a window, the order of the input, and vLLM.

    python benchmarks/order.py [--rounds 3] [--documents 300] [--tail-rows 1280] [--quick]

Real vLLM with a simulated accelerator (accelerator.py). First, counts, which do not depend on the speed of
the machine:
- prompt tokens that vLLM computed, because they were not in its prefix cache, by its own counts: ten
  shuffled questions to each of ``--documents`` texts of about 700 tokens, and a KV cache for a thirtieth
  of the texts. The ideal: each text is computed once. 6,000 documents are what the issue asks for; fewer have
  a smaller window and fewer requests at once, in the same proportion.
- idle slots of the device after 95 % of the rows: answers of heavy-tailed length, whose median depends on
  the row's column ``kind``. A slot is idle in a step if the engine could have computed one more request.

Then seconds. Two inputs, shuffled:
- images: six questions to each image (RealHiTBench has 5.7). 8 ms a step, 20 µs a token, 10 ms an
  image.
- documents: six questions to each of 100 texts of about 300 tokens; 16 requests at once, and a KV
  cache that holds about a tenth of the texts beside them. 8 ms a step, 20 µs a token. The cache's
  blocks have 32 tokens, the least that vLLM takes on a CPU (its default on a GPU is 16, on a CPU 128:
  then only 256 tokens of each text would be shared).
The rows come from files on both sides, and are rendered while the model loads on both.
"""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import images
import text
from frame import Figure, arguments
from models import FIRST_WORD
from sides import GENERATE_ALL, IN_ORDER, IN_WINDOW, Setting, check, compare, run_side

from batchkit.commands.demo_model import SAMPLE_TEXT, build_demo_model

QUESTIONS = 6
ASKED, LARGE = 10, 6000  # questions to each document; documents
DOCUMENT_TOKENS = 736  # with the question
KINDS = (4, 5, 6, 8, 10, 14, 20, 40, 100, 200)  # medians of the answers, in tokens
TOKENS = {"step_ms": 8, "token_us": 20, "image_ms": 0, "median_tokens": 12}
SHORT = {**TOKENS, "step_ms": 2, "token_us": 10, "median_tokens": 4}


def main() -> None:
    numbers = {"rounds": (3, 1), "subjects": (50, 25), "documents": (300, 120)}
    args = arguments(__doc__, "one round, fewer rows", **numbers, tail_rows=(1280, 640))
    subjects = args.subjects
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        build_demo_model(folder / "text", text_only=True)
        build_demo_model(folder / "model")
        text_engine = {"model": str(folder / "text"), "options": text.OPTIONS}
        small_cache = {
            "max_model_len": 1024,
            "max_num_seqs": 16,
            "kv_cache_memory_bytes": 4 * 2**20,
            "block_size": 32,
        }
        settings = [
            Setting(
                "images",
                write_images(folder, subjects),
                images.STEP,
                {IN_ORDER: None},
                {
                    "prompt": {"user": "{{ q }}", "images": ["{{ file }}"]},
                    "media": {"root": str(folder), "max_pixels": 262144, "factor": 32},
                    "engine": {
                        "model": str(folder / "model"),
                        "options": {**images.OPTIONS, "mm_processor_cache_gb": 0.25},
                    },
                },
            ),
            Setting(
                "documents",
                write_documents(folder / "documents.jsonl", 2 * subjects),
                TOKENS,
                {IN_ORDER: 1.3},
                {"engine": {**text_engine, "options": {**text.OPTIONS, **small_cache}}},
            ),
        ]
        job: dict[str, Any] = {
            "prompt": {"user": "{{ q }}"},
            "engine": text_engine,
            "sampling": {"temperature": 0, "max_tokens": 64},
            "output": {"dir": str(folder / "output")},
        }
        counts = [*computed(folder, job, args.documents), *tail(folder, job, args.tail_rows)]
        compare("order", settings, job, rounds=args.rounds, also=counts)


def computed(folder: Path, job: Mapping[str, Any], n_documents: int) -> Iterator[Figure]:
    """Print the prompt tokens that each side computes."""
    share = n_documents / LARGE
    options = small_cache(folder / "text", n_documents)
    rows = write_documents(folder / "many.jsonl", n_documents, ASKED, 690)
    tables = {
        "engine": {**job["engine"], "options": options},
        "run": {"look_ahead": max(4, round(share * 1024))},
    }
    setting = Setting("computed", rows, SHORT, {}, tables)
    found = {
        side: run_side(setting, side, job, f"computed-{place}")
        for place, side in enumerate(["batchkit", IN_WINDOW, IN_ORDER, GENERATE_ALL])
    }
    expected = found["batchkit"]["answers"]
    for side, its in found.items():
        check(f"computed, {side}", its["answers"], expected)
    documents = [json.loads(line)["document"] for line in rows.open()]
    ideal = least_computed(documents, [its["prompts"] for its in found.values()])
    print(
        f"{len(documents):,} questions over {n_documents:,} documents, KV cache for {n_documents // 30:,}:"
    )
    print(
        f"{'side':>20} {'prompt tokens':>14} {'computed':>12} {'of the ideal':>13} {'s':>7} {'ratio':>6}"
    )
    for side, its in found.items():
        n_prompt, n_cached = map(sum, zip(*its["prompts"], strict=True))
        of_ideal = (n_prompt - n_cached) / ideal
        slower = its["seconds"] / found["batchkit"]["seconds"]
        print(
            f"{side:>20} {n_prompt:>14,} {n_prompt - n_cached:>12,} {of_ideal:>11.2f} ×"
            f" {its['seconds']:>7.1f} {slower:>6.2f}"
        )
        wanted = 1.15 if side == "batchkit" else None
        yield Figure(f"prompt tokens computed, {side}", of_ideal, "× ideal", wanted, at_most=True)
    print()


def small_cache(model: Path, n_documents: int) -> dict[str, Any]:
    """Return engine options with a KV cache for a thirtieth of the documents."""
    config = json.loads((model / "config.json").read_text())
    head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    token_bytes = 2 * 4 * config["num_hidden_layers"] * config["num_key_value_heads"] * head
    return {
        **text.OPTIONS,
        "max_model_len": 1024,
        "max_num_seqs": max(4, round(n_documents / LARGE * 128)),
        "kv_cache_memory_bytes": round(n_documents / 30 * DOCUMENT_TOKENS * token_bytes),
        "block_size": 32,
    }


def least_computed(documents: Sequence[int], sides: Sequence[Sequence[Sequence[int]]]) -> int:
    """Return the prompt tokens that must be computed if what the questions to a document share is computed once."""
    shared, n_prompt = dict[int, int](), sum(n for n, _ in sides[0])
    for prompts in sides:
        for document, (_, n_cached) in zip(documents, prompts, strict=True):
            shared[document] = max(shared.get(document, 0), n_cached)
    return n_prompt - sum((ASKED - 1) * n for n in shared.values())


def tail(folder: Path, job: Mapping[str, Any], n_rows: int) -> Iterator[Figure]:
    """Print the idle slots after 95 % of the rows."""
    from tokenizers import Tokenizer

    most = n_rows // 80  # requests at once: more than 95 % of the rows are done when fewer run
    tokenizer = Tokenizer.from_file(str(folder / "text" / "tokenizer.json"))
    words = {tokenizer.decode([FIRST_WORD + n]).strip(): FIRST_WORD + n for n in range(len(KINDS))}
    draw = random.Random(3)
    drawn = draw.choices([*words], [1 / median for median in KINDS], k=n_rows)
    rows = folder / "tail.jsonl"
    lines = [{"kind": kind, "q": f"{n}: what of it?"} for n, kind in enumerate(drawn)]
    rows.write_text("".join(json.dumps(line) + "\n" for line in lines))
    options = {**text.OPTIONS, "max_model_len": 2048, "max_num_seqs": most}
    tables = {
        "prompt": {"user": "Kind {{ kind }}. {{ q }}"},
        "engine": {**job["engine"], "options": options},
        "sampling": {"temperature": 0, "max_tokens": 1500, "min_tokens": 1},
        "run": {"look_ahead": n_rows // 5},
    }
    medians = {str(token): median for token, median in zip(words.values(), KINDS, strict=True)}
    costs: dict[str, Any] = {
        **TOKENS,
        "step_ms": 2,
        "token_us": 1,
        "sigma": 0.3,
        "medians": medians,
    }
    setting = Setting("tail", rows, costs, {}, tables)
    idle = {}
    print(
        f"{n_rows:,} rows, {most} at once, {len(KINDS)} kinds with medians of {KINDS[0]} to {KINDS[-1]} tokens:"
    )
    print(f"{'side':>20} {'steps':>7} {'idle slots':>11} {'after 95 % of the rows':>23}")
    for place, side in enumerate(["batchkit", IN_WINDOW, IN_ORDER]):
        running = [n for _, _, n in run_side(setting, side, job, f"tail-{place}")["timeline"]]
        end = max(number for number, n in enumerate(running) if n >= most)
        idle[side] = sum(most - n for n in running[end:])
        print(
            f"{side:>20} {len(running):>7,} {sum(most - n for n in running):>11,} {idle[side]:>23,}"
        )
    for side in (IN_WINDOW, IN_ORDER):
        ratio = idle["batchkit"] / max(1, idle[side])
        yield Figure(f"idle slots at the end, against {side}", ratio, "×", 0.5, at_most=True)
    print()


def write_images(folder: Path, subjects: int) -> Path:
    rows = [json.loads(line) for line in images.write(folder, subjects).open()]
    asked = [{**row, "q": f"{n}: {row['q']}"} for row in rows for n in range(QUESTIONS)]
    return shuffled(folder / "images.jsonl", asked)


def write_documents(
    path: Path, subjects: int, questions: int = QUESTIONS, n_words: int = 300
) -> Path:
    draw = random.Random(1)
    words = SAMPLE_TEXT.replace(".", "").replace(",", "").split()
    rows: list[dict[str, Any]] = []
    for number in range(subjects):
        document = " ".join(draw.choices(words, k=n_words))
        asked = [f"Read this: {document}. Question {n}?" for n in range(questions)]
        rows += [{"document": number, "q": question} for question in asked]
    return shuffled(path, rows)


def shuffled(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    rows = random.Random(2).sample(rows, len(rows))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


if __name__ == "__main__":
    main()
