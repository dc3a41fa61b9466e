"""Draw the log of `train_demo_model.py`: losses, and exact answers in each style of the test.

python scripts/plot_demo_training.py FOLDER/log.jsonl training.png
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib.pyplot as plt


def plot(log: Path, picture: Path) -> None:
    records = sorted(map(json.loads, log.open()), key=lambda record: record["spent_s"])
    figure, (above, below) = plt.subplots(2, sharex=True, figsize=(8, 7), layout="constrained")
    for name in ("letters", "reading", "answering", "pointing"):
        points = [(record["spent_s"], record[name]) for record in records if record.get(name)]
        above.plot(*zip(*points, strict=True), label=name)
    above.set(ylabel="loss", yscale="log")
    tested = [record for record in records if any(record.get("exact", {}).get("own", {}).values())]
    for style in tested[-1]["exact"]:
        points = [(record["spent_s"], record["exact"][style]["all"]) for record in tested]
        below.plot(*zip(*points, strict=True), label=style, marker="o")
    below.set(xlabel="seconds", ylabel="exact answers", ylim=(0, 1.02))
    for axes in (above, below):
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(picture, dpi=120)


if __name__ == "__main__":
    plot(Path(sys.argv[1]), Path(sys.argv[2]))
