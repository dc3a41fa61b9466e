"""batchkit against plain scripts: same rows, same vLLM, a fresh program for each run.

Shared by text.py, images.py, order.py and embed.py; as a program (task as JSON on stdin) it is one such run.
The clock runs from the loaded model to the last record written: it includes reading rows, loading
images, chat template, tokenizer and image processor. batchkit could decode images while the model
loads; its rows are held back until then (all but the first, which it reads earlier). It writes its
ledger with checkpoints and fsyncs, of which only the last is not counted; the scripts write plain
lines and never fsync. No environment variable of vLLM's is set but those for its log, and
OMP_NUM_THREADS is unset, as for most users: the scripts' vLLM has its engine core in a process of its
own, and on a CPU its worker in another. ``as_on_gpu`` gives both sides the arrangement of a GPU. Nobody
is told how long an answer will be.

Host CPU is that of all processes of a side, from the loaded model on (sampled, so right to about
0.2 s), by tokens answered (embed.py: tokens of the prompts) and, on the simulated accelerator, by its
steps.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import psutil
from frame import Figure, figures_of, spread

COSTS = "SIMULATED_ACCELERATOR"  # accelerator.py
FIRST = "UNEVEN"  # uneven.py
GENERATE_ALL = "generate(all)"
BATCHES_OF_64 = "batches of 64"
IN_ORDER = "batchkit, in order"  # … of its input
IN_WINDOW = "batchkit, window"
ORDERS = {IN_ORDER: "input", IN_WINDOW: "window"}  # run.order
BATCHES = {GENERATE_ALL: None, BATCHES_OF_64: 64}
EMBED_ALL = "embed(all)"
SPEECH_RATE = 16_000  # of the demo speech model
SHOWN = 8  # numbers of a vector that are compared
TIME_LIMIT_S = 900
ONLY = {"action": "append", "help": "a setting's name"}  # options of the scripts
SET = {"action": "append", "default": [], "help": "KEY=VALUE of batchkit's job"}


class Setting(NamedTuple):
    """A setting: the rows, and the cost of a step in the simulated worker. ``costs`` is None for
    the real worker on the CPU.

    ``as_on_gpu``: core and worker are in one process of their own, on both sides.
    ``job``: tables that override those of the job. ``wanted``: by name of another side, the minimum
    of its time divided by batchkit's; None for no target.
    """

    name: str
    rows: Path
    costs: Mapping[str, float] | None
    wanted: Mapping[str, float | None]
    job: Mapping[str, Any] = {}
    as_on_gpu: bool = False


class Line(NamedTuple):
    """The results of a side in a setting: medians. A ratio is the side's time divided by batchkit's
    time in the same round."""

    setting: str
    side: str
    seconds: float
    rows_per_s: float
    cpu_us_per_token: float
    cpu_ms_per_step: float | None
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
    job: Mapping[str, Any],
    *,
    rounds: int,
    overrides: Sequence[str] = (),
    hold_back: bool = False,
    also: Sequence[Figure] = (),
) -> None:
    """Run all, interleaved; print a table and one JSON line. Exits with 1 if answers differ.

    ``also``: figures that the script has measured before. ``hold_back``: batchkit sees its rows only once the model is loaded, as the scripts do.
    """
    lines: list[Line] = []
    for setting in settings:
        runs: dict[str, list[dict[str, Any]]] = {side: [] for side in ["batchkit", *setting.wanted]}
        answers: list[Any] = []
        for number in range(rounds):
            for place, side in enumerate(runs):
                name = f"{setting.name}-{number}-{place}".replace(" ", "_")
                found = run_side(setting, side, job, name, overrides, hold_back)
                runs[side].append(found)
                answers = answers or found["answers"]
                check(f"{setting.name}, {side}, round {number + 1}", found["answers"], answers)
                times = f"loaded in {found['load_s']:.1f} s, ran {found['seconds']:.2f} s"
                said = f"{setting.name} {number + 1} {side}: {times}{told(found['timeline'])}"
                print(said, file=sys.stderr, flush=True)
        lines += _lines(setting, runs, len(answers))
    print(f"{'setting':>12} {'side':>18} {'rows':>5} {'s':>7} {'rows/s':>7}", end="")
    print(f" {'µs/token':>8} {'ms/step':>7} {'ratio':>6} {'spread':>12}  wanted")
    for line in lines:
        rows = round(line.seconds * line.rows_per_s)
        per_step = "" if line.cpu_ms_per_step is None else f"{line.cpu_ms_per_step:.2f}"
        print(
            f"{line.setting:>12} {line.side:>18} {rows:>5} {line.seconds:>7.2f}"
            f" {line.rows_per_s:>7.1f} {line.cpu_us_per_token:>8.1f} {per_step:>7}"
            f" {line.ratio:>6.2f} {spread(line.ratios):>12}  {line.outcome}".rstrip()
        )
    results = [{**line._asdict(), "ratio": line.ratio} for line in lines]
    report: dict[str, Any] = {"rounds": rounds, "overrides": [*overrides], "answers_equal": True}
    if also:
        figures = [*also, *figures_of({"results": results})]
        report["figures"] = [figure.to_json() for figure in figures]
    print(json.dumps({"benchmark": benchmark, **report, "results": results}))


def _lines(
    setting: Setting, runs: Mapping[str, Sequence[Mapping[str, Any]]], rows: int
) -> Iterator[Line]:
    for side, found in runs.items():
        pairs = zip(runs["batchkit"], found, strict=True)
        ratios = [other["seconds"] / ours["seconds"] for ours, other in pairs]
        seconds = statistics.median(run["seconds"] for run in found)
        cpu_s = statistics.median(run["cpu_s"] for run in found)
        tokens = sum(n_tokens for _, n_tokens in found[0]["answers"])
        steps = statistics.median(run["steps"] for run in found)
        per_step = 1e3 * cpu_s / steps if steps else None
        wanted = setting.wanted.get(side)
        per_token = 1e6 * cpu_s / tokens
        yield Line(setting.name, side, seconds, rows / seconds, per_token, per_step, ratios, wanted)


def run_side(
    setting: Setting,
    side: str,
    job: Mapping[str, Any],
    name: str,
    overrides: Sequence[str] = (),
    hold_back: bool = False,
) -> dict[str, Any]:
    """Run one side of a setting once, in a process of its own. ``name``: unique among all runs."""
    environment = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
    environment |= {
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_LOGGING_STREAM": "ext://sys.stderr",
        "VLLM_NO_USAGE_STATS": "1",
    }
    if setting.as_on_gpu:
        # vLLM gives a CPU worker a process of its own only for "1" itself.
        environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "01"
    job = {**job, **setting.job}
    if setting.costs is not None:
        steps = setting.rows.parent / f"{name}.steps"
        environment[COSTS] = json.dumps({**setting.costs, "steps": str(steps)})
        kind = "Embedder" if job.get("task") == "embed" else "Worker"
        worker = {"worker_cls": f"accelerator.Simulated{kind}"}
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
    timeline = steps.read_bytes() if setting.costs is not None else b""
    found["timeline"] = list(struct.iter_unpack("ddi", timeline))
    found["steps"] = len(found["timeline"])
    return found


def told(timeline: Sequence[tuple[float, float, int]]) -> str:
    """Return, as text, how a simulated accelerator spent its time. ``timeline``: begin, end and
    number of requests of each step."""
    if not timeline:
        return ""
    most = max(requests for _, _, requests in timeline)
    full = [n for n, (_, _, requests) in enumerate(timeline) if requests >= 0.9 * most]
    idle = [max(0.0, after[0] - before[1]) for before, after in pairwise(timeline)]
    in_full = statistics.mean(timeline[n][2] for n in range(full[0], full[-1] + 1))
    return (
        f"; {len(timeline)} steps in {timeline[-1][1] - timeline[0][0]:.2f} s, idle {sum(idle):.2f} s"
        f" (median {1e3 * statistics.median(idle):.2f} ms); {full[0]} steps until it is full,"
        f" then {in_full:.1f} requests, {len(timeline) - full[-1]} steps at the end"
    )


def check(where: str, found: Sequence[Any], expected: Sequence[Any]) -> None:
    """Exit if an answer differs from the expected one. An answer is its text (or the first numbers
    of its vector), and its number of tokens."""
    different = [
        n for n, pair in enumerate(zip(found, expected, strict=False)) if not are_equal(*pair)
    ]
    if len(found) != len(expected) or different:
        counts = f"{len(found)} answers of {len(expected)}, {len(different)} differ"
        example = "".join(
            f"\n{a}\n{b}" for n in different[:1] for a, b in [(found[n], expected[n])]
        )
        raise SystemExit(f"{where}: {counts}{example}")


def are_equal(found: Sequence[Any], expected: Sequence[Any]) -> bool:
    """Return whether two answers are equal. Vectors may differ by 1e-4, because the composition of
    a batch changes rounding."""
    (answer, tokens), (wanted, wanted_tokens) = found, expected
    if isinstance(answer, str):
        return found == expected
    return tokens == wanted_tokens and math.dist(answer, wanted) < 1e-4


def main() -> None:
    task = json.load(sys.stdin)
    rows, cpu = Path(task["rows"]), HostCpu()
    if task["side"] == "batchkit" or task["side"] in ORDERS:
        order = ORDERS.get(task["side"])
        overrides = task["overrides"] + ([f"run.order={order}"] if order else [])
        found = run_batchkit(task["job"], rows, overrides, hold_back=task["hold_back"])
    elif task["side"] == EMBED_ALL:
        found = run_embed(task["job"], rows)
    else:
        found = run_script(task["job"], rows, BATCHES[task["side"]])
    loaded_at = found.pop("loaded_at")
    found["cpu_s"] = cpu.between(loaded_at, loaded_at + found["seconds"])
    print(json.dumps(found), flush=True)
    os._exit(0)  # vLLM is slow to exit


class HostCpu:
    """A sampler of the CPU seconds of this process and its descendants, ten times a second.

    Finding the descendants takes psutil some 30 ms, so it looks for them only once a second: more often, it would
    take a third of a core from what is measured.
    """

    def __init__(self) -> None:
        self._seen: list[tuple[float, float]] = []
        threading.Thread(target=self._look, daemon=True).start()

    def between(self, start: float, end: float) -> float:
        """Return the CPU seconds between two times of the monotonic clock."""
        inside = [cpu_s for at, cpu_s in self._seen if start <= at <= end]
        return inside[-1] - inside[0]

    def _look(self) -> None:
        this = psutil.Process()
        while True:
            processes = [this, *this.children(recursive=True)]
            for _ in range(10):
                total = 0.0
                for process in processes:
                    with suppress(psutil.NoSuchProcess):
                        times = process.cpu_times()
                        total += times.user + times.system
                self._seen.append((time.monotonic(), total))
                time.sleep(0.1)


def run_batchkit(
    table: dict[str, Any], rows: Path, overrides: Sequence[str], *, hold_back: bool = False
) -> dict[str, Any]:
    """Run batchkit. Its answers are read from its ledger."""
    from batchkit.config.loading import make_job
    from batchkit.execution.processor import ProductionBatchProcessor

    job = make_job(table, "benchmark", overrides)
    processor = ProductionBatchProcessor(job, quiet=True)
    asked, loaded = read(rows), Loaded(job.folder / "run.log")
    summary = processor.process(held_back(asked, loaded) if hold_back else None)
    records = list(summary.records())
    indexes = [record["index"] for record in records if record["status"] == "ok"]
    if summary.exit or indexes != list(range(len(asked))):
        raise SystemExit(f"the ledger holds {len(indexes)} of {len(asked)} rows: {summary}")
    return {
        "seconds": summary.seconds,
        "load_s": summary.load_seconds,
        "loaded_at": loaded.wait(),
        "answers": vectors_of(summary) if job.task == "embed" else texts_of(records),
        "prompts": [prompt_of(record["usage"]) for record in records],
    }


def prompt_of(usage: Mapping[str, Any]) -> list[int]:
    """Return the tokens of a prompt, and how many of them were in the prefix cache."""
    return [usage["prompt_tokens"], usage.get("cached_tokens") or 0]


def texts_of(records: Sequence[Mapping[str, Any]]) -> list[list[Any]]:
    return [[record["text"], record["usage"]["completion_tokens"]] for record in records]


def vectors_of(summary: Any) -> list[list[Any]]:
    frame = summary.to_pandas()
    pairs = zip(frame["embedding"], frame["prompt_tokens"], strict=True)
    return [[vector[:SHOWN].tolist(), int(tokens)] for vector, tokens in pairs]


class Loaded:
    """A watcher of batchkit's log. It returns the time, on the monotonic clock, at which the log
    reports the loaded model."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._at = 0.0
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def wait(self) -> float:
        self._thread.join()
        return self._at

    def _watch(self) -> None:
        while not self._log.exists() or "; model loaded in" not in self._log.read_text():
            time.sleep(0.005)
        self._at = time.monotonic()


def held_back(rows: Sequence[dict[str, Any]], loaded: Loaded) -> Iterator[dict[str, Any]]:
    """Yield the first row immediately, and the other rows when the model is loaded."""
    first, *others = rows
    yield first
    loaded.wait()
    yield from others


def run_script(table: Mapping[str, Any], rows: Path, size: int | None) -> dict[str, Any]:
    """Run the rows in batches of ``size``, and write each batch when it is done. ``size`` None: all
    rows in one batch."""
    from vllm import LLM, SamplingParams

    began = time.monotonic()
    llm = LLM(table["engine"]["model"], **table["engine"]["options"])
    tokenizer = llm.get_tokenizer()
    params = SamplingParams(**table["sampling"])
    answers, counts = [], []
    loaded = time.monotonic()
    asked = read(rows)
    size = size or len(asked)
    with Path(f"{table['name']}.jsonl").open("w") as results:
        for start in range(0, len(asked), size):
            batch = asked[start : start + size]
            prompts = [prompt(tokenizer, row) for row in batch]
            for row, output in zip(
                batch, llm.generate(prompts, params, use_tqdm=False), strict=True
            ):
                answer = output.outputs[0]
                results.write(json.dumps({"q": row["q"], "text": answer.text}) + "\n")
                answers.append([answer.text, len(answer.token_ids)])
                counts.append([len(output.prompt_token_ids), output.num_cached_tokens or 0])
            results.flush()
    found = {
        "seconds": time.monotonic() - loaded,
        "load_s": loaded - began,
        "loaded_at": loaded,
        "answers": answers,
        "prompts": counts,
    }
    llm.llm_engine.engine_core.shutdown()  # its processes would outlive os._exit
    return found


def run_embed(table: Mapping[str, Any], rows: Path) -> dict[str, Any]:
    """Run one ``LLM.embed`` over all rows, then write one file for numpy."""
    import numpy as np
    from vllm import LLM

    began = time.monotonic()
    llm = LLM(table["engine"]["model"], runner="pooling", **table["engine"]["options"])
    loaded = time.monotonic()
    outputs = llm.embed([row["q"] for row in read(rows)], use_tqdm=False)
    vectors = np.array([output.outputs.embedding for output in outputs], np.float32)
    np.save(f"{table['name']}.npy", vectors)
    seconds = time.monotonic() - loaded
    llm.llm_engine.engine_core.shutdown()
    counts = [len(output.prompt_token_ids) for output in outputs]
    answers = zip(vectors[:, :SHOWN].tolist(), counts, strict=True)
    return {
        "seconds": seconds,
        "load_s": loaded - began,
        "loaded_at": loaded,
        "answers": [list(answer) for answer in answers],
    }


def prompt(tokenizer: Any, row: Mapping[str, Any]) -> Any:
    if "clip" in row:  # as vLLM's examples load them
        from vllm.multimodal.media.audio import load_audio

        sound = load_audio(row["clip"], sr=SPEECH_RATE)
        return {"prompt": row["q"], "multi_modal_data": {"audio": sound}}
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
