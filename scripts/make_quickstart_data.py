"""Draw the quickstart's forty tables and write a question about each: jobs/data/quickstart.

    python scripts/make_quickstart_data.py [FOLDER]

`batchkit demo tables` writes such files, too. The script also writes ``largest.jsonl``. For each
table, this file names the rows with the largest and the second largest number of a column. No
question was left out.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from random import Random

from batchkit.commands.demo_tables import write_demo_tables

FOLDER = Path(__file__).parents[1] / "jobs" / "data" / "quickstart"
SEED, COUNT = "quickstart", 40


def write(folder: Path) -> None:
    lines = []
    for number, table in enumerate(write_demo_tables(folder, COUNT, SEED), 1):
        x = Random(f"{SEED} {number}").randrange(len(table.columns))
        best, second, *_ = sorted(
            zip((v[x] for v in table.values), table.rows, strict=True), reverse=True
        )
        row = {"id": number, "image": f"image/{number:02}.png", "column": table.columns[x]}
        lines.append(json.dumps({**row, "second": second[1], "answer": best[1]}) + "\n")
    (folder / "largest.jsonl").write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER)
