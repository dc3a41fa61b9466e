"""Put a trained model into the package, with its figures: what `batchkit-demo` is from then on.

    python scripts/publish_demo_model.py FOLDER

FOLDER is that of `train_demo_model.py`. Writes `batchkit/demo_model`, the curves of the training in
`docs/demo-model.png`, and the table of `docs/demo-model.md`, from `evaluate_demo_model.py` with vLLM.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from demo_tables import SIZES, TEST_SIZES
from evaluate_demo_model import ENGINES, by_kind, by_size, in_words, is_right, make_cases, share
from plot_demo_training import plot

ROOT = Path(__file__).parents[1]
PACKAGED = ROOT / "batchkit" / "demo_model"
PAGE = ROOT / "docs" / "demo-model.md"
TABLES = 500
README = """\
# batchkit-demo

A Qwen3-VL of 2.4 million weights, trained from nothing by `scripts/train_demo_model.py` of batchkit on
tables that `scripts/demo_tables.py` draws. It reads such tables and knows nothing else; docs/demo-model.md
has its figures. Licence: Apache 2.0, as batchkit.
"""


def main(training: Path) -> None:
    shutil.rmtree(PACKAGED, ignore_errors=True)
    shutil.copytree(training / "model", PACKAGED)
    (PACKAGED / "README.md").write_text(README, encoding="utf-8")
    plot(training / "log.jsonl", PAGE.with_suffix(".png"))
    cases = make_cases(TABLES, seed=0)
    right = is_right(cases, ENGINES["vllm"](str(PACKAGED), cases))
    weights = hashlib.sha256((PACKAGED / "model.safetensors").read_bytes()).hexdigest()
    figures = [*_kinds(by_kind(cases, right)), "", *_sizes(by_size(cases, right)), ""]
    figures.append(f"SHA-256 of the weights: `{weights}`")
    page = PAGE.read_text(encoding="utf-8")
    between = "(?s)(?<=<!-- figures -->\n).*(?=<!-- end -->)"
    PAGE.write_text(re.sub(between, "\n".join(["", *figures, "", ""]), page), encoding="utf-8")


def _kinds(found: dict[str, list[bool]]) -> Iterator[str]:
    yield from ("| kind | questions | exact |", "|---|--:|--:|")
    yield from (f"| {name} | {len(exact)} | {share(exact):.1%} |" for name, exact in found.items())


def _sizes(found: dict[str, list[bool]]) -> Iterator[str]:
    """A table like those that are read: by rows and columns."""
    columns = sorted({columns for _, columns in SIZES})
    yield "| look-ups: rows | " + " | ".join(f"{n} column{'s' * (n > 1)}" for n in columns) + " |"
    yield "|--:|" + "--:|" * len(columns)
    for rows in sorted({rows for rows, _ in SIZES}):
        shares = [(size, share(found[in_words(size)])) for size in [(rows, n) for n in columns]]
        cells = [f"**{s:.0%}**" if size in TEST_SIZES else f"{s:.0%}" for size, s in shares]
        yield f"| {rows} | {' | '.join(cells)} |"


if __name__ == "__main__":
    main(Path(sys.argv[1]))
