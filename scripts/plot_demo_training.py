"""Draw the log of `train_demo_model.py`: losses, and exact answers on tables of the test.

python scripts/plot_demo_training.py FOLDER/log.jsonl training.png
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib.pyplot as plt


def plot(log: Path, picture: Path) -> None:
    # A training that was continued may have done some steps twice; the later ones count.
    by_step = {record["step"]: record for record in map(json.loads, log.open())}
    records = [by_step[step] for step in sorted(by_step)]
    figure, (above, below) = plt.subplots(2, sharex=True, figsize=(8, 7), layout="constrained")
    for name in ("reading", "answering", "pointing"):
        points = [(record["step"], record[name]) for record in records if record.get(name)]
        above.plot(*zip(*points, strict=True), label=name)
    above.set(ylabel="loss", yscale="log")
    tested = [record for record in records if "exact" in record]
    for kind in sorted({kind for record in tested for kind in record["exact"]}):
        points = [(record["step"], record["exact"][kind]) for record in tested]
        below.plot(*zip(*points, strict=True), label=kind)
    below.set(xlabel="step", ylabel="exact answers", ylim=(0, 1.02))
    for axes in (above, below):
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(picture, dpi=120)


if __name__ == "__main__":
    plot(Path(sys.argv[1]), Path(sys.argv[2]))
