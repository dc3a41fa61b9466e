"""Draw the quickstart's forty tables and write a question about each: jobs/data/quickstart.

    python scripts/make_quickstart_data.py [FOLDER]

``largest.jsonl`` names the row with the largest number of a column, and the second, of each table.

Tables and questions are of the demo model's test: its training had none of their numbers, and never
these rows and columns together. They depend only on the seed below; no question was left out.
"""

from __future__ import annotations

import json
import sys
from itertools import cycle
from pathlib import Path
from random import Random

from demo_tables import SIZES, draw, make_table, questions

FOLDER = Path(__file__).parents[1] / "jobs" / "data" / "quickstart"
SEED = "quickstart"
COUNT = 40
KINDS = (*["value"] * 6, "compare", "largest", "smallest", "count")
MIN_ROWS = 2  # to compare


def write(folder: Path) -> None:
    random = Random(SEED)
    (folder / "image").mkdir(parents=True, exist_ok=True)
    sizes = random.sample([size for size in SIZES if size[0] >= MIN_ROWS] * 2, COUNT)
    lines, largest = [], []
    for number, size, kind in zip(range(1, COUNT + 1), sizes, cycle(KINDS), strict=False):
        table = make_table(random, size, test=True)
        asked = next(q for q in questions(random, table, test=True) if q.kind == kind)
        image = f"image/{number:02}.png"
        draw(table).save(folder / image, optimize=True)
        row = {"id": number, "image": image, "question": asked.text, "answer": asked.answer}
        lines.append(json.dumps({**row, "kind": kind}) + "\n")
        x = Random(f"{SEED} {number}").randrange(len(table.columns))
        best, second, *_ = sorted(
            zip((v[x] for v in table.values), table.rows, strict=True), reverse=True
        )
        row = {"id": number, "image": image, "column": table.columns[x]}
        largest.append(json.dumps({**row, "second": second[1], "answer": best[1]}) + "\n")
    (folder / "questions.jsonl").write_text("".join(lines), encoding="utf-8")
    (folder / "largest.jsonl").write_text("".join(largest), encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER)
