"""The gain from batching with the transformers engine: the same rows at several batch sizes.

    python benchmarks/transformers_batch.py [--rounds 3] [--rows 24] [--sizes 1,2,4,8,16] [--quick]

A text model of 23 million parameters with random weights, on the CPU, float32; prompts of 20 to 200
tokens. ``even``: every answer has 32 tokens; ``heavy-tailed``: 4 to 128, most of them short. All
sizes are one process with one engine each, its model loaded before the clock; a ratio is batch size
1's time divided by this size's in the same round. Every size's answers are compared with batch size
1's.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, NamedTuple

from frame import Figure, arguments, report, spread
from models import MEDIUM, build_text_model

from batchkit.config.tables import JobConfig
from batchkit.engines.base import Engine
from batchkit.engines.registry import open_engine
from batchkit.types import Request, Row

HEAVY_TAIL = (6, 9, 12, 16, 24, 8, 128, 11, 4, 40)


class Run(NamedTuple):
    """The result of one pass over the rows. ``tokens``: number of tokens of all answers."""

    seconds: float
    tokens: int
    texts: Sequence[str]


class Line(NamedTuple):
    rows: str
    batch_size: int
    tokens_per_s: float
    ratios: Sequence[float]
    equal_texts: float

    @property
    def ratio(self) -> float:
        return statistics.median(self.ratios)


def main() -> None:
    sizes = {"sizes": {"default": "1,2,4,8,16", "metavar": "N,…", "help": "1 is one of them"}}
    args = arguments(__doc__, "one round, half the rows", sizes, rounds=(3, 1), rows=(24, 12))
    sizes = sorted({1, *(int(size) for size in args.sizes.split(","))})
    lines: list[Line] = []
    print(f"{'rows':>14} {'batch':>6} {'tokens/s':>9} {'ratio':>6} {'spread':>12} {'equal':>6}")
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        model = build_text_model(Path(folder) / "model", MEDIUM)
        engines = {size: stack.enter_context(closing(_engine(model, size))) for size in sizes}
        for kind, lengths in {"even": (32,), "heavy-tailed": HEAVY_TAIL}.items():
            for line in _lines(kind, engines, _requests(args.rows, lengths), args.rounds):
                print(
                    f"{line.rows:>14} {line.batch_size:>6} {line.tokens_per_s:>9.1f}"
                    f" {line.ratio:>6.2f} {spread(line.ratios):>12} {line.equal_texts:>6.0%}",
                    flush=True,
                )
                lines.append(line)
    figures = [
        Figure(f"{line.rows}, batch {line.batch_size} against 1", line.ratio)
        for line in lines
        if line.batch_size > 1
    ]
    results = [{**line._asdict(), "ratio": line.ratio} for line in lines]
    report("transformers_batch", figures, rounds=args.rounds, results=results)


def _lines(
    kind: str, engines: Mapping[int, Engine], requests: Sequence[Request], rounds: int
) -> Iterator[Line]:
    runs: dict[int, list[Run]] = {size: [] for size in engines}
    for number in range(rounds):
        for size, engine in engines.items():
            runs[size].append(_run(engine, requests))
            result = f"{kind} {number + 1}, batch {size}: {runs[size][-1].seconds:.2f} s"
            print(result, file=sys.stderr, flush=True)
    for size, found in runs.items():
        ratios = [one.seconds / run.seconds for one, run in zip(runs[1], found, strict=True)]
        rate = statistics.median(run.tokens / run.seconds for run in found)
        same = [a == b for a, b in zip(found[0].texts, runs[1][0].texts, strict=True)]
        yield Line(kind, size, rate, ratios, statistics.mean(same))


def _run(engine: Engine, requests: Sequence[Request]) -> Run:
    began = time.monotonic()
    for request in requests:
        engine.submit(request)
    texts: dict[int, str] = {}
    tokens = 0
    while len(texts) < len(requests):
        for completion in engine.poll(0.1):
            if completion.error is not None or completion.usage is None:
                raise SystemExit(f"row {completion.request.row.index}: {completion.error}")
            texts[completion.request.row.index] = completion.choices[0].text
            tokens += completion.usage.completion_tokens
    return Run(time.monotonic() - began, tokens, [texts[n] for n in range(len(requests))])


def _engine(model: Path, size: int) -> Engine:
    options: dict[str, Any] = {"dtype": "float32", "max_model_len": 512, "max_num_seqs": size}
    engine = {"kind": "transformers", "model": str(model), "in_process": True, "options": options}
    return open_engine(JobConfig(engine=engine))


def _requests(rows: int, lengths: Sequence[int]) -> list[Request]:
    return [
        Request(
            Row(n, str(n), {}),
            [{"role": "user", "content": f"tell me of {n}" + " tea" * (n * 37 % 180)}],
            None,
            {"temperature": 0.0, "max_tokens": lengths[n % len(lengths)], "ignore_eos": True},
            "",
        )
        for n in range(rows)
    ]


if __name__ == "__main__":
    main()
