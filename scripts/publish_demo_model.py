"""Put a trained model into the package, with its figures: what `batchkit-demo` is from then on.

    python scripts/publish_demo_model.py FOLDER [FONTS]

FOLDER is that of `train_demo_model.py`, FONTS where the fonts are. Writes `batchkit/demo_model`, the curves of the training in
`docs/demo-model.png`, and the tables of `docs/demo-model.md`, from `evaluate_demo_model.py` with vLLM.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import sys
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path

from evaluate_demo_model import STYLES, Marks, evaluate, share
from plot_demo_training import plot

ROOT = Path(__file__).parents[1]
PACKAGED = ROOT / "batchkit" / "demo_model"
PAGE = ROOT / "docs" / "demo-model.md"
TABLES = 500
README = """\
# batchkit-demo

A Qwen3-VL of 2.6 million weights, trained from nothing by `scripts/train_demo_model.py` of batchkit on
pictures that `scripts/demo_styles.py` draws. It reads such tables and knows nothing else; docs/demo-model.md
has its figures. Licence: Apache 2.0, as batchkit.
"""


def main(training: Path, fonts: Path) -> None:
    shutil.rmtree(PACKAGED, ignore_errors=True)
    shutil.copytree(training / "model", PACKAGED)
    (PACKAGED / "README.md").write_text(README, encoding="utf-8")
    plot(training / "log.jsonl", PAGE.with_suffix(".png"))
    marks = evaluate(PACKAGED, "vllm", TABLES, 0, fonts)
    weights = hashlib.sha256((PACKAGED / "model.safetensors").read_bytes()).hexdigest()
    figures = [*_kinds(marks), "", *_looks(marks), "", f"SHA-256 of the weights: `{weights}`"]
    page = PAGE.read_text(encoding="utf-8")
    between = "(?s)(?<=<!-- figures -->\n).*(?=<!-- end -->)"
    PAGE.write_text(re.sub(between, "\n".join(["", *figures, "", ""]), page), encoding="utf-8")


def _kinds(marks: dict[str, Marks]) -> Iterator[str]:
    yield f"| questions | {' | '.join(STYLES.values())} |"
    yield "|---|" + "--:|" * len(STYLES)
    for name in marks["own"].kinds:
        shares = (f"{share(some.kinds[name]):.1%}" for some in marks.values())
        yield f"| {name} | {' | '.join(shares)} |"


def _looks(marks: dict[str, Marks]) -> Iterator[str]:
    """Yield the lines of a table with looks and fonts side by side."""
    yield from ("| look | exact | font | exact |", "|---|--:|---|--:|")
    columns = [
        [f"{name} | {share(exact):.1%}" for name, exact in marks[style].looks.items()]
        for style in ("looks", "fonts")
    ]
    for look, font in zip_longest(*columns, fillvalue=" | "):
        yield f"| {look} | {font} |"


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2] if len(sys.argv) > 2 else "/usr/share/fonts"))
