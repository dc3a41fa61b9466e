"""batchkit on an NVIDIA GPU: against plain scripts, and when GPU memory runs out.

    python benchmarks/gpu.py [--only text,tune,images,ledger,find-bs,ladder,sharing,speculation]
                             [--models 0.5B,7B] [--tiny]

On a machine with a GPU and no network: unpack vLLM for CUDA (0.26 to 0.32) and batchkit's own
dependencies, set the environment variables that they need, then run ``python benchmarks/gpu.py`` in
a checkout. Nothing is downloaded: the models have the shapes of Qwen2-0.5B, Qwen2.5-7B and
Qwen3-VL-2B, and random weights that vLLM generates at load (shapes.py). With torch.compile and CUDA
graphs a load takes about a minute, the first longer: there are four for each model in text, four in
images, four in ledger. To save time use ``--only`` and ``--models``, or switch compilation off with
``--no-compile`` or, without CUDA graphs, ``--eager``, which makes all sides slower. find-bs and ladder are always eager, with about ten loads
each. ``--tiny`` runs the same on a CPU with the demo model's shape and few rows, for a test.

- **text**: rows as in text.py. The scripts run vLLM as its users do: by default its engine core has a
  process of its own; ``in process`` is without that, only for information. Batches of 64 get only the
  first rows: they take much longer. Ratios are of rows/s.
- **tune**: the same rows; `batchkit tune`, whose last rounds are the default against what it found.
- **images**: as in images.py; then find-bs with one batch size, to find the bottleneck.
- **ledger**: as in ledger.py, with the 0.5B shape instead of the dry-run engine.
- **sharing**: the 0.5B shape and the rows of text, with one engine, and with two and four on the GPU
  (``workers.per_gpu``), with and without NVIDIA's MPS. The ratio is one engine's rate divided by that of the
  line: below 1, several engines are faster.
- **speculation**: a model of the 0.5B shape that copies a text of its prompt (copying.py), without and with n-gram
  speculation. Every guess is right, so this is the most that speculation can gain. The ratio is as in sharing.
- **find-bs**, **ladder**: too many requests at once end in the device's own error: CUDA's out of
  memory, on a CPU an allocation that the kernel refuses (gpu_memory.py). On a GPU, ladder also
  claims more memory at load than is free, and another process takes GPU memory during a run.

sharing and speculation have a fifth of the rows and run without torch.compile, so that they end within ten minutes
together (an estimate: not yet measured on a GPU).

In text, images, ledger and sharing answers end by a stop token, at lengths that only vLLM's worker knows
(endings.py, which all sides get by the same engine options; it runs in both of vLLM's model runners,
so VLLM_USE_V2_MODEL_RUNNER may stay unset). max_tokens is the same for all rows.

All runs are in bfloat16, where the composition of a batch changes rounding: each row must have the
same number of tokens on all sides, fewer than max_tokens, and the share of equal texts is reported.
If a section fails, the last line (JSON) says why, the other sections still run, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import bounded
import copying
import images
import shapes
import text
import tomlkit
from gpu_memory import find_bs_section, ladder_section
from gpu_place import (
    Found,
    Place,
    SectionError,
    answer,
    environment,
    find_bs,
    python,
    tune,
    wait_for_card,
)
from ledger import AS_IT_IS, TIMED
from sides import GENERATE_ALL

from tests.support import mps_stand_in


class Way(NamedTuple):
    """One way to run the rows. ``side``: the name of the side in sides.py."""

    name: str
    side: str
    rows: int | None = None  # only the first ones; None: all
    in_process: bool = False  # vLLM's engine core in the script's process
    wanted: float | None = None  # minimum of batchkit's rate divided by this one's
    overrides: Sequence[str] = ()  # KEY=VALUE of batchkit's job
    variables: Mapping[str, str] = MappingProxyType({})  # of the environment


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default=",".join(SECTIONS), metavar="SECTION,…")
    parser.add_argument("--models", default="0.5B,7B", metavar="SHAPE,…", help="of text")
    parser.add_argument("--rows", type=int, default=20_000, help="of text; images get a 50th")
    parser.add_argument("--limit-s", type=float, default=540, help="for each section")
    parser.add_argument("--eager", action="store_true", help="no torch.compile, no CUDA graphs")
    parser.add_argument("--no-compile", action="store_true", help="CUDA graphs, no torch.compile")
    parser.add_argument("--tiny", action="store_true", help="on a CPU: tiny shapes, few rows")
    parser.add_argument("--look", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.look:
        print(json.dumps(machine_here()))
        return
    chosen = args.only.split(",")
    if unknown := [name for name in chosen if name not in SECTIONS]:
        parser.error(f"--only: no section {', '.join(unknown)}; there are {', '.join(SECTIONS)}")
    models = ["tiny"] if args.tiny else args.models.split(",")
    if unknown := [name for name in models if name not in TEXT_SHAPES]:
        parser.error(f"--models: no shape {', '.join(unknown)}; there are {', '.join(TEXT_SHAPES)}")
    options: dict[str, Any] = {
        "dtype": "bfloat16",
        "load_format": "dummy",
        "max_model_len": 2048,
        "worker_cls": "endings.Worker",
        "additional_config": {"median_tokens": text.MEDIAN_TOKENS},
    }
    if args.tiny:
        small = {"enforce_eager": True, "max_num_seqs": 16, "kv_cache_memory_bytes": 2**27}
        options |= {**small, "max_model_len": 1024, "additional_config": {"median_tokens": 6}}
    else:  # below vLLM's default of 0.92: an earlier process may still hold GPU memory
        options |= {"gpu_memory_utilization": 0.85, "enforce_eager": args.eager}
    if args.no_compile:
        options["compilation_config"] = NO_COMPILE
    with tempfile.TemporaryDirectory() as name:
        machine = look(Path(name))
        sections: dict[str, Found] = {}
        for section in chosen:
            folder = Path(name, section)
            folder.mkdir()
            began = time.monotonic()
            rows = 24 if args.tiny else args.rows
            until = began + args.limit_s
            place = Place(folder, args.tiny, rows, models, machine, options, until)
            found = sections[section] = {"error": None}
            print(f"\n{section}", flush=True)
            try:
                if not args.tiny and machine["card"] is None:
                    raise SectionError("torch finds no GPU; --tiny runs on a CPU")
                SECTIONS[section](place, found)
            except Exception as error:  # a section's failure is a result, and the others run
                trace = "" if isinstance(error, SectionError) else traceback.format_exc()
                found["error"] = f"{type(error).__name__}: {error}"
                print(f"{section} FAILED: {found['error']}\n{trace}", flush=True)
            found["seconds"] = round(time.monotonic() - began, 1)
    about = {"benchmark": "gpu", "tiny": args.tiny, "eager": args.eager, "machine": machine}
    print(json.dumps({**about, "sections": sections}))
    raise SystemExit(1 if any(found["error"] for found in sections.values()) else 0)


def look(folder: Path) -> dict[str, Any]:
    """Print and return the facts of this machine. They are read in another process, so that this
    one holds no GPU memory."""
    done = bounded.run(python("gpu", "--look"), cwd=folder, limit_s=300, environment=environment())
    if done.code:
        raise SystemExit(f"torch and vLLM can't be imported: {done.message}")
    machine: dict[str, Any] = json.loads(done.stdout[-1])
    version = Path("/proc/driver/nvidia/version")
    machine["driver"] = version.read_text().splitlines()[0] if version.is_file() else None
    for name, value in machine.items():
        print(f"{name}: {value}")
    return machine


def machine_here() -> dict[str, Any]:
    import torch
    import vllm

    card = torch.cuda.is_available()
    return {
        "vllm": vllm.__version__,
        "torch": torch.__version__,
        "card": torch.cuda.get_device_name() if card else None,
        "card_bytes": torch.cuda.mem_get_info()[1] if card else None,
    }


def text_section(place: Place, found: Found) -> None:
    ways = against_all(place, wanted=0.98)  # then 1.05
    few = min(place.rows, 1920)
    # With --tiny in process: it starts faster.
    ways.append(Way("batches of 64", "batches of 64", rows=few, in_process=place.tiny))
    rows = text.write(place.folder / "rows.jsonl", place.rows)
    for shape in place.models:
        path = place.folder / shape
        model = shapes.build_shape(path, TEXT_SHAPES[shape], text_only=True)
        job = {"prompt": {"user": "{{ q }}"}, **place.job(model, text.MAX_TOKENS)}
        beside(place, shape, rows, ways, job, found)


def tune_section(place: Place, found: Found) -> None:
    """Run `batchkit tune` for each model. The limit of minutes is an equal part of the section's
    remaining time."""
    rows = text.write(place.folder / "rows.jsonl", place.rows)
    results = found["results"] = []
    for nth, shape in enumerate(place.models):
        left_s = place.left_s / (len(place.models) - nth) - TUNE_ENDS_S
        minutes = 0.1 if place.tiny else left_s / 60
        model = shapes.build_shape(place.folder / shape, TEXT_SHAPES[shape], text_only=True)
        job = {"prompt": {"user": "{{ q }}"}, **place.job(model, text.MAX_TOKENS)}
        tuned = tune(place, {**job, "input": {"path": str(rows)}}, minutes)
        results.append({"shape": shape, **tuned})
        compared = tuned["compared"] or {"ratio": 1.0, "low": 1.0, "high": 1.0}
        print(
            "{}: {ratio:.2f} x the default ({low:.2f} to {high:.2f})".format(shape, **compared),
            tuned["best"]["options"],
            flush=True,
        )


def images_section(place: Place, found: Found) -> None:
    rows = images.write(place.folder, 8 if place.tiny else max(1, place.rows // 50))
    shape = shapes.TINY_VL if place.tiny else shapes.QWEN3_VL_2B
    model = shapes.build_shape(place.folder / "model", shape, text_only=False)
    options = {
        "max_model_len": 1024,
        "mm_processor_cache_gb": 0,
        "limit_mm_per_prompt": {"image": 1, "video": 0},
        "additional_config": {"median_tokens": images.STEP["median_tokens"]},
    }
    job = {
        "prompt": {"user": "{{ q }}", "images": ["{{ file }}"]},
        # As images.py: by the rule of Qwen's own processor this is images.SEEN_SIZE.
        "media": {"root": str(place.folder), "max_pixels": 262144, "factor": 32},
        **place.job(model, images.MAX_TOKENS, **options),
    }
    ways = against_all(place, wanted=1.3)
    try:
        beside(place, "tiny" if place.tiny else "VL-2B", rows, ways, job, found)
    finally:  # the bottleneck is useful even if not all sides could be run
        size, seconds = (4, 2) if place.tiny else (128, 15)
        with_input = {**job, "input": {"path": str(rows)}}
        tried = find_bs(place, with_input, size, size, seconds=seconds)
        (line,) = tried["batch_sizes"]
        found["waits"], found["bottleneck"] = line["waits"], tried["bottleneck"]
        shares = line["waits"] or {}
        reasons = ", ".join(f"{name} {share:.0%}" for name, share in shares.items())
        print(f"why the engine had free places: {reasons or 'unknown, too few rows'}")
        if tried["bottleneck"]:
            print("bottleneck: {resource}: {reason}".format(**tried["bottleneck"]))


def ledger_section(place: Place, found: Found) -> None:
    """Measure the ledger. Each start loads a new engine, and only the shares of ``timed`` are not
    affected by differences between engines."""
    rows = text.write(place.folder / "rows.jsonl", place.rows)
    model = shapes.build_shape(place.folder / "model", place.half_b, text_only=True)
    job = {"name": "ledger", "input": {"path": str(rows)}, "prompt": {"user": "{{ q }}"}}
    (place.folder / "job.toml").write_text(
        tomlkit.dumps({**job, **place.job(model, text.MAX_TOKENS)})
    )
    modes = [AS_IT_IS, TIMED] if place.tiny else [AS_IT_IS, "no fsync", "no checkpoint", TIMED]
    results = found["results"] = []
    print(f"{'':>16} {'rows/s':>9} {'ratio':>7}  share of the time")
    for mode in modes:
        wait_for_card()
        shutil.rmtree(place.folder / "output", ignore_errors=True)
        interval_s = "0.5" if place.tiny else "5"
        summary = answer(place, "ledger", "--child", mode, "--interval-s", interval_s)
        per_s = summary["rows_per_s"]
        ratio = per_s / results[0]["rows_per_s"] if results else 1.0
        shares = {part: s / summary["seconds"] for part, s in summary["wall"].items() if s}
        results.append({"mode": mode, "rows_per_s": per_s, "ratio": ratio, "shares": shares})
        shares_text = ", ".join(f"{part} {share:.2%}" for part, share in shares.items())
        print(f"{mode:>16} {per_s:>9,.1f} {ratio:>7.3f}  {shares_text}".rstrip(), flush=True)
        if summary["ok"] != place.rows:
            raise SectionError(f"{mode}: {summary['ok']} rows of {place.rows} answered")


def sharing_section(place: Place, found: Found) -> None:
    rows = text.write(place.folder / "rows.jsonl", few_rows(place))
    model = shapes.build_shape(place.folder / "model", place.half_b, text_only=True)
    job = {
        "prompt": {"user": "{{ q }}"},
        **place.job(model, text.MAX_TOKENS, **quick_load(place)),
    }
    failing = place.folder / "no-mps"
    failing.mkdir()
    no_mps = mps_stand_in.install(failing, works=False)
    # With --tiny, batchkit believes that the CPU has a GPU.
    gpu = {"CUDA_VISIBLE_DEVICES": "0"} if place.tiny else {}
    ways = [Way("one engine", "batchkit")]
    for engines in (2,) if place.tiny else (2, 4):
        shared = [f"workers.per_gpu={engines}"]
        ways.append(Way(f"{engines} engines, MPS", "batchkit", overrides=shared, variables=gpu))
        ways.append(
            Way(f"{engines} engines, sliced", "batchkit", overrides=shared, variables=gpu | no_mps)
        )
    beside(place, "tiny" if place.tiny else "0.5B", rows, ways, job, found)
    found["without_mps"] = [
        log.parent.name
        for log in sorted(place.folder.glob("output/*/run.log"))
        if "MPS can't run" in log.read_text()
    ]
    print("runs without MPS:", ", ".join(found["without_mps"]) or "none")


def speculation_section(place: Place, found: Found) -> None:
    model = copying.build_copying_model(place.folder / "model", place.half_b)
    rows = copying.write(place.folder / "rows.jsonl", few_rows(place), model)
    options = {"load_format": "auto", "worker_cls": "auto", "additional_config": {}}
    table = place.job(model, text.MAX_TOKENS, **quick_load(place), **options)
    guesses = '{ method = "ngram", num_speculative_tokens = 4, prompt_lookup_max = 4 }'
    ways = [
        Way("no speculation", "batchkit"),
        Way("n-gram", "batchkit", overrides=[f"engine.options.speculative_config={guesses}"]),
    ]
    job = {"prompt": {"user": "{{ q }}"}, **table}
    beside(place, "tiny" if place.tiny else "0.5B", rows, ways, job, found)


def few_rows(place: Place) -> int:
    return place.rows if place.tiny else max(1, place.rows // 5)


def quick_load(place: Place) -> dict[str, Any]:
    """Return options with which an engine loads sooner."""
    return {} if place.tiny else {"compilation_config": NO_COMPILE}


SECTIONS: Mapping[str, Callable[[Place, Found], None]] = {
    "text": text_section,
    "tune": tune_section,
    "images": images_section,
    "ledger": ledger_section,
    "find-bs": find_bs_section,
    "ladder": ladder_section,
    "sharing": sharing_section,
    "speculation": speculation_section,
}
NO_COMPILE = {
    "mode": 0,
    "cudagraph_mode": "FULL_DECODE_ONLY",
    "cudagraph_capture_sizes": [1, 8, 32, 64, 128, 256, 384, 512, 768, 1024],
}
TUNE_ENDS_S = bounded.INTERRUPTED_S + 10.0  # its last round may end later than its limit
TEXT_SHAPES = {"tiny": shapes.TINY, "0.5B": shapes.QWEN2_HALF_B, "7B": shapes.QWEN25_7B}


def against_all(place: Place, wanted: float) -> list[Way]:
    ways = [Way("batchkit", "batchkit"), Way(GENERATE_ALL, GENERATE_ALL, wanted=wanted)]
    if not place.tiny:
        ways.append(Way(f"{GENERATE_ALL}, in process", GENERATE_ALL, in_process=True))
    return ways


def beside(
    place: Place,
    shape: str,
    rows: Path,
    ways: Sequence[Way],
    job: Mapping[str, Any],
    found: Found,
) -> None:
    """Run all ways, batchkit's first; print each result and add it to ``found`` at once.

    Raises:
        SectionError: a side failed, its answers' lengths differ from batchkit's, or an answer was cut.
    """
    results = found.setdefault("results", [])
    head = f"{'shape':>6} {'side':>25} {'rows':>6} {'load s':>7} {'s':>7} {'rows/s':>8}"
    print(f"{head} {'ratio':>6} {'equal':>6}  wanted", flush=True)
    ours: dict[str, Any] = {}
    for way in ways:
        wait_for_card()
        got = side(place, shape, rows, way, job)
        ours = ours or got
        theirs, expected = got["answers"], ours["answers"][: len(got["answers"])]
        if max(tokens for _, tokens in theirs) == job["sampling"]["max_tokens"]:
            raise SectionError(f"{shape}, {way.name}: an answer was not ended by a stop token")
        if [tokens for _, tokens in theirs] != [tokens for _, tokens in expected]:
            raise SectionError(
                f"{shape}, {way.name}: its answers have not as many tokens as batchkit's"
            )
        per_s = len(theirs) / got["seconds"]
        equal = sum(a[0] == b[0] for a, b in zip(theirs, expected, strict=True)) / len(theirs)
        line = {
            "shape": shape,
            "side": way.name,
            "rows": len(theirs),
            "load_s": got["load_s"],
            "seconds": got["seconds"],
            "rows_per_s": per_s,
            "tokens": sum(tokens for _, tokens in theirs),
            "ratio": len(ours["answers"]) / ours["seconds"] / per_s,
            "equal_texts": equal,
            "wanted": way.wanted,
        }
        results.append(line)
        outcome = ""
        if way.wanted is not None:
            outcome = f"{way.wanted} {'holds' if line['ratio'] >= way.wanted else 'MISSED'}"
        print(
            f"{shape:>6} {way.name:>25} {len(theirs):>6} {got['load_s']:>7.1f}"
            f" {got['seconds']:>7.2f} {per_s:>8.1f} {line['ratio']:>6.2f} {equal:>6.0%}"
            f"  {outcome}".rstrip(),
            flush=True,
        )


def side(place: Place, shape: str, rows: Path, way: Way, job: Mapping[str, Any]) -> dict[str, Any]:
    """Run sides.py once; it reads its task from stdin."""
    if way.rows is not None:
        lines = rows.read_text().splitlines(keepends=True)[: way.rows]
        rows = rows.with_name(f"first-{way.rows}.jsonl")
        rows.write_text("".join(lines))
    name = f"{shape}-{way.name}".replace(" ", "_").replace(",", "")
    table = {"input": {"path": str(rows)}, **job, "name": name}
    task = {
        "side": way.side,
        "job": table,
        "rows": str(rows),
        "overrides": [*way.overrides],
        "hold_back": "images" in job["prompt"],  # as in images.py
    }
    return answer(
        place,
        "sides",
        stdin=json.dumps(task),
        in_process=way.in_process,
        variables=way.variables,
    )


if __name__ == "__main__":
    main()
