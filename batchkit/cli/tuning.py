"""The commands that try a job before it runs: plan, find-bs, bench and parity."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

import batchkit.cli.options as options
from batchkit.cli.frame import Result, echo, say
from batchkit.cli.options import COUNT, JOB, JSON, LIMIT, SET, Texts, load, of_key, printed
from batchkit.errors import JobError


@click.command()
@JOB
@options.rows("Answer N rows for the forecast; by default 64, at most a quarter of those left.")
@click.option(
    "--lengths",
    type=COUNT,
    metavar="N",
    help="Count the prompts of at most N rows, drawn at random; by default 100,000, with images 2,000.",
)
@LIMIT
@of_key(
    "run.price_per_gpu_hour",
    "--price-per-gpu-hour",
    "What an hour of one GPU costs",
    type=click.FloatRange(0, min_open=True),
    metavar="PRICE",
)
@of_key(
    "run.price_per_million_tokens",
    "--price-per-million-tokens",
    "What a million tokens of prompts and of answers cost",
    metavar="IN,OUT",
    callback=lambda context, option, text: _prices(text),
)
@options.TRUST
@SET
@printed
def plan(
    job: Path,
    rows: int | None,
    lengths: int | None,
    trust: bool,
    overrides: Texts,
    **keys: Any,
) -> Result:
    """Forecast what JOB will take: tokens, time, GPU hours and price.

    A random sample of its rows is answered with JOB's engine and settings. The answers are kept: they
    count when the run begins, which is then compared with the forecast. Each figure has a 90 %
    interval.
    """
    from batchkit.commands.plan import plan as forecast

    loaded = load(job, overrides, options.given_keys(keys), trust=trust)
    return forecast(loaded, rows=rows, lengths=lengths, say=say)


def _prices(text: str | None) -> list[float] | None:
    """Raises JobError if ``text`` is not two prices."""
    if text is None:
        return None
    try:
        of_prompts, of_answers = map(float, text.split(","))
    except ValueError:
        raise JobError(
            f"--price-per-million-tokens {text}: write two prices, of prompts and of answers: 0.15,0.60"
        ) from None
    return [of_prompts, of_answers]


@click.command("find-bs")
@JOB
@click.option("--low", type=COUNT, default=1, help="Smallest size.")
@click.option("--high", type=COUNT, default=1024, help="Largest size.")
@options.rows("Try with the first N rows only.")
@options.seconds(
    "Measure each size for at most this long, after at most as long to fill the engine.", 30.0
)
@click.option("--write", is_flag=True, help="Set the best size in JOB; nothing else in it changes.")
@SET
@printed
def find_bs(job: Path, write: bool, overrides: Texts, **limits: Any) -> Result:
    """Find the best batch size for JOB, tried with its own rows.

    The engine batches continuously: the batch size is how many requests it runs at once,
    engine.options.max_num_seqs, which costs GPU memory.

    Each size is tried with its own engine: doubled from --low on, then narrowed down to the largest
    that fits. Stops when twice the size gains less than 3 %. Exits with 1 if no size fits.
    """
    from batchkit.commands.tuning.find import find_batch_size

    write_to = job if write else None
    return find_batch_size(load(job, overrides), write_to=write_to, say=say, **limits)


@click.command()
@JOB
@click.option(
    "--minutes",
    type=click.FloatRange(0, min_open=True),
    default=20.0,
    help="About how long to search, comparing the best with the default included.",
)
@options.rows("Try with the first N rows only.")
@options.seconds("At most this long per trial, after at most as long to fill the engine.", 10.0)
@click.option(
    "--allow-changes",
    is_flag=True,
    help="Also try what changes answers: bfloat16, fp8 weights, an fp8 KV cache; count the changed ones.",
)
@click.option(
    "--write", is_flag=True, help="Set the best options in JOB; nothing else in it changes."
)
@SET
@printed
def tune(job: Path, write: bool, overrides: Texts, **limits: Any) -> Result:
    """Find the options with which JOB is fastest on this machine.

    Options that decide speed and not the answers are tried with the job's own rows: how the GPUs are used, how many
    requests run at once, tokens a step, memory, CUDA graphs, and what else helps against what the job waits for. At the
    end, the default and the best options are measured by turns, three times each. The trials are drawn in
    NAME.tune.html beside the run folder. Run it again to continue a search that was stopped.
    """
    from batchkit.commands.tuning.tune import tune as search

    write_to = job if write else None
    return search(load(job, overrides), write_to=write_to, say=say, **limits)


@click.command()
@JOB
@click.option(
    "--batch-sizes", default="1,4,16,64", metavar="N,N,…", help="How many requests run at once."
)
@click.option(
    "--rounds", type=COUNT, default=3, help="How often each size is measured, the sizes in turn."
)
@options.rows("Measure with the first N rows only.")
@options.seconds("At most this long per round, after at most as long to fill the engine.", 20.0)
@SET
@JSON
def bench(job: Path, batch_sizes: str, overrides: Texts, as_json: bool, **limits: Any) -> None:
    """Measure JOB's throughput, latency and memory by batch size.

    The batch size is how many requests run at once, as for find-bs. Each figure is the median of the
    rounds, which start when the engine is warm and full. p50 and p99 are latencies of a request,
    counted from when it enters the engine's queue. One line of JSON follows the table.
    """
    from batchkit.commands.tuning.table import bench as measure
    from batchkit.commands.tuning.table import sizes_in

    found = measure(load(job, overrides), sizes_in(batch_sizes), say=say, **limits)
    if not as_json:
        echo(found.to_text())
    echo(json.dumps(found.to_json()))
    raise SystemExit(found.exit_code)


@click.command()
@JOB
@click.option(
    "--engines",
    required=True,
    metavar="A,B",
    help="Two engine kinds, for example vllm,transformers; one kind twice with --set-a or --set-b.",
)
@options.rows("Only the first N rows (after the job's filter).", default=100)
@SET
@options.setting(
    "--set-a",
    "only_a",
    "Like --set, for A only; a key of the engine: engine.model=PATH. May be repeated.",
)
@options.setting("--set-b", "only_b", "Like --set-a, for B.")
@click.option(
    "--tie",
    type=click.FloatRange(0),
    default=0.01,
    help="A difference with a smaller gap is a tie. bfloat16 needs more, for example 0.25.",
)
@printed
def parity(
    job: Path, engines: str, overrides: Texts, only_a: Texts, only_b: Texts, **limits: Any
) -> Result:
    """Show where the answers of two engines to JOB differ.

    Both run the same rows, greedy, first A, then B. The gap of a difference is how much (in
    logprob) the side that was more certain preferred its own token to the other's: near 0 it is a
    tie that was broken differently, a large one is a real difference. Without logprobs, answers are
    compared by words and the gap is unknown.

    What only one kind of engine supports is left out, and listed: options of JOB for the other side,
    parameters of its sampling for both. Nothing is written to the run folder.

    Exits with 0 if all rows are equal or ties, with 3 if some differ, fail on one side only, or none
    was answered on both.
    """
    from batchkit.commands.parity import parity as compare
    from batchkit.errors import Interrupted

    settings = only_a, only_b
    try:
        return compare(load(job, overrides), engines, settings=settings, say=say, **limits)
    except Interrupted as stop:
        say(f"stopped by {stop}; nothing is kept")
        raise SystemExit(128 + stop.signum) from None
