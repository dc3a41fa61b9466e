"""batchkit against plain scripts: same rows, same vLLM, a fresh process for each run.

Shared by text.py and images.py; as a program (task as JSON on stdin) it is one such process.
The clock runs from the loaded model to the last record written: it includes reading rows, loading
images, chat template, tokenizer and image processor. batchkit could decode images while the model
loads; its rows are held back until then (all but the first, which it reads earlier). It writes its
ledger with checkpoints and fsyncs, of which only the last is not counted; the scripts write plain
lines and never fsync. OMP_NUM_THREADS is unset everywhere, as for most users. batchkit's engine has
its own process (the default); the scripts' vLLM runs in their process, where nothing is serialised.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

COSTS = "SIMULATED_ACCELERATOR"  # accelerator.py
FIRST = "UNEVEN"  # uneven.py
GENERATE_ALL = "generate(all)"
IN_ORDER = "batchkit, in order"  # … of its input: run.look_ahead = 0
BATCHES = {GENERATE_ALL: None, "batches of 32": 32, "batches of 64": 64}
TIME_LIMIT_S = 900


class Setting(NamedTuple):
    """The rows, and the cost of a step in the simulated worker; None: the real one, on the CPU.

    ``job``: tables that override the job's. ``wanted``: for the name of each other side, the
    minimum of its time divided by batchkit's.
    """

    name: str
    rows: Path
    costs: Mapping[str, float] | None
    wanted: Mapping[str, float]
    job: Mapping[str, Any] = {}


class Line(NamedTuple):
    """A side in a setting; a ratio is its time by batchkit's in the same round."""

    setting: str
    side: str
    seconds: float
    rows_per_s: float
    ratios: Sequence[float]
    wanted: float | None

    @property
    def ratio(self) -> float:
        return statistics.median(self.ratios)

    @property
    def outcome(self) -> str:
        if self.wanted is None:
            return ""
        return f"{self.wanted:.2f} {'holds' if self.ratio >= self.wanted else 'MISSED'}"


def compare(
    benchmark: str,
    settings: Sequence[Setting],
    sides: Sequence[str],
    job: Mapping[str, Any],
    *,
    rounds: int,
    overrides: Sequence[str] = (),
    hold_back: bool = False,
) -> None:
    """Run all, interleaved; print a table and one JSON line. Exits with 1 if answers differ.

    ``hold_back``: batchkit sees its rows only once the model is loaded, as the scripts do.
    """
    lines: list[Line] = []
    for setting in settings:
        seconds: dict[str, list[float]] = {side: [] for side in ["batchkit", *sides]}
        answers: list[Any] = []
        for number in range(rounds):
            for side in seconds:
                name = f"{setting.name}-{number}-{list(seconds).index(side)}"
                found = _run(setting, side, job, name, overrides, hold_back)
                seconds[side].append(found["seconds"])
                answers = answers or found["answers"]
                check(f"{setting.name}, {side}, round {number + 1}", found["answers"], answers)
                times = f"loaded in {found['load_s']:.1f} s, ran {found['seconds']:.2f} s"
                print(f"{setting.name} {number + 1} {side}: {times}", file=sys.stderr, flush=True)
        lines += _lines(setting, seconds, len(answers))
    print(f"{'setting':>10} {'side':>18} {'rows':>5} {'s':>7} {'rows/s':>7}", end="")
    print(f" {'ratio':>6} {'spread':>12}  wanted")
    for line in lines:
        rows = round(line.seconds * line.rows_per_s)
        spread = f"{min(line.ratios):.2f}–{max(line.ratios):.2f}"
        print(
            f"{line.setting:>10} {line.side:>18} {rows:>5} {line.seconds:>7.2f}"
            f" {line.rows_per_s:>7.1f} {line.ratio:>6.2f} {spread:>12}  {line.outcome}".rstrip()
        )
    results = [{**line._asdict(), "ratio": line.ratio} for line in lines]
    report = {"rounds": rounds, "overrides": list(overrides), "answers_equal": True}
    print(json.dumps({"benchmark": benchmark, **report, "results": results}))


def _lines(setting: Setting, seconds: Mapping[str, Sequence[float]], rows: int) -> Iterator[Line]:
    for side, took in seconds.items():
        ratios = [other / ours for ours, other in zip(seconds["batchkit"], took, strict=True)]
        median = statistics.median(took)
        wanted = setting.wanted.get(side)
        yield Line(setting.name, side, median, rows / median, ratios, wanted)


def _run(
    setting: Setting,
    side: str,
    job: Mapping[str, Any],
    name: str,
    overrides: Sequence[str],
    hold_back: bool,
) -> dict[str, Any]:
    environment = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
    environment |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_LOGGING_STREAM": "ext://sys.stderr",
        "VLLM_NO_USAGE_STATS": "1",
    }
    job = {**job, **setting.job}
    if setting.costs is not None:
        environment[COSTS] = json.dumps(setting.costs)
        worker = {"worker_cls": "accelerator.SimulatedWorker"}
        job["engine"] = {**job["engine"], "options": {**job["engine"]["options"], **worker}}
    task = {
        "side": side,
        "job": {"input": {"path": str(setting.rows)}, **job, "name": name},
        "rows": str(setting.rows),
        "overrides": list(overrides),
        "hold_back": hold_back,
    }
    done = subprocess.run(
        [sys.executable, __file__],
        input=json.dumps(task),
        capture_output=True,
        text=True,
        cwd=setting.rows.parent,
        env=environment,
        timeout=TIME_LIMIT_S,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{setting.name}, {side}: {done.stderr[-4000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def check(where: str, found: Sequence[Any], expected: Sequence[Any]) -> None:
    """An answer is its text and the number of its tokens."""
    different = [
        n for n, pair in enumerate(zip(found, expected, strict=False)) if pair[0] != pair[1]
    ]
    if len(found) != len(expected) or different:
        counts = f"{len(found)} answers of {len(expected)}, {len(different)} differ"
        example = "".join(
            f"\n{a}\n{b}" for n in different[:1] for a, b in [(found[n], expected[n])]
        )
        raise SystemExit(f"{where}: {counts}{example}")


def main() -> None:
    task = json.load(sys.stdin)
    rows = Path(task["rows"])
    if task["side"] in ("batchkit", IN_ORDER):
        in_order = ["run.look_ahead=0"] if task["side"] == IN_ORDER else []
        overrides = task["overrides"] + in_order
        found = run_batchkit(task["job"], rows, overrides, hold_back=task["hold_back"])
    else:
        found = run_script(task["job"], rows, BATCHES[task["side"]])
    print(json.dumps(found), flush=True)
    os._exit(0)  # vLLM is slow to exit


def run_batchkit(
    table: dict[str, Any], rows: Path, overrides: Sequence[str], *, hold_back: bool = False
) -> dict[str, Any]:
    """Its answers are read from its ledger."""
    from batchkit.config.loading import make_job
    from batchkit.execution.processor import ProductionBatchProcessor

    job = make_job(table, "benchmark", overrides)
    processor = ProductionBatchProcessor(job, quiet=True)
    asked = read(rows)
    summary = processor.process(held_back(asked, job.folder / "run.log") if hold_back else None)
    records = list(summary.records())
    indexes = [record["index"] for record in records if record["status"] == "ok"]
    if summary.exit or indexes != list(range(len(asked))):
        raise SystemExit(f"the ledger holds {len(indexes)} of {len(asked)} rows: {summary}")
    return {
        "seconds": summary.seconds,
        "load_s": summary.load_seconds,
        "answers": [[record["text"], record["usage"]["completion_tokens"]] for record in records],
    }


def held_back(rows: Sequence[dict[str, Any]], log: Path) -> Iterator[dict[str, Any]]:
    """The first row at once, the others when ``log`` says that the model is loaded."""
    first, *others = rows
    yield first
    while "generating;" not in log.read_text():
        time.sleep(0.005)
    yield from others


def run_script(table: Mapping[str, Any], rows: Path, size: int | None) -> dict[str, Any]:
    """Batch by batch, each written when it is done; None: all rows in one batch."""
    from vllm import LLM, SamplingParams

    began = time.monotonic()
    llm = LLM(table["engine"]["model"], **table["engine"]["options"])
    tokenizer = llm.get_tokenizer()
    answers = []
    loaded = time.monotonic()
    asked = read(rows)
    size = size or len(asked)
    with Path(f"{table['name']}.jsonl").open("w") as results:
        for start in range(0, len(asked), size):
            batch = asked[start : start + size]
            prompts = [prompt(tokenizer, row) for row in batch]
            params = [SamplingParams(temperature=0, **row["params"]) for row in batch]
            for row, output in zip(
                batch, llm.generate(prompts, params, use_tqdm=False), strict=True
            ):
                answer = output.outputs[0]
                results.write(json.dumps({"q": row["q"], "text": answer.text}) + "\n")
                answers.append([answer.text, len(answer.token_ids)])
            results.flush()
    return {
        "seconds": time.monotonic() - loaded,
        "load_s": loaded - began,
        "answers": answers,
    }


def prompt(tokenizer: Any, row: Mapping[str, Any]) -> Any:
    content: Any = row["q"]
    if "file" in row:
        content = [{"type": "image"}, {"type": "text", "text": content}]
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
    )
    if "file" not in row:
        return text
    return {"prompt": text, "multi_modal_data": {"image": picture(row["file"], row["size"])}}


def picture(path: str, size: Sequence[int]) -> Any:
    from PIL import Image

    with Image.open(path) as image:
        return image.convert("RGB").resize(tuple(size), Image.Resampling.LANCZOS)


def read(rows: Path) -> list[dict[str, Any]]:
    with rows.open() as lines:
        return [json.loads(line) for line in lines]


if __name__ == "__main__":
    main()
